# SPDX-License-Identifier: Apache-2.0
"""Lower bounds that no plan can beat. They are printed beside every plan to show how much could still be gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_fsmoe.planning.chunks import chunk_shares
from ds_fsmoe.planning.cost import Cost, LinearCost, least_ms
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.workload import BlockWork, Gradient, Layer, MoEWork, Work


def lower_bound_ms(work: BlockWork, costs: Mapping[str, Cost], max_degree: int = 16, grad_ms: float = 0.0) -> float:
    """Return a lower bound for the time of one layer in one phase, over all orders that this package can express and
    all degrees up to ``max_degree``.

    It is the larger of two bounds. The first is the sum of the part before the MoE part, the MoE part's own bound and
    the part after it. The second is all work of the inter-node link, gradients included. Inside the MoE part a chunk
    has to pass every stage, and each lane has to do all its work between the shortest path to it and the shortest path
    from it.

    Args:
        work: the layer.
        costs: kind of task -> cost.
        max_degree: the highest degree.
        grad_ms: the time of the gradients that the inter-node link has to send during this layer.
    """
    rest_ms = sum(_whole_ms(each, costs) for each in (*work.before, *work.after))
    return max(rest_ms + _moe_ms(work.moe, costs, max_degree), _inter_ms(work, costs) + grad_ms)


def _whole_ms(work: Work, costs: Mapping[str, Cost]) -> float:
    """Return the least time that an operation can take, with the cut that is best for it."""
    cost = costs[work.kind]
    return cost.ms(work.size, work.launches) if isinstance(cost, LinearCost) else least_ms(cost, work.size)


def _moe_ms(moe: MoEWork, costs: Mapping[str, Cost], max_degree: int) -> float:
    def sum_ms(works: Sequence[Work], share: float) -> float:
        return sum(costs[each.kind].ms(each.size * share, each.launches) for each in works)

    degree = max_degree if moe.capacity is None else min(max_degree, moe.capacity)
    shares = chunk_shares(moe.capacity, degree)
    way = moe.stages
    bound_ms = sum_ms(way, max(shares))
    for lane in Lane:
        mine = [place for place, each in enumerate(way) if each.lanes[0] is lane]
        if not mine:
            continue
        own_ms = sum(_whole_ms(way[place], costs) for place in mine)
        head_ms = sum_ms(way[: mine[0]], min(shares))
        tail_ms = sum_ms(way[mine[-1] + 1 :], min(shares))
        bound_ms = max(bound_ms, head_ms + own_ms + tail_ms)
    return bound_ms


def _inter_ms(work: BlockWork, costs: Mapping[str, Cost]) -> float:
    """Return the time of the work that only the inter-node link can do, uncut."""
    works = (*work.before, *work.moe.collectives, *work.after)
    return sum(_whole_ms(each, costs) for each in works if each.lanes[0] is Lane.INTER)


def step_bounds_ms(
    layers: Sequence[Layer], costs: Mapping[str, Cost], max_degree: int = 16, carried: Sequence[Gradient] = ()
) -> tuple[float, float]:
    """Return the lower bound for a whole forward and a whole backward.

    Args:
        layers: the layers of the model.
        costs: kind of task -> cost, for layers without costs of their own.
        max_degree: the highest degree.
        carried: the gradients that already wait when the backward begins.
    """

    def parts(layer: Layer) -> list[tuple[BlockWork, Mapping[str, Cost]]]:
        own = layer.costs
        again = [(layer.forward, own.forward if own else costs)] if layer.recompute else []
        return [*again, (layer.backward, own.backward if own else costs)]

    forward_ms = sum(
        lower_bound_ms(each.forward, each.costs.forward if each.costs else costs, max_degree) for each in layers
    )
    backwards = [part for layer in layers for part in parts(layer)]
    backward_ms = sum(lower_bound_ms(work, of_work, max_degree) for work, of_work in backwards)
    of_layers = costs if not layers or layers[-1].costs is None else layers[-1].costs.backward
    # Gradients can travel together, so each kind has to be launched once.
    gradients = (*carried, *(each for layer in layers for each in layer.gradients))
    between = [each for each in gradients if Lane.INTER in each.lanes]
    grads_ms = sum(of_layers[each.kind].ms(each.size_bytes, 0) for each in between)
    grads_ms += sum(of_layers[kind].ms(0.0) for kind in {each.kind for each in between})
    traffic_ms = sum(_inter_ms(work, of_work) for work, of_work in backwards)
    forwards = [(each.forward, costs) for each in layers if each.sharing is not None]
    shared = [each.sharing for each in layers if each.sharing is not None]
    return (
        max(forward_ms, _shared_ms(forwards, [each.forward for each in shared], costs)),
        max(
            backward_ms,
            traffic_ms + grads_ms,
            _shared_ms(backwards, [(*each.backward, *each.gradients) for each in shared], costs) + grads_ms,
        ),
    )


def _shared_ms(
    works: Sequence[tuple[BlockWork, Mapping[str, Cost]]], sent: Sequence[Sequence[Work]], costs: Mapping[str, Cost]
) -> float:
    """Return the time of the link between nodes, with what ZeRO sends there; 0: it sends nothing."""
    between_ms = sum(_whole_ms(each, costs) for of_layer in sent for each in of_layer if each.lanes[0] is Lane.INTER)
    return between_ms + sum(_inter_ms(*each) for each in works) if between_ms else 0.0


def busiest_ms(
    layers: Sequence[Layer], costs: Mapping[str, Cost], carried: Sequence[Gradient] = ()
) -> tuple[float, float]:
    """Return the time of the busiest lane in a whole forward and a whole backward, which no plan can beat, not even one
    in halves: these run on while :func:`step_bounds_ms` has every layer end before the next begins.

    Args:
        layers, costs, carried: see :func:`step_bounds_ms`.
    """

    def lanes_ms(work: BlockWork, of_work: Mapping[str, Cost]) -> dict[Lane, float]:
        found = dict.fromkeys(Lane, 0.0)
        for each in (*work.before, *work.moe.stages, *work.after):
            found[each.lanes[0]] += _whole_ms(each, of_work)
        return found

    totals = [dict.fromkeys(Lane, 0.0), dict.fromkeys(Lane, 0.0)]
    for layer in layers:
        own = layer.costs
        forward, backward = (own.forward, own.backward) if own else (costs, costs)
        phases = [(0, layer.forward, forward), (1, layer.backward, backward)]
        for phase, work, of_work in (*phases, *([(1, layer.forward, forward)] if layer.recompute else [])):
            for lane, time_ms in lanes_ms(work, of_work).items():
                totals[phase][lane] += time_ms
    gradients = (*carried, *(each for layer in layers for each in layer.gradients))
    of_layers = costs if not layers or layers[-1].costs is None else layers[-1].costs.backward
    for each in gradients:
        totals[1][each.lanes[0]] += of_layers[each.kind].ms(each.size_bytes, 0)
    return max(totals[0].values()), max(totals[1].values())

# SPDX-License-Identifier: Apache-2.0
"""Computes lower bounds that no plan can beat. ``ds_fsmoe plan`` prints them with every plan to show the largest
possible gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_fsmoe.planning.chunks import chunk_shares
from ds_fsmoe.planning.cost import Cost, LinearCost, least_ms
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.workload import BlockWork, Gradient, Layer, MoEWork, Work


def lower_bound_ms(work: BlockWork, costs: Mapping[str, Cost], max_degree: int = 16, grad_ms: float = 0.0) -> float:
    """Return a lower bound for the time of one layer in one phase, in ms.

    It covers all orders of this package and all degrees up to ``max_degree``. It is the larger of two bounds. The first
    is the sum of the part before the MoE part, the MoE part's own bound, and the part after it. The second is all work
    of the inter-node link, with gradients. Inside the MoE part a chunk has to pass every stage. Each lane has to do its
    work between the shortest path to it and the shortest path from it.

    Args:
        work: the layer.
        costs: kind of task -> cost.
        max_degree: the highest degree.
        grad_ms: the time of the gradients that the inter-node link has to send during this layer.
    """
    rest_ms = sum(_whole_ms(each, costs) for each in (*work.before, *work.after))
    # Rows are converted on the links or concurrently with the experts.
    moes = (work.moe, work.moe.converting_on_compute()) if work.moe.may_convert_on_compute else (work.moe,)
    moe_ms = min(_moe_ms(each, costs, max_degree) for each in moes)
    return max(rest_ms + moe_ms, _inter_ms(work, costs) + grad_ms)


def _whole_ms(work: Work, costs: Mapping[str, Cost]) -> float:
    """Return the least time of an operation in ms, with the best split."""
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
    """Return the time of the work that only the inter-node link can do, unchunked, in ms."""
    works = (*work.before, *work.moe.collectives, *work.after)
    return sum(_whole_ms(each, costs) for each in works if each.lanes[0] is Lane.INTER)


def step_bounds_ms(
    layers: Sequence[Layer], costs: Mapping[str, Cost], max_degree: int = 16, carried: Sequence[Gradient] = ()
) -> tuple[float, float]:
    """Return the lower bounds of a whole forward and a whole backward, in ms.

    Args:
        layers: the layers of the model.
        costs: kind of task -> cost, for layers without costs of their own.
        max_degree: the highest degree.
        carried: the gradients that already wait when the backward begins.
    """
    forwards, backwards = _phases(layers, costs)
    forward_ms, backward_ms = (
        sum(lower_bound_ms(work, of_work, max_degree) for work, of_work in parts) for parts in (forwards, backwards)
    )
    of_layers, gradients = _gradients(layers, costs, carried)
    # Gradients can be sent together, so each kind needs one launch.
    between = [each for each in gradients if Lane.INTER in each.lanes]
    grads_ms = sum(of_layers[each.kind].ms(each.size_bytes, 0) for each in between)
    grads_ms += sum(of_layers[kind].ms(0.0) for kind in {each.kind for each in between})
    traffic_ms = sum(_inter_ms(work, of_work) for work, of_work in backwards)
    shared = [each.sharing for each in layers if each.sharing is not None]
    in_forward = [(each.forward, costs) for each in layers if each.sharing is not None]
    return (
        max(forward_ms, _shared_ms(in_forward, [each.forward for each in shared], costs)),
        max(
            backward_ms,
            traffic_ms + grads_ms,
            _shared_ms(backwards, [(*each.backward, *each.gradients) for each in shared], costs) + grads_ms,
        ),
    )


def _shared_ms(
    works: Sequence[tuple[BlockWork, Mapping[str, Cost]]], sent: Sequence[Sequence[Work]], costs: Mapping[str, Cost]
) -> float:
    """Return the time of the inter-node link with ZeRO's collectives, in ms; 0 if ZeRO sends nothing there."""
    between_ms = sum(_whole_ms(each, costs) for of_layer in sent for each in of_layer if each.lanes[0] is Lane.INTER)
    return between_ms + sum(_inter_ms(*each) for each in works) if between_ms else 0.0


def busiest_ms(
    layers: Sequence[Layer], costs: Mapping[str, Cost], carried: Sequence[Gradient] = ()
) -> tuple[float, float]:
    """Return the time of the busiest lane in a whole forward and a whole backward, in ms.

    No plan can beat it. It also bounds two-batch overlap, while :func:`step_bounds_ms` assumes that layers do not
    overlap.

    Args:
        layers, costs, carried: see :func:`step_bounds_ms`.
    """

    def lanes_ms(work: BlockWork, of_work: Mapping[str, Cost]) -> dict[Lane, float]:
        found = dict.fromkeys(Lane, 0.0)
        for each in (*work.before, *work.moe.stages, *work.after):
            found[each.lanes[0]] += _whole_ms(each, of_work)
        return found

    totals = [dict.fromkeys(Lane, 0.0), dict.fromkeys(Lane, 0.0)]
    for total, parts in zip(totals, _phases(layers, costs), strict=True):
        for lane, time_ms in (each for part in parts for each in lanes_ms(*part).items()):
            total[lane] += time_ms
    of_layers, gradients = _gradients(layers, costs, carried)
    for each in gradients:
        totals[1][each.lanes[0]] += of_layers[each.kind].ms(each.size_bytes, 0)
    return max(totals[0].values()), max(totals[1].values())


_Costs = Mapping[str, Cost]


def _phases(
    layers: Sequence[Layer], costs: _Costs
) -> tuple[list[tuple[BlockWork, _Costs]], list[tuple[BlockWork, _Costs]]]:
    """Return the work of all layers in a forward and in a backward (with recomputation), each with its costs."""
    forwards, backwards = [], []
    for layer in layers:
        forward, backward = (layer.costs.forward, layer.costs.backward) if layer.costs else (costs, costs)
        forwards.append((layer.forward, forward))
        backwards += [*([(layer.forward, forward)] if layer.recompute else []), (layer.backward, backward)]
    return forwards, backwards


def _gradients(layers: Sequence[Layer], costs: _Costs, carried: Sequence[Gradient]) -> tuple[_Costs, list[Gradient]]:
    """Return the costs of gradients, and all gradients that are sent."""
    of_layers = costs if not layers or layers[-1].costs is None else layers[-1].costs.backward
    return of_layers, [*carried, *(each for layer in layers for each in layer.gradients)]

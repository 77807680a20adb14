# SPDX-License-Identifier: Apache-2.0
"""What no plan can beat: printed beside every plan, so that one sees what is left to gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.shares import SMALLEST
from ds_fsmoe.planning.workload import BlockWork, Gradient, Layer, Work


def lower_bound_ms(
    work: BlockWork, costs: Mapping[str, LinearCost], max_degree: int = 16, grad_ms: float = 0.0
) -> float:
    """A time that one layer takes in one phase in any order this package can write down, at any degree up to
    ``max_degree``, equal chunks or not, among layers that are equal to it.

    It is the larger of two kinds of bound. The longest chain: what comes before the MoE part, the MoE part's own
    bound, what comes after. And for each lane all its work, after the shortest possible time to its first task.
    Inside the MoE part: a chunk has to go all the way (the longest chunk is at least an equal one), and each lane has
    to do all its work between the shortest way to it and the shortest way from it. Weight gradients can be put off,
    even into the next layer, so they count for their lane only.

    Args:
        work: the layer.
        costs: kind -> cost.
        max_degree: the highest degree.
        grad_ms: gradients that this layer has to make room for on the inter-node link.
    """
    chain_ms = _chain_ms(work, costs, max_degree)
    return max(chain_ms, _computed_ms(work, costs), _inter_ms(work, costs) + grad_ms)


def _chain_ms(work: BlockWork, costs: Mapping[str, LinearCost], max_degree: int) -> float:
    """What comes one after the other."""

    def ms(each: Work, share: float = 1.0) -> float:
        return costs[each.kind].ms(each.size * share, each.launches)

    def sum_ms(works: Sequence[Work], share: float = 1.0) -> float:
        return sum(ms(each, share) for each in works)

    moe = work.moe
    needed = moe.expert if moe.expert_dx is None else moe.expert_dx
    way = [*moe.enter, *moe.gather, needed, *moe.reduce, *moe.leave]
    first = SMALLEST / max_degree
    moe_ms = sum_ms(way, 1.0 / max_degree)
    for lane in Lane:
        mine = [i for i, each in enumerate(way) if each.lanes[0] is lane]
        if not mine:
            continue
        head_ms, tail_ms = sum_ms(way[: mine[0]], first), sum_ms(way[mine[-1] + 1 :], first)
        moe_ms = max(moe_ms, head_ms + sum(ms(way[i]) for i in mine) + tail_ms)
    before_ms, after_ms = sum_ms(work.before), sum_ms(work.after)
    return before_ms + moe_ms + after_ms


def _computed_ms(work: BlockWork, costs: Mapping[str, LinearCost]) -> float:
    """What has to be computed, in one piece."""

    def ms(each: Work) -> float:
        return costs[each.kind].ms(each.size, each.launches)

    moe = work.moe

    experts_ms = ms(moe.expert)
    if moe.expert_dx is not None and moe.expert_dw is not None:
        experts_ms = min(experts_ms, ms(moe.expert_dx) + ms(moe.expert_dw))
    return experts_ms + sum(ms(each) for each in (*work.before, *work.after) if Lane.COMPUTE in each.lanes)


def _inter_ms(work: BlockWork, costs: Mapping[str, LinearCost]) -> float:
    """What only the link between nodes can do, in one piece."""
    moe = work.moe
    works = (*work.before, *moe.enter, *moe.gather, *moe.reduce, *moe.leave, *work.after)
    return sum(costs[each.kind].ms(each.size, each.launches) for each in works if each.lanes[0] is Lane.INTER)


def step_bounds_ms(
    layers: Sequence[Layer], costs: Mapping[str, LinearCost], max_degree: int = 16, carried: Sequence[Gradient] = ()
) -> tuple[float, float]:
    """The same for a whole forward and a whole backward: layer after layer, or all that one lane has to do.

    Args:
        layers: of the model.
        costs: kind -> cost.
        max_degree: the highest degree.
        carried: gradients that wait when the backward begins.
    """
    # Layer by layer only what comes one after the other counts: computation may move from one layer to the next.
    forwards = [layer.forward for layer in layers]
    backwards = [part for layer in layers for part in _backward_parts(layer)]
    chain_ms = {each: _chain_ms(each, costs, max_degree) for each in {*forwards, *backwards}}
    forward_ms, backward_ms = (
        max(sum(chain_ms[each] for each in parts), sum(_computed_ms(each, costs) for each in parts))
        for parts in (forwards, backwards)
    )
    # Gradients can travel together, so each kind has to be launched once.
    gradients = (*carried, *(each for layer in layers for each in layer.gradients))
    between = [each for each in gradients if Lane.INTER in each.lanes]
    grads_ms = sum(costs[each.kind].ms(each.size_bytes, 0) for each in between)
    grads_ms += sum(costs[kind].alpha_ms for kind in {each.kind for each in between})
    traffic_ms = sum(_inter_ms(each, costs) for each in backwards)
    return forward_ms, max(backward_ms, traffic_ms + grads_ms)


def _backward_parts(layer: Layer) -> tuple[BlockWork, ...]:
    return (layer.forward, layer.backward) if layer.recompute else (layer.backward,)

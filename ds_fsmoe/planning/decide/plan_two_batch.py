# SPDX-License-Identifier: Apache-2.0
"""The plan of a step whose micro-batch is run in two halves that take turns.

While one half's tokens travel the other computes, so that fewer chunks are needed than in a whole micro-batch, and all
layers have the same: whole steps are simulated with each of a few ways to run a half, and the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.degree import smallest_of_best
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner
from ds_fsmoe.planning.decide.plan_requests import (
    MIN_GAIN,
    PlanRequest,
    SearchSpace,
    each_alltoall,
    sendings_in_two_batch,
    used_alltoalls,
)
from ds_fsmoe.planning.two_batch import sub_batch_layer
from ds_fsmoe.planning.workload import Layer


def plan_two_batch(planner: Planner, request: PlanRequest) -> ModelPlan | None:
    """Plan a step in halves, with one all-to-all for all layers that have it, and choose what its way leaves open.

    Args:
        planner: with the costs and settings.
        way: how; another all-to-all than the one in use is taken where the step gains more than
            :data:`~ds_fsmoe.planning.decide.plan_requests.MIN_GAIN`.

    Returns:
        The plan; ``None`` where there are no layers or only one lane, or rules allow none.
    """
    # With one lane there is nothing that a half could hide behind.
    if not request.options or planner.settings.is_serial:
        return None
    used = (
        [used_alltoalls(request.options), *each_alltoall(request.options)]
        if request.alltoalls is None
        else [request.alltoalls]
    )
    plans = [_with_alltoalls(planner, replace(request, alltoalls=each)) for each in dict.fromkeys(map(tuple, used))]
    found = [each for each in plans if each is not None]
    if not found:
        return None
    first, best = found[0], min(found, key=planner.step_ms)
    return best if planner.step_ms(best) < (1 - MIN_GAIN) * planner.step_ms(first) else first


def _with_alltoalls(planner: Planner, request: PlanRequest) -> ModelPlan | None:
    """Plan a step in halves whose all-to-alls are given: when gradients are sent is chosen first, then degrees, then
    once more when gradients are sent."""
    modes, shares = sendings_in_two_batch(request.mode)
    unsplit = [planner.plan(replace(request, mode=each, orders=None)) for each in modes]
    # They differ in when gradients are sent.
    bases = [*unsplit, *map(unsplit[0].sending_in_next, shares)]
    layers, spaces = unsplit[0].layers, request.spaces
    if request.orders is not None:
        return min((assembled(planner, each, request.orders) for each in bases), key=planner.step_ms)

    def open_orders(layer: Layer, space: SearchSpace) -> list[Sequence[Order]]:
        half = sub_batch_layer(layer)
        costs = layer.costs or planner.written
        phases = [
            space.orders_of(half.forward.moe, False, True, costs.forward),
            space.orders_of(half.backward.moe, True, True, costs.backward),
        ]
        return [[each for each in orders if each.degree == request.degree] or orders for orders in phases]

    requests = [open_orders(layer, space) for layer, space in zip(layers, spaces, strict=True)]
    if not all(orders for of_layer in requests for orders in of_layer):
        return None

    def plan(base: ModelPlan, wanted: tuple[Order, Order]) -> ModelPlan:
        orders = [(_nearest(wanted[0], of_layer[0]), _nearest(wanted[1], of_layer[1])) for of_layer in requests]
        return assembled(planner, base, orders)

    def pick(pairs: Sequence[tuple[Order, Order]], phases: slice = slice(None)) -> tuple[Order, Order]:
        """Return the ways with which these phases are the fastest: the first unless another gains enough."""
        times_ms = [sum(planner.phases_ms(plan(base, each))[phases]) for each in pairs]
        best = smallest_of_best(times_ms)
        return pairs[best] if times_ms[best] < (1 - request.space.min_gain) * times_ms[0] else pairs[0]

    forward, backward = (list(dict.fromkeys(order for each in requests for order in each[phase])) for phase in (0, 1))
    chosen = forward[0], backward[0]
    base = min(bases, key=lambda each: planner.step_ms(plan(each, chosen)))
    uses_rng = any(layer.costs is not None and layer.costs.uses_rng for layer in layers)
    if uses_rng or request.space.common_degree:
        chosen = pick([(each, each) for each in forward if each in backward] or [chosen])
    else:
        chosen = pick([(each, backward[0]) for each in forward], slice(0, 1))
        chosen = pick([(chosen[0], each) for each in backward], slice(1, 2))
    return min((plan(each, chosen) for each in bases), key=planner.step_ms)


def _nearest(wanted: Order, requests: Sequence[Order]) -> Order:
    """Return the order that is wanted, or of those that a layer allows the one with the most chunks up to as many."""
    if wanted in requests:
        return wanted
    fewer = [each for each in requests if each.degree <= wanted.degree]
    return max(fewer, key=lambda each: (each.degree, each.links == wanted.links), default=requests[0])


def assembled(planner: Planner, base: ModelPlan, orders: Sequence[tuple[Order, Order]]) -> ModelPlan:
    """Return the plan in halves with the all-to-alls and the gradients of a plan that is not.

    Args:
        planner: with the costs.
        base: the other plan.
        orders: the ways to run a half of each layer, forward and backward.
    """
    requests = zip(base.layers, orders, strict=True)
    pairs = [planner.choose(sub_batch_layer(layer), SearchSpace.fixed(*order)) for layer, order in requests]
    forward = tuple(pair[0].order.plan() for pair in pairs)
    sent = zip(base.backward, pairs[::-1], strict=True)
    backward = tuple(pair[1].order.plan(each.moe_slices, each.dense_slices) for each, pair in sent)
    choices = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs[::-1])
    return replace(
        base,
        forward=forward,
        backward=backward,
        forward_choices=choices[0],
        backward_choices=choices[1],
        is_two_batch=True,
    )

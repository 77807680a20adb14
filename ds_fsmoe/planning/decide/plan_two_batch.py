# SPDX-License-Identifier: Apache-2.0
"""Plans a step with two-batch overlap: a micro-batch is split in two, and one part is computed while the other's
tokens are sent. The search over candidates calls it; :mod:`~ds_fsmoe.planning.decide.plan` plans whole
micro-batches.

Fewer chunks are needed than for a whole micro-batch, and all layers have the same. Whole steps are simulated with each
of a few orders, and the fastest is chosen.
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
    """Plan a step with two-batch overlap, with one all-to-all for all layers that have it.

    Args:
        planner: the planner with the costs and settings.
        request: the given and the open choices. An all-to-all other than the current one has to gain more than
            :data:`~ds_fsmoe.planning.decide.plan_requests.MIN_GAIN`.

    Returns:
        The plan; ``None`` without layers, with only one lane, or where the rules allow no plan.
    """
    # With one lane, two-batch overlap cannot hide anything.
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
    """Plan a step with two-batch overlap and given all-to-alls. First it chooses when gradients are sent, then the
    degrees, then again when gradients are sent.
    """
    modes, shares = sendings_in_two_batch(request.mode)
    unsplit = [planner.plan(replace(request, mode=each, orders=None)) for each in modes]
    # They differ in when gradients are sent.
    bases = [*unsplit, *map(unsplit[0].sending_in_next, shares)]
    layers, spaces = unsplit[0].layers, request.spaces
    if request.orders is not None:
        return min((assembled(planner, each, request.orders) for each in bases), key=planner.step_ms)

    def open_orders(layer: Layer, space: SearchSpace) -> list[Sequence[Order]]:
        of_sub_batch = sub_batch_layer(layer)
        costs = layer.costs or planner.written
        phases = [
            space.orders_of(of_sub_batch.forward.moe, False, True, costs.forward),
            space.orders_of(of_sub_batch.backward.moe, True, True, costs.backward),
        ]
        return [[each for each in orders if each.degree == request.degree] or orders for orders in phases]

    requests = [open_orders(layer, space) for layer, space in zip(layers, spaces, strict=True)]
    if not all(orders for of_layer in requests for orders in of_layer):
        return None

    def plan(base: ModelPlan, wanted: tuple[Order, Order]) -> ModelPlan:
        orders = [(_nearest(wanted[0], of_layer[0]), _nearest(wanted[1], of_layer[1])) for of_layer in requests]
        return assembled(planner, base, orders)

    def pick(pairs: Sequence[tuple[Order, Order]], phases: slice = slice(None)) -> tuple[Order, Order]:
        """Return the orders with which these phases are the fastest: the first unless another gains enough."""
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
    """Return the wanted order, or the allowed one with the most chunks up to the wanted number."""
    if wanted in requests:
        return wanted
    fewer = [each for each in requests if each.degree <= wanted.degree]
    return max(fewer, key=lambda each: (each.degree, each.links == wanted.links), default=requests[0])


def assembled(planner: Planner, base: ModelPlan, orders: Sequence[tuple[Order, Order]]) -> ModelPlan:
    """Return a plan with two-batch overlap that has the all-to-alls and gradients of a plan without it.

    Args:
        planner: the planner with the costs.
        base: the plan without two-batch overlap.
        orders: the orders of a sub-batch of each layer, forward and backward.
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

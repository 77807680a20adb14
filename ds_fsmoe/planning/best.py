# SPDX-License-Identifier: Apache-2.0
"""The preset ``best``: whatever is the fastest on these links, however they contend.

It may use every order there is, the paper's and those beyond it (reduces ahead of later gathers, weight gradients put
off, chunks of different sizes), and it plans every named system as well. What it returns is the fastest of them all by
simulation, so it is never slower than any of them: where overlap is a loss it falls back to one stream, or to none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.planning.block import ORDERS, BlockPlan, block_schedule
from ds_fsmoe.planning.block_times import Order
from ds_fsmoe.planning.choose import Choice
from ds_fsmoe.planning.plan import ModelPlan, Planner
from ds_fsmoe.planning.presets import BEST, PRESETS, Switches, late_choices, preset
from ds_fsmoe.planning.schedule import EXPERT_GRAD
from ds_fsmoe.planning.shares import best_shares
from ds_fsmoe.planning.timeline import simulate
from ds_fsmoe.planning.workload import BlockWork, Gradient, Layer


@dataclass(frozen=True, slots=True)
class Beyond:
    """What ``best`` may use beyond the paper. Each alone can be switched off."""

    reduce_first: bool = True
    split_dw: bool = True
    uneven_chunks: bool = True


def plan_best(
    planner: Planner, layers: Sequence[Layer], carried: Sequence[Gradient] = (), beyond: Beyond = Beyond()
) -> ModelPlan:
    """Plan a step with everything there is.

    Args:
        planner: costs and settings.
        layers: in the order of the forward.
        carried: gradients that wait when the backward begins.
        beyond: what it may use beyond the named systems.
    """
    settings = planner.settings
    links = tuple(each for each in ORDERS if each != "reduce_first" or beyond.reduce_first)

    none = (0, 0, 0)
    # Weight gradients that wait for the next layer could not be reduced in this one.
    carry = not any(each.kind == EXPERT_GRAD for layer in layers for each in layer.gradients)
    carry &= len(layers) > 1 or bool(carried)

    def open_orders(backward: bool) -> tuple[Order, ...]:
        return tuple(
            Order(degree, order, *late)
            for degree in range(1, settings.max_degree + 1)
            for order in links[: 2 if degree == 1 else None]
            for late in ((none, *late_choices(degree, carry)) if backward and beyond.split_dw else (none,))
        )

    own = planner.plan(layers, Switches("per_phase", gradients="adaptive"), carried, open_orders)
    plans = [own, *(planner.plan(layers, preset(name), carried) for name in PRESETS)]
    # The phases do not touch each other, so the best of both may come from different plans.
    timelines = [each.timelines(planner.costs, settings.contention, settings.host_ms) for each in plans]
    pairs = list(zip(plans, timelines, strict=True))
    if any(layer.recompute for layer in layers):
        # The backward runs the forward's plan again, so they belong together.
        forward = backward = min(pairs, key=lambda pair: sum(each.makespan_ms for each in pair[1]))[0]
    else:
        forward, backward = (min(pairs, key=lambda pair: pair[1][phase].makespan_ms)[0] for phase in (0, 1))
    best = replace(backward, forward=forward.forward, forward_choices=forward.forward_choices)
    return _uneven(planner, best, beyond) if beyond.uneven_chunks else best


def _uneven(planner: Planner, plan: ModelPlan, beyond: Beyond) -> ModelPlan:
    """The same with chunks of different sizes where that helps."""
    seen: dict[tuple[BlockWork, BlockPlan], BlockPlan] = {}

    def improved(work: BlockWork, block: BlockPlan, choice: Choice) -> BlockPlan:
        key = work, block.without_ages()
        if key not in seen:
            seen[key] = _improved(planner, work, key[1], choice, beyond)
        found = seen[key]
        return replace(found, moe_slices=block.moe_slices, dense_slices=block.dense_slices)

    forward = tuple(
        improved(layer.forward, block, choice)
        for layer, block, choice in zip(plan.layers, plan.forward, plan.forward_choices, strict=True)
    )
    backward = tuple(
        improved(layer.backward, block, choice)
        for layer, block, choice in zip(plan.layers[::-1], plan.backward, plan.backward_choices, strict=True)
    )
    uneven = replace(plan, forward=forward, backward=backward)
    settings = planner.settings
    now_ms, then_ms = (each.step_ms(planner.costs, settings.contention, settings.host_ms) for each in (plan, uneven))
    return uneven if then_ms < now_ms else plan


def _improved(planner: Planner, work: BlockWork, block: BlockPlan, choice: Choice, beyond: Beyond) -> BlockPlan:
    settings, costs = planner.settings, planner.costs
    moe_ms, dense_ms = (
        sum(costs[each.kind].ms(each.size_bytes) for each in slices)
        for slices in (block.moe_slices, block.dense_slices)
    )
    times = planner.times(work, (*block.moe_slices, *block.dense_slices))

    def time_ms(candidate: BlockPlan) -> float:
        schedule = block_schedule(work, candidate)
        return simulate(schedule, costs, settings.contention, settings.host_ms).makespan_ms

    best, best_ms = block, time_ms(block)
    # Chunks of the right sizes need to be fewer.
    for order in _candidates(choice.order, beyond, settings.max_degree):
        shares = best_shares(times, order, moe_ms, dense_ms)
        if shares is None:
            continue
        put_off = {name: getattr(order, name) for name in ("late_dw", "held_dw", "carried_dw")}
        candidate = replace(block, shares=shares, links=order.links, **put_off)
        candidate_ms = time_ms(candidate)
        if candidate_ms < best_ms * (1 - 1e-6):
            best, best_ms = candidate, candidate_ms
    return best


def _candidates(order: Order, beyond: Beyond, max_degree: int) -> list[Order]:
    """Orders that may gain from uneven chunks, of which fewer are needed."""
    links = {order.links}
    if order.links != "shared":
        links |= {"paper", "reduce_first"} if beyond.reduce_first else {"paper"}
    near = (order.degree + 1, order.degree, order.degree - 1, -(-order.degree // 2))
    degrees = {each for each in near if 2 <= each <= max_degree}
    return [replace(order, degree=degree, links=each) for degree in sorted(degrees) for each in sorted(links)]


def plan_by_name(planner: Planner, name: str, layers: Sequence[Layer], carried: Sequence[Gradient] = ()) -> ModelPlan:
    """Plan a step the way a named system would.

    Raises:
        ValueError: no such name, with those there are.
    """
    if name == BEST:
        return plan_best(planner, layers, carried)
    return planner.plan(layers, preset(name), carried)

# SPDX-License-Identifier: Apache-2.0
"""Lower bounds are reached by schedules that leave nothing idle but what they cannot help."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_fsmoe.planning.block import BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.bounds import busiest_ms, lower_bound_ms, step_bounds_ms
from ds_fsmoe.planning.decide.degree import Load, Phase
from ds_fsmoe.planning.decide.plan import Planner, Settings, plan_by_name
from ds_fsmoe.planning.schedule import EXPERT, GRAD, Lane
from ds_fsmoe.planning.timeline import simulate
from ds_fsmoe.planning.workload import BlockWork, Gradient, Layer, MoEWork, Stage, Work
from tests.planning.layers import bare_block, layer_of, played_ms, random_costs, simulated_ms


def phase_of(*sizes: float) -> Phase:
    """Of all-to-all, gather, experts and reduce in ms, whose pieces cost their share."""
    a2a, gather, expert, reduce = (Load(LinearCost(0.0, 1.0), each) for each in sizes)
    return Phase(a2a, gather, expert, reduce)


@pytest.mark.parametrize("degree", [1, 2, 5])
@pytest.mark.parametrize(
    ("sizes", "beside_ms"),
    [
        # The first chunk comes by 2 + 3, and the last one goes by 1 + 2.
        ((2.0, 3.0, 40.0, 1.0), (5.0, 3.0)),
        # Of the link in a node, which gathers and reduces, the first chunk comes by 2 and the last one goes by 2.
        ((2.0, 30.0, 1.0, 20.0), (2.0, 2.0)),
    ],
)
def test_the_busiest_lane_waits_for_one_chunk_to_come_and_one_to_go(
    sizes: tuple[float, ...], beside_ms: tuple[float, float], degree: int
) -> None:
    phase = phase_of(*sizes)
    work, costs = bare_block(phase)
    bound_ms = lower_bound_ms(work, costs, degree)
    assert bound_ms == pytest.approx(simulated_ms(phase, degree, with_gradient=False))
    if degree > 1:
        own_ms = sizes[2] if sizes[2] > sizes[1] else sizes[1] + sizes[3]
        assert bound_ms == pytest.approx(own_ms + sum(beside_ms) / degree)


def test_gradients_that_have_to_be_launched_once_of_each_kind_are_part_of_the_bound() -> None:
    phase = phase_of(20.0, 1.0, 1.0, 1.0)
    work, costs = bare_block(phase)
    costs = costs | {GRAD: LinearCost(0.7, 0.5)}
    gradient = Gradient(GRAD, (Lane.INTER,), 8)
    layer = Layer(work, work, (gradient,))
    # All-to-alls come one behind the other, and the gradients behind them or between them.
    sent = Slice(GRAD, (Lane.INTER,), 16.0)
    took_ms = simulate(block_schedule(work, BlockPlan(2, "paper", moe_slices=(sent,))), costs).makespan_ms
    assert took_ms == pytest.approx(2 * 20.0 + 0.7 + 0.5 * 16)
    assert step_bounds_ms([layer], costs, carried=(gradient,))[1] == pytest.approx(took_ms)


def test_in_halves_the_busiest_lane_alone_is_the_bound_and_gradients_are_on_it() -> None:
    work, costs = bare_block(phase_of(2.0, 3.0, 40.0, 1.0))
    costs = costs | {GRAD: LinearCost(0.7, 0.5)}
    layer = Layer(work, work, (Gradient(GRAD, (Lane.INTER,), 200),))
    assert busiest_ms([layer] * 2, costs) == pytest.approx((80.0, 2 * (2 * 2.0 + 100.0)))
    # A layer that is recomputed does its forward again in the backward.
    again = replace(layer, recompute=True, gradients=())
    assert busiest_ms([again] * 2, costs) == pytest.approx((80.0, 160.0))


def bare(enter_ms: float, forward_ms: float, backward_ms: float) -> Layer:
    """A layer with an all-to-all and experts; sizes are milliseconds."""
    enter = (Stage("A2A_IN", (Lane.INTER,), enter_ms, group="ep"),)
    forward, backward = (
        BlockWork((), MoEWork(enter, Work(EXPERT, (Lane.COMPUTE,), ms), ()), ()) for ms in (forward_ms, backward_ms)
    )
    return Layer(forward, backward, ())


def test_the_bound_of_a_model_is_what_its_busiest_lane_has_to_do_and_no_less() -> None:
    costs = {kind: LinearCost(0.0, 1.0) for kind in ("A2A_IN", EXPERT, GRAD)}
    gradient = Gradient(GRAD, (Lane.INTER,), 5)
    sending, computing = replace(bare(10.0, 1.0, 2.0), gradients=(gradient,)), bare(1.0, 10.0, 12.0)
    # Three all-to-alls, and in the backward three times the gradients; a chunk has to be computed after the last.
    assert step_bounds_ms([sending] * 3, costs) == pytest.approx((30.0, 45.0), abs=0.2)
    assert lower_bound_ms(sending.backward, costs, grad_ms=5.0) == pytest.approx(15.0, abs=0.2)
    assert step_bounds_ms([computing] * 3, costs) == pytest.approx((30.0, 36.0), abs=0.5)
    # Plans of many chunks come near: it is no less than what can be done.
    for layer in (sending, computing):
        plan = plan_by_name(Planner(costs, Settings(max_degree=16, min_gain=0.0)), "best", [layer] * 3)
        forward_ms, backward_ms = (each.makespan_ms for each in plan.timelines(costs))
        bounds_ms = step_bounds_ms([layer] * 3, costs, 17)
        assert forward_ms <= 1.05 * bounds_ms[0]
        assert backward_ms <= 1.05 * bounds_ms[1]


def test_the_lower_bound_is_reached_where_nothing_can_overlap() -> None:
    costs = {kind: LinearCost(0.25, 1e-3) for kind in random_costs(random.Random(8))}
    work = layer_of("one rank").forward
    assert lower_bound_ms(work, costs, 1) == pytest.approx(played_ms(work, Order(1), costs))

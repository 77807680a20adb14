# SPDX-License-Identifier: Apache-2.0
"""What is chosen is the best of all plans that a system and the rules allow, each simulated by itself; a layer's times
for many orders at once are those of its schedules; and lower bounds are reached by schedules made for them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from ds_fsmoe.planning.block import ORDERS, BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.call_shape import layer_of_call
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order
from ds_fsmoe.planning.decide.bounds import busiest_ms, lower_bound_ms, step_bounds_ms
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.degree import Load, Phase
from ds_fsmoe.planning.decide.plan import Planner, Settings, plan_by_name
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.decide.search import LANE_NAMES
from ds_fsmoe.planning.schedule import EXPERT, GRAD, Lane
from ds_fsmoe.planning.timeline import IDEAL, simulate
from ds_fsmoe.planning.workload import BlockWork, Gradient, Layer, MoEWork, Stage, Work
from tests.covering import covering
from tests.planning.layers import (
    CONTENTIONS,
    LAYOUTS,
    bare_block,
    choice_of,
    choices_to_make,
    cut_anew,
    every_plan,
    grad_lanes_of,
    layer_of,
    played_ms,
    random_costs,
    simulated_ms,
)
from tests.planning.measured_layers import GROUPS, SIZES, Machine, choose_degrees, made_up

MAX_DEGREE = 8


@settings(max_examples=100)
@given(choices_to_make())
def test_what_is_chosen_is_the_best_of_all_plans_by_simulation(drawn: tuple) -> None:
    planner, layer, space, sent = drawn
    every = every_plan(planner, layer, space, sent)
    forward, backward = planner.choose(layer, space, sent)
    chosen = forward.order, backward.order
    assert chosen in every.times_ms, "neither the system nor the rules allow it"
    assert every.may_be_chosen(chosen), "it gains too little over an uncut layer"
    times_ms = every.times_ms[chosen]
    assert (forward.time_ms, backward.time_ms) == pytest.approx(times_ms, rel=1e-9)
    assert sum(times_ms) == pytest.approx(every.best_ms, rel=1e-9)
    assert forward.both_ms == backward.both_ms == pytest.approx(sum(times_ms), rel=1e-9)
    assert (forward.unchunked_ms, backward.unchunked_ms) == pytest.approx(every.uncut_ms, rel=1e-9)
    for phase, moe in enumerate((layer.forward.moe, layer.backward.moe)):
        most = max(pair[phase].degree for pair in every.times_ms)
        costs = (layer.costs or planner.written).of(bool(phase))[0]
        bound_ms = lower_bound_ms(BlockWork((), moe, ()), costs, most)
        assert min(each[phase] for each in every.times_ms.values()) >= bound_ms * (1 - 1e-9)
    # Beside them stands what lanes would take that do not slow each other down.
    alone = replace(planner, settings=replace(planner.settings, contention=IDEAL), _times={}, _choices={})
    free = every_plan(alone, layer, space.with_orders(*chosen), sent)
    isolated_ms = free.times_ms[chosen]
    if planner.settings.contention == IDEAL or forward.order.degree == backward.order.degree:
        assert (forward.isolated_ms, backward.isolated_ms) == pytest.approx(isolated_ms, rel=1e-9)


@pytest.mark.parametrize("uses_rng", [False, True])
@pytest.mark.parametrize("anew", [1.0, 1.3])
def test_a_runner_up_is_what_could_be_run_instead_and_both_phases_take_no_less_with_it(
    uses_rng: bool, anew: float
) -> None:
    space = SearchSpace.of("fsmoe", MAX_DEGREE)
    faster_alone = 0
    for number in range(5):
        profile = cut_anew(made_up(number, is_written=False, uses_rng=uses_rng), anew)
        pair = choose_degrees(profile, Machine(), space)
        for at, choice in enumerate(pair):
            assert choice.runner_up_both_ms >= choice.both_ms * (1 - 1e-9)
            faster_alone += choice.runner_up_ms < choice.time_ms
            # Asked for, it takes what was said; no other number of chunks takes less.
            took_ms = {}
            for degree in {*range(1, MAX_DEGREE + 1)} - {choice.order.degree}:
                asked = [degree if uses_rng or place == at else each.order.degree for place, each in enumerate(pair)]
                found = choose_degrees(profile, Machine(), space, tuple(asked), "paper")
                took_ms[degree] = sum(each.time_ms for each in found)
            assert took_ms[choice.runner_up] == pytest.approx(choice.runner_up_both_ms)
            assert took_ms[choice.runner_up] == pytest.approx(min(took_ms.values()))
    # With one degree for both, a phase alone would often go faster with another.
    assert bool(faster_alone) is uses_rng


def test_beside_degrees_by_hand_stand_those_that_would_have_been_chosen() -> None:
    space = SearchSpace.of("fsmoe", MAX_DEGREE)
    free = choose_degrees(made_up(3), Machine(), space)
    for asked in ((None, 1), (5, None), (11, 1)):
        for choice, degree, freely in zip(
            choose_degrees(made_up(3), Machine(), space, asked, "paper"), asked, free, strict=True
        ):
            assert choice.order.degree == (freely.order.degree if degree is None else degree)
            assert choice.auto_degree == freely.order.degree
            assert choice.auto_ms == pytest.approx(freely.time_ms)


@pytest.mark.parametrize(("schedule", "asked"), [("best", (8, 8)), ("fsmoe", (8, None)), ("tutel", (None, 8))])
def test_a_degree_above_the_capacity_that_is_asked_for_is_kept(schedule: str, asked: tuple) -> None:
    space = SearchSpace.of(schedule, MAX_DEGREE).with_degrees(*asked, "paper")
    layer = layer_of_call(GROUPS, replace(SIZES, capacity=4), made_up().costs())
    search = Search(Machine().planner(), PlanRequest([{"flat": layer}] * 2, space, "adaptive", "paper"))
    for plan in search.candidates():
        for block, degree in zip(plan.blocks(0), asked, strict=True):
            assert degree in (None, block.degree)


def test_a_choice_is_said_to_be_bound_by_the_lane_that_its_end_waits_for_most() -> None:
    """In an order that has no closed form, so that it is read off the critical path."""
    space = SearchSpace.fixed(*[Order(2, "reduce_first")] * 2)
    for sent_ms, computed_ms, lane in ((10.0, 2.0, Lane.INTER), (1.0, 12.0, Lane.COMPUTE)):
        sent = Stage("A2A_IN", (Lane.INTER,), sent_ms, group="ep")
        block = BlockWork((), MoEWork((sent,), Work(EXPERT, (Lane.COMPUTE,), computed_ms), ()), ())
        planner = replace(Machine().planner(), costs={kind: LinearCost(0.0, 1.0) for kind in ("A2A_IN", EXPERT)})
        for choice in planner.choose(Layer(block, block, ()), space):
            assert choice.bottleneck == LANE_NAMES[lane]


# ---- times of many orders at once


GRADS_MS = ((0.0, 0.0), (0.7, 0.0), (0.0, 2.5), (40.0, 0.3))
CASES = covering(sorted(LAYOUTS), ("forward", "backward"), range(len(CONTENTIONS)), (0.0, 0.01), ORDERS)


@pytest.mark.parametrize(("layout", "phase", "contention", "host_ms", "links"), CASES)
def test_times_are_those_of_the_schedules(layout: str, phase: str, contention: int, host_ms: float, links: str) -> None:
    work, lanes, how = getattr(layer_of(layout), phase), grad_lanes_of(layout), CONTENTIONS[contention]
    costs = random_costs(random.Random(f"{layout}{phase}{contention}")) | {GRAD: LinearCost(0.0, 1.0)}
    orders = [Order(degree, links) for degree in (1, 3, 4)]
    found = BlockTimes(work, costs, how, host_ms, lanes).times_ms(orders, *map(np.array, zip(*GRADS_MS, strict=True)))
    for row, order in zip(found, orders, strict=True):
        for found_ms, grads_ms in zip(row, GRADS_MS, strict=True):
            slices = tuple((Slice(GRAD, lanes, each),) if each else () for each in grads_ms)
            expected_ms = played_ms(work, order, costs, how, host_ms, slices=slices)
            assert found_ms == pytest.approx(expected_ms, rel=1e-9), (order, grads_ms)


def test_the_papers_choice_is_never_better_and_falls_back_where_it_does_not_apply() -> None:
    rng = random.Random(5)
    for layout in LAYOUTS:
        times = BlockTimes(layer_of(layout).backward, random_costs(rng))
        for links in ("paper", "shared"):
            orders = [Order(degree, links) for degree in range(1, 13)]
            exact, paper = choice_of(times, orders, 0.4), choice_of(times, orders, 0.4, "slsqp")
            assert exact.time_ms <= paper.time_ms * (1 + 1e-12)
            assert exact == paper or (links == "paper" and times.is_papers)
        for degree in (1, 2, 5, 16):
            assert choice_of(times, [Order(degree, "paper")], solver="slsqp").order.degree == degree


# ---- lower bounds


def phase_of(*sizes: float) -> Phase:
    """Of all-to-all, gather, experts and reduce in ms, whose pieces cost their share."""
    a2a, gather, expert, reduce = (Load(LinearCost(0.0, 1.0), each) for each in sizes)
    return Phase(a2a, gather, expert, reduce)


@pytest.mark.parametrize("degree", [1, 2, 5])
@pytest.mark.parametrize(
    ("sizes", "own_ms", "beside_ms"),
    [
        # The first chunk comes by 2 + 3, and the last one goes by 1 + 2.
        ((2.0, 3.0, 40.0, 1.0), 40.0, 5.0 + 3.0),
        # Of the link in a node, which gathers and reduces, the first chunk comes by 2 and the last one goes by 2.
        ((2.0, 30.0, 1.0, 20.0), 50.0, 2.0 + 2.0),
    ],
)
def test_the_busiest_lane_waits_for_one_chunk_to_come_and_one_to_go(
    sizes: tuple[float, ...], own_ms: float, beside_ms: float, degree: int
) -> None:
    phase = phase_of(*sizes)
    bound_ms = lower_bound_ms(*bare_block(phase), degree)
    assert bound_ms == pytest.approx(simulated_ms(phase, degree, with_gradient=False))
    assert degree == 1 or bound_ms == pytest.approx(own_ms + beside_ms / degree)
    # Where nothing can overlap, it is reached at once.
    costs = {kind: LinearCost(0.25, 1e-3) for kind in random_costs(random.Random(8))}
    work = layer_of("one rank").forward
    assert lower_bound_ms(work, costs, 1) == pytest.approx(played_ms(work, Order(1), costs))


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
        for timeline, bound_ms in zip(plan.timelines(costs), step_bounds_ms([layer] * 3, costs, 17), strict=True):
            assert timeline.makespan_ms <= 1.05 * bound_ms

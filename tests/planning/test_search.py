# SPDX-License-Identifier: Apache-2.0
"""What is chosen is the best of all plans that a system and the rules allow, each simulated by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from ds_fsmoe.planning.call_shape import layer_of_call
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.bounds import lower_bound_ms
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.decide.search import LANE_NAMES
from ds_fsmoe.planning.job.measured import Timing
from ds_fsmoe.planning.schedule import EXPERT, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import BlockWork, Layer, MoEWork, Stage, Work
from tests.planning.layers import choices_to_make, cut_anew, every_plan
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
@pytest.mark.parametrize("anew", [None, 1.3])
def test_a_runner_up_is_what_could_be_run_instead_and_both_phases_take_no_less_with_it(
    uses_rng: bool, anew: float | None
) -> None:
    space = SearchSpace.of("fsmoe", MAX_DEGREE)
    faster_alone = 0
    for number in range(5):
        profile = made_up(number, is_written=False, uses_rng=uses_rng)
        profile = cut_anew(profile, anew) if anew else profile
        forward, backward = choose_degrees(profile, Machine(), space)
        for choice, other, asked in ((forward, backward, (1, 0)), (backward, forward, (0, 1))):
            assert choice.runner_up_both_ms >= choice.both_ms * (1 - 1e-9)
            faster_alone += choice.runner_up_ms < choice.time_ms
            # Asked for, it takes what was said; no other number of chunks takes less.
            degrees = (choice.runner_up,) * 2 if uses_rng else (choice.runner_up, other.order.degree)
            took_ms = {}
            for degree in {*range(1, MAX_DEGREE + 1)} - {choice.order.degree}:
                pair = (degree,) * 2 if uses_rng else (degree, other.order.degree)
                found = choose_degrees(profile, Machine(), space, pair if asked == (1, 0) else pair[::-1], "paper")
                took_ms[pair] = sum(each.time_ms for each in found)
            assert took_ms[degrees] == pytest.approx(choice.runner_up_both_ms)
            assert took_ms[degrees] == pytest.approx(min(took_ms.values()))
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


def test_best_cuts_for_a_gain_of_more_than_three_hundredths_and_not_for_one_within_the_noise() -> None:
    best, gains = SearchSpace.of("best", MAX_DEGREE), []
    for all_gather_ms in (0.4, 1.2, 1.4, 1.7, 2.4):
        # Two chunks hide half of the all-gather beside other traffic, and nothing else; a launch costs nothing.
        big = {"all-to-all": 50.0, "all-gather": all_gather_ms, "reduce-scatter": all_gather_ms}
        base = made_up(0, **big, experts_forward=0.1, experts_backward=0.1)
        free = {
            name: Timing("byte", each.sizes, tuple(ms - each.fit.cost.alpha_ms for ms in each.times_ms))
            for name, each in base.operations.items()
        }
        profile = replace(base, operations=free)
        any_gain, _ = choose_degrees(profile, Machine(), replace(best, min_gain=0.0))
        forward, _ = choose_degrees(profile, Machine(), best)
        gains.append(1 - any_gain.time_ms / any_gain.unchunked_ms)
        assert any_gain.order.degree > 1
        assert (forward.order.degree > 1) == (gains[-1] > 0.03)
    assert gains == sorted(gains)
    assert 0.02 < gains[2] < 0.03 < gains[3] < 0.04


def test_lanes_that_slow_each_other_down_to_a_standstill_are_not_worth_a_cut() -> None:
    space = SearchSpace.of("best", MAX_DEGREE)
    for number in range(2):
        free = choose_degrees(made_up(number), Machine(), space)
        assert max(choice.order.degree for choice in free) > 1
        # Two lanes at once do no more than one: nothing is left to be gained.
        stuck = Machine(contention=Contention(links=1.0, compute=1.0, traffic=1.0))
        assert [each.order.degree for each in choose_degrees(made_up(number), stuck, space)] == [1, 1]


def test_a_layer_whose_issuing_takes_longer_than_its_work_is_not_cut_where_one_thread_issues_for_all_lanes() -> None:
    """On lanes that are threads the same numbers count for nothing: there each task is done by whoever issues it."""
    space, profile, degrees = SearchSpace.of("fsmoe", MAX_DEGREE), made_up(0), {}
    for issue_ms in (0.0, 0.3, 3.0, 30.0):
        # To issue a task of experts takes as long as ten of the others.
        operations = {
            name: replace(timing, issued_ms=(issue_ms if "experts" in name else issue_ms / 10,) * 3)
            for name, timing in profile.operations.items()
        }
        bound = replace(profile, operations=operations)
        ahead, threads = (choose_degrees(bound, Machine(issues_ahead=ahead), space) for ahead in (True, False))
        degrees[issue_ms] = [each.order.degree for each in ahead]
        assert [each.order.degree for each in threads] == degrees[0.0]
        # Nothing is over before the host has issued one task of experts for each chunk.
        assert all(each.time_ms >= issue_ms * each.order.degree for each in ahead)
    assert max(degrees[0.0]) > 1
    assert degrees[30.0] == [1, 1]
    for phase in range(2):
        of_phase = [each[phase] for each in degrees.values()]
        assert of_phase == sorted(of_phase, reverse=True)


def test_what_issuing_takes_counts_where_tasks_run_one_after_another_too() -> None:
    uncut = SearchSpace.of("deepspeed", 1)
    for ahead in (False, True):
        machine = Machine(is_serial=True, issues_ahead=ahead)
        free, dear = (choose_degrees(made_up(0, task_ms=task_ms), machine, uncut) for task_ms in (0.0, 50.0))
        for cheap, slow in zip(free, dear, strict=True):
            assert slow.time_ms >= cheap.time_ms + 4 * 50.0


@pytest.mark.parametrize("schedule", ["best", "fsmoe", "tutel"])
@pytest.mark.parametrize("asked", [(8, 8), (8, None), (None, 8)])
def test_a_degree_above_the_capacity_that_is_asked_for_is_kept(schedule: str, asked: tuple) -> None:
    few = replace(SIZES, capacity=4)
    space = SearchSpace.of(schedule, MAX_DEGREE).with_degrees(*asked, "paper")
    layer = layer_of_call(GROUPS, few, made_up().costs())
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

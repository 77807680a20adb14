# SPDX-License-Identifier: Apache-2.0
"""The degrees that are chosen are those that a search of all of them finds, within what was asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ds_fsmoe.planning.block import ORDERS
from ds_fsmoe.planning.call_shape import layer_of_call, moe_work
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.plan_requests import MIN_GAIN, PlanRequest, SearchSpace
from ds_fsmoe.planning.job.measured import BACKWARD, BACKWARD_ANEW, LayerProfile, Timing
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import BlockWork
from tests.planning.measured_layers import GROUPS, SIZES, Machine, choose_degrees, made_up

MAX_DEGREE = 8


def by_brute_force(profile: LayerProfile, backward: bool, orders: list[Order]) -> list[float]:
    """Times by the planner's own price of a block, which knows nothing of calls and slots."""
    moe = moe_work(GROUPS, backward, SIZES)
    once_launched = replace(moe, expert=replace(moe.expert, launches=1), capacity=None)
    costs = profile.costs().of(backward)[0]
    return BlockTimes(BlockWork((), once_launched, ()), costs).times_ms(orders)[:, 0].tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schedule", ["fsmoe", "fsmoe_no_iio"])
def test_each_phase_gets_the_degree_that_is_the_fastest_of_all(schedule: str, seed: int) -> None:
    profile = made_up(seed, task_ms=0.02)
    space = SearchSpace.of(schedule, MAX_DEGREE)
    for backward, choice in enumerate(choose_degrees(profile, Machine(), space)):
        orders = space.orders
        times_ms = by_brute_force(profile, bool(backward), orders)
        best = min(range(len(orders)), key=times_ms.__getitem__)
        assert len(orders) == MAX_DEGREE
        assert choice.order == orders[best]
        assert choice.time_ms == pytest.approx(times_ms[best])
        assert choice.unchunked_ms == pytest.approx(times_ms[0])
        rest_ms = [(time_ms, order.degree) for time_ms, order in zip(times_ms, orders, strict=True)]
        runner_up = min(pair for pair in rest_ms if pair[1] != choice.order.degree)
        assert (choice.runner_up_ms, choice.runner_up) == (pytest.approx(runner_up[0]), runner_up[1])


@pytest.mark.parametrize("seed", range(4))
def test_best_searches_every_order(seed: int) -> None:
    profile = made_up(seed)
    space = SearchSpace.of("best", MAX_DEGREE)
    forward, backward = choose_degrees(profile, Machine(), space)
    every = [Order(1, "reduce_first")] + [
        Order(degree, links) for degree in range(2, MAX_DEGREE + 1) for links in ORDERS
    ]
    for is_backward, choice in enumerate((forward, backward)):
        found_ms = by_brute_force(profile, bool(is_backward), every)
        gains = min(found_ms) < (1 - MIN_GAIN) * found_ms[0]
        assert choice.time_ms == pytest.approx(min(found_ms) if gains else found_ms[0])


def free_to_cut(all_gather_ms: float) -> LayerProfile:
    """Two chunks hide half of the all-gather beside other traffic, and nothing else; a launch costs nothing."""
    big = {"all-to-all": 50.0, "all-gather": all_gather_ms, "reduce-scatter": all_gather_ms}
    small = {"experts_forward": 0.1, "experts_backward": 0.1}
    base = made_up(0, **big, **small)
    free = {
        name: Timing("byte", each.sizes, tuple(ms - each.fit.cost.alpha_ms for ms in each.times_ms))
        for name, each in base.operations.items()
    }
    return replace(base, operations=free)


def test_best_cuts_for_a_gain_of_more_than_three_hundredths_and_not_for_one_within_the_noise() -> None:
    best, gains = SearchSpace.of("best", MAX_DEGREE), []
    for all_gather_ms in (0.4, 1.2, 1.4, 1.7, 2.4):
        profile = free_to_cut(all_gather_ms)
        # What may be gained at all, and what is chosen.
        any_gain, _ = choose_degrees(profile, Machine(), replace(best, min_gain=0.0))
        forward, _ = choose_degrees(profile, Machine(), best)
        gains.append(1 - any_gain.time_ms / any_gain.unchunked_ms)
        assert any_gain.order.degree > 1
        assert (forward.order.degree > 1) == (gains[-1] > 0.03)
        assert forward.order.degree > 1 or forward.order.links == "reduce_first"
    assert gains == sorted(gains)
    assert gains[0] < 0.01
    assert 0.02 < gains[2] < 0.03 < gains[3] < 0.04


@pytest.mark.parametrize("schedule", ["tutel", "tutel_improved", "pipemoe_lina"])
@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_of_one_degree_gets_the_one_with_the_least_sum(schedule: str, seed: int) -> None:
    profile = made_up(seed)
    space = SearchSpace.of(schedule, MAX_DEGREE)
    forward, backward = choose_degrees(profile, Machine(), space)
    orders = space.orders
    sums_ms = [
        sum(pair)
        for pair in zip(by_brute_force(profile, False, orders), by_brute_force(profile, True, orders), strict=True)
    ]
    assert forward.order.degree == backward.order.degree == 1 + sums_ms.index(min(sums_ms))


def test_the_schedule_that_does_not_cut_is_not_cut() -> None:
    space = SearchSpace.of("deepspeed", MAX_DEGREE)
    for choice in choose_degrees(made_up(), Machine(), space):
        assert (choice.order.degree, choice.runner_up) == (1, None)


def test_experts_that_draw_random_numbers_are_cut_alike_in_both_phases() -> None:
    space = SearchSpace.of("fsmoe", MAX_DEGREE)
    apart = 0
    for seed in range(12):
        free = choose_degrees(made_up(seed, is_written=False), Machine(), space)
        apart += free[0].order.degree != free[1].order.degree
        pair = choose_degrees(made_up(seed, is_written=False, uses_rng=True), Machine(), space)
        assert pair[0].order.degree == pair[1].order.degree
    assert apart > 0


@pytest.mark.parametrize("uses_rng", [False, True])
@pytest.mark.parametrize("anew", [None, 1.3])
def test_a_runner_up_is_what_could_be_run_instead_and_both_phases_take_no_less_with_it(
    uses_rng: bool, anew: float | None
) -> None:
    space = SearchSpace.of("fsmoe", MAX_DEGREE)
    faster_alone = 0
    for seed in range(12):
        profile = made_up(seed, is_written=False, uses_rng=uses_rng)
        if anew:
            at = profile.operations[BACKWARD]
            dearer = replace(at, times_ms=tuple(anew * each for each in at.times_ms))
            profile = replace(profile, operations=dict(profile.operations) | {BACKWARD_ANEW: dearer})
        forward, backward = choose_degrees(profile, Machine(), space)
        assert forward.both_ms == backward.both_ms == pytest.approx(forward.time_ms + backward.time_ms)
        for choice, other, asked in ((forward, backward, (1, 0)), (backward, forward, (0, 1))):
            assert choice.runner_up_both_ms >= choice.both_ms * (1 - 1e-9)
            faster_alone += choice.runner_up_ms < choice.time_ms
            # Asked for, it takes what was said.
            degrees = (choice.runner_up,) * 2 if uses_rng else (choice.runner_up, other.order.degree)
            pair = degrees if asked == (1, 0) else degrees[::-1]
            found = choose_degrees(profile, Machine(), space, pair, "paper")
            assert sum(each.time_ms for each in found) == pytest.approx(choice.runner_up_both_ms)
    # With one degree for both, a phase alone would often go faster with another.
    assert bool(faster_alone) is uses_rng


def test_phases_are_cut_alike_where_cutting_anew_costs_more_than_it_gains() -> None:
    space = SearchSpace.of("fsmoe", MAX_DEGREE)
    for seed in range(6):
        dear = made_up(seed, is_written=False)
        operations = dict(dear.operations) | {
            BACKWARD_ANEW: replace(
                dear.operations[BACKWARD], times_ms=tuple(100 * each for each in dear.operations[BACKWARD].times_ms)
            )
        }
        forward, backward = choose_degrees(replace(dear, operations=operations), Machine(), space)
        assert forward.order.degree == backward.order.degree


def test_degrees_given_by_hand_are_kept_and_the_others_chosen_around_them() -> None:
    profile = made_up(3)
    space = SearchSpace.of("fsmoe", MAX_DEGREE)
    free = choose_degrees(profile, Machine(), space)
    for asked in itertools.product((None, 1, 5, 11), repeat=2):
        found = choose_degrees(profile, Machine(), space, asked, "paper")
        for choice, degree, freely in zip(found, asked, free, strict=True):
            assert choice.order.degree == (freely.order.degree if degree is None else degree)
            assert choice.auto_degree == freely.order.degree
            assert choice.auto_ms == pytest.approx(freely.time_ms)


def test_where_one_task_runs_after_another_nothing_is_cut() -> None:
    for schedule in ("best", "fsmoe", "tutel"):
        space = SearchSpace.of(schedule, MAX_DEGREE)
        for choice in choose_degrees(made_up(1), Machine(is_serial=True), space):
            assert choice.order.degree == 1


def test_no_more_chunks_than_slots_are_considered() -> None:
    few = replace(SIZES, capacity=3)
    for choice in choose_degrees(made_up(), Machine(), SearchSpace.of("fsmoe", MAX_DEGREE), shape=few):
        assert choice.order.degree <= 3


def test_a_dear_host_makes_fewer_chunks() -> None:
    for ahead in (False, True):
        space = SearchSpace.of("fsmoe", MAX_DEGREE)
        cheap, dear = (
            choose_degrees(made_up(0, task_ms=task_ms), Machine(issues_ahead=ahead), space)[0] for task_ms in (0.0, 5.0)
        )
        assert dear.order.degree < cheap.order.degree


def test_lanes_that_slow_each_other_down_to_a_standstill_are_not_worth_a_cut() -> None:
    space = SearchSpace.of("best", MAX_DEGREE)
    for seed in range(4):
        profile = made_up(seed)
        free = choose_degrees(profile, Machine(), space)
        assert max(choice.order.degree for choice in free) > 1
        # Two lanes at once do no more than one: nothing is left to be gained.
        stuck = Machine(contention=Contention(links=1.0, compute=1.0, traffic=1.0))
        for choice, freely in zip(choose_degrees(profile, stuck, space), free, strict=True):
            assert choice.order.degree == 1
            assert choice.time_ms == pytest.approx(freely.unchunked_ms)


def test_contention_is_priced_and_the_isolated_time_is_told_beside_it() -> None:
    space = SearchSpace.of("fsmoe", MAX_DEGREE)
    busy = Machine(contention=Contention(links=0.3, compute=0.4, traffic=0.2))
    for seed in range(4):
        profile = made_up(seed)
        for choice, freely in zip(
            choose_degrees(profile, busy, space),
            choose_degrees(profile, Machine(), space),
            strict=True,
        ):
            assert freely.isolated_ms == pytest.approx(freely.time_ms)
            assert freely.time_ms <= choice.isolated_ms + 1e-9
            assert choice.isolated_ms < choice.time_ms <= choice.unchunked_ms + 1e-9


def test_links_that_are_one_wire_are_one_lane_for_best() -> None:
    for seed in range(3):
        for choice in choose_degrees(made_up(seed), Machine(), SearchSpace.of("best", MAX_DEGREE, shared_link=True)):
            assert choice.order.links == "shared"


def test_best_does_not_cut_for_less_than_what_the_lines_are_off_by() -> None:
    profile = made_up(0)
    space = SearchSpace.of("best", MAX_DEGREE)
    forward, _ = choose_degrees(profile, Machine(), space)
    gain = 1 - forward.time_ms / forward.unchunked_ms
    assert forward.order.degree > 1
    # Off by more than the gain, up and down in turn, so that the lines stay about where they are.
    off = min(0.9, 2.5 * gain)

    def swinging(at: Timing) -> Timing:
        times_ms = [(1 + (off if place % 2 else -off)) * at.fit.cost.ms(size) for place, size in enumerate(at.sizes)]
        return replace(at, times_ms=tuple(times_ms))

    doubtful = replace(profile, operations={name: swinging(each) for name, each in profile.operations.items()})
    assert doubtful.relative_residual > MIN_GAIN
    for choice in choose_degrees(doubtful, Machine(), space):
        assert choice.time_ms < (1 - doubtful.relative_residual) * choice.unchunked_ms or choice.order.degree == 1


def test_a_layer_whose_issuing_takes_longer_than_its_work_is_not_cut_where_one_thread_issues_for_all_lanes() -> None:
    """On lanes that are threads the same numbers count for nothing: there each task is done by whoever issues it."""
    space = SearchSpace.of("fsmoe", MAX_DEGREE)
    for seed in range(3):
        profile = made_up(seed)
        degrees = {}
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


@pytest.mark.parametrize("schedule", ["best", "fsmoe", "tutel"])
@pytest.mark.parametrize("asked", [(8, 8), (8, None), (None, 8)])
def test_a_degree_above_the_capacity_that_is_asked_for_is_kept(schedule: str, asked: tuple) -> None:
    few = replace(SIZES, capacity=4)
    machine, space = Machine(), SearchSpace.of(schedule, MAX_DEGREE).with_degrees(*asked, "paper")
    layer = layer_of_call(GROUPS, few, made_up().costs())
    search = Search(machine.planner(), PlanRequest([{"flat": layer}] * 2, space, "adaptive", "paper"))
    for plan in search.candidates():
        for block, degree in zip(plan.blocks(0), asked, strict=True):
            assert degree in (None, block.degree)


def test_an_uncut_layer_is_planned_as_it_is_run() -> None:
    space = SearchSpace.of("best", MAX_DEGREE).unchunked("reduce_first")
    for seed in range(6):
        for choice in choose_degrees(made_up(seed), Machine(), space):
            assert choice.order.degree == 1


def test_what_issuing_takes_counts_where_tasks_run_one_after_another_too() -> None:
    uncut = SearchSpace.of("deepspeed", 1)
    for ahead in (False, True):
        free, dear = (
            choose_degrees(made_up(0, task_ms=task_ms), Machine(is_serial=True, issues_ahead=ahead), uncut)
            for task_ms in (0.0, 50.0)
        )
        for cheap, slow in zip(free, dear, strict=True):
            assert slow.time_ms >= cheap.time_ms + 4 * 50.0

# SPDX-License-Identifier: Apache-2.0
"""How much time a backward leaves for gradients, and how much of them is planned into it: against a clock that tests
set, so that every number is exact."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.gradients.idle_times import Idle, IdleTimes, TimedWindow, plan_by_time
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.gradient_plan import BufferReadiness, GradientPlan
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import GRAD, Lane
from tests.fake_clock import SetClock
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


# ---- windows


def walk(idle: IdleTimes, clock: SetClock, windows: list[tuple[float, float]]) -> None:
    """One backward: of each window how long it was idle inside the layer, and how long what followed took."""
    for moe_ms, dense_ms in windows:
        idle.opened()
        clock.now_ms += 50.0
        idle.closed(moe_ms)
        clock.now_ms += dense_ms
    idle.next_round()


def typical_of(rank: int, world_size: int) -> list[Idle]:
    clock = SetClock()
    idle = IdleTimes(CPU, clock)
    walk(idle, clock, [(99.0, 99.0)])  # another number of windows: not one of these backwards
    walk(idle, clock, [(90.0, 80.0), (70.0, 60.0)])  # the first of them: all is slow
    # Of each the median counts, which is neither the mean nor the first; of ranks the least.
    for moe_ms in (4.0, 30.0, 5.0):
        walk(idle, clock, [(moe_ms + rank, 2.0 * moe_ms), (moe_ms, moe_ms - rank)])
    return idle.typical(2, dist.group.WORLD)


def test_of_each_window_the_median_over_backwards_counts_and_of_ranks_the_least(tmp_path: Path) -> None:
    for found in run_on_ranks(typical_of, 2, tmp_path):
        assert found == [Idle(5.0, 10.0), Idle(5.0, 4.0)]


def layer(links: Any = "paper", degree: int = 2, **groups: int) -> PhasePlan:
    sizes = {"world": 4, "gpus_per_node": 2, "ep": 2, "esp": 2} | groups
    return PhasePlan(BlockPlan(degree, links), Groups(**sizes), backward=True)


@pytest.fixture
def opened() -> Any:
    return SimpleNamespace(open=lambda label: (), close=lambda: None, is_sending=lambda: True, plan=None)


def passed(
    clock: SetClock, reducer: Any, plan: PhasePlan, at_ms: dict[int, tuple[float, float]], last_ms: float
) -> Idle:
    """A window over a backward of which some tasks (by their number) ran at these times, the others in no time."""
    idle = IdleTimes(CPU, clock)
    window = TimedWindow(reducer, plan, idle)
    window.open("L00")
    began_ms = clock.now_ms = 1000.0
    recorder = window.observer.of_run(plan.schedule, "L00/backward")
    for index, task in enumerate(plan.schedule.tasks):
        start_ms, end_ms = at_ms.get(index, (0.0, 0.0))
        clock.now_ms = began_ms + start_ms
        recorder.begin(index, task)
        clock.now_ms = began_ms + end_ms
        recorder.end(index, task)
    clock.now_ms = began_ms + last_ms
    window.close()
    clock.now_ms += 7.0
    idle.over()
    (found,) = idle.rounds[-1]
    return found


def test_the_lane_of_gradients_is_idle_from_the_last_tokens_in_to_the_first_out(clock: SetClock, opened: Any) -> None:
    plan = layer()
    of_lane = [i for i, task in enumerate(plan.schedule.tasks) if task.lane is Lane.INTER]
    kinds = [f"{plan.schedule.tasks[i].kind} {plan.schedule.tasks[i].chunk}" for i in of_lane]
    assert kinds == ["A2A_IN 0", "A2A_IN 1", "A2A_OUT 0", "A2A_OUT 1"]
    spans_ms = [(0.0, 3.0), (4.0, 6.0), (17.0, 19.0), (25.0, 26.0)]
    found = passed(clock, opened, plan, dict(zip(of_lane, spans_ms, strict=True)), 26.0)
    assert found == Idle(moe_ms=11.0, dense_ms=7.0)
    # One that never stands still is not idle for less than no time.
    full = passed(clock, opened, plan, dict(zip(of_lane, [(0, 3), (3, 6), (5, 9), (9, 12)], strict=True)), 12.0)
    assert full.moe_ms == 0.0


def test_a_lane_that_nothing_of_the_layer_is_on_is_idle_as_long_as_the_layer_takes(
    clock: SetClock, opened: Any
) -> None:
    plan = layer(ep=1, esp=2, degree=1)
    assert all(task.lane is not Lane.INTER for task in plan.schedule.tasks)
    assert any(task.lane is Lane.INTER for task in plan.sending(((GRAD,),)).tasks)
    last = len(plan.schedule.tasks) - 1
    assert passed(clock, opened, plan, {0: (0.0, 5.0), last: (5.0, 23.0)}, 30.0).moe_ms == 23.0


# ---- the plan


MS_PER_BYTE = 1e-4
NUMEL = 100_000


def planned(idle: list[Idle], ready: tuple[int, ...], alpha_ms: float = 0.0, mode: Any = "adaptive") -> GradientPlan:
    supplies = [BufferReadiness(GRAD, 4, ready, NUMEL)]
    costs = [LinearCost(alpha_ms, MS_PER_BYTE)]
    return plan_by_time(supplies, [(Lane.INTER,)], costs, idle, mode, solver="dp", chunk_bytes=1 << 16)


def sent_ms(plan: GradientPlan) -> list[float]:
    """What travels takes so long: inside the first layer, behind it, inside the second, ..."""
    return [sum(each.stop - each.first for each in parcels) * 4 * MS_PER_BYTE for parcels in plan.parts]


def test_windows_are_filled_with_as_much_as_they_have_time_for() -> None:
    # All of it takes 40 ms.
    idle = [Idle(6.0, 3.0), Idle(12.0, 0.0)]
    assert sent_ms(planned(idle, (NUMEL, NUMEL))) == pytest.approx([6.0, 3.0, 12.0, 0.0], abs=0.2)
    # Half of the time, half as much.
    assert sent_ms(planned([Idle(3.0, 1.5), Idle(6.0, 0.0)], (NUMEL, NUMEL))) == pytest.approx([3, 1.5, 6, 0], abs=0.2)
    assert sent_ms(planned([Idle(50.0, 0.0), Idle(0.0, 0.0)], (NUMEL, NUMEL)))[0] == pytest.approx(40.0)


def test_what_does_not_exist_yet_when_a_window_opens_does_not_travel_in_it() -> None:
    idle = [Idle(40.0, 0.0), Idle(12.0, 0.0)]
    assert sent_ms(planned(idle, (NUMEL // 10, NUMEL))) == pytest.approx([4.0, 0.0, 12.0, 0.0], abs=0.2)


def test_no_launch_is_made_that_costs_more_than_it_hides() -> None:
    # Neither in a window that is too short for one, nor after the backward for what one window has no time for.
    idle = [Idle(0.5, 0.0), Idle(20.0, 0.0)]
    assert sent_ms(planned(idle, (NUMEL, NUMEL), alpha_ms=2.0)) == pytest.approx([0.0, 0.0, 40.0, 0.0])

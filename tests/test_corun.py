# SPDX-License-Identifier: Apache-2.0
"""How much lanes slow each other down is measured as it is: on lanes whose slowness is known, and against a clock that
they set, so that every number is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.execution.lanes import SerialLanes
from ds_fsmoe.measuring import stopwatch as contention
from ds_fsmoe.measuring.stopwatch import MOST_TASKS, SHORTEST_MS, Stopwatch, slowdowns
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.schedule import Lane, Schedule
from ds_fsmoe.planning.timeline import Contention
from tests.fake_clock import SetClock
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")
INTER, INTRA, COMPUTE = Lane.INTER, Lane.INTRA, Lane.COMPUTE
ONCE_MS = {INTER: 3.0, INTRA: 7.0, COMPUTE: 11.0}
# No two alike, so that none can stand for another.
KNOWN = {(INTER, INTRA): 1.5, (INTRA, INTER): 1.25, (INTER, COMPUTE): 1.1, (COMPUTE, INTER): 1.4}
KNOWN |= {(INTRA, COMPUTE): 1.75, (COMPUTE, INTRA): 1.05}


@dataclass
class Run:
    """What was asked of the lanes at once."""

    counts: Mapping[Lane, int]
    done: list[Lane] = field(default_factory=list)


class Slowed(SerialLanes):
    """Lanes that take a known time for a task (``once_ms``), by the factor of (slowed, by) as long while another one is
    at work; all of a run by ``stretched`` of its number, as if the machine had been disturbed."""

    def __init__(
        self,
        clock: SetClock,
        once_ms: Mapping[Lane, float],
        factors: Mapping[tuple[Lane, Lane], float],
        stretched: Callable[[int], float] = lambda run: 1.0,
    ) -> None:
        super().__init__()
        self.runs: list[Run] = []
        self._clock, self._once_ms, self._factors, self._stretched = clock, once_ms, factors, stretched

    def run(self, schedule: Schedule, bodies: Any, label: str = "", observer: Any = None) -> None:
        counts = {lane: len(tasks) for lane, tasks in schedule.lanes.items() if tasks}
        stretched, began_ms = self._stretched(len(self.runs)), self._clock.now_ms
        run = Run(counts)
        self.runs.append(run)
        slowed = {lane: self._factors.get((lane, *(set(counts) - {lane})), 1.0) for lane in counts}
        # When the first lane is through: from then on the other has the machine to itself.
        apart_ms = min(counts[lane] * self._once_ms[lane] * slowed[lane] for lane in counts)

        def after_ms(lane: Lane, tasks: int) -> float:
            work_ms = tasks * self._once_ms[lane]
            beside_ms = min(work_ms * slowed[lane], apart_ms)
            return stretched * (beside_ms + work_ms - beside_ms / slowed[lane])

        observer.start(schedule, label)
        for lane in counts:
            for place, index in enumerate(schedule.lanes[lane]):
                task = schedule.tasks[index]
                self._clock.now_ms = began_ms + after_ms(lane, place)
                observer.begin(index, task)
                bodies[task.kind](task)
                run.done.append(lane)
                self._clock.now_ms = began_ms + after_ms(lane, place + 1)
                observer.end(index, task)
        self._clock.now_ms = began_ms + 1e3


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def measured(lanes: SerialLanes, clock: SetClock, once_ms: Mapping[Lane, float] = ONCE_MS) -> Slowdowns:
    return slowdowns(Stopwatch(CPU, host=clock), lanes, {lane: lambda: lambda: None for lane in once_ms}, "a test")


def test_what_two_lanes_slow_each_other_is_found_as_it_is_whichever_is_through_first(clock: SetClock) -> None:
    lanes = Slowed(clock, ONCE_MS, KNOWN)
    assert measured(lanes, clock).factors == pytest.approx(KNOWN)
    through_first = set()
    for a, b in itertools.combinations(ONCE_MS, 2):
        (counts,) = {tuple(run.counts.items()) for run in lanes.runs if set(run.counts) == {a, b}}
        took_ms = {lane: count * ONCE_MS[lane] for lane, count in counts}
        through_first.add(took_ms[a] * KNOWN[a, b] < took_ms[b] * KNOWN[b, a])
    assert through_first == {True, False}


def test_a_lane_that_is_as_fast_or_faster_beside_another_is_said_not_to_be_slowed(clock: SetClock) -> None:
    found = measured(Slowed(clock, ONCE_MS, KNOWN | {(INTER, INTRA): 0.9, (INTRA, COMPUTE): 0.5}), clock)
    assert found.factors == pytest.approx(KNOWN | {(INTER, INTRA): 1.0, (INTRA, COMPUTE): 1.0})
    alone = measured(Slowed(clock, ONCE_MS, {}), clock)
    assert alone.contention() == Contention()
    assert alone.overlap_gains() == pytest.approx(dict.fromkeys(itertools.combinations(Lane, 2), 2.0))


def test_first_runs_and_a_run_that_was_disturbed_do_not_count(clock: SetClock) -> None:
    # Of the three that count, one is always disturbed, each time by another factor; and the first of a lane are slow.
    first = contention.REPEATS * len(ONCE_MS)
    disturbed = [
        lambda run, at=at: 2.0 + run if run % contention.REPEATS == at else 1.0 for at in range(contention.REPEATS)
    ]
    for stretched in (*disturbed, lambda run: 100.0 if run < first else 1.0):
        assert measured(Slowed(clock, ONCE_MS, KNOWN, stretched), clock).factors == pytest.approx(KNOWN)


@pytest.mark.parametrize("once_ms", [ONCE_MS, {INTER: 0.01, COMPUTE: 0.9}, {INTRA: 70.0, COMPUTE: 3.0}])
def test_both_lanes_are_busy_for_as_long_as_it_takes_and_for_about_as_long(
    clock: SetClock, once_ms: dict[Lane, float]
) -> None:
    lanes = Slowed(clock, once_ms, KNOWN)
    measured(lanes, clock, once_ms)
    of_pairs = [run for run in lanes.runs if len(run.counts) == 2]
    assert len(of_pairs) == contention.REPEATS * len(list(itertools.combinations(once_ms, 2)))
    for run in of_pairs:
        assert sorted(run.done) == sorted(lane for lane, count in run.counts.items() for _ in range(count))
        for lane, count in run.counts.items():
            assert count <= MOST_TASKS
            aim_ms = max(SHORTEST_MS, 2 * max(once_ms.values()))
            assert count == MOST_TASKS or abs(count * once_ms[lane] - aim_ms) <= once_ms[lane]


def test_what_is_done_is_made_ready_once_and_one_lane_alone_is_slowed_by_nobody(clock: SetClock) -> None:
    made: list[Lane] = []

    def found(*of: Lane) -> Slowdowns:
        work = {lane: lambda lane=lane: made.append(lane) or (lambda: None) for lane in of}
        return slowdowns(Stopwatch(CPU, host=clock), Slowed(clock, ONCE_MS, KNOWN), work, "a test")

    assert found(*ONCE_MS) != Slowdowns({})
    assert made == list(ONCE_MS)
    assert found(COMPUTE) == Slowdowns({})


def slowed_on_one(rank: int, world_size: int) -> Mapping[tuple[Lane, Lane], float]:
    clock = SetClock()
    return measured(Slowed(clock, ONCE_MS, KNOWN if rank else {}), clock).factors


def test_the_rank_that_is_slowed_most_counts_on_all_of_them(tmp_path: Path) -> None:
    for found in run_on_ranks(slowed_on_one, 2, tmp_path):
        assert found == pytest.approx(KNOWN)


# ---- as the planner knows it


def test_the_planner_is_told_how_much_longer_each_kind_of_task_takes_and_what_two_lanes_do_at_once() -> None:
    expected = {"links": (0.5 + 0.25) / 2, "compute": (0.4 + 0.05) / 2, "traffic": (0.1 + 0.75) / 2}
    assert asdict(Slowdowns(KNOWN).contention()) == pytest.approx(expected)
    of_one_link = Slowdowns({pair: factor for pair, factor in KNOWN.items() if INTER not in pair})
    assert asdict(of_one_link.contention()) == pytest.approx({"links": 0.0, "compute": 0.05, "traffic": 0.75})
    assert Slowdowns(KNOWN).overlap_gains() == {
        (COMPUTE, INTRA): pytest.approx(1 / 1.05 + 1 / 1.75),
        (COMPUTE, INTER): pytest.approx(1 / 1.4 + 1 / 1.1),
        (INTRA, INTER): pytest.approx(1 / 1.25 + 1 / 1.5),
    }

# SPDX-License-Identifier: Apache-2.0
"""This module measures how much two lanes slow each other down: alone, then both at once.

What an operation takes alone says little about a machine on which others are under way: links may share a wire or an
adapter, and traffic and computation take processor time, memory bandwidth or multiprocessors from each other.

A GPU is kept waiting until it has been given all that is to run side by side: one thread issues for all lanes, so lanes
that wait for it would seem to slow each other down, by as much as they share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from ds_fsmoe.distributed.fail_together import raise_on_all_ranks
from ds_fsmoe.execution.lanes import Lanes
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.observing.device_time import pause_ms
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.measured import Slowdowns
from ds_fsmoe.planning.schedule import Draft, Lane, Schedule, Task

REPEATS = 3
SHORTEST_MS = 20.0
"""The least time that a lane is kept busy, so that its start does not matter."""
MOST_TASKS = 64
MOST_ISSUED_MS = 2.0
"""Of a lane, what the host needs at the most to issue its tasks: a GPU takes a thousand launches ahead, and a host that
has to wait for room would be timed with it."""

Prepare = Callable[[], Callable[[], object]]
"""A function that prepares, without communication, work that can then be done many times."""


def slowdowns(watch: Stopwatch, lanes: Lanes, work: Mapping[Lane, Prepare], what: str) -> Slowdowns:
    """Measure every pair. Collective; each lane's work is the same on every rank.

    Args:
        watch: the stopwatch of this job.
        lanes: the lanes that overlap.
        work: lane -> what it does, over and over.
        what: the measured thing, for messages.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    bodies: dict[Lane, Callable[[], object]] = {}
    with raise_on_all_ranks(watch.group, f"making ready to measure {what}"):
        bodies = {lane: prepare() for lane, prepare in work.items()}
    recorder = Recorder(watch.device, watch.host)
    last_issue_ms = 0.0

    def busy_ms(counts: Mapping[Lane, int]) -> list[float]:
        """Return lane -> when it finished on the slowest rank, the median over repeats."""
        schedule = _beside(counts)
        calls = {lane.value: _calling(bodies[lane]) for lane in counts}

        def run() -> None:
            lanes.run(schedule, calls, what, recorder)

        nonlocal last_issue_ms
        if watch.issues_ahead:
            last_issue_ms = watch.issued_in_ms(what, run)
        runs = []
        for _ in range(REPEATS):
            with raise_on_all_ranks(watch.group, f"measuring {what}"):
                if watch.issues_ahead:
                    watch.hold_back(pause_ms(last_issue_ms), meets=True, group=watch.group)
                run()
                spans = recorder.timeline(schedule).spans
            runs.append([max(each.end_ms for each in spans if each.task.lane is lane) for lane in counts])
        return torch.tensor(watch.slowest(runs)).median(dim=0).values.tolist()

    if len(bodies) < 2:
        return Slowdowns({})
    for lane in bodies:  # warm up
        busy_ms({lane: 1})
    once_ms, issue_ms = {}, []
    for lane in bodies:
        once_ms[lane] = max(1e-3, busy_ms({lane: 1})[0])
        issue_ms.append(last_issue_ms)
    counts = _counts(once_ms, watch.slowest([issue_ms])[0] if watch.issues_ahead else issue_ms)
    alone_ms = {lane: busy_ms({lane: counts[lane]})[0] for lane in bodies}
    factors: dict[tuple[Lane, Lane], float] = {}
    for a, b in itertools.combinations(bodies, 2):
        a_ms, b_ms = busy_ms({a: counts[a], b: counts[b]})
        factors[a, b] = _slowdown(alone_ms[a], a_ms, b_ms)
        factors[b, a] = _slowdown(alone_ms[b], b_ms, a_ms)
    return Slowdowns(factors)


def _counts(once_ms: Mapping[Lane, float], issue_ms: Sequence[float]) -> dict[Lane, int]:
    """Return how many tasks keep each lane busy for about as long as the others.

    Args:
        once_ms: what a task of the lane takes; the same on every rank, as is the result.
        issue_ms: of each lane, what it takes the host to issue one ahead.
    """
    aim_ms = max(SHORTEST_MS, 2 * max(once_ms.values()))
    most = [MOST_TASKS if not each_ms else min(MOST_TASKS, int(MOST_ISSUED_MS / each_ms)) for each_ms in issue_ms]
    return {
        lane: max(1, min(most_of_lane, round(aim_ms / once_ms[lane])))
        for lane, most_of_lane in zip(once_ms, most, strict=True)
    }


def _slowdown(alone_ms: float, together_ms: float, other_ms: float) -> float:
    """Compute the slowdown from when a lane finished alone and together; it only slows while the other is busy."""
    beside_ms = min(together_ms, other_ms)
    # What was left of it when the other was through ran at full speed.
    done_beside_ms = alone_ms - (together_ms - beside_ms)
    return max(1.0, beside_ms / done_beside_ms) if done_beside_ms > 0 else 1.0


def _beside(counts: Mapping[Lane, int]) -> Schedule:
    """Return this many tasks on each lane that wait only for their lane. A task's kind is its lane's name."""
    draft = Draft()
    for chunk in range(max(counts.values())):
        for lane, count in counts.items():
            if chunk < count:
                draft.add(lane.value, lane, chunk=chunk)
    return draft.finish()


def _calling(body: Callable[[], object]) -> Callable[[Task], None]:
    def call(task: Task) -> None:
        body()

    return call

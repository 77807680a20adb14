# SPDX-License-Identifier: Apache-2.0
"""Simulates a schedule: when every task would start and end, and what the whole waits for. The planner's plans and
reports use it; :mod:`~ds_fsmoe.planning.batch` simulates many candidates at once.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_fsmoe.planning.cost import Cost, HostCost
from ds_fsmoe.planning.schedule import Lane, Schedule, Task

_INSTANT_MS = 1e-12  # what floating point leaves of a finished task


@dataclass(frozen=True)
class Contention:
    """Holds the slowdown of lanes by each other. All zero: lanes are independent."""

    links: float = 0.0
    """kappa: while both links are busy, what is left of each task takes 1 + kappa times as long."""
    compute: float = 0.0
    """While any link is busy, what is left of a compute task takes 1 + this times as long."""
    traffic: float = 0.0
    """While something is computed, what is left of a task on a link takes this times its length more, besides."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(each) and each >= 0 for each in (self.links, self.compute, self.traffic)):
            raise ValueError(
                f"Contention: links = {self.links}, compute = {self.compute}, traffic = {self.traffic}: must be finite "
                "numbers of at least 0"
            )

    def slowdown(self, lane: Lane, busy: set[Lane]) -> float:
        """Return the factor by which a task on ``lane`` is slowed while the lanes in ``busy`` are at work."""
        if lane is Lane.COMPUTE:
            return 1.0 + self.compute if busy & {Lane.INTRA, Lane.INTER} else 1.0
        beside_link = self.links if {Lane.INTRA, Lane.INTER} <= busy else 0.0
        return 1.0 + beside_link + (self.traffic if Lane.COMPUTE in busy else 0.0)


IDEAL = Contention()


@dataclass(frozen=True, slots=True)
class Span:
    """Holds the start and end of one task, in ms."""

    task: Task
    start_ms: float
    end_ms: float
    waited_for: int | None
    """Index of the task whose end let this one start; ``None`` for one that waited for nothing but the host."""


@dataclass(frozen=True)
class Timeline:
    """Holds the spans, in the order of the schedule's tasks."""

    spans: tuple[Span, ...]

    @property
    def makespan_ms(self) -> float:
        """Return the ms from the start to the end of the last task."""
        return max((span.end_ms for span in self.spans), default=0.0)

    def busy_ms(self, lane: Lane) -> float:
        """Return the ms in which a lane is at work."""
        return sum(span.end_ms - span.start_ms for span in self.spans if span.task.lane is lane)

    def critical_path(self) -> tuple[Span, ...]:
        """Return the chain of tasks that the end waits for, first to last: each ended when the next one started."""
        if not self.spans:
            return ()
        index: int | None = max(range(len(self.spans)), key=lambda i: self.spans[i].end_ms)
        path = []
        while index is not None:
            path.append(self.spans[index])
            index = self.spans[index].waited_for
        return tuple(reversed(path))

    def gantt(self, width: int = 100) -> str:
        """Return the timeline as text, one row per lane. A task is drawn as the last letters of its kind and its
        chunk.
        """
        scale = width / self.makespan_ms if self.makespan_ms else 0.0
        rows = []
        for lane in Lane:
            row = [" "] * width
            for span in (each for each in self.spans if each.task.lane is lane):
                first = min(width - 1, int(span.start_ms * scale))
                last = max(first + 1, min(width, int(span.end_ms * scale)))
                label = f"|{span.task.kind}{span.task.chunk}".ljust(last - first, "-")
                row[first:last] = label[: last - first]
            rows.append(f"{lane:7s} {''.join(row)}")
        return "\n".join([*rows, f"{self.makespan_ms:.3f} ms"])

    def chrome_trace(self) -> str:
        """Return JSON for Perfetto and chrome://tracing, one row per lane, with times in microseconds."""
        events = [
            {
                "name": span.task.name,
                "cat": span.task.kind,
                "ph": "X",
                "pid": 0,
                "tid": span.task.lane.value,
                "ts": span.start_ms * 1e3,
                "dur": (span.end_ms - span.start_ms) * 1e3,
            }
            for span in self.spans
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def simulate(
    schedule: Schedule,
    costs: Mapping[str, Cost],
    contention: Contention = IDEAL,
    host_ms: HostCost = 0.0,
) -> Timeline:
    """Simulate a schedule.

    Args:
        schedule: the tasks.
        costs: kind -> cost, for every kind in the schedule.
        contention: how lanes slow each other down.
        host_ms: the host time of a launch in ms, or kind -> that of its launches. One thread issues for all lanes,
            in the order of the list, without waiting. So a task starts after its own launches and those of all
            tasks before it, on any lane.

    Raises:
        ValueError: a kind has no cost or host cost (the message lists the known kinds), or a host cost is
            invalid.
    """
    of_kinds = host_ms if isinstance(host_ms, Mapping) else {"": host_ms}
    for kind, each_ms in of_kinds.items():
        if not (math.isfinite(each_ms) and each_ms >= 0):
            of_kind = f" of {kind}" if kind else ""
            raise ValueError(f"host_ms{of_kind} = {each_ms}: must be a finite number of at least 0")
    missing = sorted({task.kind for task in schedule.tasks} - set(costs))
    if missing:
        raise ValueError(f"no cost for {', '.join(missing)}; costs exist for {', '.join(sorted(costs))}")
    work_ms = [costs[task.kind].ms(task.size, task.launches) for task in schedule.tasks]
    return play(schedule, work_ms, _issue_ms(schedule, host_ms), contention)


def play(
    schedule: Schedule, work_ms: Sequence[float], issue_ms: Sequence[float], contention: Contention = IDEAL
) -> Timeline:
    """Simulate a schedule with known task times.

    Args:
        schedule: the tasks.
        work_ms: the ms of each task alone.
        issue_ms: the ms at which the host has issued each task.
        contention: how lanes slow each other down.

    Raises:
        ValueError: a task's time is negative or infinite.
    """
    for task, time_ms in zip(schedule.tasks, work_ms, strict=True):
        # Time would stand still or run back, and the simulation would not end.
        if not 0 <= time_ms < math.inf:
            raise ValueError(f"{task.kind} {task.chunk} takes {time_ms} ms: must be a finite number of at least 0")
    if contention == IDEAL:
        return _walk(schedule, work_ms, issue_ms)
    return _play(schedule, work_ms, issue_ms, contention)


def _walk(schedule: Schedule, work_ms: Sequence[float], issue_ms: Sequence[float]) -> Timeline:
    """Simulate without contention: a task's times follow from those before it in the list."""
    spans: list[Span] = []
    last_of_lane: dict[Lane, int] = {}
    for index, task in enumerate(schedule.tasks):
        start_ms, waited_for = issue_ms[index], None
        for needed in (*task.after, *_present(last_of_lane.get(task.lane))):
            if spans[needed].end_ms > start_ms or (waited_for is None and spans[needed].end_ms == start_ms):
                start_ms, waited_for = spans[needed].end_ms, needed
        spans.append(Span(task, start_ms, start_ms + work_ms[index], waited_for))
        last_of_lane[task.lane] = index
    return Timeline(tuple(spans))


def _issue_ms(schedule: Schedule, host_ms: HostCost) -> list[float]:
    """Return the ms at which the host has issued each task."""
    if not isinstance(host_ms, Mapping):
        return [host_ms * launched for launched in schedule.launched]
    missing = sorted({task.kind for task in schedule.tasks if task.launches} - set(host_ms))
    if missing:
        raise ValueError(f"no host cost for {', '.join(missing)}; host costs exist for {', '.join(sorted(host_ms))}")
    paid_ms = (task.launches * host_ms[task.kind] if task.launches else 0.0 for task in schedule.tasks)
    return list(itertools.accumulate(paid_ms))


def _present(index: int | None) -> tuple[int, ...]:
    return () if index is None else (index,)


def _play(schedule: Schedule, work_ms: Sequence[float], issue_ms: Sequence[float], contention: Contention) -> Timeline:
    """Simulate with contention, event by event: the speed of a task depends on what else is running."""
    lanes = list(Lane)
    queues = [schedule.lanes[lane] for lane in lanes]
    slowdown_of = _slowdowns(lanes, contention)
    num = len(schedule.tasks)
    start_ms, end_ms, left_ms = [0.0] * num, [-1.0] * num, list(work_ms)  # an end below 0: not yet
    waited_for: list[int | None] = [None] * num
    heads, running = [0] * len(lanes), [-1] * len(lanes)
    now_ms, num_left = 0.0, num
    while num_left:
        until_ms = math.inf
        for lane, queue in enumerate(queues):
            if running[lane] >= 0 or heads[lane] == len(queue):
                continue
            index = queue[heads[lane]]
            issued_ms = issue_ms[index] - now_ms
            if issued_ms > _INSTANT_MS:
                until_ms = min(until_ms, issued_ms)
                continue
            after = schedule.tasks[index].after
            if heads[lane]:
                after = (*after, queue[heads[lane] - 1])
            if all(end_ms[each] >= 0 for each in after):
                latest = max(after, key=end_ms.__getitem__, default=None)
                if latest is not None and end_ms[latest] >= now_ms - _INSTANT_MS:
                    waited_for[index] = latest
                start_ms[index] = now_ms
                running[lane] = index
                heads[lane] += 1
        slowdown = slowdown_of[tuple(index >= 0 for index in running)]
        # To the next end of a task, or to the next moment at which the host has issued one.
        ends_ms = (left_ms[index] * slow for index, slow in zip(running, slowdown, strict=True) if index >= 0)
        step_ms = min(until_ms, min(ends_ms, default=math.inf))
        now_ms += step_ms
        for lane, index in enumerate(running):
            if index >= 0:
                left_ms[index] -= step_ms / slowdown[lane]
                if left_ms[index] <= _INSTANT_MS:
                    end_ms[index] = now_ms
                    running[lane] = -1
                    num_left -= 1
    return Timeline(tuple(map(Span, schedule.tasks, start_ms, end_ms, waited_for)))


def _slowdowns(lanes: list[Lane], contention: Contention) -> dict[tuple[bool, ...], tuple[float, ...]]:
    """Return which lanes are busy -> the slowdown of each."""
    found = {}
    for busy in itertools.product((False, True), repeat=len(lanes)):
        at_work = {lane for lane, is_busy in zip(lanes, busy, strict=True) if is_busy}
        found[busy] = tuple(contention.slowdown(lane, at_work) for lane in lanes)
    return found

# SPDX-License-Identifier: Apache-2.0
"""Measures spans: an observer that returns a run as the planner's timeline, to compare with the simulated one.

Traces, timed steps and the stopwatch record runs with it.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from ds_fsmoe.execution.lanes import Observer
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.planning.schedule import Schedule, Task
from ds_fsmoe.planning.timeline import Span, Timeline


class Recorder(Observer):
    """Records when each task of a run began and ended: on the CPU by the clock, on CUDA by events on the lane's stream.

    It holds one run, which the next one replaces.
    """

    def __init__(self, device: torch.device | None = None, host: Clock = HOST) -> None:
        """Initialize a recorder without a run.

        Args:
            device: the device of the lanes; the CPU if left out.
            host: the clock of the CPU.
        """
        clock = clock_of(device, host)
        self._stamp, self._elapsed_ms = clock.now, clock.elapsed_ms
        self.schedule: Schedule | None = None
        """The schedule of the last run."""
        self._start: Any = None
        self._begins: list[Any] = []
        self._ends: list[Any] = []

    def start(self, schedule: Schedule, label: str) -> None:
        self.schedule = schedule
        self._begins = [None] * len(schedule.tasks)
        self._ends = [None] * len(schedule.tasks)
        self._start = self._stamp()

    def begin(self, index: int, task: Task) -> None:
        self._begins[index] = self._stamp()

    def end(self, index: int, task: Task) -> None:
        self._ends[index] = self._stamp()

    def timeline(self, schedule: Schedule) -> Timeline:
        """Return the last run, in milliseconds from its start. On CUDA this waits until its tasks are done.

        ``waited_for`` is the task that ended last among those in ``after`` and the one before on the lane. The times
        show whether the task started at that end, or later because the host or a processor was busy.

        Raises:
            ValueError: the last run had another schedule, or lacks some of its tasks.
        """
        if schedule != self.schedule:
            raise ValueError("the last observed run is of another schedule")
        unfinished = [task.name for task, end in zip(schedule.tasks, self._ends, strict=True) if end is None]
        if unfinished:
            raise ValueError(f"the last run did not finish: it has no spans for {', '.join(unfinished)}")
        spans: list[Span] = []
        last_of_lane: dict[str, int] = {}
        for index, task in enumerate(schedule.tasks):
            needed = (*task.after, *((last_of_lane[task.lane],) if task.lane in last_of_lane else ()))
            spans.append(
                Span(
                    task,
                    self._elapsed_ms(self._start, self._begins[index]),
                    self._elapsed_ms(self._start, self._ends[index]),
                    max(needed, key=lambda each: spans[each].end_ms, default=None),
                )
            )
            last_of_lane[task.lane] = index
        return Timeline(tuple(spans))


class HostClock:
    """Stamps with nanoseconds of the host."""

    def __init__(self, host: Clock = HOST) -> None:
        self.now = host.perf_counter_ns

    @staticmethod
    def wait_for(stamp: int) -> None:
        """Return at once: a stamp of the host needs no wait."""

    @staticmethod
    def has_come(stamp: int) -> bool:
        return True

    @staticmethod
    def elapsed_ns(one: int, other: int) -> int:
        return other - one

    @staticmethod
    def elapsed_ms(one: int, other: int) -> float:
        return (other - one) / 1e6


class StreamClock:
    """Stamps with events on the current stream."""

    @staticmethod
    def now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def wait_for(stamp: torch.cuda.Event) -> None:
        stamp.synchronize()

    @staticmethod
    def has_come(stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    @staticmethod
    def elapsed_ns(one: torch.cuda.Event, other: torch.cuda.Event) -> int:
        return round(one.elapsed_time(other) * 1e6)

    @staticmethod
    def elapsed_ms(one: torch.cuda.Event, other: torch.cuda.Event) -> float:
        other.synchronize()
        return one.elapsed_time(other)


def clock_of(device: torch.device | None, host: Clock = HOST) -> HostClock | StreamClock:
    """Return the clock for the lanes of a device; the host's for ``None``."""
    return StreamClock() if device is not None and device.type == "cuda" else HostClock(host)


def set_clock(clock: HostClock | StreamClock, host: Clock = HOST) -> tuple[Any, int]:
    """Measure a stamp of the lanes' clock and the host's time together, several times; return the pair taken fastest:
    (stamp, ns since 1970)."""
    clock.wait_for(clock.now())  # what the device was given before
    pairs = []
    for _ in range(5):
        before_ns = host.time_ns()
        stamp = clock.now()
        clock.wait_for(stamp)
        took_ns = host.time_ns() - before_ns
        pairs.append((took_ns, stamp, before_ns + took_ns // 2))
    return min(pairs, key=itemgetter(0))[1:]

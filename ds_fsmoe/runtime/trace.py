# SPDX-License-Identifier: Apache-2.0
"""The trace: when every task of chosen steps began and ended, on every lane, beside what was predicted.

Where torch's profiler is on, or its NVTX ranges, each task is a range there too, under the same name. On the CPU the
profiler sees the caller's thread only, and those of the links if it is told to profile all threads.
"""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import record_function

from ds_fsmoe.planning.schedule import Schedule, Task
from ds_fsmoe.planning.timeline import Timeline
from ds_fsmoe.runtime.lanes import Observer
from ds_fsmoe.runtime.topology import world_size_now
from ds_fsmoe.runtime.trace_files import TracedRun, range_name, rank_file, trace_of, write_trace

logger = logging.getLogger("ds_fsmoe")

# How long the writing waits for a device that has not done all it was given: after the last step, and at an early end,
# which may be that of a device that hangs.
_PATIENCE_S = 60.0
_PATIENCE_AT_CLOSE_S = 5.0


class Tracer(Observer):
    """Records the runs of some steps and writes them to ``folder/rank{rank}.json`` when the last of the steps is over.

    One object for all lanes of an engine. Outside of the steps it does nothing. A job that ends early leaves a file
    with what there is: it is written by :meth:`close`, which the interpreter calls at its exit if nobody else has.

    The host waits for the device when the first step begins, to set the clocks by each other, and after the last; in
    between times are events on the lanes' streams.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        start_step: int,
        num_steps: int,
        device: torch.device,
        predicted: Mapping[str, Timeline] | None = None,
    ) -> None:
        """
        Args:
            folder: made if need be. What an earlier job has left there of this rank is removed.
            rank: of this process.
            start_step: the first step to record.
            num_steps: how many.
            device: that of the lanes.
            predicted: label of a run, such as "L03/backward", -> what was expected of it.

        Raises:
            OSError: the folder cannot be made or written to.
        """
        self.path = rank_file(Path(folder), rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._rank = rank
        self._wanted = range(start_step, start_step + num_steps)
        self._device = device
        self._predicted = dict(predicted or {})
        self._clock = _StreamClock() if device.type == "cuda" else _HostClock()
        self._now = self._clock.now
        self._reference: tuple[Any, int] | None = None
        self._step: int | None = None
        self._seen: list[int] = []
        self._is_on = False
        self._is_written = False
        self._runs: list[_Run] = []
        self._open: tuple[_Run, ...] = ()
        """Those whose tasks may begin or end, the latest first. Replaced, never changed: lanes read it unlocked."""
        self._names: dict[str, tuple[Schedule, tuple[str, ...]]] = {}
        # Reentrant: a handler of a signal may close in the middle of anything.
        self._lock = threading.RLock()
        atexit.register(self.close)

    def step(self, number: int) -> None:
        """Step ``number`` is about to begin. To be told at every step; once more for the same one does nothing."""
        if number == self._step:
            return
        self._step = number
        self._forget_runs_that_are_over()
        if self._is_written:
            return
        if number >= self._wanted.stop:
            self._write("after the last step", _PATIENCE_S, is_early=False)
        elif number in self._wanted:
            if self._reference is None:
                self._reference = _set_clock(self._clock)
            self._seen.append(number)
        self._is_on = number in self._wanted

    def start(self, schedule: Schedule, label: str) -> None:
        if not self._is_on:
            return
        with self._lock:
            if label not in self._names or self._names[label][0] is not schedule:
                self._names[label] = schedule, tuple(range_name(label, task) for task in schedule.tasks)
            run = _Run(label, self._step, schedule, self._names[label][1], self._now())
            self._runs.append(run)
            self._open = (run, *(each for each in self._open if None in each.ends))

    def begin(self, index: int, task: Task) -> None:
        # A run inside a body, or after one that has failed, is the latest; its tasks are told by their identity.
        for run in self._open:
            if run.has(index, task) and run.begins[index] is None:
                # As torch's own code asks. A range that nobody sees costs more than all else here.
                if getattr(torch_profiler, "_is_profiler_enabled", True):
                    run.ranges[index] = record_function(run.names[index]).__enter__()
                run.begins[index] = self._now()
                return

    def end(self, index: int, task: Task) -> None:
        opened = self._open
        for run in opened:
            if run.has(index, task) and run.begins[index] is not None and run.ends[index] is None:
                run.ends[index] = self._now()
                if run.ranges[index] is not None:
                    run.ranges[index].__exit__(None, None, None)
                    run.ranges[index] = None
                if run is not opened[0]:
                    self._forget_runs_inside(run)
                return

    def close(self) -> None:
        """Write what there is, unless all of it has been written. A second time does nothing.

        From any thread, also while a run hangs: the tasks that are under way are named in the file.
        """
        when = "before the first step" if self._step is None else f"in step {self._step}"
        self._write(f"closed {when}", _PATIENCE_AT_CLOSE_S, is_early=True)

    def _forget_runs_inside(self, run: _Run) -> None:
        """A task has ended, so all runs are over that its body started, in this thread: also those that failed."""
        here = threading.get_ident()
        with self._lock:
            at = next((at for at, each in enumerate(self._open) if each is run), 0)
            later = tuple(each for each in self._open[:at] if each.thread != here)
            self._open = later + self._open[at:]

    def _forget_runs_that_are_over(self) -> None:
        """Also those that have failed. Of others the lane is still to say that a task has ended."""
        self._open = tuple(run for run in self._open if run.is_under_way())

    def _write(self, ended: str, patience_s: float, is_early: bool) -> None:
        with self._lock:
            if self._is_written:
                return
            self._is_written, self._is_on = True, False
            atexit.unregister(self.close)
            self._forget_runs_that_are_over()
            self._wait(patience_s)
            runs = [] if self._reference is None else self._read(*self._reference)
            is_complete = not is_early and self._seen == list(self._wanted)
            asked_for = f"steps {self._wanted[0]} to {self._wanted[-1]}"
            about = {
                "world_size": world_size_now(),
                "device": str(self._device),
                "asked_for": asked_for,
                "steps": self._seen,
                "complete": is_complete,
                "ended": ended,
                "runs": len(runs),
                "unfinished": [self._describe(run) for run in runs if not run.is_whole],
            }
            self._runs.clear()
            try:
                write_trace(trace_of(self._rank, socket.gethostname(), runs, about), self.path)
            except OSError as error:
                # Training goes on without its trace.
                logger.warning("the trace of rank %d is lost: %s", self._rank, error)
                return
        if self._rank == 0 and is_complete:
            logger.info("the trace of %s is in %s", asked_for, self.path.parent)
        elif self._rank == 0:
            steps = ", ".join(map(str, self._seen)) or "none"
            logger.warning("%s: not all of %s: %s; steps there are: %s", self.path.parent, asked_for, ended, steps)

    def _wait(self, patience_s: float) -> None:
        """Until the device has done what was recorded, but not for ever."""
        deadline_s = time.monotonic() + patience_s
        with suppress(RuntimeError):  # a device that has failed
            for stamp in (each for run in self._runs for each in (run.start, *run.ends) if each is not None):
                while not self._clock.has_come(stamp) and time.monotonic() < deadline_s:
                    time.sleep(0.001)

    def _read(self, reference: Any, unix_ns: int) -> list[TracedRun]:
        """All runs, in nanoseconds since 1970.

        From run to run, and from the run's start to its tasks: over a long time events are some microseconds coarse.
        """
        found = []
        for number, run in enumerate(self._runs):
            since_ns = self._elapsed_ns(reference, run.start)
            spans_ns: list[tuple[int, int] | None] = [None] * len(run.begins)
            if since_ns is not None:
                reference, unix_ns = run.start, unix_ns + since_ns
                for index, stamps in enumerate(zip(run.begins, run.ends, strict=True)):
                    begin_ns, end_ns = (self._elapsed_ns(run.start, stamp) for stamp in stamps)
                    if begin_ns is not None and end_ns is not None:
                        spans_ns[index] = unix_ns + begin_ns, unix_ns + end_ns
            predicted = self._predicted.get(run.label)
            found.append(TracedRun(number, run.label, run.step, run.schedule.tasks, unix_ns, spans_ns, predicted))
        return found

    def _elapsed_ns(self, one: Any, other: Any) -> int | None:
        """``None`` where one of the two is not there, or has not come."""
        with suppress(RuntimeError):
            if other is not None and self._clock.has_come(one) and self._clock.has_come(other):
                return self._clock.elapsed_ns(one, other)
        return None

    def _describe(self, run: TracedRun) -> dict[str, Any]:
        """What is known of a run that did not come to its end."""
        begins = self._runs[run.number].begins
        under_way = [
            range_name(run.label, task)
            for task, begin, span_ns in zip(run.tasks, begins, run.spans_ns, strict=True)
            if begin is not None and span_ns is None
        ]
        done = len(run.tasks) - run.spans_ns.count(None)
        return {"label": run.label, "step": run.step, "tasks": len(run.tasks), "done": done, "under_way": under_way}


class _Run:
    """One run, a slot per task: each is written by the one lane that does the task, so nothing is locked."""

    __slots__ = ("begins", "ends", "label", "names", "ranges", "schedule", "start", "step", "thread")

    def __init__(self, label: str, step: int, schedule: Schedule, names: tuple[str, ...], start: Any) -> None:
        self.label = label
        self.step = step
        self.schedule = schedule
        self.names = names
        self.start = start
        self.thread = threading.get_ident()
        self.begins: list[Any] = [None] * len(names)
        self.ends: list[Any] = [None] * len(names)
        self.ranges: list[Any] = [None] * len(names)

    def has(self, index: int, task: Task) -> bool:
        return index < len(self.names) and self.schedule.tasks[index] is task

    def is_under_way(self) -> bool:
        """Whether a task has begun and not ended."""
        return any(begin is not None and end is None for begin, end in zip(self.begins, self.ends, strict=True))


class _HostClock:
    """Stamps are nanoseconds."""

    now = staticmethod(time.perf_counter_ns)

    @staticmethod
    def wait_for(stamp: int) -> None:
        """A stamp of the host has always come."""

    @staticmethod
    def has_come(stamp: int) -> bool:
        return True

    @staticmethod
    def elapsed_ns(one: int, other: int) -> int:
        return other - one


class _StreamClock:
    """Stamps are events on the stream that is current."""

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


def _set_clock(clock: _HostClock | _StreamClock) -> tuple[Any, int]:
    """(a stamp, the nanoseconds since 1970 at which it was made), the closest pair of a few."""
    clock.wait_for(clock.now())  # what the device was given before
    pairs = []
    for _ in range(5):
        before_ns = time.time_ns()
        stamp = clock.now()
        clock.wait_for(stamp)
        took_ns = time.time_ns() - before_ns
        pairs.append((took_ns, stamp, before_ns + took_ns // 2))
    return min(pairs, key=itemgetter(0))[1:]

# SPDX-License-Identifier: Apache-2.0
"""Traces when every task of chosen steps began and ended, on every lane, together with its prediction.

The call observer and the trace of stock engines record with it. If torch's profiler or its NVTX ranges are on, each
task is a range there too, under the same name. On the CPU the profiler records the caller's thread only, and those of
the links if it profiles all threads.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import record_function

from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.execution.lanes import Observer
from ds_fsmoe.files.traces import TracedRun, range_name, rank_file, trace_of, write_trace
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.observing.spans import clock_of, set_clock
from ds_fsmoe.planning.schedule import Schedule, Task
from ds_fsmoe.planning.timeline import Timeline

logger = logging.getLogger("ds_fsmoe")

# How long the writing waits for a device that has not done all it was given: after the last step, and at an early end,
# which may be that of a device that hangs.
_PATIENCE_S = 60.0
_PATIENCE_AT_CLOSE_S = 5.0
# Less than a watchdog gives all it calls at the end of a process.
_PATIENCE_AT_SAVE_S = 1.0


class Tracer(Observer):
    """Records the runs of some steps and writes them to ``folder/rank{rank}.json`` when the last of the steps is over.

    One object serves all lanes of an engine. It is idle outside of the chosen steps. A job that ends early leaves a
    file with the recorded runs. :meth:`close` writes it, which the interpreter calls at its exit at the latest.
    :meth:`save` writes it for a watchdog that is about to end the process without the interpreter's exit.

    The host waits for the device when the first step begins, to align the clocks, and after the last. In between, times
    are events on the lanes' streams.
    """

    _of = ""
    """The words for what is traced, where it is not ours."""
    _more_about: ClassVar[Mapping[str, Any]] = {}
    """Is added to what the file says of itself."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        start_step: int,
        num_steps: int,
        device: torch.device,
        host: Clock = HOST,
    ) -> None:
        """Initialize a tracer and its folder.

        Args:
            folder: created if needed. An earlier job's files of this rank are removed.
            rank: the rank of this process.
            start_step: the first step to record.
            num_steps: the number of steps to record.
            device: the device of the lanes.
            host: the clock of the CPU.

        Raises:
            OSError: the folder cannot be made or written to.
        """
        self.path = rank_file(Path(folder), rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self.peers: dict[str, dict[str, Sequence[int]]] = {}
        """Layer -> kind of task -> the ranks that do it together with this one, for the file."""
        self._rank = rank
        self._process = os.getpid()
        self._wanted = range(start_step, start_step + num_steps)
        self._device = device
        self._host = host
        self._clock = clock_of(device, host)
        self._reference: tuple[Any, int] | None = None
        self._step: int | None = None
        self._traced_steps: list[int] = []
        self._is_on = False
        self._is_written = False
        """Whether the trace is over: nothing is recorded any more."""
        self._is_saved = False
        """Whether the end of the trace has been written."""
        self._runs: list[RunningTrace] = []
        self._names: dict[str, tuple[Schedule, tuple[str, ...]]] = {}
        # Reentrant: a handler of a signal may close in the middle of anything.
        self._lock = threading.RLock()
        atexit.register(self.close)

    def step(self, number: int) -> None:
        """Start step ``number``. Call it at every step; a second call for the same step is ignored."""
        if number == self._step:
            return
        self._step = number
        if self._is_written:
            return
        if number >= self._wanted.stop:
            self._write("after the last step", _PATIENCE_S, is_early=False)
        elif number in self._wanted:
            if self._reference is None:
                self._reference = set_clock(self._clock, self._host)
            self._traced_steps.append(number)
        self._is_on = number in self._wanted

    @property
    def is_recording(self) -> bool:
        """Return True if the current step is recorded."""
        return self._is_on

    def of_run(self, schedule: Schedule, label: str, expected: Callable[[], Timeline] | None = None) -> Observer:
        """Record a run that is about to begin.

        Args:
            schedule, label: see :class:`~ds_fsmoe.execution.lanes.Observer`.
            expected: returns the predicted timeline, or raises ``ValueError``; then the trace has no prediction. It is
                called when the trace is written.
        """
        if not self._is_on:
            return _NO_OBSERVER
        with self._lock:
            if label not in self._names or self._names[label][0] is not schedule:
                self._names[label] = schedule, tuple(range_name(label, task) for task in schedule.tasks)
            run = RunningTrace(label, self._step, schedule.tasks, self._clock.now, self._names[label][1], expected)
            self._runs.append(run)
        return run

    def close(self) -> None:
        """Write the recorded runs, unless all of them are written. A second call is ignored.

        It may be called from any thread, also while a run hangs: the file names the running tasks.
        """
        when = "before the first step" if self._step is None else f"in step {self._step}"
        self._write(f"closed {when}", _PATIENCE_AT_CLOSE_S, is_early=True)

    def save(self, reason: str) -> None:
        """Write the runs recorded so far and continue, unless all of them are written.

        It may be called from any thread and takes no lock, because the thread that holds it may hang. A later write
        replaces this one.

        Args:
            reason: the reason for writing now, for the file.
        """
        if self._is_saved:
            return
        runs = tuple(self._runs)
        self._wait(runs, _PATIENCE_AT_SAVE_S)
        trace = self._trace_of(runs, reason, is_complete=False)
        # The end of the trace may have been written meanwhile, and has more.
        if not self._is_saved:
            self._put(trace)

    def _write(self, ended: str, patience_s: float, is_early: bool) -> None:
        with self._lock:
            # The end of a forked process is not that of the traced one.
            if self._is_written or os.getpid() != self._process:
                return
            self._is_written, self._is_on = True, False
            atexit.unregister(self.close)
            self._wait(self._runs, patience_s)
            is_complete = not is_early and self._traced_steps == list(self._wanted)
            trace = self._trace_of(self._runs, ended, is_complete)
            is_written = self._put(trace)
            # In this order, and a new list: a thread that saves may be reading the old one.
            self._is_saved = True
            self._runs = []
        if not is_written:
            return
        asked_for = self._asked_for
        if self._rank == 0 and is_complete:
            logger.info("trace of %s%s written to %s", asked_for, self._of, self.path.parent)
        elif self._rank == 0:
            steps = ", ".join(map(str, self._traced_steps)) or "none"
            logger.warning("%s: not all of %s: %s; steps there are: %s", self.path.parent, asked_for, ended, steps)

    @property
    def _asked_for(self) -> str:
        return f"steps {self._wanted[0]} to {self._wanted[-1]}"

    def _trace_of(self, recorded: Sequence[RunningTrace], ended: str, is_complete: bool) -> dict[str, Any]:
        """Return the content of the file for these runs."""
        runs = [] if self._reference is None else self._read(recorded, *self._reference)
        about = {
            "world_size": world_size_now(),
            "device": str(self._device),
            "asked_for": self._asked_for,
            "steps": list(self._traced_steps),
            "complete": is_complete,
            "ended": ended,
            "peers": self.peers,
            "runs": len(runs),
            "unfinished": [
                _describe(run, each.begins) for run, each in zip(runs, recorded, strict=True) if not run.is_whole
            ],
        }
        return trace_of(self._rank, socket.gethostname(), runs, about | self._more_about)

    def _put(self, trace: Mapping[str, Any]) -> bool:
        """Write the file; return True if that succeeded."""
        try:
            write_trace(trace, self.path)
        except OSError as error:
            # Training continues without its trace.
            logger.warning("the trace of rank %d was lost: %s", self._rank, error)
            return False
        return True

    def _wait(self, runs: Sequence[RunningTrace], patience_s: float) -> None:
        """Wait until the device has finished the recorded work, at most ``patience_s`` seconds."""
        deadline_s = self._host.monotonic() + patience_s
        with suppress(RuntimeError):  # a device that has failed
            for stamp in (each for run in runs for each in (run.start, *run.ends) if each is not None):
                while not self._clock.has_come(stamp) and self._host.monotonic() < deadline_s:
                    self._host.sleep(0.001)

    def _read(self, runs: Sequence[RunningTrace], reference: Any, unix_ns: int) -> list[TracedRun]:
        """Return the runs, in nanoseconds since 1970.

        Times are taken from run to run, and from a run's start to its tasks: over a long time events are microseconds
        off.
        """
        found = []
        for number, run in enumerate(runs):
            since_ns = self._elapsed_ns(reference, run.start)
            spans_ns: list[tuple[int, int] | None] = [None] * len(run.begins)
            if since_ns is not None:
                reference, unix_ns = run.start, unix_ns + since_ns
                for index, stamps in enumerate(zip(run.begins, run.ends, strict=True)):
                    begin_ns, end_ns = (self._elapsed_ns(run.start, stamp) for stamp in stamps)
                    if begin_ns is not None and end_ns is not None:
                        spans_ns[index] = unix_ns + begin_ns, unix_ns + end_ns
            predicted = self._prediction_of(run)
            found.append(TracedRun(number, run.label, run.step, run.tasks, unix_ns, spans_ns, predicted))
        return found

    def _prediction_of(self, run: RunningTrace) -> Timeline | None:
        if run.expected is None:
            return None
        try:
            return run.expected()
        except ValueError as error:
            logger.warning("the trace has no prediction of %s: %s", run.label, error)
            return None

    def _elapsed_ns(self, one: Any, other: Any) -> int | None:
        """Return the nanoseconds between two stamps; ``None`` if one is missing or not reached."""
        with suppress(RuntimeError):
            if other is not None and self._clock.has_come(one) and self._clock.has_come(other):
                return self._clock.elapsed_ns(one, other)
        return None


def _describe(run: TracedRun, begins: Sequence[Any]) -> dict[str, Any]:
    """Describe the known part of a run that did not end."""
    under_way = [
        range_name(run.label, task)
        for task, begin, span_ns in zip(run.tasks, begins, run.spans_ns, strict=True)
        if begin is not None and span_ns is None
    ]
    done = len(run.tasks) - run.spans_ns.count(None)
    return {"label": run.label, "step": run.step, "tasks": len(run.tasks), "done": done, "under_way": under_way}


_NO_OBSERVER = Observer()
"""Is told of runs that are not recorded."""


class RunningTrace(Observer):
    """Holds one run, with a slot per task: only the lane of a task writes its slot, so no lock is needed."""

    __slots__ = ("begins", "ends", "expected", "label", "names", "now", "ranges", "start", "step", "tasks")

    def __init__(
        self,
        label: str,
        step: int | None,
        tasks: Sequence[Task],
        now: Callable[[], Any],
        names: Sequence[str] = (),
        expected: Callable[[], Timeline] | None = None,
    ) -> None:
        """Initialize a run.

        Args:
            label: the label of the run.
            step: its step.
            tasks: its tasks.
            now: returns a stamp of the lanes' clock.
            names: the names of the tasks for torch's profiler.
            expected: see :meth:`Tracer.of_run`.
        """
        self.label, self.step, self.tasks, self.now = label, step, tasks, now
        self.names, self.expected = names, expected
        self.start = now()
        self.begins: list[Any] = [None] * len(tasks)
        self.ends: list[Any] = [None] * len(tasks)
        self.ranges: list[Any] = [None] * len(tasks)

    def begin(self, index: int, task: Task) -> None:
        # As torch's own code asks. A range without a profiler costs more than all else here.
        if getattr(torch_profiler, "_is_profiler_enabled", True):
            self.ranges[index] = record_function(self.names[index]).__enter__()
        self.begins[index] = self.now()

    def end(self, index: int, task: Task) -> None:
        self.ends[index] = self.now()
        if self.ranges[index] is not None:
            self.ranges[index].__exit__(None, None, None)
            self.ranges[index] = None

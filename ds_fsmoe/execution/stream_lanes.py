# SPDX-License-Identifier: Apache-2.0
"""Lanes on CUDA: a stream per link, and the caller's current stream computes.

``make_lanes`` creates them on a GPU; ``thread_lanes`` is the counterpart on a CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

import torch

from ds_fsmoe.execution.device_tables import allow_queries_in_captures, is_capturing
from ds_fsmoe.execution.lanes import Dependencies, LaneRun, Lanes, LaneWork, lane_name
from ds_fsmoe.planning.schedule import Lane, Task

_HIGH_PRIORITY = -1
_HISTORY = 256
"""Minimum number of kept events: the host runs far ahead of the device, and a watchdog needs some earlier layers."""


class StreamLanes(Lanes):
    """Runs links on two high-priority streams; COMPUTE is the current stream when ``run`` is called.

    One pass over the list issues all tasks from the caller's thread, without a wait for the device. The order is the
    same on every rank. Both links wait for the work that the compute stream had before the run. The compute stream
    waits at the end for both links. In between a stream waits for an event only where a task needs one on another lane.

    Bodies issue collectives with ``async_op=False``, which run on the lane's stream. With ``async_op=True`` they would
    run on the process group's own stream, outside the order of the lane.

    Memory: the allocator ties a tensor to the stream it was made on. It may reuse the memory there once the last
    reference is gone. It does not know readers on other streams. So the caller of ``run`` must keep every tensor that
    is made on one lane and used on another until ``run`` returns. This includes tensors of an earlier run. Then the
    streams are joined, the next run waits for the compute stream, and references may be dropped, without a host wait.

    With ``one_link`` both links share one stream, in the order of the list. This is for cases where two concurrent
    collectives could wait for each other across ranks.

    During a graph capture no event is queried, because CUDA would abort the capture. A captured run does not execute
    and cannot be behind; its events belong to the graph, and later replays are invisible to the lanes.

    After an error the issued work still finishes on the device, and the compute stream waits for it.
    """

    overlap: ClassVar[Mapping[Lane, str]] = {
        Lane.COMPUTE: "the caller's stream; overlaps with both links, as far as their kernels leave it multiprocessors",
        Lane.INTRA: "a high-priority stream; overlaps with COMPUTE and INTER",
        Lane.INTER: "a high-priority stream; overlaps with COMPUTE and INTRA",
    }
    runs_behind: ClassVar[bool] = True

    def __init__(self, device: torch.device, one_link: bool = False) -> None:
        """Create the streams.

        Args:
            device: a CUDA device; without an index, the current one.
            one_link: whether the two links share one stream instead of overlapping.
        """
        super().__init__()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        first = torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY)
        second = first if one_link else torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY)
        self._links = {Lane.INTRA: first, Lane.INTER: second}
        self._events = _Events()
        self._is_captured = False
        """Whether the last run was captured. Set before the first of its events is recorded."""
        self._end: torch.cuda.Event | None = None
        """The event on the compute stream at the end of the last run."""

    def _run_of(self, dependencies: Dependencies, work: LaneWork) -> LaneRun:
        return _StreamRun(self, dependencies, work)

    def is_behind(self) -> bool:
        """Return True if the device has not reached the end of the last run; ignores a run in progress.

        For a watchdog: it may be called from any thread, and does not wait for the device.
        """
        end = self._end
        if end is None or self._is_captured:
            return False
        # A new thread starts on device 0, and would create a context there.
        with suppress(RuntimeError), torch.cuda.device(self._device), allow_queries_in_captures():
            return not end.query()
        return False  # a failed device raises at its next use

    def progress(self) -> dict[Lane, tuple[str, str]]:
        """Map each lane to its last issued task, and the last task known to be finished on the device, as "label/name".

        A task is known to be finished if another lane waits for it or the run has ended; the last few hundred are kept.
        """
        if self._is_captured:  # it has not executed, and earlier events must not be queried
            return {lane: (lane_name(mark.begun), "") for lane, mark in self._marks.items()}
        with allow_queries_in_captures():
            finished = self._events.finished()
        return {lane: (lane_name(mark.begun), lane_name(finished.get(lane))) for lane, mark in self._marks.items()}


class _StreamRun(LaneRun):
    """Represents one run: it has an event per dependency, from the time that it is recorded."""

    _lanes: StreamLanes

    def __init__(self, lanes: StreamLanes, dependencies: Dependencies, work: LaneWork) -> None:
        super().__init__(lanes)
        self._dependencies = dependencies
        self._work = work
        self._left = deque(dependencies.steps)
        self._recorded: list[tuple[torch.cuda.Stream, torch.cuda.Event] | None] = [None] * dependencies.count
        self._is_captured = lanes._is_captured = is_capturing()
        # An event that was recorded in a capture must not be queried afterwards either.
        self._events = _Events() if self._is_captured else lanes._events
        self._number = self._events.begin()

    def _go(self, stop: int | None) -> None:
        compute = torch.cuda.current_stream(self._lanes._device)
        try:
            self._issue(compute, stop)
        except BaseException:
            # With new events, whatever the state of the others. A failed device raises here again.
            self._end()
            raise

    def _join(self) -> None:
        compute = torch.cuda.current_stream(self._lanes._device)
        if self._left:
            for lane in self._dependencies.links:
                compute.wait_stream(self._lanes._links[lane])
            # The host may block in the code that runs now: a watchdog must see that rows are still in flight.
            end = self._events.record(compute, None, self._number)
            self._lanes._end = None if self._is_captured else end
            return
        for number in self._dependencies.joins:
            compute.wait_event(self._recorded[number][1])
        self._ends_with(self._events.record(compute, None, self._number))

    def abandon(self) -> None:
        self._end()

    def _end(self) -> None:
        """Make the compute stream wait for both links, and drop the remaining tasks."""
        self._left.clear()
        compute = torch.cuda.current_stream(self._lanes._device)
        with suppress(RuntimeError):
            for lane in self._dependencies.links:
                compute.wait_stream(self._lanes._links[lane])
            self._ends_with(self._events.record(compute, None, self._number))

    def _ends_with(self, end: torch.cuda.Event) -> None:
        self._events.end(self._number)
        self._lanes._end = None if self._is_captured else end

    def _issue(self, compute: torch.cuda.Stream, stop: int | None) -> None:
        """Issue tasks to the streams, up to ``stop``."""
        lanes, events, crossed = self._lanes, self._events, self._recorded
        lanes._is_captured = self._is_captured
        if self._dependencies.links and self._left and (stop is None or self._left[0].index < stop):
            # In each part again: memory that a run in between has released may still be read on the compute stream.
            fork = events.record(compute, None, self._number)
            for lane in self._dependencies.links:
                lanes._links[lane].wait_event(fork)
        while self._left and (stop is None or self._left[0].index < stop):
            step = self._left.popleft()
            task = step.task
            mark = lanes._marks[task.lane]
            stream = lanes._links.get(task.lane, compute)
            for number in step.needs:
                needed_on, event = crossed[number]
                if needed_on is not stream:
                    stream.wait_event(event)
            if stream is compute:
                self._work.do(step, mark)
            else:
                with torch.cuda.stream(stream):
                    self._work.do(step, mark)
            if step.feeds:
                event = events.record(stream, mark.finished, self._number)
                for number in step.feeds:
                    crossed[number] = stream, event


class _Events:
    """Holds a pool of reused events, each with the task that it was recorded after.

    An event is free for the next record once the last wait for it has been issued: a wait refers to the record before.
    Waits are issued in the run that records: its events are free when it has ended.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._after: list[tuple[str, Task] | None] = []
        self._of_run: list[int] = []
        self._open: set[int] = set()
        """The numbers of the runs that have not ended."""
        self._num_runs = 0
        self._next = 0
        self._size = _HISTORY

    def begin(self) -> int:
        """Return a number for a new run, whose events are reserved until it ends."""
        self._num_runs += 1
        self._open.add(self._num_runs)
        return self._num_runs

    def end(self, run: int) -> None:
        """Mark all waits of a run as issued."""
        self._open.discard(run)

    def record(self, stream: torch.cuda.Stream, after: tuple[str, Task] | None, run: int) -> torch.cuda.Event:
        """Record an event on a stream after a task of a run, and return it."""
        at = self._free()
        if at == len(self._events):
            self._after.append(None)
            self._of_run.append(0)
            self._events.append(torch.cuda.Event())
        event = self._events[at]
        event.record(stream)
        # Set after the record, so that a watchdog never counts the new task as done by the old record
        self._after[at] = after
        self._of_run[at] = run
        self._next = (at + 1) % self._size
        return event

    def _free(self) -> int:
        """Return the index of the next event that no open run uses; of a new one if there is no other."""
        count = len(self._events)
        for step in range(count):
            at = (self._next + step) % self._size
            if at >= count or self._of_run[at] not in self._open:
                return at
        self._size = max(self._size, count + 1)
        return count

    def finished(self) -> dict[Lane, tuple[str, Task]]:
        """Map each lane to the last recorded task whose event has completed."""
        found: dict[Lane, tuple[str, Task]] = {}
        at = self._next
        for back in range(1, len(self._events) + 1):
            index = (at - back) % len(self._events)
            after = self._after[index]
            if after is None or after[1].lane in found:
                continue
            with suppress(RuntimeError):  # a failed device has no finished events
                if self._events[index].query():
                    found[after[1].lane] = after
        return found

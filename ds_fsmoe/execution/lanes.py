# SPDX-License-Identifier: Apache-2.0
"""Runs schedules on lanes: every task on its lane, after the tasks that it needs.

``pipeline`` and the profiler run schedules here; ``ds_fsmoe.planning.timeline.simulate`` plays the same list against a
clock. One object owns all lanes of an engine and serves many runs:

- :class:`SerialLanes` runs one task after another, in the order of the list: the reference;
- :class:`~ds_fsmoe.execution.thread_lanes.ThreadLanes` (CPU): a link is a thread;
- :class:`~ds_fsmoe.execution.stream_lanes.StreamLanes` (CUDA): a link is a stream.

No schedule can deadlock on one rank. Consider the earliest task in the list that is not done: all tasks that it needs
are done, and so are the earlier tasks of its lane. Ranks do not deadlock with each other under three conditions. All
ranks run the same collectives in the same order. Each process group is used on one lane only. A rank either can run a
collective of each lane at once, as threads can, or starts them in the order of the list. A GPU guarantees neither by
itself: see ``distributed/nccl.py``.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ds_fsmoe.planning.schedule import HOLD, Lane, Schedule, Task

# ---- The dependencies between lanes: the waits that the order within the lanes does not already ensure
#
# A lane runs its tasks in order, so a dependency within a lane needs no wait. Of several on one other lane the last is
# enough, and a lane need not wait twice for the same task. Every kind of lanes waits for exactly the rest.


@dataclass(frozen=True, slots=True)
class Step:
    """Holds a task with its waits, as its lane runs it."""

    index: int
    """The index of the task in the schedule."""
    task: Task
    needs: tuple[int, ...]
    """The numbers of the dependencies that the task waits for."""
    feeds: tuple[int, ...]
    """The numbers of the dependencies that the finished task fulfils."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Holds a schedule with its dependencies, ready to run."""

    steps: tuple[Step, ...]
    """The steps in the order of issue."""
    by_lane: dict[Lane, tuple[Step, ...]]
    """The steps of each lane."""
    links: tuple[Lane, ...]
    """The lanes besides COMPUTE that have tasks."""
    joins: tuple[int, ...]
    """The numbers of the dependencies that COMPUTE waits for after its last task, so that all tasks are done."""
    count: int
    """The number of dependencies, numbered from 0."""
    kinds: frozenset[str]
    """The kinds that need a body: all but HOLD."""


# Kept per schedule object for its lifetime. By identity, as a schedule's hash iterates over all of its tasks.
_known: dict[int, Dependencies] = {}


def dependencies_of(schedule: Schedule) -> Dependencies:
    """Return the dependencies between the lanes of a schedule, computed once per schedule object."""
    found = _known.get(id(schedule))
    if found is None:
        found = _find(schedule)
        # First: an interrupt in between must not leave an entry that outlives the schedule, whose id may be reused.
        weakref.finalize(schedule, _known.pop, id(schedule), None)
        _known[id(schedule)] = found
    return found


def _find(schedule: Schedule) -> Dependencies:
    needs: list[list[int]] = [[] for _ in schedule.tasks]
    feeds: list[list[int]] = [[] for _ in schedule.tasks]
    count = 0
    seen = {(lane, other): -1 for lane in Lane for other in Lane}  # the last task of `other` that `lane` waited for

    def cross(needed: int, lane: Lane) -> int | None:
        """Return the number of a new dependency of a lane on a task, or ``None`` if the lane has waited already."""
        nonlocal count
        other = schedule.tasks[needed].lane
        if other is lane or needed <= seen[lane, other]:
            return None
        seen[lane, other] = needed
        feeds[needed].append(count)
        count += 1
        return count - 1

    for index, task in enumerate(schedule.tasks):
        # In reverse: the last needed task of a lane comes first and makes the others superfluous.
        found = (cross(needed, task.lane) for needed in sorted(task.after, reverse=True))
        needs[index] = [number for number in found if number is not None]
    links = tuple(lane for lane in Lane if lane is not Lane.COMPUTE and schedule.lanes[lane])
    joins = [cross(schedule.lanes[lane][-1], Lane.COMPUTE) for lane in links]
    steps = tuple(
        Step(index, task, tuple(needs[index]), tuple(feeds[index])) for index, task in enumerate(schedule.tasks)
    )
    return Dependencies(
        steps,
        {lane: tuple(steps[index] for index in schedule.lanes[lane]) for lane in Lane},
        links,
        tuple(number for number in joins if number is not None),
        count,
        frozenset(task.kind for task in schedule.tasks) - {HOLD},
    )


# ---- Lanes, and runs on them


Body = Callable[[Task], None]
"""Runs a task on the data that belongs to it. It must not start a run on its own lanes."""


class Observer:
    """Receives events on the lane where they happen; methods that are not overridden do nothing.

    On CUDA the lane's stream is current in all three, so an event recorded there is on the lane. On the CPU ``begin``
    and ``end`` are called from the lane's thread, so several calls may be concurrent. An error of an observer is an
    error of its task.
    """

    def of_run(self, schedule: Schedule, label: str) -> Observer:
        """Return the observer of the tasks of a run that is about to begin.

        The default calls :meth:`start` and returns itself. An observer that separates the tasks of concurrent runs
        returns another.
        """
        self.start(schedule, label)
        return self

    def start(self, schedule: Schedule, label: str) -> None:
        """Receive the start of a run, on the caller's thread and stream."""

    def begin(self, index: int, task: Task) -> None:
        """Receive the start of a task: all tasks that it needs are done."""

    def end(self, index: int, task: Task) -> None:
        """Receive the end of a task, or the error of its body; tasks that need it have not begun."""


class Mark:
    """Holds the progress of a lane: (label of the run, task) of the task that began last and of the one that finished
    last."""

    __slots__ = ("begun", "finished")

    def __init__(self) -> None:
        self.begun: tuple[str, Task] | None = None
        self.finished: tuple[str, Task] | None = None


class LaneWork:
    """Holds the bodies, the label and the observer of one run."""

    def __init__(self, bodies: Mapping[str, Body], label: str, observer: Observer | None) -> None:
        self._bodies = bodies
        self.label = label
        self._observer = observer

    def do(self, step: Step, mark: Mark) -> None:
        """Run a task in this thread; an error is raised with a note that names the task."""
        task, observer = step.task, self._observer
        mark.begun = self.label, task
        try:
            if observer is None:
                if task.kind != HOLD:
                    self._bodies[task.kind](task)
            else:
                observer.begin(step.index, task)
                try:
                    if task.kind != HOLD:
                        self._bodies[task.kind](task)
                finally:
                    observer.end(step.index, task)
        except BaseException as error:
            error.add_note(f"raised by task {step.index} of the schedule, {lane_name(mark.begun)}, on lane {task.lane}")
            raise
        mark.finished = mark.begun


class LaneRun(ABC):
    """Represents a run that has begun. Its tasks are started in the order of the list, up to a given index at a time.

    Other runs may begin in between. Every rank starts the same tasks of the same runs in the same order.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def go(self, stop: int, joins: bool = False) -> None:
        """Start the tasks before index ``stop``. On return those of COMPUTE are done, or on CUDA issued.

        Args:
            stop: the index of the first task that is not started.
            joins: whether to wait for tasks of the links too, or let the compute stream wait.

        Raises:
            RuntimeError, BaseException: see :meth:`Lanes.run`; the run must not be used after that.
        """
        self._lanes._let(self, stop, joins)

    def finish(self) -> None:
        """Start the remaining tasks and wait for all, as :meth:`Lanes.run` does. Raises like :meth:`go`."""
        self._lanes._let(self, None, joins=True)

    @abstractmethod
    def _go(self, stop: int | None) -> None:
        """Start tasks up to ``stop``; ``None``: all."""

    @abstractmethod
    def _join(self) -> None:
        """Wait for all started tasks, or let the compute stream wait for them."""

    @abstractmethod
    def abandon(self) -> None:
        """Abandon the run, and wait for tasks that have started. Raises no error."""


class Lanes(ABC):
    """Runs schedules on all lanes of one engine.

    Only one run at a time may be active; runs that have begun and are paused do not count. A second run from another
    thread or from inside a body is refused (:class:`SerialLanes` allows the latter). An expert that contains another
    MoE layer needs its own lanes and process groups for that layer. On shared ones, the order of inner and outer
    collectives would differ between ranks.
    """

    overlap: ClassVar[Mapping[Lane, str]]
    """Describes each lane, and the lanes that it may overlap with."""
    runs_behind: ClassVar[bool] = False
    """Whether a body only issues its work to its lane's stream before it returns. Then every tensor that is made on one
    lane and used on another must be kept until the run is over."""
    _nests: ClassVar[bool] = False

    def __init__(self) -> None:
        self._marks = {lane: Mark() for lane in Lane}
        self._is_running = False
        self._has_run = False
        """Whether a run has finished: a watchdog allows the first one more time."""
        self._is_closed = False
        self.on_error: Callable[[BaseException], None] | None = None
        """Called with the error of a run before the caller can catch it."""

    def run(
        self,
        schedule: Schedule,
        bodies: Mapping[str, Body],
        label: str = "",
        observer: Observer | None = None,
    ) -> None:
        """Run every task of a schedule.

        On return the caller's thread (CPU) or current stream (CUDA) may read everything that the tasks wrote.

        Args:
            schedule: the tasks to run. Data derived from it is kept with the object, so keep and reuse it.
            bodies: kind -> the body that runs tasks of that kind. HOLD needs none.
            label: the name of this run, for messages and for :meth:`progress`, such as "forward".
            observer: receives the start and end of tasks.

        Raises:
            ValueError: kinds without a body; nothing has begun.
            RuntimeError: the lanes are closed, or in a run already; nothing has begun.
            BaseException: the first error that a body raised, with a note that names the task. No task has begun
                since, those that were running have ended, and the lanes can run again.
        """
        self.begin(schedule, bodies, label, observer).finish()

    def begin(
        self,
        schedule: Schedule,
        bodies: Mapping[str, Body],
        label: str = "",
        observer: Observer | None = None,
    ) -> LaneRun:
        """Prepare a run without starting a task; arguments and errors as in :meth:`run`."""
        self._check_free()
        dependencies = dependencies_of(schedule)
        if not dependencies.kinds <= bodies.keys():
            missing = sorted(dependencies.kinds - bodies.keys())
            raise ValueError(f"no body for {', '.join(missing)}; bodies exist for {', '.join(sorted(bodies))}")
        if observer is not None:
            try:
                observer = observer.of_run(schedule, label)
            except BaseException as error:
                self._call_on_error(error)
                raise
        return self._run_of(dependencies, LaneWork(bodies, label, observer))

    def _check_free(self) -> None:
        if self._is_closed:
            raise RuntimeError("these lanes are closed")
        if self._is_running and not self._nests:
            raise RuntimeError(
                f"{type(self).__name__} are running already: a nested run (an expert that holds another MoE layer), "
                "or a run of a second thread, needs its own lanes and process groups"
            )

    def _let(self, run: LaneRun, stop: int | None, joins: bool) -> None:
        """Run up to the next stop, and wait for started tasks if the run is joined; see :meth:`LaneRun.go`."""
        self._check_free()
        was_running = self._is_running
        try:
            self._is_running = True
            run._go(stop)
            if joins:
                run._join()
                self._has_run = True
        except BaseException as error:
            self._call_on_error(error)
            raise
        finally:
            self._is_running = was_running

    def _call_on_error(self, error: BaseException) -> None:
        if self.on_error is not None:
            self.on_error(error)

    @abstractmethod
    def _run_of(self, dependencies: Dependencies, work: LaneWork) -> LaneRun:
        """Return a run of these steps."""

    def progress(self) -> dict[Lane, tuple[str, str]]:
        """Map each lane to its last started and last finished task, as "label/name"; "" if there is none yet.

        For a watchdog: it may be called from any thread, during a run and while it hangs.
        """
        return {lane: (lane_name(mark.begun), lane_name(mark.finished)) for lane, mark in self._marks.items()}

    def close(self) -> None:
        """Release all resources. A later run is an error; a second close is not.

        Raises:
            RuntimeError: a run is active.
        """
        if self._is_running:
            raise RuntimeError(f"{type(self).__name__} cannot be closed during a run")
        self._is_closed = True


def lane_name(at: tuple[str, Task] | None) -> str:
    """Return "label/name" of a task for messages; "" for ``None``."""
    if at is None:
        return ""
    label, task = at
    return f"{label}/{task.name}" if label else task.name


class SerialLanes(Lanes):
    """Runs one task after another, in the order of the list, in the caller's thread and on its current stream.

    It is the reference for the other lanes, and the only kind in which a body may start a run.
    """

    overlap: ClassVar[Mapping[Lane, str]] = dict.fromkeys(Lane, "the caller's thread and stream; overlaps with nothing")
    _nests: ClassVar[bool] = True

    def _run_of(self, dependencies: Dependencies, work: LaneWork) -> LaneRun:
        return _SerialRun(self, dependencies, work)


class _SerialRun(LaneRun):
    """Runs one task after another in the caller's thread."""

    def __init__(self, lanes: SerialLanes, dependencies: Dependencies, work: LaneWork) -> None:
        super().__init__(lanes)
        self._steps = dependencies.steps
        self._work = work
        self._at = 0

    def _go(self, stop: int | None) -> None:
        work, marks = self._work, self._lanes._marks
        first, self._at = self._at, len(self._steps) if stop is None else max(stop, self._at)
        for step in self._steps[first : self._at]:
            work.do(step, marks[step.task.lane])

    def _join(self) -> None:
        """Return at once, as no task is active."""

    def abandon(self) -> None:
        self._at = len(self._steps)


def make_lanes(device: torch.device, overlap: bool = True, one_link: bool = False) -> Lanes:
    """Create the lanes for a device.

    Args:
        device: the device of the tasks' tensors.
        overlap: whether lanes may run concurrently; otherwise :class:`SerialLanes`.
        one_link: on a GPU, whether the two links share a stream instead of overlapping; they still overlap computation.

    Raises:
        ValueError: lanes cannot overlap on that device.
    """
    # Both import this module.
    from ds_fsmoe.execution.stream_lanes import StreamLanes
    from ds_fsmoe.execution.thread_lanes import ThreadLanes

    if not overlap:
        return SerialLanes()
    if device.type == "cpu":
        return ThreadLanes()
    if device.type == "cuda":
        return StreamLanes(device, one_link)
    raise ValueError(f"device {device}: lanes can overlap on cpu and cuda only; set overlap to false")


class Together(Observer):
    """Combines several observers: they receive a start in their order, and an end in reverse order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def of_run(self, schedule: Schedule, label: str) -> Together:
        return Together(*(each.of_run(schedule, label) for each in self._observers))

    def begin(self, index: int, task: Task) -> None:
        for each in self._observers:
            each.begin(index, task)

    def end(self, index: int, task: Task) -> None:
        for each in reversed(self._observers):
            each.end(index, task)

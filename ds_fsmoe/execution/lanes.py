# SPDX-License-Identifier: Apache-2.0
"""Lanes run a schedule: every task on its lane, after the tasks that it needs.

``ds_fsmoe.planning.timeline.simulate`` plays the same list against a clock. One object owns all lanes of an engine and
serves many runs:

- :class:`SerialLanes` does one task after another, in the order of the list: the reference;
- :class:`~ds_fsmoe.execution.thread_lanes.ThreadLanes` (CPU): a link is a thread;
- :class:`~ds_fsmoe.execution.stream_lanes.StreamLanes` (CUDA): a link is a stream.

No schedule can hang any of them: consider the earliest task in the list that is not done. All it needs is done, and so
collective of each lane, as threads have, or starts them in the order of the list. A GPU does neither by itself: see
the same collectives in the same order, if each process group is used on one lane only and either a rank has room for a
collective of each lane, as threads have, or begins them in the order of the list. A GPU does neither by itself: see
``distributed/nccl.py``.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ds_fsmoe.planning.schedule import HOLD, Lane, Schedule, Task

# ---- The lane crossings of a schedule: the waits that the order within the lanes does not already ensure
#
# A lane does its tasks in order, so a need within a lane costs nothing. Of several needs on one other lane the last
# is enough, and a lane need not wait twice for the same task. What is left are the crossings, and every kind of lanes
# waits for exactly these.


@dataclass(frozen=True, slots=True)
class Step:
    """A task as its lane runs it."""

    index: int
    """The index of the task in the schedule."""
    task: Task
    needs: tuple[int, ...]
    """The numbers of the crossings that the task waits for."""
    feeds: tuple[int, ...]
    """The numbers of the crossings that the task opens when it is done."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """A schedule that is ready to run."""

    steps: tuple[Step, ...]
    """The steps in the order of issue."""
    by_lane: dict[Lane, tuple[Step, ...]]
    """The steps of each lane."""
    links: tuple[Lane, ...]
    """The lanes besides COMPUTE that have tasks."""
    joins: tuple[int, ...]
    """The numbers of the crossings that COMPUTE waits for after its last task, so that all is done."""
    count: int
    """The number of crossings, numbered from 0."""
    kinds: frozenset[str]
    """The kinds that need a body: all but HOLD."""


# Kept per schedule object for as long as that lives. By identity: a schedule's hash goes through all of its tasks.
_known: dict[int, Dependencies] = {}


def dependencies_of(schedule: Schedule) -> Dependencies:
    """Return the crossings of a schedule, computed once per schedule object."""
    found = _known.get(id(schedule))
    if found is None:
        found = _find(schedule)
        # First: an interrupt in between must not leave an entry that outlives the schedule, whose id is used again.
        weakref.finalize(schedule, _known.pop, id(schedule), None)
        _known[id(schedule)] = found
    return found


def _find(schedule: Schedule) -> Dependencies:
    needs: list[list[int]] = [[] for _ in schedule.tasks]
    feeds: list[list[int]] = [[] for _ in schedule.tasks]
    count = 0
    seen = {(lane, other): -1 for lane in Lane for other in Lane}  # the last task of `other` that `lane` waited for

    def cross(needed: int, lane: Lane) -> int | None:
        """Return the number of a new crossing from a task to a lane, or ``None`` if the lane has waited already."""
        nonlocal count
        other = schedule.tasks[needed].lane
        if other is lane or needed <= seen[lane, other]:
            return None
        seen[lane, other] = needed
        feeds[needed].append(count)
        count += 1
        return count - 1

    for index, task in enumerate(schedule.tasks):
        # Downwards: the last needed one of a lane comes first and makes the others superfluous.
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


# ---- Lanes run a schedule: every task on its lane, after the tasks that it needs


Body = Callable[[Task], None]
"""Does a task and knows what the task reads and writes. It must not start a run on the lanes it runs on."""


class Observer:
    """Receives events on the lane where they happen; methods that are not overridden do nothing.

    On CUDA the lane's stream is the current one in all three, so an event recorded there is on the lane. On the CPU
    ``begin`` and ``end`` are called from the lane's thread, so several may be under way at once. An error of an
    observer is an error of its task.
    """

    def of_run(self, schedule: Schedule, label: str) -> Observer:
        """Return what is told of the tasks of a run that is about to begin: itself, after :meth:`start`, unless it has
        to tell the tasks of runs that take turns apart."""
        self.start(schedule, label)
        return self

    def start(self, schedule: Schedule, label: str) -> None:
        """Called when a run is about to begin, on the caller's thread and stream."""

    def begin(self, index: int, task: Task) -> None:
        """Called when a task is about to begin: everything it needs is done."""

    def end(self, index: int, task: Task) -> None:
        """Called when the task has ended or its body has raised; tasks that need it have not begun."""


class Mark:
    """The progress of a lane: (label of the run, task) of the task begun last and of the task finished last."""

    __slots__ = ("begun", "finished")

    def __init__(self) -> None:
        self.begun: tuple[str, Task] | None = None
        self.finished: tuple[str, Task] | None = None


class LaneWork:
    """The work that one run asks of its lanes."""

    def __init__(self, bodies: Mapping[str, Body], label: str, observer: Observer | None) -> None:
        self._bodies = bodies
        self.label = label
        self._observer = observer

    def do(self, step: Step, mark: Mark) -> None:
        """Do a task now in this thread; an error is raised with a note that names the task."""
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
    """A run that has begun. Its tasks are handed out in the order of the list, up to a point at a time; others may be
    begun in between. Every rank hands out the same tasks of the same runs in the same order."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def go(self, stop: int, joins: bool = False) -> None:
        """Hand out the tasks before index ``stop``: links begin them when they may, and those of COMPUTE are done, or
        on CUDA issued, on return.

        Args:
            stop: the index of the first task that is not handed out.
            joins: whether to wait for those of the links as well, or let the compute stream wait.

        Raises:
            RuntimeError, BaseException: see :meth:`Lanes.run`; nothing may be asked of the run after that.
        """
        self._lanes._let(self, stop, joins)

    def finish(self) -> None:
        """Hand out the rest and wait for all of it, as :meth:`Lanes.run` does. Raises like :meth:`go`."""
        self._lanes._let(self, None, joins=True)

    @abstractmethod
    def _go(self, stop: int | None) -> None:
        """Hand out tasks up to ``stop``; ``None``: all."""

    @abstractmethod
    def _join(self) -> None:
        """Wait for all tasks that have been handed out, or let the compute stream wait for them."""

    @abstractmethod
    def abandon(self) -> None:
        """Abandon the run, and wait for tasks that have started. Raises nothing."""


class Lanes(ABC):
    """All lanes of one engine.

    Only one run at a time may go on: a second one from another thread or from inside a body is refused
    (:class:`SerialLanes` allows the latter); those that have begun and wait to go on do not count. An expert that holds
    another MoE layer gives that layer its own lanes and process groups: on shared ones, the order of the inner and the
    outer collectives would be left to chance.
    """

    overlap: ClassVar[Mapping[Lane, str]]
    """Describes what a lane is and what it may overlap with."""
    runs_behind: ClassVar[bool] = False
    """Whether a body only issues its work to its lane's stream before it returns. Then every tensor that is made on one
    lane and used on another has to be kept until the run is over."""
    _nests: ClassVar[bool] = False

    def __init__(self) -> None:
        self._marks = {lane: Mark() for lane in Lane}
        self._is_running = False
        self._has_run = False
        """Whether a run has come to its end: a watchdog gives the first one more time."""
        self._is_closed = False
        self.on_error: Callable[[BaseException], None] | None = None
        """Is called with the error of a run before the caller can catch it."""

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
            bodies: kind -> the body that does tasks of that kind. HOLD needs none and does nothing.
            label: the name of this run, for messages and for :meth:`progress`, such as "forward".
            observer: is told when tasks begin and end.

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
        """Begin a run and do nothing of it yet; arguments and errors as in :meth:`run`."""
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
        """Map each lane to the task begun last and the one finished last, as "label/name"; "" where there is none yet.

        For a watchdog: it may be called from any thread, while a run is under way and while it hangs.
        """
        return {lane: (lane_name(mark.begun), lane_name(mark.finished)) for lane, mark in self._marks.items()}

    def close(self) -> None:
        """Release everything; running afterwards is an error, closing again is not.

        Raises:
            RuntimeError: a run is under way.
        """
        if self._is_running:
            raise RuntimeError(f"{type(self).__name__} cannot be closed during a run")
        self._is_closed = True


def lane_name(at: tuple[str, Task] | None) -> str:
    """Return "label/name" of a task for messages; "" for none."""
    if at is None:
        return ""
    label, task = at
    return f"{label}/{task.name}" if label else task.name


class SerialLanes(Lanes):
    """Runs one task after another, in the order of the list, in the caller's thread and on its current stream.

    It is the reference for the other lanes, and the only one in which a body may start a run of its own.
    """

    overlap: ClassVar[Mapping[Lane, str]] = dict.fromkeys(Lane, "the caller's thread and stream; overlaps with nothing")
    _nests: ClassVar[bool] = True

    def _run_of(self, dependencies: Dependencies, work: LaneWork) -> LaneRun:
        return _SerialRun(self, dependencies, work)


class _SerialRun(LaneRun):
    """Does one task after another in the caller's thread."""

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
        """Return: nothing is under way."""

    def abandon(self) -> None:
        self._at = len(self._steps)


def make_lanes(device: torch.device, overlap: bool = True, one_link: bool = False) -> Lanes:
    """Make the lanes for a device.

    Args:
        device: the device of the tasks' tensors.
        overlap: whether lanes may work at the same time; otherwise :class:`SerialLanes`.
        one_link: on a GPU, whether the two links take turns instead of overlapping; they still overlap computation.

    Raises:
        ValueError: lanes cannot overlap on that device.
    """
    # Both build on this file.
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
    """Combines several observers: they are told of a beginning in order, and of an end in reverse order."""

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

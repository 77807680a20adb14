# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule: every task on its lane, after what it needs.

``ds_fsmoe.planning.timeline.simulate`` plays the same list against a clock. One object owns all lanes of an engine and
lasts over many runs:

- :class:`SerialLanes` does one task after another, in the order of the list: the reference;
- :class:`~ds_fsmoe.execution.thread_lanes.ThreadLanes` (CPU): a link is a thread;
- :class:`~ds_fsmoe.execution.stream_lanes.StreamLanes` (CUDA): a link is a stream.

No schedule can hang any of them: consider the earliest task in the list that is not done. All it needs is done, and so
are the tasks before it on its lane, so it is running or about to. The same argument holds over ranks whose lists have
the same collectives in the same order, if each process group is used on one lane only and either a rank has room for a
collective of each lane, as threads have, or begins them in the order of the list. A GPU does neither by itself: see
``distributed/nccl.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from ds_fsmoe.execution.dependencies import Dependencies, Step, dependencies_of
from ds_fsmoe.planning.schedule import HOLD, Lane, Schedule, Task

Body = Callable[[Task], None]
"""Does a task: what it reads and writes, it knows. It starts no run on the lanes it runs on."""


class Observer:
    """Is told what happens, on the lane on which it happens; what is not overridden does nothing.

    On CUDA the lane's stream is the current one in all three, so an event recorded there is on the lane. On the CPU
    ``begin`` and ``end`` are called from the lane's thread, so several may be under way at once. An error of an
    observer is an error of its task.
    """

    def start(self, schedule: Schedule, label: str) -> None:
        """A run is about to begin; on the caller's thread and stream."""

    def begin(self, index: int, task: Task) -> None:
        """A task is about to begin: what it needs is done."""

    def end(self, index: int, task: Task) -> None:
        """The task has ended, or its body has raised; what needs it has not begun."""


class Mark:
    """How far a lane has come: (label of the run, task) of the one begun last and of the one finished last."""

    __slots__ = ("begun", "finished")

    def __init__(self) -> None:
        self.begun: tuple[str, Task] | None = None
        self.finished: tuple[str, Task] | None = None


class Work:
    """What one run asks of its lanes."""

    def __init__(self, bodies: Mapping[str, Body], label: str, observer: Observer | None) -> None:
        self._bodies = bodies
        self.label = label
        self._observer = observer

    def do(self, step: Step, mark: Mark) -> None:
        """Do a task, now and here; an error leaves with a note that names the task."""
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
            error.add_note(f"raised by task {step.index} of the schedule, {name_of(mark.begun)}, on lane {task.lane}")
            raise
        mark.finished = mark.begun


class Lanes(ABC):
    """All lanes of one engine.

    A run at a time: a second one from another thread, or from inside a body, is refused (:class:`SerialLanes` allows
    the latter). An expert that holds another MoE layer gives that layer lanes of its own, and process groups of its
    own: on shared ones, the order of the inner and the outer collectives would be left to chance.
    """

    overlap: ClassVar[Mapping[Lane, str]]
    """What a lane is, and what it may overlap with."""
    runs_behind: ClassVar[bool] = False
    """Whether a body that returns has only issued its work, to a stream of its lane: every tensor that is made on one
    lane and used on another then has to be kept until the run is over."""
    _nests: ClassVar[bool] = False

    def __init__(self) -> None:
        self._marks = {lane: Mark() for lane in Lane}
        self._is_running = False
        self._is_closed = False
        self.on_error: Callable[[BaseException], None] | None = None
        """Hears of the error of a run before the caller does, who may catch it."""

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
            schedule: what is to be done. What is worked out for it is kept with the object, so keep and reuse it.
            bodies: kind -> what does a task of that kind. HOLD needs none and does nothing.
            label: of this run, for messages and for :meth:`progress`, such as "forward".
            observer: is told when tasks begin and end.

        Raises:
            ValueError: kinds without a body; nothing has begun.
            RuntimeError: the lanes are closed, or in a run already; nothing has begun.
            BaseException: the first that a body raised, itself, with a note that names the task. No task has begun
                since, those that were running have ended, and the lanes can run again.
        """
        if self._is_closed:
            raise RuntimeError("these lanes are closed")
        if self._is_running and not self._nests:
            raise RuntimeError(
                f"{type(self).__name__} are in a run already: a run inside a body (an expert that holds another MoE "
                "layer), or from a second thread, needs lanes and process groups of its own"
            )
        crossings = dependencies_of(schedule)
        if not crossings.kinds <= bodies.keys():
            missing = sorted(crossings.kinds - bodies.keys())
            raise ValueError(f"no body for {', '.join(missing)}: there are bodies for {', '.join(sorted(bodies))}")
        was_running = self._is_running
        try:
            self._is_running = True
            if observer is not None:
                observer.start(schedule, label)
            self._execute(crossings, Work(bodies, label, observer))
        except BaseException as error:
            if self.on_error is not None:
                self.on_error(error)
            raise
        finally:
            self._is_running = was_running

    @abstractmethod
    def _execute(self, crossings: Dependencies, work: Work) -> None:
        """Do every step."""

    def progress(self) -> dict[Lane, tuple[str, str]]:
        """Lane -> the task begun last and the one finished last, as "label/name"; "" where there is none yet.

        For a watchdog: it may be called from any thread, while a run is under way and while it hangs.
        """
        return {lane: (name_of(mark.begun), name_of(mark.finished)) for lane, mark in self._marks.items()}

    def close(self) -> None:
        """Give everything back; running afterwards is an error, closing again is not.

        Raises:
            RuntimeError: a run is under way.
        """
        if self._is_running:
            raise RuntimeError(f"{type(self).__name__} cannot be closed in a run")
        self._is_closed = True


def name_of(at: tuple[str, Task] | None) -> str:
    """As messages have it: "label/name" of a task; "" for none."""
    if at is None:
        return ""
    label, task = at
    return f"{label}/{task.name}" if label else task.name


class SerialLanes(Lanes):
    """One task after another, in the order of the list, in the caller's thread and on its current stream.

    It is what the others are held against, and the one in which a body may start a run of its own.
    """

    overlap: ClassVar[Mapping[Lane, str]] = dict.fromkeys(Lane, "the caller's thread and stream; overlaps with nothing")
    _nests: ClassVar[bool] = True

    def _execute(self, crossings: Dependencies, work: Work) -> None:
        for step in crossings.steps:
            work.do(step, self._marks[step.task.lane])


def make_lanes(device: torch.device, overlap: bool = True, one_link: bool = False) -> Lanes:
    """The lanes for a device.

    Args:
        device: on which the tasks' tensors are.
        overlap: whether lanes may be at work at the same time; otherwise :class:`SerialLanes`.
        one_link: on a GPU, whether the traffic of both links goes one after another, beside the computation.

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
    raise ValueError(f"device {device}: lanes overlap on cpu and cuda; elsewhere turn overlap off")


class Together(Observer):
    """Several observers as one: told of a beginning in turn, and of an end the other way round."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def start(self, schedule: Schedule, label: str) -> None:
        for each in self._observers:
            each.start(schedule, label)

    def begin(self, index: int, task: Task) -> None:
        for each in self._observers:
            each.begin(index, task)

    def end(self, index: int, task: Task) -> None:
        for each in reversed(self._observers):
            each.end(index, task)

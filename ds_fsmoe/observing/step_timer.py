# SPDX-License-Identifier: Apache-2.0
"""Times a step: its forwards and its backwards as a whole, and inside them each run of a layer, task by task.

The engine starts its clock; the autotuner and trials of plans read it. A whole forward of the engine is one stretch, a
backward with the reduction of gradients another; the optimizer's step is in neither. The part of a stretch outside of
layers' runs is dense: the model without the experts' part of its layers. Under activation checkpointing, a recomputed
forward belongs to its backward.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import most_of
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.observing.spans import Recorder, clock_of
from ds_fsmoe.planning.schedule import Schedule
from ds_fsmoe.planning.timeline import Timeline

_FIRST = 2
"""The forward in training that is timed without being asked for: the first one is slow throughout."""


@dataclass(frozen=True)
class MeasuredRun:
    """Measures one phase of one call of a layer."""

    label: str
    """The label of the phase, such as "L03/backward"."""
    in_backward: bool
    """Whether it ran in a backward, as a recomputed forward does too."""
    schedule: Schedule
    timeline: Timeline
    about: Any
    """The value that :meth:`StepClock.run` was given."""


@dataclass(frozen=True)
class MeasuredStep:
    """Measures a step on this rank without the optimizer's part, in milliseconds."""

    num_forwards: int
    num_backwards: int
    forward_ms: float
    """The time of all forwards together."""
    backward_ms: float
    """The time of all backwards together, gradients included."""
    runs: tuple[MeasuredRun, ...]
    is_interleaved: bool = False
    """Whether runs of two sub-batches alternated: then the time outside of them is not that of dense layers."""
    batch_ms: float | None = None
    """The time of a whole batch that goes through stages, from its beginning to its end; ``None``: there are none."""
    sums_ms: float = 0.0
    """The time of the backwards' ends, from where the gradients that are left are summed over ranks."""

    @property
    def step_ms(self) -> float:
        """Return the time by which plans are judged: that of the batch, or else of all forwards and backwards."""
        return self.forward_ms + self.backward_ms if self.batch_ms is None else self.batch_ms

    @property
    def has_both(self) -> bool:
        """Return True if there was a forward and a backward."""
        return self.num_forwards > 0 and self.num_backwards > 0

    @cached_property
    def phases_ms(self) -> dict[str, float]:
        """Return label of a phase -> time of all its runs together."""
        found: dict[str, float] = defaultdict(float)
        for run in self.runs:
            found[run.label] += run.timeline.makespan_ms
        return dict(found)

    @property
    def dense_forward_ms(self) -> float:
        """Return the time of the forwards outside of layers' runs."""
        return self._outside_ms(self.forward_ms, in_backward=False)

    @property
    def dense_backward_ms(self) -> float:
        """Return the time of the backwards outside of layers' runs, with gradients that no layer's run has sent."""
        return self._outside_ms(self.backward_ms, in_backward=True)

    def _outside_ms(self, whole_ms: float, in_backward: bool) -> float:
        inside_ms = sum(run.timeline.makespan_ms for run in self.runs if run.in_backward is in_backward)
        # Where there is nothing outside, the marks of a device are off by more than it takes.
        return max(0.0, whole_ms - inside_ms)


class DenseTimes(NamedTuple):
    """Holds the time of a model without the experts' part of its layers, in milliseconds."""

    forward_ms: float
    backward_ms: float
    wait_ms: float = 0.0
    """The time by which a step's first forward is longer than the one that was seen: it waits for parameters."""


@dataclass
class _Stretch:
    in_backward: bool
    start: Any
    end: Any = None
    sums: Any = None
    """The beginning of the sums of gradients at its end."""


class StepClock:
    """Times the forwards in training and the backwards reported to it, between :meth:`start` and :meth:`stop`.

    On CUDA it only records events: only reading waits for the device.

    It always times the second forward in training and its backward, for the dense part. It also times the first forward
    after an optimizer step, which may have to wait for updated parameters.

    Args:
        device: the device on which steps run.
        host: the clock of the CPU.
    """

    def __init__(self, device: torch.device, host: Clock = HOST) -> None:
        self.device = device
        self._host = host
        clock = clock_of(device, host)
        self._stamp, self._elapsed_ms = clock.now, clock.elapsed_ms
        self._num_forwards = 0
        """The number of forwards, counted only for the first ones."""
        self._is_asked = False
        self._last: MeasuredStep | None = None
        self._second: _Stretch | None = None
        self._after_step: _Stretch | None = None
        self._is_after_step = False
        self.is_listening = False
        """Whether runs are to be reported, because a stretch under way is timed."""
        self._forget(is_on=False)

    def start(self) -> None:
        """Record all runs from here on, and drop earlier records."""
        self._is_asked = True
        self._forget(is_on=True)

    def stop(self) -> None:
        """Stop recording, and drop earlier records."""
        self._forget(is_on=False)

    def _forget(self, is_on: bool) -> None:
        self._is_on = is_on
        self.is_listening = False
        self._is_whole = True
        self._stretches: list[_Stretch] = []
        self._runs: list[tuple[str, bool, Schedule, Recorder, Any]] = []
        self._is_interleaved = False
        self._batch: _Stretch | None = None

    def begin_step(self) -> None:
        """Start the clock of a batch in a pipeline of stages."""
        if self._is_on:
            self._batch = _Stretch(False, self._stamp())

    def end_step(self) -> None:
        """End the clock of the batch, with the optimizer's part."""
        if self._batch is not None:
            self._batch.end = self._stamp()

    def begin_forward(self) -> None:
        """Start the clock of the engine's forward, in training."""
        if self._num_forwards <= _FIRST:
            self._num_forwards += 1
            if not self._is_asked:
                if self._num_forwards > _FIRST:
                    self.read()
                self._forget(is_on=self._num_forwards == _FIRST)
        if self._is_on:
            self._begin(in_backward=False)
            if self._num_forwards == _FIRST and not self._is_asked:
                self._second = self._stretches[-1]
        if self._is_after_step and self._second is not None:
            self._is_after_step = False
            self._after_step = self._stretches[-1] if self._is_on else _Stretch(False, self._stamp())

    def step_is_over(self) -> None:
        """End the clock of an optimizer step: the next forward is the first one with new parameters."""
        self._is_after_step = self._after_step is None

    def begin_backward(self) -> None:
        """Start the clock of the engine's backward."""
        if self._is_on:
            self._begin(in_backward=True)

    def begin_sums(self) -> None:
        """Mark where the sums of gradients begin that end a backward."""
        if self.is_listening and self._stretches[-1].in_backward:
            self._stretches[-1].sums = self._stamp()

    def _begin(self, in_backward: bool) -> None:
        # One that is still open has ended in an error.
        self._is_whole = self._is_whole and not self.is_listening
        self._stretches.append(_Stretch(in_backward, self._stamp()))
        self.is_listening = True

    def end_forward(self) -> None:
        """End the clock of the engine's forward."""
        self.end_backward()
        if self._after_step is not None and self._after_step.end is None:
            self._after_step.end = self._stamp()

    def end_backward(self) -> None:
        """End the clock of the engine's backward."""
        if self.is_listening:
            self._stretches[-1].end = self._stamp()
            self.is_listening = False

    def run(self, schedule: Schedule, label: str, about: Any = None, is_interleaved: bool = False) -> Recorder | None:
        """Start the clock of a layer's run, in the calling thread and on its stream.

        Args:
            schedule: the schedule of the run.
            label: the label of the phase, such as "L03/backward".
            about: a value to keep with the run.
            is_interleaved: whether another run continues while this one pauses.

        Returns:
            The recorder for its tasks, or ``None`` if the run is not timed.
        """
        if not self.is_listening:
            # The layer was called in a forward that was timed, so this is a backward that was not reported.
            self._is_whole = self._is_whole and not self._is_on
            return None
        self._is_interleaved = self._is_interleaved or is_interleaved
        recorder = Recorder(self.device, self._host)
        recorder.start(schedule, label)
        self._runs.append((label, self._stretches[-1].in_backward, schedule, recorder, about))
        return recorder

    def read(self) -> MeasuredStep | None:
        """Return the recorded step. On CUDA this waits for the last backward.

        Returns:
            ``None`` if a part is missing, as after an error or after a backward outside of the engine.
        """
        if not self._is_whole or any(each.end is None for each in self._stretches):
            return None
        parts_ms = {False: [], True: []}
        for each in self._stretches:
            parts_ms[each.in_backward].append(self._elapsed_ms(each.start, each.end))
        try:
            runs = tuple(
                MeasuredRun(label, in_backward, schedule, recorder.timeline(schedule), about)
                for label, in_backward, schedule, recorder, about in self._runs
            )
        except ValueError:  # one that did not get to its end
            return None
        forward, backward = parts_ms[False], parts_ms[True]
        batch, times = self._batch, (sum(forward), sum(backward))
        batch_ms = None if batch is None or batch.end is None else self._elapsed_ms(batch.start, batch.end)
        sums_ms = sum(self._elapsed_ms(each.sums, each.end) for each in self._stretches if each.sums is not None)
        step = MeasuredStep(len(forward), len(backward), *times, runs, self._is_interleaved, batch_ms, sums_ms)
        if step.has_both:
            self._last = step
        return step

    def _wait_ms(self) -> float:
        """Return by how many milliseconds a step's first forward is longer than the one that is always timed."""
        first, other = self._after_step, self._second
        if first is None or other is None or first.end is None or other.end is None:
            return 0.0
        return max(0.0, self._elapsed_ms(first.start, first.end) - self._elapsed_ms(other.start, other.end))

    def dense_ms(self, group: dist.ProcessGroup | None = None) -> DenseTimes | None:
        """Return the dense part of one forward and one backward, without the sums of gradients at its end, and the wait
        of a step's first forward. Collective.

        Each is the largest over ranks, of the present record or else of the last reading.

        The other ranks wait for the rank with the largest, but in their layers' runs, so their dense parts exclude this
        wait.

        Args:
            group: the ranks; ``None``: all.

        Returns:
            ``None`` on every rank if one rank lacks either.
        """
        step, numbers = self.read(), [1.0, 0.0, 0.0, 0.0]
        if step is None or not step.has_both:
            step = self._last
        if step is not None:
            backward_ms = max(0.0, step.dense_backward_ms - step.sums_ms)
            dense = step.dense_forward_ms / step.num_forwards, backward_ms / step.num_backwards
            # A whole step's forwards have it among them.
            numbers = [0.0, *dense, self._wait_ms() if step.num_forwards == 1 else 0.0]
        lacks, *times_ms = most_of(numbers, self.device, group)
        return None if lacks else DenseTimes(*times_ms)

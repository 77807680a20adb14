# SPDX-License-Identifier: Apache-2.0
"""Measures how much time a backward leaves for gradients, in the backward itself, in the rounds before the plan.

A window's first part is the time in which the lane of gradients is idle inside an MoE layer, between the last tokens
that come in and the first that go out; its second part is between the end of that layer and the next window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.lanes import Observer
from ds_fsmoe.gradients.flat_buffers import MOST_PIECES, PIECE_NUMEL, FlatGradients
from ds_fsmoe.gradients.reducer import GradientReducer
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.observing.spans import Recorder, clock_of
from ds_fsmoe.planning.cost import LinearCost, fit
from ds_fsmoe.planning.gradient_plan import BufferReadiness, GradientPlan, GradientSlice, WindowBytes, plan_by_bytes
from ds_fsmoe.planning.gradients import Mode, QueuedGradient, Window, partition
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import GRAD, Lane, Schedule

MEASURED_NUMEL = 1 << 20
"""The largest message that is timed, in elements: enough for a slope, and not much memory."""


@dataclass
class Idle:
    """The idle times of one window in one round, in milliseconds."""

    moe_ms: float = 0.0
    dense_ms: float = 0.0


class IdleTimes:
    """Collects idle times of windows, round by round.

    Args:
        device: the device on which the backward runs. Reading its clock waits for it, so this is for a few rounds only.
        host: the clock of the CPU.
    """

    def __init__(self, device: torch.device, host: Clock = HOST) -> None:
        self.device = device
        self.host = host
        self.rounds: list[list[Idle]] = [[]]
        clock = clock_of(device, host)
        self._stamp, self._elapsed_ms = clock.now, clock.elapsed_ms
        self._closed_at: object = None

    def opened(self) -> None:
        """Take note that a window begins, so the part behind the last layer is over."""
        self.over()
        self.rounds[-1].append(Idle())

    def closed(self, moe_ms: float) -> None:
        """Take note that the layer has ended."""
        self.rounds[-1][-1].moe_ms = moe_ms
        self._closed_at = self._stamp()

    def over(self) -> None:
        """Take note that the part behind a layer is over."""
        if self._closed_at is not None:
            self.rounds[-1][-1].dense_ms = self._elapsed_ms(self._closed_at, self._stamp())
            self._closed_at = None

    def next_round(self) -> None:
        """Take note that the backward has ended."""
        self.over()
        self.rounds.append([])

    def typical(self, num_windows: int, group: dist.ProcessGroup) -> list[Idle]:
        """Return each window's median over rounds, and of that the least of all ranks. Collective.

        The first round, in which everything is slow, is left out where there are more.
        """
        rounds = [each for each in self.rounds if len(each) >= num_windows and each] or [[Idle()] * num_windows]
        rounds = rounds[1:] or rounds
        times = [[(each.moe_ms, each.dense_ms) for each in windows[:num_windows]] for windows in rounds]
        medians = torch.tensor(np.median(np.array(times).reshape(len(rounds), num_windows, 2), axis=0))
        medians = medians.to(self.device)
        with waiting("the idle times of windows"):
            dist.all_reduce(medians, dist.ReduceOp.MIN, group=group)
            return [Idle(*each) for each in medians.tolist()]


class _Backwards(Observer):
    """Records the backwards of a layer: the last one, and the one before, of the other half of the batch if there are
    halves."""

    def __init__(self, idle: IdleTimes) -> None:
        self._idle = idle
        self.last, self.before = self._recorder(), self._recorder()

    def of_run(self, schedule: Schedule, label: str) -> Observer:
        if not label.endswith("/backward"):
            return Observer()
        self.last, self.before = self._recorder(), self.last
        self.last.start(schedule, label)
        return self.last

    def _recorder(self) -> Recorder:
        return Recorder(self._idle.device, self._idle.host)


class TimedWindow:
    """Wraps a layer's window and also measures how idle the lane of gradients is in it.

    Args:
        reducer: the owner of the window.
        plan: the plan of the layer's backward.
        idle: where the times are recorded.
    """

    def __init__(self, reducer: GradientReducer, plan: PhasePlan, idle: IdleTimes) -> None:
        self.observer = _Backwards(idle)
        """The observer to be told what the layer's backward does."""
        self._reducer = reducer
        self._plan = plan
        self._idle = idle
        self._is_timed = False

    @property
    def flats(self) -> tuple[FlatGradients, ...]:
        """The reducer's buffers."""
        return self._reducer.flats

    def open(self, label: str) -> tuple[GradientSlice, ...]:
        """See :class:`~ds_fsmoe.gradients.reducer.GradientReducer`."""
        # What is still under way is waited for.
        self._idle.over()
        parcels = self._reducer.open(label)
        # A graph that is older than the plan still has this window, and gradients travel in it by now.
        self._is_timed = self._reducer.is_sending() and self._reducer.plan is None
        if self._is_timed:
            self._idle.opened()
        return parcels

    def tasks(self, parcel: GradientSlice) -> tuple[str, ...]:
        """See :class:`~ds_fsmoe.gradients.reducer.GradientReducer`."""
        return self._reducer.tasks(parcel)

    def send(self, parcel: GradientSlice, task: str) -> None:
        """See :class:`~ds_fsmoe.gradients.reducer.GradientReducer`."""
        self._reducer.send(parcel, task)

    def close(self) -> None:
        """See :class:`~ds_fsmoe.gradients.reducer.GradientReducer`."""
        if self._is_timed:
            self._idle.closed(self._gap_ms())
        self._reducer.close()

    def _gap_ms(self) -> float:
        """Return the time between the tasks before and behind the gradients' place on their lane."""
        plan = self._plan
        recorder = self.observer.last
        schedule = recorder.schedule
        assert schedule is not None
        # A batch that was whole is run as a whole, whatever the plan says of halves.
        has_paused = schedule is not plan.schedule
        sending = plan.paused(((GRAD,),), is_second=True)[0] if has_paused else plan.sending(((GRAD,),))
        place = next(i for i, task in enumerate(sending.tasks) if task.kind == GRAD)
        lane = sending.tasks[place].lane
        num_before = sum(task.lane is lane for task in sending.tasks[:place])
        spans = recorder.timeline(schedule).spans
        on_lane = [each for each in spans if each.task.lane is lane]
        start_ms = on_lane[num_before - 1].end_ms if num_before else 0.0
        if has_paused:
            # What the other half sends back leaves ahead of gradients.
            start_ms = max(start_ms, self.observer.before.ended_ms(lane, since=recorder))
        end_ms = on_lane[num_before].start_ms if num_before < len(on_lane) else max(each.end_ms for each in spans)
        return max(0.0, end_ms - start_ms)


@dataclass(frozen=True)
class ReducingCost:
    """The measured costs of reducing bytes of a buffer in one way."""

    on_lane: LinearCost
    """What the task on the lane of gradients costs."""
    alone_ms: float
    """What the largest message that was timed takes, in pieces that follow each other over the links."""


def cost_of(flat: FlatGradients, in_levels: bool, host: Clock = HOST) -> ReducingCost:
    """Measure what reducing bytes of a buffer costs, at present among its ranks. Collective.

    Args:
        flat: the buffer.
        in_levels: whether it is added up inside nodes first.
        host: the clock of the CPU.
    """
    way = flat.way_in(in_levels)
    largest = max(8, min(flat.numel, MEASURED_NUMEL))
    sizes = [max(1, largest // 16), max(2, largest // 4), largest]
    watch = Stopwatch(flat.device, flat.group, host)
    of_tasks = {
        task: watch.times_ms(f"gradients, {way}", sizes, flat.reducing(task, way), flat.group)
        for task in way.most_kinds
    }
    on_lane = fit([numel * flat.element_bytes for numel in sizes], of_tasks[GRAD]).cost
    inside_ms = sum(medians_ms[-1] for task, medians_ms in of_tasks.items() if task != GRAD)
    between_ms = of_tasks[GRAD][-1]
    pieces = max(1, min(MOST_PIECES, largest // PIECE_NUMEL))
    # The shorter of the two is hidden but for that of one piece.
    return ReducingCost(on_lane, max(inside_ms, between_ms) + min(inside_ms, between_ms) / pieces)


def plan_by_time(
    supplies: Sequence[BufferReadiness],
    lanes: Sequence[tuple[Lane, ...]],
    costs: Sequence[LinearCost],
    idle: Sequence[Idle],
    mode: Mode,
    *,
    solver: str,
    chunk_bytes: int,
) -> GradientPlan:
    """Slice for the time there is (paper, section 5): up to it gradients cost nothing, beyond it as much as alone.

    Args:
        supplies: what each buffer has ready, and when.
        lanes: the lanes of the buffers.
        costs: the costs of the buffers, per byte.
        idle: the idle times of the windows.
        mode: any mode but "off".
        solver, chunk_bytes: see :func:`ds_fsmoe.planning.gradients.partition`.
    """
    pieces: list[QueuedGradient] = []
    windows: list[Window] = []
    for number, window in enumerate(idle):
        for supply, lane, cost in zip(supplies, lanes, costs, strict=True):
            before = supply.ready[number - 1] if number else 0
            size_bytes = (supply.ready[number] - before) * supply.element_bytes
            pieces.append(QueuedGradient(supply.kind, lane, size_bytes, cost))
        for kind, time_ms in (("moe", window.moe_ms), ("dense", window.dense_ms)):
            windows.append(Window(number, kind, len(pieces), _beyond(time_ms)))
    found = partition(pieces, windows, mode, solver=solver, chunk_bytes=chunk_bytes)
    wanted = [
        WindowBytes(
            *(tuple((each.kind, each.size_bytes) for each in found.slices[2 * number + part]) for part in (0, 1))
        )
        for number in range(len(idle))
    ]
    return plan_by_bytes(supplies, wanted)


def _beyond(idle_ms: float):
    return lambda grad_ms: np.maximum(0.0, grad_ms - idle_ms)

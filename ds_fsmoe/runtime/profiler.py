# SPDX-License-Identifier: Apache-2.0
"""What the tasks of a layer's plan cost here: each is timed alone, on the groups, types and device that it runs on.

Letters: E experts of all ranks, e of this rank, c slots of a chunk, M width, G ranks of an EP group, P of an ESP group,
N = P * G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_OUT,
    EXPERT,
    EXPERT_DW,
    EXPERT_DX,
    GATHER,
    HOLD,
    REDUCE,
    Schedule,
)
from ds_fsmoe.runtime.lanes import Lanes, SerialLanes
from ds_fsmoe.runtime.pipeline import CallSizes, ExpertCall, Experts
from ds_fsmoe.runtime.stopwatch import Prepare, Stopwatch, Timing
from ds_fsmoe.runtime.wires import Wires

ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = "all-to-all", "all-gather", "reduce-scatter"
FORWARD, BACKWARD = "experts forward", "experts backward"
BACKWARD_ANEW = "experts backward, cut anew"
DX, DW = "experts dX", "experts dW"
_COLLECTIVES = (ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER)
_HOST_RUNS = 8


@dataclass(frozen=True)
class LayerProfile:
    """The costs of one kind of layer."""

    operations: Mapping[str, Timing]
    """By the names above. Collectives per byte: of what an all-to-all sends, an all-gather ends with, a reduce-scatter
    starts from. Experts per floating-point operation of their matrix products."""
    task_ms: float
    """What a task costs beside its work: to hand it to a lane, and to wait for what it needs."""
    draws: bool
    """Whether the experts draw random numbers: then forward and backward have to be cut alike."""

    def costs(self, backward: bool, same_cuts: bool = True) -> dict[str, LinearCost]:
        """Kind of task -> what one costs in that phase, however many launches it is.

        Args:
            backward: which phase.
            same_cuts: whether the backward has the chunks of the forward.
        """
        at = self.operations
        anew = BACKWARD_ANEW if BACKWARD_ANEW in at and not same_cuts else BACKWARD
        names = {A2A_IN: ALL_TO_ALL, A2A_OUT: ALL_TO_ALL, GATHER: ALL_GATHER, REDUCE: REDUCE_SCATTER}
        names |= {EXPERT: anew, EXPERT_DX: DX, EXPERT_DW: DW} if backward else {EXPERT: FORWARD}
        found = {kind: at[name].fit.cost for kind, name in names.items() if name in at}
        if EXPERT_DW in found:
            # The sum of its parts, of half the size each: measured apart from them, it differs by the noise of the
            # clock, and putting weight gradients off would seem to gain that.
            dx, dw = found[EXPERT_DX], found[EXPERT_DW]
            found[EXPERT] = LinearCost(dx.alpha_ms + dw.alpha_ms, (dx.beta_ms + dw.beta_ms) / 2)
        return {HOLD: LinearCost(0.0, 0.0)} | found

    @property
    def splits(self) -> bool:
        """Whether weight gradients can be put off."""
        return DW in self.operations


@dataclass(frozen=True)
class Subject:
    """One layer, as it was called."""

    name: str
    """For messages."""
    wires: Wires
    experts: Experts
    num_local_experts: int
    """e."""
    num_weights: int
    """Elements of the matrices of this rank's experts; at least 1."""
    splits: bool
    recompute: bool
    sizes: CallSizes
    surroundings: Callable[[], AbstractContextManager]
    """What holds around a call: autocast."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.num_local_experts * self.wires.num_exchanging

    @property
    def operations(self) -> tuple[str, ...]:
        """What there is to time."""
        groups = (self.wires.ep_group, self.wires.esp_group, self.wires.esp_group)
        names = [name for name, group in zip(_COLLECTIVES, groups, strict=True) if group is not None]
        names += [FORWARD, BACKWARD]
        if self.splits:
            names += [DX, DW]
        elif not self.recompute:
            names.append(BACKWARD_ANEW)
        return tuple(names)


def measured_slots(capacity: int) -> list[int]:
    """Chunks to time, in slots, smallest first: up to the whole capacity, and at least four different ones."""
    found = sorted({-(-max(1, capacity) // parts) for parts in (16, 8, 4, 2, 1)})
    while len(found) < 4:
        found.append(2 * found[-1])
    return found


def profile(watch: Stopwatch, subject: Subject, lanes: Lanes, schedule: Schedule) -> LayerProfile:
    """Time everything that a layer's plans are made of. Collective; random numbers and buffers are left as they were.

    Args:
        watch: of this job.
        subject: the layer.
        lanes: on which it runs.
        schedule: of such a layer, cut: what handing out its tasks costs is timed.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    with _untouched(watch.device, subject.experts):
        draws = _Draws(watch.device)
        operations = {name: _time(watch, subject, name, draws) for name in subject.operations}
        task_ms = _task_ms(watch, subject.name, lanes, schedule)
    return LayerProfile(operations, task_ms, watch.any_rank(draws.seen))


_Work = Callable[[], object]
_Body = Callable[[ExpertCall, int, torch.Tensor], _Work]
"""From a call that has gone forward, its slots and a gradient of its results to what is timed."""


def _time(watch: Stopwatch, subject: Subject, name: str, draws: _Draws) -> Timing:
    operation = _Operations(watch.device, subject, draws).table()[name]
    slots = measured_slots(subject.sizes.capacity)
    times_ms = watch.times_ms(f"{name} of {subject.name}", slots, operation.prepare, operation.group)
    return Timing(operation.unit, tuple(each * operation.size_of_slot for each in slots), tuple(times_ms))


@dataclass(frozen=True)
class _Operation:
    prepare: Prepare
    """Of so many slots."""
    size_of_slot: float
    unit: str
    group: dist.ProcessGroup | None = None
    """Of a collective."""


class _Operations:
    """What there is to time, on made-up rows."""

    def __init__(self, device: torch.device, subject: Subject, draws: _Draws) -> None:
        self._device = device
        self._subject = subject
        self._draws = draws

    def table(self) -> dict[str, _Operation]:
        """Name -> operation."""
        wires, sizes = self._subject.wires, self._subject.sizes
        sent_bytes = float(self._subject.num_experts * sizes.width * sizes.dtype.itemsize)
        shared_bytes = wires.num_sharing * sent_bytes
        flops = 2.0 * wires.num_exchanging * wires.num_sharing * self._subject.num_weights
        backward = self._after_forward(lambda call, slots, dy: lambda: call.backward(0, slots, dy))
        anew = self._after_forward(lambda call, slots, dy: lambda: call.backward(0, slots, dy), same_cuts=False)
        dx = self._after_forward(lambda call, slots, dy: lambda: call.backward_dx(0, slots, dy))
        return {
            ALL_TO_ALL: _Operation(self._exchange, sent_bytes, "byte", wires.ep_group),
            ALL_GATHER: _Operation(self._gather, shared_bytes, "byte", wires.esp_group),
            REDUCE_SCATTER: _Operation(self._reduce, shared_bytes, "byte", wires.esp_group),
            FORWARD: _Operation(self._forward, flops, "flop"),
            BACKWARD: _Operation(backward, 2 * flops, "flop"),
            BACKWARD_ANEW: _Operation(anew, 2 * flops, "flop"),
            DX: _Operation(dx, flops, "flop"),
            DW: _Operation(self._after_forward(_after_dx), flops, "flop"),
        }

    def _rows(self, *shape: int) -> torch.Tensor:
        sizes = self._subject.sizes
        return torch.randn(*shape, sizes.width, device=self._device).to(sizes.dtype)

    def _exchange(self, slots: int) -> _Work:
        wires, x_EcM = self._subject.wires, self._rows(self._subject.num_experts, slots)
        return lambda: wires.to_experts(x_EcM)

    def _gather(self, slots: int) -> _Work:
        wires = self._subject.wires
        x_GecM = self._rows(wires.num_exchanging, self._subject.num_local_experts, slots)
        return lambda: wires.gather(x_GecM)

    def _reduce(self, slots: int) -> _Work:
        wires, y_NecM = self._subject.wires, self._arrived(slots)
        return lambda: wires.reduce(y_NecM)

    def _arrived(self, slots: int) -> torch.Tensor:
        """[N, e, c, M]."""
        wires = self._subject.wires
        return self._rows(wires.num_exchanging * wires.num_sharing, self._subject.num_local_experts, slots)

    def _call(self, same_cuts: bool = True) -> ExpertCall:
        with self._subject.surroundings():
            return self._subject.experts.call(True, same_cuts=same_cuts, recompute=self._subject.recompute)

    def _forward(self, slots: int) -> _Work:
        call, x_NecM = self._call(), self._arrived(slots)
        return lambda: call.forward(0, slots, x_NecM)

    def _after_forward(self, body: _Body, same_cuts: bool = True) -> Prepare:
        def prepare(slots: int) -> _Work:
            call, x_NecM = self._call(same_cuts), self._arrived(slots)
            with self._draws.watched():
                y_NecM = call.forward(0, slots, x_NecM)
            return body(call, slots, torch.randn_like(y_NecM))

        return prepare


def _after_dx(call: ExpertCall, slots: int, dy_NecM: torch.Tensor) -> _Work:
    call.backward_dx(0, slots, dy_NecM)
    return lambda: call.backward_dw(0, slots)


def _task_ms(watch: Stopwatch, name: str, lanes: Lanes, schedule: Schedule) -> float:
    """A schedule whose tasks do nothing, per task."""
    bodies = dict.fromkeys({task.kind for task in schedule.tasks}, lambda task: None)

    def prepare(runs: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(runs):
                lanes.run(schedule, bodies, f"{name}/empty")

        return work

    (time_ms,) = watch.times_ms(f"empty tasks of {name}", [_HOST_RUNS], prepare)
    return time_ms / (_HOST_RUNS * max(1, sum(task.kind != HOLD for task in schedule.tasks)))


class _Draws:
    """Notices when random numbers are drawn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seen = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = self._state()
        yield
        self.seen = self.seen or not all(map(torch.equal, before, self._state()))

    def _state(self) -> Sequence[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states


@contextmanager
def _untouched(device: torch.device, experts: Experts) -> Iterator[None]:
    """Made-up rows leave nothing behind: neither in the generators of random numbers nor in buffers of experts."""
    modules = getattr(experts, "experts", ())
    kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        try:
            yield
        finally:
            for buffer, value in kept:
                buffer.copy_(value)


def is_serial(lanes: Lanes) -> bool:
    """Whether these lanes do one task after another."""
    return isinstance(lanes, SerialLanes)

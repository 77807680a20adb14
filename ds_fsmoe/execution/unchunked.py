# SPDX-License-Identifier: Apache-2.0
"""The experts' part of an uncut layer. Its experts are called as one module under autograd, as DeepSpeed does.

This is for experts whose whole input and output somebody wants to see or to change at once. Nothing is known then about
what is computed, which parameters it takes, or who else keeps its graph. The collectives are those of any uncut layer,
in the same order in both phases, so one rank may run a layer this way while its peers compute their experts as usual.

Letters: E experts of all ranks, C slots per expert, M width, N ranks the rows came from, e experts on this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fsmoe.execution.lanes import Body, Observer
from ds_fsmoe.execution.phase import Direction, Hook, PhaseRun
from ds_fsmoe.planning.schedule import EXPERT, GRADIENT_TASKS, Schedule, Task

if TYPE_CHECKING:
    from ds_fsmoe.execution.call import Layout
    from ds_fsmoe.execution.pipeline import LayerPipeline


@dataclass(frozen=True)
class WholeExperts:
    """The experts of this rank, as one module."""

    module: Callable[[torch.Tensor], Any]
    """The call that turns [N, e, C, M] into a tensor of as many elements."""
    parameters: tuple[nn.Parameter, ...]
    name: str
    """The name that messages use."""
    again: Callable[[], AbstractContextManager] = nullcontext
    """The context that is entered around a repeated call."""
    is_timed: bool = True
    """Whether the layer's runs are reported to the code that times steps."""


def run_whole(
    pipeline: LayerPipeline,
    x_RM: torch.Tensor,
    layout: Layout,
    experts: WholeExperts,
    hook: Hook | None,
    needs_backward: bool,
    weights_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send the rows to the experts and back; see :class:`~ds_fsmoe.execution.pipeline.LayerPipeline`.

    Args:
        pipeline, x_RM, layout, experts, hook: see :meth:`~ds_fsmoe.execution.pipeline.LayerPipeline.run`.
        needs_backward: whether there will be a backward; the same on every rank.
        weights_R: see :meth:`~ds_fsmoe.execution.pipeline.LayerPipeline.run`.

    Raises:
        ValueError: the layer is cut, or the experts return another number of elements.
    """
    call = _Call(pipeline, layout, hook)
    # Both ways back are walked whatever the module does with its rows: the other ranks count on it.
    anchor = torch.zeros((), device=x_RM.device, requires_grad=needs_backward)
    rows, token = _Arrive.apply(x_RM, weights_R, call, anchor)
    y_NecM = _computed(pipeline, experts, rows.view(call.shape))
    if y_NecM.requires_grad and not needs_backward:
        raise ValueError(
            f"{experts.name}: neither its input nor a parameter of its own requires a gradient, and its result does: "
            "hand what is trained there to the module as its parameter"
        )
    return _Leave.apply(y_NecM, call, token)


def _computed(pipeline: LayerPipeline, experts: WholeExperts, x_NecM: torch.Tensor) -> torch.Tensor:
    try:
        if pipeline.recompute and torch.is_grad_enabled():
            # A copy: the module may write into its rows, and they are needed once more.
            contexts = nullcontext(), experts.again()
            y = checkpoint(
                lambda kept: experts.module(kept.clone()), x_NecM, use_reentrant=False, context_fn=lambda: contexts
            )
        else:
            y = experts.module(x_NecM)
        if not isinstance(y, torch.Tensor) or y.numel() != x_NecM.numel():
            made = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise ValueError(
                f"{experts.name} made {made} of {tuple(x_NecM.shape)}: it must return a tensor with a row of the same "
                "width for every row"
            )
    except BaseException as error:
        if pipeline.lanes.on_error is not None:
            pipeline.lanes.on_error(error)
        raise
    return y.reshape(x_NecM.shape)


class _Arrive(torch.autograd.Function):
    """Turn [E * C, M] into the rows of this rank's experts: as many elements as [N, e, C, M], in that order."""

    @staticmethod
    def forward(
        ctx: Any, x_RM: torch.Tensor, weights_R: torch.Tensor | None, call: _Call, anchor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.call = call
        x_NecM = call.forward_in.arrive(x_RM.detach())
        call.shape = x_NecM.shape
        return _own_memory(x_NecM, x_RM), anchor.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx_NecM: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = ctx.call.backward_out(dx_NecM.reshape(ctx.call.shape))
        return *found, None, torch.zeros((), device=dx_NecM.device)


def _own_memory(x_NecM: torch.Tensor, x_RM: torch.Tensor) -> torch.Tensor:
    """Return the rows in memory that the module may write into, as it may in DeepSpeed's layer. Autograd must not see
    them as a view, because it would refuse such writes."""
    is_callers = x_NecM.untyped_storage().data_ptr() == x_RM.untyped_storage().data_ptr()
    base = x_NecM._base
    if is_callers or (base is not None and not (base.is_contiguous() and base.numel() == x_NecM.numel())):
        return x_NecM.clone()
    return x_NecM if base is None else base


class _Leave(torch.autograd.Function):
    """Turn [N, e, C, M] into the results of this rank's slots, [E * C, M]."""

    @staticmethod
    def forward(ctx: Any, y_NecM: torch.Tensor, call: _Call, token: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        # Hooks of the layer may write into what they are given, and autograd may have kept it.
        return call.forward_in.leave(y_NecM.detach() if call.hook is None else y_NecM.clone()).result()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_RM: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.call.backward_in(dy_RM).reshape(ctx.call.shape), None, torch.zeros((), device=dy_RM.device)


class _Call:
    """Holds one call, which may be waiting for its backward while others run."""

    def __init__(self, pipeline: LayerPipeline, layout: Layout, hook: Hook | None) -> None:
        if pipeline.is_cut:
            raise ValueError(f"{pipeline.label}: experts that are called as a whole in a layer that is cut")
        self._pipeline = pipeline
        self._layout = layout
        self.hook = hook
        self.shape = torch.Size()
        """The shape [N, e, C, M], known once the rows have arrived."""
        self.forward_in = self._halves("forward", pipeline.forward.schedule, {})
        self._backward: _Halves | None = None

    def _halves(self, direction: Direction, schedule: Schedule, bodies: dict[str, Body]) -> _Halves:
        collectives, holds = self._pipeline.collectives, self._pipeline.lanes.runs_behind

        def phase(rows_RM: torch.Tensor) -> PhaseRun:
            return PhaseRun(self._layout.chunks(collectives, direction, rows_RM), self.hook, direction, holds)

        return _Halves(self._pipeline, schedule, phase, bodies, direction)

    def backward_in(self, dy_RM: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of the results into that of the module's output, [N, e, C, M]."""
        window = self._pipeline.window
        parcels = () if window is None else window.open(self._pipeline.label)
        schedule = self._pipeline.backward.sending(tuple(map(window.tasks, parcels)) if parcels else ())
        send: Body = lambda task: window.send(parcels[task.chunk], task.kind)  # noqa: E731
        self._backward = self._halves("backward", schedule, dict.fromkeys(GRADIENT_TASKS, send))
        return self._backward.arrive(dy_RM)

    def backward_out(self, dx_NecM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Turn the gradient of the module's rows into that of the rows that were sent, [E * C, M], and that of the
        weights of this rank's choices."""
        assert self._backward is not None
        halves, self._backward = self._backward, None
        phase = halves.leave(dx_NecM)
        if self._pipeline.window is not None:
            self._pipeline.window.close()
        return phase.result(), phase.weight_gradients()


class _Halves:
    """Runs one phase of a call in two parts, with the experts in between; observers see one run."""

    def __init__(
        self,
        pipeline: LayerPipeline,
        schedule: Schedule,
        phase: Callable[[torch.Tensor], PhaseRun],
        bodies: dict[str, Body],
        direction: Direction,
    ) -> None:
        self._lanes, self._observer = pipeline.lanes, pipeline.observer
        self._label = f"{pipeline.label}/{direction}"
        self._schedule = schedule
        self._make_phase = phase
        self._bodies = bodies
        self._phase: PhaseRun | None = None

    def arrive(self, rows_RM: torch.Tensor) -> torch.Tensor:
        """Run everything before the experts and return their rows."""
        self._phase = self._make_phase(rows_RM)
        if self._observer is not None:
            self._observer = self._observer.of_run(self._schedule, self._label)
        before, _, _ = _split(self._schedule)
        self._run(before)
        self._tell("begin")
        return self._phase.arrived()

    def leave(self, rows_NecM: torch.Tensor) -> PhaseRun:
        """Run everything after the experts on their results and return the phase, which has ended."""
        assert self._phase is not None
        self._tell("end")
        phase, self._phase = self._phase, None
        phase.computed(rows_NecM)
        _, _, after = _split(self._schedule)
        self._run(after, phase)
        return phase

    def _run(self, half: _Half, phase: PhaseRun | None = None) -> None:
        travel = (phase or self._phase).travel(self._schedule)
        observer = None if self._observer is None else _OfHalf(self._observer, self._schedule, half.indices)
        self._lanes.run(half.schedule, travel | self._bodies, self._label, observer)

    def _tell(self, what: str) -> None:
        if self._observer is not None:
            for index in _split(self._schedule)[1]:
                getattr(self._observer, what)(index, self._schedule.tasks[index])


@dataclass(frozen=True)
class _Half:
    schedule: Schedule
    indices: tuple[int, ...]
    """The indices of its tasks in the whole schedule."""


@functools.lru_cache(maxsize=256)
def _split(schedule: Schedule) -> tuple[_Half, tuple[int, ...], _Half]:
    """Return (the part before the experts, the indices of the experts' tasks, the part after the experts)."""
    experts = tuple(index for index, task in enumerate(schedule.tasks) if task.kind == EXPERT)
    before = range(experts[0])
    after = [index for index in range(experts[0], len(schedule.tasks)) if index not in experts]
    return _half(schedule, before), experts, _half(schedule, after)


def _half(schedule: Schedule, indices: Sequence[int]) -> _Half:
    place = {index: at for at, index in enumerate(indices)}

    def moved(task: Task) -> Task:
        return replace(task, after=tuple(place[needed] for needed in task.after if needed in place))

    return _Half(Schedule(tuple(moved(schedule.tasks[index]) for index in indices)), tuple(indices))


class _OfHalf(Observer):
    """Reports the tasks of a half as tasks of the whole schedule."""

    def __init__(self, observer: Observer, schedule: Schedule, indices: tuple[int, ...]) -> None:
        self._observer, self._schedule, self._indices = observer, schedule, indices

    def begin(self, index: int, task: Task) -> None:
        self._observer.begin(self._indices[index], self._schedule.tasks[self._indices[index]])

    def end(self, index: int, task: Task) -> None:
        self._observer.end(self._indices[index], self._schedule.tasks[self._indices[index]])

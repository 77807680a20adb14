# SPDX-License-Identifier: Apache-2.0
"""The experts' part of an uncut layer. Its experts are called as one module under autograd, as DeepSpeed does.

This is for experts whose whole input and output somebody wants to see or to change at once. Nothing is known then about
what is computed, which parameters it takes, or who else keeps its graph. The collectives are those of any uncut layer,
in the same order in both phases, so one rank may run a layer this way while its peers compute their experts as usual.

Letters: E experts of all ranks, C slots per expert, M width, N ranks the rows came from, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fsmoe.execution.call import Call, Layout
from ds_fsmoe.execution.lanes import Body, Observer
from ds_fsmoe.execution.phase import Direction, Hook, PhaseRun
from ds_fsmoe.planning.schedule import EXPERT, Schedule, Task

if TYPE_CHECKING:
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
    call = _WholeCall(pipeline, layout, hook)
    # Both ways back are walked whatever the module does with its rows: the other ranks count on it.
    anchor = torch.zeros((), device=x_RM.device, requires_grad=needs_backward)
    rows, token = _Arrive.apply(x_RM, weights_R, call, anchor)
    try:
        y_NecM = _computed(pipeline, experts, rows.view(call.shape))
        if y_NecM.requires_grad and not needs_backward:
            raise ValueError(
                f"{experts.name}: neither its input nor a parameter of its own requires a gradient, and its result "
                "does: hand what is trained there to the module as its parameter"
            )
    except BaseException:
        call.give_up()
        raise
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
        ctx: Any, x_RM: torch.Tensor, weights_R: torch.Tensor | None, call: _WholeCall, anchor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.call = call
        call.begin_forward(x_RM)
        x_NecM = call.arrived()
        call.shape = x_NecM.shape
        return _own_memory(x_NecM, x_RM), anchor.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx_NecM: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.call.left(dx_NecM.reshape(ctx.call.shape))
        return *ctx.call.end_backward(), None, torch.zeros((), device=dx_NecM.device)


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
    def forward(ctx: Any, y_NecM: torch.Tensor, call: _WholeCall, token: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        # Hooks of the layer may write into what they are given, and autograd may have kept it.
        call.left(y_NecM.detach() if call.hook is None else y_NecM.clone())
        return call.end_forward()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_RM: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.call.begin_backward(dy_RM)
        return ctx.call.arrived().reshape(ctx.call.shape), None, torch.zeros((), device=dy_RM.device)


class _WholeCall(Call):
    """Holds one call, which pauses in each phase while the experts' module, or its backward, runs under autograd."""

    def __init__(self, pipeline: LayerPipeline, layout: Layout, hook: Hook | None) -> None:
        if pipeline.is_cut:
            raise ValueError(f"{pipeline.label}: experts that are called as a whole in a layer that is cut")
        super().__init__(pipeline, layout, None, hook)
        self.hook = hook
        self.shape = torch.Size()
        """The shape [N, e, C, M], known once the rows have arrived."""
        if pipeline.observer is not None:
            self._observer = _UntilReturned(pipeline.observer)

    def _expert_body(self, phase: PhaseRun, direction: Direction) -> Body:
        # It has waited for the rows by then, and that is all that the lanes are to do for it.
        return lambda task: None

    def arrived(self) -> torch.Tensor:
        """Run everything before the experts, after the phase has begun, and return their rows, [N, e, C, M]."""
        assert self._run is not None
        assert self._phase is not None
        after = 1 + max(index for index, task in enumerate(self._tasks) if task.kind == EXPERT)
        # Nothing else is under way when code runs of which nothing is known, hooks of a backward among it.
        self._run.go(after, joins=True)
        return self._phase.arrived()

    def left(self, rows_NecM: torch.Tensor) -> None:
        """Have what the experts, or their backward, have made of the rows sent behind the pause."""
        assert self._phase is not None
        if isinstance(self._observer, _UntilReturned):
            self._observer.experts_have_returned()
        self._phase.computed(rows_NecM)


class _UntilReturned(Observer):
    """Passes on what it is told, and that the experts' task has ended only when their module has returned."""

    def __init__(self, observer: Observer) -> None:
        self._observer = self._of_run = observer

    def of_run(self, schedule: Schedule, label: str) -> Observer:
        self._of_run = self._observer.of_run(schedule, label)
        return self

    def begin(self, index: int, task: Task) -> None:
        self._of_run.begin(index, task)

    def end(self, index: int, task: Task) -> None:
        if task.kind == EXPERT:
            self.experts_have_returned = partial(self._of_run.end, index, task)
        else:
            self._of_run.end(index, task)

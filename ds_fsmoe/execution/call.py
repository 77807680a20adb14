# SPDX-License-Identifier: Apache-2.0
"""Runs one call of a layer's experts in autograd's graph: at once, or in three steps with two pauses.

``pipeline`` creates a :class:`Call` per forward; ``phase`` runs its chunks. With pauses, forward and backward each send
rows to the experts, compute and send results, and receive them. The other sub-batch computes in the pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ds_fsmoe.execution.lanes import Body, LaneRun
from ds_fsmoe.execution.phase import Direction, Hook, PhaseRun
from ds_fsmoe.execution.row_chunks import RowLayout
from ds_fsmoe.execution.slot_chunks import SlotLayout
from ds_fsmoe.planning.schedule import EXPERT, GRADIENT_TASKS, Task

if TYPE_CHECKING:
    from ds_fsmoe.execution.pipeline import LayerPipeline
    from ds_fsmoe.planning.phase_plan import PhasePlan


# ---- Pauses of a call while its tokens are sent, in which another sub-batch computes
#
# Two-batch overlap calls the layers of a sub-batch inside :meth:`SubBatch.running`. Such a call pauses twice, see
# :func:`with_pauses`. The work in a pause is the same on every rank.


_current: ContextVar[SubBatch | None] = ContextVar("sub_batch", default=None)


@dataclass(frozen=True, eq=False)
class SubBatch:
    """Represents one of the sub-batches of two-batch overlap."""

    pause: Callable[[], None]
    """Runs the other sub-batch, and returns when this one continues."""
    is_last_in_backward: bool
    """True if its backward comes last: the layers after it in the forward then have all their gradients, which may be
    sent."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pause layers that are called inside the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_sub_batch() -> SubBatch | None:
    """Return the sub-batch for which a layer is called now; ``None`` for the whole batch."""
    return _current.get()


# ---- One call of a layer's experts in autograd's graph: at once, or in three steps with pauses


class CallOfExperts(Protocol):
    """Represents one call of this rank's experts; keeps the tensors of its backward."""

    def forward(self, start: int, stop: int, x: torch.Tensor) -> torch.Tensor:
        """Return the results of a chunk: slots [N, e, stop - start, M], or rows [stop - start, M] of the phase."""

    def backward(
        self,
        start: int,
        stop: int,
        dy: torch.Tensor,
        weights_R: torch.Tensor | None = None,
        gradients_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradients of the rows of a chunk; for rows with weights, also add to the weights' gradients."""

    def gradients(self) -> tuple[torch.Tensor | None, ...]: ...

    def release(self) -> list[torch.Tensor | None]: ...

    def restore(self, tensors: Iterable[torch.Tensor | None]) -> None: ...

    def rows(self) -> list[torch.Tensor]: ...


Layout = SlotLayout | RowLayout
"""The layout of the rows of a call, and their chunks."""


class GradientWindow(Protocol):
    """Gradients of dense layers that the backward has finished, sent during a layer's backward slice by slice."""

    def open(self, label: str) -> Sequence[Any]: ...

    def tasks(self, grad_slice: Any) -> tuple[str, ...]: ...

    def send(self, grad_slice: Any, task: str) -> None: ...

    def close(self) -> None: ...


_Gradients = tuple[torch.Tensor | None, ...]


def with_pauses(
    call: Call,
    x_RM: torch.Tensor,
    weights_R: torch.Tensor | None,
    parameters: Iterable[torch.Tensor],
    sub_batch: SubBatch,
    needs_backward: bool,
) -> torch.Tensor:
    """Run a call as :class:`AtOnce` does, with two pauses in each direction.

    Autograd runs the newest nodes first. The other sub-batch's nodes are made between our three nodes, so its backward
    runs between them.

    Args:
        call, x_RM, weights_R, parameters: see :class:`AtOnce`.
        sub_batch: the sub-batch that is run.
        needs_backward: whether there will be a backward.
    """
    try:
        if not needs_backward:
            call.begin_forward(x_RM)
            sub_batch.pause()
            call.go_on_forward()
            sub_batch.pause()
            return call.end_forward()
        entered = _Enter.apply(x_RM, weights_R, call)
        sub_batch.pause()
        # `parameters` are inputs of this node, because their gradients are computed in its backward.
        computed = _Compute.apply(entered, call, *parameters)
        sub_batch.pause()
        return _Leave.apply(computed, call)
    except BaseException:
        # An error of either sub-batch: this one's tokens may be in flight.
        call.give_up()
        raise


class AtOnce(torch.autograd.Function):
    """Runs a call and returns its rows: ``apply(x_RM, weights_R, call, *parameters)``; its backward runs at once too.

    ``weights_R`` is given only if results are added up before combine. The parameters are aliases of the
    experts' parameters: as inputs, each gets its gradient here once per backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x_RM: torch.Tensor, weights_R: torch.Tensor | None, call: Call, *parameters: torch.Tensor
    ) -> torch.Tensor:
        y_RM = call.forward(x_RM)
        ctx.call = call
        ctx.save_for_backward(*call.experts.release())
        return y_RM

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_RM: torch.Tensor) -> _Gradients:
        call: Call = ctx.call
        call.take_back(ctx)
        call.begin_backward(dy_RM)
        dx_RM, of_weights_R = call.end_backward()
        gradients = call.experts.gradients()
        call.drop()
        return dx_RM, of_weights_R, None, *gradients


class _Enter(torch.autograd.Function):
    """Sends tokens to the experts; in the backward, returns their gradients."""

    @staticmethod
    def forward(ctx: Any, x_RM: torch.Tensor, weights_R: torch.Tensor | None, call: Call) -> torch.Tensor:
        ctx.call = call
        call.begin_forward(x_RM)
        return x_RM.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, nothing: torch.Tensor) -> _Gradients:
        found = ctx.call.end_backward()
        ctx.call.drop()
        return *found, None


class _Compute(torch.autograd.Function):
    """Runs the experts and sends their output back; takes their parameters as :class:`AtOnce` does."""

    @staticmethod
    def forward(ctx: Any, entered: torch.Tensor, call: Call, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        call.go_on_forward()
        ctx.save_for_backward(*call.experts.release())
        return entered.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, nothing: torch.Tensor) -> _Gradients:
        call: Call = ctx.call
        call.take_back(ctx)
        gradients = call.go_on_backward()
        if not ctx.needs_input_grad[0]:
            call.end_backward()
            call.drop()
        return nothing, None, *gradients


class _Leave(torch.autograd.Function):
    """Waits for the experts' output; in the backward, sends gradients to them."""

    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(computed)
        return call.end_forward()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_RM: torch.Tensor) -> _Gradients:
        # Under checkpointing both sub-batches run again here, on every rank ahead of the same collectives.
        (_,) = ctx.saved_tensors
        ctx.call.begin_backward(dy_RM)
        return dy_RM.new_empty(0), None


class Call:
    """Runs one call of a layer, which may wait for its backward while other calls run.

    Args:
        pipeline: runs the call.
        layout: the layout of its rows.
        experts: the call of the experts; ``None``: they are called outside the lanes.
        hook: the layer's hook, see ``phase.Hook``.
        sub_batch: the sub-batch of the call; ``None``: the whole batch, without pauses.
    """

    def __init__(
        self,
        pipeline: LayerPipeline,
        layout: Layout,
        experts: CallOfExperts | None,
        hook: Hook | None,
        sub_batch: SubBatch | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._layout = layout
        self.experts = experts
        self._hook = hook
        self._sub_batch = sub_batch
        self._observer = pipeline.observer
        # Gradients of dense layers behind this one are complete only after the last sub-batch's backward.
        self._window = pipeline.window if sub_batch is None or sub_batch.is_last_in_backward else None
        self._phase: PhaseRun | None = None
        self._run: LaneRun | None = None
        self._tasks: Sequence[Task] = ()
        self._kept_rows: list[torch.Tensor] = []

    def forward(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Run the forward on the rows, and return as many results."""
        self.begin_forward(x_RM)
        return self.end_forward()

    def begin_forward(self, x_RM: torch.Tensor) -> None:
        """Start the forward; if the call pauses, send the rows to the experts."""
        self._begin("forward", x_RM.detach(), self._pipeline.forward, (), {})

    def go_on_forward(self) -> None:
        """Compute the experts, and send results back."""
        self._run.go(len(self._tasks))

    def end_forward(self) -> torch.Tensor:
        """Wait for all tasks, and return as many rows as were passed."""
        return self._end().result()

    def take_back(self, ctx: Any) -> None:
        """Restore the saved tensors of the experts, ahead of the backward."""
        # Read before anything runs: under checkpointing this runs the forward again.
        self.experts.restore(ctx.saved_tensors)
        # Each tensor is freed after its last use. On streams that use is only issued by then, and the memory of
        # received rows would be reused for the next chunk: so these are kept until the streams are joined.
        self._kept_rows = self.experts.rows() if self._pipeline.lanes.runs_behind else []
        # Unless the graph is retained, autograd need not keep them: each is freed after its last use. This saves memory
        # only, and is skipped on a torch without it.
        getattr(ctx, "maybe_clear_saved_tensors", lambda: None)()

    def begin_backward(self, dy_RM: torch.Tensor) -> None:
        """Start the backward; if the call pauses, send the gradients of results to the experts."""
        window = self._window
        grad_slices = () if window is None else window.open(self._pipeline.label)
        bodies: dict[str, Body] = {}
        for kind in GRADIENT_TASKS if grad_slices else ():
            bodies[kind] = lambda task: window.send(grad_slices[task.chunk], task.kind)
        slices = tuple(map(window.tasks, grad_slices)) if grad_slices else ()
        self._begin("backward", dy_RM, self._pipeline.backward, slices, bodies)

    def go_on_backward(self) -> _Gradients:
        """Compute the experts' backward, send gradients of rows back, and return those of the experts' parameters."""
        self._run.go(len(self._tasks))
        return self.experts.gradients()

    def end_backward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Wait for all tasks, and return the gradients of the rows and of the choices' weights."""
        phase = self._end()
        if self._window is not None:
            self._window.close()
        return phase.result(), phase.weight_gradients()

    def give_up(self) -> None:
        """Finish tasks that are in flight, and start no others."""
        run, self._phase, self._run = self._run, None, None
        if run is not None:
            run.abandon()

    def drop(self) -> None:
        """Release the tensors of the backward."""
        self._kept_rows = []
        self.experts.release()

    def _begin(
        self,
        direction: Direction,
        rows_RM: torch.Tensor,
        plan: PhasePlan,
        slices: tuple[tuple[str, ...], ...],
        bodies: dict[str, Body],
    ) -> None:
        pipeline, pause = self._pipeline, 0
        chunks = self._layout.chunks(pipeline.collectives, direction, rows_RM)
        self._phase = phase = PhaseRun(chunks, self._hook, direction, pipeline.lanes.runs_behind)
        if self._sub_batch is None:
            schedule = plan.sending(slices)
        else:
            # In the backward the sub-batches come in reverse order.
            schedule, pause = plan.paused(slices, is_second=self._sub_batch.is_last_in_backward == plan.backward)
        self._tasks = schedule.tasks
        bodies |= phase.communication(schedule)
        bodies[EXPERT] = self._expert_body(phase, direction)
        self._run = pipeline.lanes.begin(schedule, bodies, f"{pipeline.label}/{direction}", self._observer)
        if self._sub_batch is not None:
            self._run.go(pause)

    def _expert_body(self, phase: PhaseRun, direction: Direction) -> Body:
        return phase.compute(getattr(self.experts, direction))

    def _end(self) -> PhaseRun:
        phase, run = self._phase, self._run
        self._phase = self._run = None
        run.finish()
        return phase

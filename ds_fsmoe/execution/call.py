# SPDX-License-Identifier: Apache-2.0
"""One call of the experts' part of a layer, in the graph of autograd: at once, or in three steps with pauses between.

With pauses, forward and backward each begin (tokens set out for the experts), go on (experts compute, results set out)
and end (results are there), and what another part of the batch has to compute runs in between.
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


# ---- Lets a call of a layer pause while its tokens travel, so that another part of the batch computes
# meanwhile
#
# Whoever runs parts of a batch in turns calls the layers inside of :meth:`SubBatch.running`; a call that finds a half
# there pauses twice, see :func:`with_pauses`. What runs in a pause is the same on every rank.


_current: ContextVar[SubBatch | None] = ContextVar("half", default=None)


@dataclass(frozen=True, eq=False)
class SubBatch:
    """One of the parts of a batch that take turns."""

    pause: Callable[[], None]
    """Lets the others compute, and returns when it is this part's turn again."""
    is_last_in_backward: bool
    """True if its backward comes last, when the layers behind have all their gradients: then some may travel."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pause layers that are called inside the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_sub_batch() -> SubBatch | None:
    """Return the part of a batch for which a layer is called now; ``None``: the whole batch."""
    return _current.get()


# ---- One call of the experts' part of a layer, in the graph of autograd: at once, or in three steps with
# pauses between


class CallOfExperts(Protocol):
    """One call of this rank's experts; keeps the tensors of its backward."""

    def forward(self, start: int, stop: int, x: torch.Tensor) -> torch.Tensor:
        """Return the results of a chunk, slots [N, e, stop - start, M] or rows [stop - start, M] of the phase."""

    def backward(
        self,
        start: int,
        stop: int,
        dy: torch.Tensor,
        weights_R: torch.Tensor | None = None,
        gradients_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradients of the rows of a chunk; of rows with weights also add to these weights' gradients."""

    def gradients(self) -> tuple[torch.Tensor | None, ...]: ...

    def release(self) -> list[torch.Tensor | None]: ...

    def restore(self, tensors: Iterable[torch.Tensor | None]) -> None: ...

    def rows(self) -> list[torch.Tensor]: ...


Layout = SlotLayout | RowLayout
"""Says how the rows of a call lie, and how they are cut."""


class GradientWindow(Protocol):
    """Other data that travels in a layer's backward: gradients that the backward has already finished, slice by
    slice."""

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
    """Run a call as :class:`AtOnce` does, and pause twice; its backward pauses where autograd has other work that is
    younger in the graph, which is that of the other part of the batch.

    Args:
        call, x_RM, weights_R, parameters: see :class:`AtOnce`.
        half: the part of the batch that is run.
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
        # Nodes are as old as their calls: parameters come in here, where their gradients are made.
        computed = _Compute.apply(entered, call, *parameters)
        sub_batch.pause()
        return _Leave.apply(computed, call)
    except BaseException:
        # Of the other half, or this one: its tokens may be on their way.
        call.give_up()
        raise


class AtOnce(torch.autograd.Function):
    """Runs a call and returns its rows: ``apply(x_RM, weights_R, call, *parameters)``; its backward runs at once, too.

    The weights of choices are given where results are added up on the way. The parameters are what stands for those of
    the experts in the graph: inputs, so that each gets its gradient from here once per backward.
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
    """Sends tokens to the experts; in the backward, their gradients are there."""

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
        # Under checkpointing both halves run again here, on every rank ahead of the same collectives.
        (_,) = ctx.saved_tensors
        ctx.call.begin_backward(dy_RM)
        return dy_RM.new_empty(0), None


class Call:
    """One call, which may wait for its backward while other calls run.

    Args:
        pipeline: that runs it.
        layout: how its rows lie.
        experts: the call of the experts; ``None``: they are called beside the lanes.
        hook: the layer's hook.
        half: the part of the batch that it is for; ``None``: all, and nothing pauses.
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
        # Gradients of dense layers behind this one are those of the whole batch only when the last part has been there.
        self._window = pipeline.window if sub_batch is None or sub_batch.is_last_in_backward else None
        self._phase: PhaseRun | None = None
        self._run: LaneRun | None = None
        self._tasks: Sequence[Task] = ()
        self._kept_rows: list[torch.Tensor] = []

    def forward(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Run the forward on the rows and return as many."""
        self.begin_forward(x_RM)
        return self.end_forward()

    def begin_forward(self, x_RM: torch.Tensor) -> None:
        """Send the rows to the experts, if the call pauses."""
        self._begin("forward", x_RM.detach(), self._pipeline.forward, (), {})

    def go_on_forward(self) -> None:
        """Compute, and send results back."""
        self._run.go(len(self._tasks))

    def end_forward(self) -> torch.Tensor:
        """Return as many rows as there were, when all is done."""
        return self._end().result()

    def take_back(self, ctx: Any) -> None:
        """Restore the saved tensors of the experts, ahead of the backward."""
        # Read before anything runs: under checkpointing this is where the forward is run again.
        self.experts.restore(ctx.saved_tensors)
        # Each goes when it has been used. On streams it has only been issued by then what uses them, and the memory of
        # rows that came over a link would be handed to the next chunk that comes: these stay until the streams are
        # joined, as they would if they had been received into memory made whole beforehand.
        self._kept_rows = self.experts.rows() if self._pipeline.lanes.runs_behind else []
        # Unless the graph is to be kept, autograd need not hold them longer: each goes when it has been used. Nothing
        # but memory depends on it, and a torch that cannot do it yet goes without.
        getattr(ctx, "maybe_clear_saved_tensors", lambda: None)()

    def begin_backward(self, dy_RM: torch.Tensor) -> None:
        """Send the gradients of results to the experts, if the call pauses."""
        window = self._window
        grad_slices = () if window is None else window.open(self._pipeline.label)
        bodies: dict[str, Body] = {}
        for kind in GRADIENT_TASKS if grad_slices else ():
            bodies[kind] = lambda task: window.send(grad_slices[task.chunk], task.kind)
        slices = tuple(map(window.tasks, grad_slices)) if grad_slices else ()
        self._begin("backward", dy_RM, self._pipeline.backward, slices, bodies)

    def go_on_backward(self) -> _Gradients:
        """Compute, send gradients of rows back, and return those of the experts' parameters."""
        self._run.go(len(self._tasks))
        return self.experts.gradients()

    def end_backward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradient of the rows and those of choices' weights, when all is done."""
        phase = self._end()
        if self._window is not None:
            self._window.close()
        return phase.result(), phase.weight_gradients()

    def give_up(self) -> None:
        """Finish tasks that are in flight, and start no more."""
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
            # In the backward the halves come the other way round.
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

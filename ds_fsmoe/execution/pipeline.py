# SPDX-License-Identifier: Apache-2.0
"""The experts' part of a layer: sends the rows of this rank's tokens to the experts and back, in one call of autograd.

A layer calls its :class:`LayerPipeline` between order and i-order. Forward and backward each run their own schedule,
with their own chunks (PAPER: FSMoE, ASPLOS'25, section 4). Received rows are kept by expert, not by chunk, so the
backward may have other chunks. Experts are row-wise, so any chunks give the numbers of the whole. (The paper's
published code keeps rows by chunk, and computes wrong weight gradients where the two degrees differ.)

Letters: E experts of all ranks, C slots per expert, c a chunk of them, M width, G ranks of an EP group, P of an ESP
group, N = P * G, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fsmoe.execution.call import (
    AtOnce,
    Call,
    CallOfExperts,
    GradientWindow,
    Layout,
    current_sub_batch,
    with_pauses,
)
from ds_fsmoe.execution.collectives import FULL, Collectives
from ds_fsmoe.execution.lanes import Body, Lanes, Observer, Together, dependencies_of
from ds_fsmoe.execution.phase import Direction, Hook, PhaseRun
from ds_fsmoe.execution.row_sizes import RowSizes
from ds_fsmoe.execution.slot_chunks import SlotLayout
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN_NODE, A2A_OUT_NODE, EXPERT, Schedule, Task


class LayerExperts(Protocol):
    """Represents the experts of this rank, which make a call per forward."""

    parameters: tuple[torch.nn.Parameter, ...]

    def call(
        self,
        needs_backward: bool,
        rows: RowSizes | None = None,
        x_RM: torch.Tensor | None = None,
        *,
        same_chunks: bool = True,
        recompute: bool = False,
    ) -> CallOfExperts: ...


@dataclass(frozen=True)
class WholeExperts:
    """Represents the experts of this rank, as one module."""

    module: Callable[[torch.Tensor], Any]
    """Computes [N, e, C, M] to a tensor with as many elements."""
    parameters: tuple[nn.Parameter, ...]
    name: str
    """The name in messages."""
    again: Callable[[], AbstractContextManager] = nullcontext
    """Returns the context of a repeated call."""
    is_timed: bool = True
    """True: runs of the layer are reported to the step timer."""


def unchunked(block: BlockPlan) -> BlockPlan:
    """Return a plan with the same order of tasks and one chunk."""
    return BlockPlan(links=block.links, conversions=block.conversions)


@dataclass(frozen=True)
class CallSizes:
    """Holds the sizes of one call of a layer's experts on this rank."""

    num_ranks: int
    """The number of ranks the rows came from, N."""
    capacity: int
    """The number of slots per expert, C; for rows, the mean number that an expert here receives from a rank."""
    width: int
    """The width of a row, M."""
    dtype: torch.dtype
    num_chunks: int
    """The number of chunks in the forward."""
    same_chunks: bool
    """Whether the backward has the same chunks as the forward."""
    num_experts: int = 0
    """The number of experts of all ranks, E."""
    num_tokens: int | None = None
    """The number of tokens that are split into chunks; ``None`` where slots are."""
    num_choices: int = 0
    """The number of choices of a token, K, where rows are sent."""
    comm_byte_shares: tuple[float, float] = (1.0, 1.0)
    """The bytes of a row in dispatch and combine, relative to the layer's own dtype."""


@dataclass(frozen=True)
class LayerPipeline:
    """Runs the experts' part of one layer: its schedules, lanes and collectives."""

    lanes: Lanes
    collectives: Collectives
    forward: PhasePlan
    backward: PhasePlan
    label: str = "moe"
    """The name for messages and traces, such as "L03"."""
    recompute: bool = False
    observer: Observer | None = None
    window: GradientWindow | None = None
    on_call: tuple[Callable[[CallSizes], None], ...] = ()
    """Functions that receive the sizes of each call, before it begins."""

    def __post_init__(self) -> None:
        kinds = dependencies_of(self.forward.schedule).kinds | dependencies_of(self.backward.schedule).kinds
        if kinds & {A2A_IN_NODE, A2A_OUT_NODE} and not self.collectives.legs:
            raise ValueError(f"{self.label}: an all-to-all in two tasks is planned, but its two parts are missing")
        if (self.forward.narrow, self.backward.narrow) != (self.collectives.comm_dtypes.narrow,) * 2:
            raise ValueError(
                f"{self.label}: conversions are planned for another comm_dtype than {self.collectives.comm_dtypes}"
            )

    @property
    def is_chunked(self) -> bool:
        """Return True if either phase has more than one chunk."""
        return max(self.forward.block.degree, self.backward.block.degree) > 1

    def unchunked(self) -> LayerPipeline:
        """Return the same pipeline with one chunk in both phases."""
        forward, backward = (replace(each, block=unchunked(each.block)) for each in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def watched(
        self, observer: Observer | None = None, on_call: Callable[[CallSizes], None] | None = None
    ) -> LayerPipeline:
        """Return the same pipeline with these observers added."""
        observers = [each for each in (self.observer, observer) if each is not None]
        together = observers[0] if len(observers) == 1 else Together(*observers) if observers else None
        return replace(self, observer=together, on_call=self.on_call if on_call is None else (*self.on_call, on_call))

    @property
    def degrees(self) -> tuple[int, int]:
        """Return the number of chunks in the forward and in the backward."""
        return self.forward.block.degree, self.backward.block.degree

    def __call__(
        self,
        x_RM: torch.Tensor,
        num_experts: int,
        capacity: int,
        experts: LayerExperts | WholeExperts,
        hook: Hook | None = None,
    ) -> torch.Tensor:
        """Send slots to the experts and back.

        Args:
            x_RM: [E * C, M], chunk by chunk of ``chunk_capacity(capacity, self.forward.block.degree)``.
            num_experts: E.
            capacity: C.
            experts: this rank's experts; as one module only in one chunk.
            hook: called for each chunk, on its lane, in the forward and in the backward.

        Returns:
            [E * C, M] in the same order.

        Raises:
            ValueError: a hook or an expert has changed the number of rows.
        """
        return self.run(x_RM, SlotLayout(num_experts, capacity, self.degrees), experts, hook)

    def run(
        self,
        x_RM: torch.Tensor,
        layout: Layout,
        experts: LayerExperts | WholeExperts,
        hook: Hook | None = None,
        weights_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send rows to the experts and back.

        Args:
            x_RM: the rows, in the order in which the forward sends them.
            layout: the sizes and chunks of the rows.
            experts, hook: see :meth:`__call__`.
            weights_R: the weights of this rank's choices, with which the layout was made, where it adds up results.

        Returns:
            As many rows in the same order.

        Raises:
            ValueError: a hook or an expert has changed the number of rows.
        """
        needs_backward = torch.is_grad_enabled() and (
            x_RM.requires_grad
            or (weights_R is not None and weights_R.requires_grad)
            or any(each.requires_grad for each in experts.parameters)
        )
        if self.on_call:
            num_exchanging = self.collectives.num_exchanging
            num_ranks, num_experts = num_exchanging * self.collectives.num_sharing, layout.num_experts
            slots = layout.slots_per_expert(num_ranks, max(1, num_experts // num_exchanging))
            same = layout.same_chunks
            of_rows = x_RM.shape[-1], x_RM.dtype, self.degrees[0], same, num_experts, layout.num_tokens
            comm_dtypes = FULL if isinstance(layout, SlotLayout) else self.collectives.comm_dtypes
            shares = comm_dtypes.shares(x_RM.shape[-1], x_RM.dtype.itemsize)
            sizes = CallSizes(num_ranks, slots, *of_rows, getattr(layout, "num_choices", 0), shares)
            for tell in self.on_call:
                tell(sizes)
        if isinstance(experts, WholeExperts):
            return run_whole(self, x_RM, layout, experts, hook, needs_backward, weights_R)
        rows = None if isinstance(layout, SlotLayout) else layout.sizes
        call = experts.call(needs_backward, rows, x_RM, same_chunks=layout.same_chunks, recompute=self.recompute)
        sub_batch = current_sub_batch() if self.forward.is_two_batch else None
        of_call = Call(self, layout, call, hook, sub_batch)
        if not needs_backward and sub_batch is None:
            return of_call.forward(x_RM)
        # Autograd runs the youngest node first, so gradients arrive from the last parameter to the first, as from
        # stock's experts. DeepSpeed fills its buckets in that order, and over more than two ranks the last bits of a
        # sum depend on the position in a bucket.
        aliases = map(torch.Tensor.view_as, experts.parameters, experts.parameters)
        if sub_batch is not None:
            return with_pauses(of_call, x_RM, weights_R, aliases, sub_batch, needs_backward)
        return AtOnce.apply(x_RM, weights_R, of_call, *aliases)


# ---- The experts' part of an unchunked layer whose experts are called as one module under autograd, as in DeepSpeed
#
# This is for experts whose whole input and output a user's code reads or replaces. Their computation, parameters and
# other users of their graph are unknown. The collectives are those of any unchunked layer, in the same order in both
# phases. So one rank may run a layer like this while its peers compute their experts as usual.


def run_whole(
    pipeline: LayerPipeline,
    x_RM: torch.Tensor,
    layout: Layout,
    experts: WholeExperts,
    hook: Hook | None,
    needs_backward: bool,
    weights_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send rows to experts that are called as one module, and back; see :class:`LayerPipeline`.

    Args:
        pipeline, x_RM, layout, experts, hook: see :meth:`~ds_fsmoe.execution.pipeline.LayerPipeline.run`.
        needs_backward: whether there will be a backward; the same on every rank.
        weights_R: see :meth:`~ds_fsmoe.execution.pipeline.LayerPipeline.run`.

    Raises:
        ValueError: the layer is chunked, or the experts return another number of elements.
    """
    call = _WholeCall(pipeline, layout, hook)
    # Both backwards run whatever the module does with its rows: the other ranks wait for them.
    anchor = torch.zeros((), device=x_RM.device, requires_grad=needs_backward)
    rows, token = _Arrive.apply(x_RM, weights_R, call, anchor)
    try:
        y_NecM = _computed(pipeline, experts, rows.view(call.shape))
        if y_NecM.requires_grad and not needs_backward:
            raise ValueError(
                f"{experts.name}: neither its input nor its parameters require a gradient, but its result does: "
                "register what is trained there as its parameter"
            )
        return _Leave.apply(y_NecM, call, token)
    except BaseException:
        call.give_up()
        raise


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
                f"{experts.name} returned {made} for {tuple(x_NecM.shape)}: it must return a tensor with a row of "
                "the same width for every row"
            )
    except BaseException as error:
        if pipeline.lanes.on_error is not None:
            pipeline.lanes.on_error(error)
        raise
    return y.reshape(x_NecM.shape)


class _Arrive(torch.autograd.Function):
    """Turns [E * C, M] into the rows of this rank's experts: as many elements as [N, e, C, M], in that order."""

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
    """Return the rows in memory that the module may write into, as in DeepSpeed's layer.

    They must not be a view, because autograd refuses writes into views.
    """
    is_callers = x_NecM.untyped_storage().data_ptr() == x_RM.untyped_storage().data_ptr()
    base = x_NecM._base
    if is_callers or (base is not None and not (base.is_contiguous() and base.numel() == x_NecM.numel())):
        return x_NecM.clone()
    return x_NecM if base is None else base


class _Leave(torch.autograd.Function):
    """Turns [N, e, C, M] into the results of this rank's slots, [E * C, M]."""

    @staticmethod
    def forward(ctx: Any, y_NecM: torch.Tensor, call: _WholeCall, token: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        # Hooks of the layer may write into their tensor, and autograd may have saved it.
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
        if pipeline.is_chunked:
            raise ValueError(f"{pipeline.label}: experts that take all rows in one call cannot run in chunks")
        super().__init__(pipeline, layout, None, hook)
        self.hook = hook
        self.shape = torch.Size()
        """The shape [N, e, C, M], known once the rows have arrived."""
        if pipeline.observer is not None:
            self._observer = _UntilReturned(pipeline.observer)

    def _expert_body(self, phase: PhaseRun, direction: Direction) -> Body:
        # The task only waits for the rows; the module runs outside the lanes.
        return lambda task: None

    def arrived(self) -> torch.Tensor:
        """Run all tasks up to the experts, after the phase has begun, and return their rows, [N, e, C, M]."""
        at = max(index for index, task in enumerate(self._tasks) if task.kind == EXPERT)
        # No task is active while unknown code runs, such as hooks of a backward, and waits for links do not count as
        # the experts' time.
        self._run.go(at, joins=True)
        self._run.go(at + 1)
        return self._phase.arrived()

    def left(self, rows_NecM: torch.Tensor) -> None:
        """Store the results of the experts, or of their backward, for the tasks behind the pause."""
        if isinstance(self._observer, _UntilReturned):
            self._observer.experts_have_returned()
        self._phase.computed(rows_NecM)


class _UntilReturned(Observer):
    """Forwards events, and delays the end of the experts' task until their module has returned."""

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

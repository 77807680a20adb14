# SPDX-License-Identifier: Apache-2.0
"""The experts' part of a layer, from the rows of this rank's tokens and back: one autograd function per call.

Forward and backward each run a schedule of their own, with their own chunks (PAPER: FSMoE, ASPLOS'25, section 4). The
rows that came to the experts are kept by expert, not by chunk, so the backward may cut them
differently; and because experts are row-wise, every cut gives the numbers of the whole. (The paper's published code
keeps them by chunk, and computes wrong weight gradients where the two degrees differ.)

Letters: E experts of all ranks, C slots per expert, c a chunk of them, M width, G ranks of an EP group, P of an ESP
group, N = P * G, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.dependencies import dependencies_of
from ds_fsmoe.execution.lanes import Body, Lanes, Observer, Together
from ds_fsmoe.execution.node_chunks import NodeLayout
from ds_fsmoe.execution.phase import Direction, Hook, Phase
from ds_fsmoe.execution.row_chunks import RowLayout
from ds_fsmoe.execution.row_sizes import RowSizes
from ds_fsmoe.execution.slot_chunks import SlotLayout
from ds_fsmoe.execution.unchunked import WholeExperts, run_whole
from ds_fsmoe.execution.wires import FULL
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import (
    A2A_IN_NODE,
    A2A_OUT_NODE,
    EXPERT,
    EXPERT_DW,
    EXPERT_DX,
    GRADIENT_TASKS,
    Schedule,
    Task,
)


class ExpertCall(Protocol):
    """One call of this rank's experts; keeps what its backward needs. Cuts are [start, stop) of the capacity."""

    def forward(self, start: int, stop: int, x_NecM: torch.Tensor) -> torch.Tensor: ...

    def backward(self, start: int, stop: int, dy_NecM: torch.Tensor) -> torch.Tensor: ...

    def backward_dx(self, start: int, stop: int, dy_NecM: torch.Tensor) -> torch.Tensor: ...

    def backward_dw(self, start: int, stop: int) -> None: ...

    def gradients(self) -> tuple[torch.Tensor | None, ...]: ...

    def release(self) -> list[torch.Tensor | None]: ...

    def restore(self, tensors: Iterable[torch.Tensor | None]) -> None: ...

    def rows(self) -> list[torch.Tensor]: ...


class RowCall(Protocol):
    """One call of this rank's experts on rows; as :class:`ExpertCall`, with chunks by their number."""

    def forward(self, chunk: int, x_RM: torch.Tensor) -> torch.Tensor: ...

    def backward(
        self,
        chunk: int,
        dy_RM: torch.Tensor,
        weights_R: torch.Tensor | None = None,
        gradients_R: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def backward_dx(
        self,
        chunk: int,
        dy_RM: torch.Tensor,
        weights_R: torch.Tensor | None = None,
        gradients_R: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def backward_dw(self, chunk: int) -> None: ...

    def gradients(self) -> tuple[torch.Tensor | None, ...]: ...

    def release(self) -> list[torch.Tensor | None]: ...

    def restore(self, tensors: Iterable[torch.Tensor | None]) -> None: ...

    def rows(self) -> list[torch.Tensor]: ...


class Experts(Protocol):
    """The experts of this rank."""

    parameters: tuple[torch.nn.Parameter, ...]

    def call(self, needs_backward: bool, *, same_cuts: bool = True, recompute: bool = False) -> ExpertCall: ...

    def call_rows(
        self, needs_backward: bool, rows: RowSizes, x_RM: torch.Tensor, *, recompute: bool = False
    ) -> RowCall: ...


Layout = SlotLayout | RowLayout | NodeLayout
"""How the rows of a call lie, and how they are cut."""


class GradientSlice(Protocol):
    """A slice of gradients."""

    @property
    def kind(self) -> str: ...


class Window(Protocol):
    """Other data that travels in a layer's backward: gradients that the backward has already finished."""

    def open(self, label: str) -> Sequence[GradientSlice]: ...

    def tasks(self, parcel: GradientSlice) -> tuple[str, ...]: ...

    def send(self, parcel: GradientSlice, task: str) -> None: ...

    def close(self) -> None: ...


def uncut(block: BlockPlan) -> BlockPlan:
    """Return the same order of tasks with one chunk."""
    return BlockPlan(links=block.links)


@dataclass(frozen=True)
class CallSizes:
    """The sizes of one call of a layer's experts on this rank."""

    num_ranks: int
    """The number of ranks the rows came from, N."""
    capacity: int
    """The number of slots per expert, C; of rows the mean number that an expert here gets from a rank."""
    width: int
    """The width of a row, M."""
    dtype: torch.dtype
    num_chunks: int
    """The number of chunks in the forward."""
    same_cuts: bool
    """Whether the backward has the same chunks as the forward."""
    num_experts: int = 0
    """The number of experts of all ranks, E."""
    num_tokens: int | None = None
    """The number of tokens by which rows are cut; ``None`` where slots are."""
    num_choices: int = 0
    """The number of choices of a token, K, where rows are sent."""
    wires: tuple[float, float] = (1.0, 1.0)
    """The bytes of a row on its way to experts and back, as shares of what it has in its own type."""


@dataclass(frozen=True)
class Pipeline:
    """The experts' part of one layer: its schedules, lanes and collectives."""

    lanes: Lanes
    collectives: Collectives
    forward: PhasePlan
    backward: PhasePlan
    label: str = "moe"
    """The name for messages and traces, such as "L03"."""
    recompute: bool = False
    observer: Observer | None = None
    window: Window | None = None
    on_call: tuple[Callable[[CallSizes], None], ...] = ()
    """Functions that receive the sizes of each call, before it begins."""

    def __post_init__(self) -> None:
        kinds = dependencies_of(self.forward.schedule).kinds | dependencies_of(self.backward.schedule).kinds
        if kinds & {A2A_IN_NODE, A2A_OUT_NODE} and not self.collectives.legs:
            raise ValueError(f"{self.label}: an all-to-all in two tasks is planned, and the wires have no legs for it")

    @property
    def is_cut(self) -> bool:
        """Whether there is more than one chunk in either phase."""
        return max(self.forward.block.degree, self.backward.block.degree) > 1

    def uncut(self) -> Pipeline:
        """Return the same pipeline with one chunk in both phases."""
        forward, backward = (replace(each, block=uncut(each.block)) for each in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def watched(self, observer: Observer | None = None, on_call: Callable[[CallSizes], None] | None = None) -> Pipeline:
        """Return the same pipeline with these observers added."""
        observers = [each for each in (self.observer, observer) if each is not None]
        together = observers[0] if len(observers) == 1 else Together(*observers) if observers else None
        return replace(self, observer=together, on_call=self.on_call if on_call is None else (*self.on_call, on_call))

    @property
    def degrees(self) -> tuple[int, int]:
        """The number of chunks in the forward and in the backward."""
        return self.forward.block.degree, self.backward.block.degree

    def __call__(
        self,
        x_RM: torch.Tensor,
        num_experts: int,
        capacity: int,
        experts: Experts | WholeExperts,
        hook: Hook | None = None,
    ) -> torch.Tensor:
        """Send slots to the experts and back.

        Args:
            x_RM: [E * C, M], chunk by chunk as ``cut(capacity, self.forward.block.degree)`` says.
            num_experts: E.
            capacity: C.
            experts: this rank's experts; as one module only where nothing is cut.
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
        experts: Experts | WholeExperts,
        hook: Hook | None = None,
        weights_R: torch.Tensor | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Send rows to the experts and back.

        Args:
            x_RM: the rows, in the order in which the forward sends them.
            layout: how many they are.
            experts, hook: see :meth:`__call__`.
            weights_R: the weights of this rank's choices, with which the layout was made, where it adds results up.
            inputs: what stands for the experts' parameters in the graph, one for each; ``None``: they themselves.

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
            same = layout.same_cuts
            of_rows = x_RM.shape[-1], x_RM.dtype, self.degrees[0], same, num_experts, layout.num_tokens
            wires = FULL if isinstance(layout, SlotLayout) else self.collectives.wires
            shares = wires.shares(x_RM.shape[-1], x_RM.dtype.itemsize)
            sizes = CallSizes(num_ranks, slots, *of_rows, getattr(layout, "num_choices", 0), shares)
            for tell in self.on_call:
                tell(sizes)
        if isinstance(experts, WholeExperts):
            return run_whole(self, x_RM, layout, experts, hook, needs_backward, weights_R)
        call: ExpertCall | RowCall
        if not isinstance(layout, SlotLayout):
            call = experts.call_rows(needs_backward, layout.sizes, x_RM, recompute=self.recompute)
        else:
            call = experts.call(needs_backward, same_cuts=layout.same_cuts, recompute=self.recompute)
        of_call = _Call(self, layout, call, hook)
        if not needs_backward:
            return of_call.forward(x_RM)
        # Autograd takes the youngest node first, so gradients arrive from the last parameter to the first, as they do
        # from stock's experts. DeepSpeed fills its buckets in that order, and over more than two ranks the last bits of
        # a sum depend on where in a bucket it lies.
        inputs = experts.parameters if inputs is None else inputs
        aliases = map(torch.Tensor.view_as, inputs, inputs)
        return _ExpertsPart.apply(x_RM, weights_R, of_call, *aliases)


class _ExpertsPart(torch.autograd.Function):
    """Takes the experts' parameters as inputs, so that each gets its gradient from here once per backward."""

    @staticmethod
    def forward(
        ctx: Any, x_RM: torch.Tensor, weights_R: torch.Tensor | None, call: _Call, *parameters: torch.Tensor
    ) -> torch.Tensor:
        y_RM = call.forward(x_RM)
        ctx.call = call
        ctx.save_for_backward(*call.experts.release())
        return y_RM

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_RM: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Read before anything runs: under checkpointing this is where the forward is run again.
        ctx.call.experts.restore(ctx.saved_tensors)
        # Each goes when it has been used. On streams it has only been issued by then what uses them, and the memory of
        # rows that came over a link would be handed to the next chunk that comes: these stay until the streams are
        # joined, as they would if they had been received into memory made whole beforehand.
        held = ctx.call.experts.rows() if ctx.call.pipeline.lanes.runs_behind else []
        # Unless the graph is to be kept, autograd need not hold them longer: each goes when it has been used. Nothing
        # but memory depends on it, and a torch that cannot do it yet goes without.
        getattr(ctx, "maybe_clear_saved_tensors", lambda: None)()
        dx_RM, of_weights_R, gradients = ctx.call.backward(dy_RM)
        del held
        ctx.call.experts.release()
        return dx_RM, of_weights_R, None, *gradients


class _Call:
    """One call, which may wait for its backward while other calls run."""

    def __init__(self, pipeline: Pipeline, layout: Layout, experts: ExpertCall | RowCall, hook: Hook | None) -> None:
        self.pipeline = pipeline
        self._layout = layout
        self.experts = experts
        self._hook = hook

    def forward(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Run the forward on the rows and return as many."""
        phase = self._phase("forward", x_RM.detach())
        return self._run(phase, self.pipeline.forward.schedule, {EXPERT: phase.compute(self.experts.forward)})

    def _phase(self, direction: Direction, rows_RM: torch.Tensor) -> Phase:
        chunks = self._layout.chunks(self.pipeline.collectives, direction, rows_RM)
        return Phase(chunks, self._hook, direction, self.pipeline.lanes.runs_behind)

    def _run(self, phase: Phase, schedule: Schedule, compute: Mapping[str, Body]) -> torch.Tensor:
        pipeline = self.pipeline
        return phase.run(pipeline.lanes, schedule, compute, pipeline.label, pipeline.observer)

    def backward(
        self, dy_RM: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
        """Return the gradient of the rows, those of choices' weights and those of the experts' parameters."""
        phase = self._phase("backward", dy_RM)
        window = self.pipeline.window
        parcels = () if window is None else window.open(self.pipeline.label)

        def expert_dw(task: Task) -> None:
            self.experts.backward_dw(*phase.place(task.chunk))

        bodies = {
            EXPERT: phase.compute(self.experts.backward),
            EXPERT_DX: phase.compute(self.experts.backward_dx),
            EXPERT_DW: expert_dw,
        }
        for kind in GRADIENT_TASKS if parcels else ():
            bodies[kind] = lambda task: window.send(parcels[task.chunk], task.kind)
        sending = self.pipeline.backward.sending(tuple(map(window.tasks, parcels)) if parcels else ())
        dx_RM = self._run(phase, sending, bodies)
        if window is not None:
            window.close()
        return dx_RM, phase.weight_gradients(), self.experts.gradients()

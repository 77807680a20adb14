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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ds_fsmoe.execution.call import (
    Call,
    CallOfExperts,
    GradientWindow,
    Layout,
    at_once,
    half_now,
    with_pauses,
)
from ds_fsmoe.execution.collectives import FULL, Collectives
from ds_fsmoe.execution.lanes import Lanes, Observer, Together, dependencies_of
from ds_fsmoe.execution.phase import Hook
from ds_fsmoe.execution.row_sizes import RowSizes
from ds_fsmoe.execution.slot_chunks import SlotLayout
from ds_fsmoe.execution.unchunked import WholeExperts, run_whole
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN_NODE, A2A_OUT_NODE


class LayerExperts(Protocol):
    """The experts of this rank."""

    parameters: tuple[torch.nn.Parameter, ...]

    def call(self, needs_backward: bool, *, same_cuts: bool = True, recompute: bool = False) -> CallOfExperts: ...

    def call_rows(
        self, needs_backward: bool, rows: RowSizes, x_RM: torch.Tensor, *, recompute: bool = False
    ) -> CallOfExperts: ...


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
class LayerPipeline:
    """The experts' part of one layer: its schedules, lanes and collectives."""

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
            raise ValueError(f"{self.label}: an all-to-all in two tasks is planned, and the wires have no legs for it")

    @property
    def is_cut(self) -> bool:
        """Whether there is more than one chunk in either phase."""
        return max(self.forward.block.degree, self.backward.block.degree) > 1

    def uncut(self) -> LayerPipeline:
        """Return the same pipeline with one chunk in both phases."""
        forward, backward = (replace(each, block=uncut(each.block)) for each in (self.forward, self.backward))
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
        """The number of chunks in the forward and in the backward."""
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
        experts: LayerExperts | WholeExperts,
        hook: Hook | None = None,
        weights_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send rows to the experts and back.

        Args:
            x_RM: the rows, in the order in which the forward sends them.
            layout: how many they are.
            experts, hook: see :meth:`__call__`.
            weights_R: the weights of this rank's choices, with which the layout was made, where it adds results up.

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
        if not isinstance(layout, SlotLayout):
            call = experts.call_rows(needs_backward, layout.sizes, x_RM, recompute=self.recompute)
        else:
            call = experts.call(needs_backward, same_cuts=layout.same_cuts, recompute=self.recompute)
        half = half_now() if self.forward.in_halves else None
        of_call = Call(self, layout, call, hook, half)
        if not needs_backward and half is None:
            return of_call.forward(x_RM)
        # Autograd takes the youngest node first, so gradients arrive from the last parameter to the first, as they do
        # from stock's experts. DeepSpeed fills its buckets in that order, and over more than two ranks the last bits of
        # a sum depend on where in a bucket it lies.
        aliases = map(torch.Tensor.view_as, experts.parameters, experts.parameters)
        if half is not None:
            return with_pauses(of_call, x_RM, weights_R, aliases, half, needs_backward)
        return at_once(of_call, x_RM, weights_R, aliases)

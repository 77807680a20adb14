# SPDX-License-Identifier: Apache-2.0
"""The sizes of one call of a layer whose chunks hold rows, as many as were chosen, instead of slots.

Letters: e experts on this rank, G ranks of an EP group, P of an ESP group, N = P * G the ranks that rows come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.execution.row_orders import moves
from ds_fsmoe.execution.token_cuts import TokenCuts


@dataclass(frozen=True)
class Block:
    """The ranks that share the experts of a layer, as one of them sees them."""

    group: dist.ProcessGroup | None
    """All of them; ``None`` for a rank that has all experts. Never used on a lane of links."""
    places: tuple[tuple[int, int], ...] = ((0, 0),)
    """Of every rank of the group its index in its EP group and in its ESP group."""
    rank: int = 0
    """This rank's index in the group."""

    @cached_property
    def num_exchanging(self) -> int:
        """The number of ranks of an EP group, G."""
        return 1 + max(ep for ep, _ in self.places)

    @cached_property
    def num_sharing(self) -> int:
        """The number of ranks of an ESP group, P."""
        return len(self.places) // self.num_exchanging

    @property
    def ep_index(self) -> int:
        """This rank's index in its EP group."""
        return self.places[self.rank][0]

    @property
    def esp_index(self) -> int:
        """This rank's index in its ESP group."""
        return self.places[self.rank][1]

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The indices in the group in the order in which rows lie at the experts: ESP rank by ESP rank, and for each
        its EP group."""
        return tuple(sorted(range(len(self.places)), key=lambda each: self.places[each][::-1]))


ALONE = Block(None)


@dataclass(frozen=True)
class PassedOn:
    """The rows that rest on a rank of an EP group on their way, as that rank sees them."""

    hears: tuple[tuple[int, ...], ...]
    """Of each rank, the destinations of those of its rows that rest here."""
    tells: tuple[tuple[int, ...], ...]
    """Of each rank, the destinations of those of our rows that rest there."""


@dataclass(frozen=True)
class ChunkSizes:
    """The rows of one chunk that this rank moves."""

    sends: list[int]
    """The rows to each of G ranks."""
    receives: list[int]
    """The rows from each of G ranks."""
    gathered: list[int]
    """The rows that each of P ranks brings to the experts."""
    of_experts: list[int]
    """The rows of each of e experts."""
    between: dict[tuple[int, int], int] | None
    """The rows from one rank to another, of those that come by here, where an all-to-all passes rows on; else
    ``None``."""

    @cached_property
    def back(self) -> ChunkSizes:
        """The sizes of the way back."""
        between = None if self.between is None else {pair[::-1]: rows for pair, rows in self.between.items()}
        return replace(self, sends=self.receives, receives=self.sends, between=between)


@dataclass(frozen=True)
class PhaseSizes:
    """The chunks of one phase, and where their rows lie."""

    chunks: tuple[ChunkSizes, ...]
    starts: tuple[int, ...]
    """The first row of each chunk among those that this rank sends, and last their number."""
    order: torch.Tensor | None
    """[rows at the experts] int64: for each row in the order of the experts (expert by expert, segment by segment,
    source by source) where it lies in its chunk as it arrives (source by source). ``None`` where that is the same."""
    ends: torch.Tensor
    """[chunks, e] int32: where the rows of each expert end in a chunk."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The first row of each chunk among those that arrive, and last their number."""
        return (0, *itertools.accumulate(sum(each.gathered) for each in self.chunks))

    def order_of(self, chunk: int) -> torch.Tensor | None:
        """Return the part of :attr:`order` for a chunk."""
        return None if self.order is None else self.order[self.places[chunk] : self.places[chunk + 1]]


class SizesOfPhase(Protocol):
    """The sizes of one phase."""

    @property
    def places(self) -> tuple[int, ...]:
        """The first row of each chunk among those at the experts, and last their number."""


Phase = TypeVar("Phase", bound=SizesOfPhase)


@dataclass(frozen=True)
class RowSizes(Generic[Phase]):
    """All sizes of a call."""

    num_rows: int
    """The number of rows that this rank sends."""
    forward: Phase
    backward: Phase
    source_order: torch.Tensor | None
    """[rows sent] int64: for each row in the order in which the backward sends it, its place in that of the forward;
    ``None`` where these are the same."""
    expert_order: torch.Tensor | None
    """[rows at the experts] int64: the same at the experts."""

    @property
    def num_arriving(self) -> int:
        """The number of rows that come to the experts of this rank."""
        return self.forward.places[-1]


def sizes_of_phases(
    cuts: TokenCuts, num_rows: int, phase: Callable[[int], Phase], own_XT: torch.Tensor, arrived_NeT: torch.Tensor
) -> RowSizes[Phase]:
    """Return all sizes of a call.

    Args:
        cuts: the cuts of the tokens.
        num_rows: the number of rows that this rank sends.
        phase: makes the sizes of the phase of a degree.
        own_XT: the rows of this rank to each place in each segment, on the device.
        arrived_NeT: the rows from each source for each expert in each segment, on the device.
    """
    forward = phase(cuts.forward)
    if cuts.is_same:
        return RowSizes(num_rows, forward, forward, None, None)
    between = partial(moves, cuts=cuts, before=(cuts.forward, "by_expert"), after=(cuts.backward, "by_expert"))
    return RowSizes(
        num_rows,
        forward,
        phase(cuts.backward),
        between(own_XT.unsqueeze(0), num_rows=num_rows),
        between(arrived_NeT.sum(0, keepdim=True), num_rows=forward.places[-1]),
    )


def expert_ends(cuts: TokenCuts, degree: int, arrived_NeT: torch.Tensor) -> torch.Tensor:
    """Return [chunks, e] int32: where the rows of each expert end in a chunk.

    Args:
        cuts: the cuts of the tokens.
        degree: the number of chunks.
        arrived_NeT: the rows from each source for each expert in each segment, on the device.
    """
    of_experts_Te = arrived_NeT.sum(0).t()
    if degree == cuts.num_segments:
        return of_experts_Te.cumsum(1).to(torch.int32)
    chunk_of_T = TABLES.get(
        ("chunk of segment", cuts, degree),
        of_experts_Te,
        lambda device: torch.from_numpy(cuts.chunk_of_segment(degree)).to(device),
    )
    of_chunks_re = of_experts_Te.new_zeros(degree, of_experts_Te.shape[1]).index_add_(0, chunk_of_T, of_experts_Te)
    return of_chunks_re.cumsum(1).to(torch.int32)

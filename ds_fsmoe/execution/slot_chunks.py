# SPDX-License-Identifier: Apache-2.0
"""Chunks of slots, for padded dispatch: equally many for every expert on every rank, taken or empty.

``call`` uses these classes for layers that send slots; ``row_chunks`` is the counterpart for rows. All sizes follow
from the capacity, so no counts are exchanged.

Letters: E experts of all ranks, C slots per expert, c a chunk of them, M width, G ranks of an EP group, N ranks that
rows come from, e experts on this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.execution.phase import Chunks, Direction
from ds_fsmoe.planning.chunks import chunk_bounds
from ds_fsmoe.planning.schedule import A2A_IN_NODE, A2A_OUT

# ---- The chunks of the capacity, and a layout in which every chunk is contiguous
#
# Rows to send are stored *chunk by chunk*: all slots of the first chunk, expert by expert, then those of the second.
# So a chunk is a view that a collective can send and receive without a copy.
#
# Letters: E experts of all ranks, C slots per expert, c those of a chunk, M width.


@dataclass(frozen=True)
class CapacityChunks:
    """Describes a capacity that is split into chunks, some perhaps empty; their number depends on the plan, never on
    the tokens."""

    bounds: tuple[int, ...]
    """The bounds of the chunks, ascending from 0 to C: chunk i is [bounds[i], bounds[i + 1])."""

    @property
    def capacity(self) -> int:
        """Return the number of slots per expert, C."""
        return self.bounds[-1]

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) of every chunk."""
        return tuple(itertools.pairwise(self.bounds))

    def chunked_slots(self, slots: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Return the rows of slots in the chunk-by-chunk order, in the same shape.

        Args:
            slots: any shape, int64: ``expert * C + position``, or ``E * C`` for "no slot", also in the result.
            num_experts: E.
        """
        if len(self.chunks) == 1:
            return slots
        # A number below 0 means "no slot" too: -1 is the last row of the table.
        table = TABLES.get((self, num_experts), slots, lambda device: _slot_table(self, num_experts, device))
        return table.take(slots.clamp(-1, num_experts * self.capacity))


def _slot_table(capacity_chunks: CapacityChunks, num_experts: int, device: torch.device) -> torch.Tensor:
    rows_Ec = [
        torch.arange(num_experts * start, num_experts * stop, device=device).view(num_experts, stop - start)
        for start, stop in capacity_chunks.chunks
    ]
    none = torch.full((1,), num_experts * capacity_chunks.capacity, device=device)
    return torch.cat([torch.cat(rows_Ec, dim=1).view(-1), none])


def chunk_capacity(capacity: int, degree: int) -> CapacityChunks:
    """Split the capacity into chunks as equal as whole slots allow; some may be empty."""
    return CapacityChunks(chunk_bounds(capacity, degree))


# ---- Chunks of slots


@dataclass(frozen=True)
class SlotLayout:
    """Describes the chunks of one call whose experts have equally many slots."""

    num_experts: int
    """The number of experts of all ranks, E."""
    capacity: int
    """The number of slots per expert, C."""
    degrees: tuple[int, int]
    """The number of chunks in the forward and in the backward."""

    num_tokens = None
    """``None``, as slots are split instead of tokens."""

    @cached_property
    def capacity_chunks(self) -> tuple[CapacityChunks, CapacityChunks]:
        """Return the chunks of the forward and of the backward."""
        return chunk_capacity(self.capacity, self.degrees[0]), chunk_capacity(self.capacity, self.degrees[1])

    @property
    def same_chunks(self) -> bool:
        """Return True if the backward has the chunks of the forward."""
        return self.capacity_chunks[0] == self.capacity_chunks[1]

    def slots_per_expert(self, num_ranks: int, num_local: int) -> int:
        """Return the number of slots per expert and rank, C."""
        return self.capacity

    def chunks(self, collectives: Collectives, direction: Direction, rows_RM: torch.Tensor) -> SlotChunks:
        """Return the chunks of a phase that starts with these rows, [E * C, M]."""
        cuttings = self.capacity_chunks
        return SlotChunks(collectives, self.num_experts, cuttings[0], cuttings[direction == "backward"], rows_RM)


class SlotChunks(Chunks):
    """Represents the chunks of a phase; see :class:`~ds_fsmoe.execution.phase.Chunks`.

    Args:
        collectives: the collectives to the other ranks.
        num_experts: E.
        layout: the chunks of the forward, by which rows are stored in both phases.
        capacity_chunks: the phase's chunks of the capacity.
        rows_RM: [E * C, M], the rows that the phase starts with.
    """

    def __init__(
        self,
        collectives: Collectives,
        num_experts: int,
        layout: CapacityChunks,
        capacity_chunks: CapacityChunks,
        rows_RM: torch.Tensor,
    ) -> None:
        super().__init__(collectives, len(capacity_chunks.chunks), rows_RM.shape)
        self._num_experts = num_experts
        self._layout = layout
        self._chunks = capacity_chunks.chunks
        self._source_RM = rows_RM.contiguous()
        self._is_whole = len(self._chunks) == len(layout.chunks) == 1

    def read(self, chunk: int) -> torch.Tensor:
        """Return [E, c, M], contiguous: a view if this is one of the layout's chunks, else a copy."""
        parts = [view[:, low:high] for view, low, high, _ in self._overlaps(self._source_RM, chunk)]
        if not parts:
            return self._source_RM.new_empty(self._num_experts, 0, self._shape[-1])
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)

    def dispatch(self, x_EcM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks that have the experts."""
        return self._collectives.to_experts(x_EcM)

    def leg(self, kind: str, x: torch.Tensor, chunk: int) -> torch.Tensor:
        """Run one of the two parts of :meth:`dispatch` or :meth:`combine`."""
        if kind in (A2A_IN_NODE, A2A_OUT):
            return self._collectives.legs[kind](self._collectives.blocks(x))
        return self._collectives.legs[kind](x).flatten(0, 1)

    def dispatched(self, x_EcM: torch.Tensor) -> torch.Tensor:
        """Return the output of :meth:`dispatch` as [G, e, c, M]."""
        return self._collectives.blocks(x_EcM)

    def gather(self, x_GecM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Gather the rows of the ranks that share the experts."""
        return self._collectives.gather(x_GecM)

    def compute(self, body: Callable[..., torch.Tensor], chunk: int, x_NecM: torch.Tensor) -> torch.Tensor:
        """Call ``body(start, stop, rows)``, and return its results."""
        y_NecM = body(*self._chunks[chunk], x_NecM)
        if self._result_RM is None and not self._is_whole:
            # Not earlier: under autocast the experts' dtype differs from that of their input.
            self._result_RM = y_NecM.new_empty(self._shape)
        return y_NecM

    def reduce(self, y_NecM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Sum the rows over the ranks that share the experts."""
        return self._collectives.reduce(y_NecM)

    def leaving(self, y_NecM: torch.Tensor) -> torch.Tensor:
        """Return the results in the layout of :meth:`combine`, [E, c, M]."""
        return y_NecM.reshape(self._num_experts, *y_NecM.shape[2:])

    def combine(self, y_EcM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks of the tokens."""
        return self._collectives.to_experts(y_EcM)

    def write(self, y_EcM: torch.Tensor, chunk: int) -> None:
        """Write the results to the places of their tokens.

        Raises:
            ValueError: the result has another shape than the sent rows.
        """
        start, stop = self._chunks[chunk]
        if y_EcM.shape != (self._num_experts, stop - start, self._shape[-1]):
            raise ValueError(
                f"{tuple(y_EcM.shape)} returned for {self._num_experts} experts of {stop - start} slots of width "
                f"{self._shape[-1]}: a hook or an expert changed the shape"
            )
        if self._is_whole:
            self._result_RM = y_EcM.reshape(self._shape)
            return
        for view, low, high, first in self._overlaps(self._result_RM, chunk):
            view[:, low:high].copy_(y_EcM[:, first : first + high - low])

    def _overlaps(self, rows_RM: torch.Tensor, chunk: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """Yield (a chunk of the layout [E, c, M], its first and last slot in this chunk, their position in this
        chunk)."""
        start, stop = self._chunks[chunk]
        for first, last in self._layout.chunks:
            low, high = first if first > start else start, last if last < stop else stop
            if low < high:
                rows = rows_RM[self._num_experts * first : self._num_experts * last]
                view = rows.view(self._num_experts, last - first, self._shape[-1])
                yield view, low - first, high - first, low - start

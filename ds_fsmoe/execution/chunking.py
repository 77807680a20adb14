# SPDX-License-Identifier: Apache-2.0
"""The cuts of the capacity, and memory in which every chunk is contiguous.

Rows that travel are kept *chunk by chunk*: all slots of the first chunk, expert after expert, then those of the second.
So a chunk is a view that a collective can send and receive without a copy.

Letters: E experts of all ranks, C slots per expert, c those of a chunk, M width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.planning.chunks import chunk_bounds


@dataclass(frozen=True)
class Cutting:
    """A capacity cut into chunks, some perhaps empty; the plan alone decides their number, never the tokens."""

    bounds: tuple[int, ...]
    """The cut positions, rising from 0 to C: chunk i is [bounds[i], bounds[i + 1])."""

    @property
    def capacity(self) -> int:
        """The number of slots per expert, C."""
        return self.bounds[-1]

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of every chunk."""
        return tuple(itertools.pairwise(self.bounds))

    def chunked_slots(self, slots: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Return the rows of slots in the chunk-by-chunk order, in the same shape.

        Args:
            slots: any shape, int64: ``expert * C + position``, or ``E * C`` for none, also in the result.
            num_experts: E.
        """
        if len(self.chunks) == 1:
            return slots
        # Before the first slot is none as well: -1 is the last row of the table.
        table = TABLES.get((self, num_experts), slots, lambda device: _slot_table(self, num_experts, device))
        return table.take(slots.clamp(-1, num_experts * self.capacity))


def _slot_table(cutting: Cutting, num_experts: int, device: torch.device) -> torch.Tensor:
    rows_Ec = [
        torch.arange(num_experts * start, num_experts * stop, device=device).view(num_experts, stop - start)
        for start, stop in cutting.chunks
    ]
    none = torch.full((1,), num_experts * cutting.capacity, device=device)
    return torch.cat([torch.cat(rows_Ec, dim=1).view(-1), none])


def cut(capacity: int, degree: int) -> Cutting:
    """Cut the capacity into chunks that are as equal as whole slots allow; some may be empty."""
    return Cutting(chunk_bounds(capacity, degree))


class ChunkedRows:
    """Holds rows [E * C, M] chunk by chunk and reads and writes them by cuts of any kind."""

    def __init__(self, rows: torch.Tensor, num_experts: int, cutting: Cutting) -> None:
        self._rows = rows
        self._num_experts = num_experts
        self._cutting = cutting

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return [E, stop - start, M], contiguous: a view if this is one of the chunks, else a copy."""
        parts = [view[:, low:high] for view, low, high, _ in self._overlaps(start, stop)]
        if not parts:
            return self._rows.new_empty(self._num_experts, 0, self._rows.shape[-1])
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)

    def write(self, start: int, stop: int, values_EcM: torch.Tensor) -> None:
        """Copy values [E, stop - start, M] to their places."""
        for view, low, high, first in self._overlaps(start, stop):
            view[:, low:high].copy_(values_EcM[:, first : first + high - low])

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """Yield (a chunk [E, c, M], its first and last wanted slots, their position in the cut)."""
        for first, last in self._cutting.chunks:
            low, high = first if first > start else start, last if last < stop else stop
            if low < high:
                yield self._view(first, last), low - first, high - first, low - start

    def _view(self, first: int, last: int) -> torch.Tensor:
        rows = self._rows[self._num_experts * first : self._num_experts * last]
        return rows.view(self._num_experts, last - first, self._rows.shape[-1])

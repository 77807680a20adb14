# SPDX-License-Identifier: Apache-2.0
"""Where the capacity is cut, and memory in which every chunk lies in one piece.

Rows that travel are kept *chunk by chunk*: all slots of the first chunk, expert after expert, then those of the second.
So a chunk is a view that a collective can send and receive without a copy.

Letters: E experts of all ranks, C slots per expert, c those of a chunk, M width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Cutting:
    """The capacity, cut. Chunks may be empty: their number follows from the plan alone, never from the tokens."""

    bounds: tuple[int, ...]
    """Rising from 0 to C: chunk i is [bounds[i], bounds[i + 1])."""

    @property
    def capacity(self) -> int:
        """C."""
        return self.bounds[-1]

    @cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every chunk."""
        return tuple(itertools.pairwise(self.bounds))

    def chunked_slots(self, slots: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Where slots lie chunk by chunk.

        Args:
            slots: any shape, int64: ``expert * C + position``, or ``E * C`` for none, which stays.
            num_experts: E.
        """
        if len(self.chunks) == 1:
            return slots
        capacity = self.capacity
        position = torch.arange(capacity)
        first, width = torch.empty(2, capacity, dtype=torch.long)
        for start, stop in self.chunks:
            first[start:stop] = num_experts * start + position[start:stop] - start
            width[start:stop] = stop - start
        first, width = (each.to(slots.device, non_blocking=True) for each in (first, width))
        expert = slots.div(capacity, rounding_mode="floor") if capacity else slots
        place = slots - expert * capacity
        return torch.where(slots < num_experts * capacity, first[place] + expert * width[place], slots)


def cut(capacity: int, shares: Sequence[float]) -> Cutting:
    """Cut the capacity into chunks of these shares, as nearly as whole slots allow; some may be empty."""
    sums = itertools.accumulate(shares)
    inner = [min(capacity, round(capacity * each)) for each in itertools.islice(sums, len(shares) - 1)]
    return Cutting((0, *inner, capacity))


class ChunkedRows:
    """Rows [E * C, M] chunk by chunk, to be read and written by cuts of any kind."""

    def __init__(self, rows: torch.Tensor, num_experts: int, cutting: Cutting) -> None:
        self._rows = rows
        self._num_experts = num_experts
        self._cutting = cutting

    def read(self, start: int, stop: int) -> torch.Tensor:
        """[E, stop - start, M], contiguous: a view if this is one of the chunks, else a copy."""
        parts = [view[:, low:high] for view, low, high, _ in self._overlaps(start, stop)]
        if not parts:
            return self._rows.new_empty(self._num_experts, 0, self._rows.shape[-1])
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)

    def write(self, start: int, stop: int, values_EcM: torch.Tensor) -> None:
        """Copy values [E, stop - start, M] to their places."""
        for view, low, high, first in self._overlaps(start, stop):
            view[:, low:high].copy_(values_EcM[:, first : first + high - low])

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """(a chunk [E, c, M], the first and the last of its slots that are wanted, where they come in the cut)."""
        for first, last in self._cutting.chunks:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield self._view(first, last), low - first, high - first, low - start

    def _view(self, first: int, last: int) -> torch.Tensor:
        rows = self._rows[self._num_experts * first : self._num_experts * last]
        return rows.view(self._num_experts, last - first, self._rows.shape[-1])

# SPDX-License-Identifier: Apache-2.0
"""Packs experts: more experts on each rank, over fewer ranks, so that the all-to-all is shorter. The engine calls it
with times from ``measuring/packing_times.py``.

Lina does so in training (ATC'23, section 4.2, "Expert packing"). Ideally the micro-ops of the experts and of the
all-to-all take equally long, and neither lane waits for the other. As an all-to-all mostly takes longer, the number of
experts on each rank is doubled until the experts' micro-op does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_fsmoe.terminal.tables import Table


@dataclass(frozen=True, slots=True)
class Packed:
    """Holds the compared times of one number of experts per rank."""

    ep_size: int
    """The number of ranks over which the experts are spread."""
    experts_ms: float
    """The time of the experts' micro-op, with as many on each rank as that leaves."""
    alltoall_ms: float
    """The time of an all-to-all's micro-op among these ranks; 0 for one rank."""


@dataclass(frozen=True)
class Packing:
    """Holds the chosen number of experts per rank, with what was compared."""

    num_experts: tuple[int, ...]
    """The numbers of experts of the layers, each once."""
    rows: tuple[Packed, ...]
    """What was compared, fewest experts per rank first. The last one is chosen."""

    @property
    def ep_size(self) -> int:
        """Return the chosen EP size."""
        return self.rows[-1].ep_size

    def experts_per_rank(self, ep_size: int) -> tuple[int, ...]:
        """Return the number of experts of a layer on a rank, for each of :attr:`num_experts`."""
        return tuple(each // ep_size for each in self.num_experts)

    def table(self) -> Table:
        """Return a table of what was compared, with a row for each number of experts per rank."""
        heads = ("experts per rank", "ep_size", "experts' micro-op [ms]", "all-to-all's micro-op [ms]")
        cells = []
        for row in self.rows:
            per_rank = " or ".join(map(str, self.experts_per_rank(row.ep_size)))
            cells.append((per_rank, str(row.ep_size), f"{row.experts_ms:.3f}", f"{row.alltoall_ms:.3f}"))
        return Table(heads, cells, has_rule=False)


def packings(ep_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the EP sizes that packing tries: the largest, then its successive halves among ``ep_sizes``.

    Args:
        ep_sizes: all possible EP sizes; at least one.
    """
    found = [max(ep_sizes)]
    while found[-1] % 2 == 0 and found[-1] // 2 in ep_sizes:
        found.append(found[-1] // 2)
    return tuple(found)


def pack(
    num_experts: Sequence[int],
    ep_sizes: Sequence[int],
    experts_ms: Callable[[int], float],
    alltoall_ms: Callable[[int], float],
) -> Packing:
    """Choose the number of experts per rank: doubled until their micro-op takes as long as the all-to-all's.

    Args:
        num_experts: the numbers of experts of the layers.
        ep_sizes: the possible EP sizes.
        experts_ms: EP size -> the ms of the experts' micro-op on one rank.
        alltoall_ms: EP size -> the ms of an all-to-all's micro-op; not called for one rank.

    Raises:
        ValueError: there is no EP size, one does not divide the experts, or a time is invalid.
    """
    kinds = tuple(sorted(set(num_experts)))
    if not ep_sizes or min(ep_sizes) < 1 or any(experts % size for experts in kinds for size in ep_sizes):
        raise ValueError(f"ep_sizes = {list(ep_sizes)}: must be numbers of ranks that divide {list(kinds)} experts")
    rows: list[Packed] = []
    for size in packings(ep_sizes):
        row = Packed(size, experts_ms(size), alltoall_ms(size) if size > 1 else 0.0)
        if not all(math.isfinite(each) and each >= 0 for each in (row.experts_ms, row.alltoall_ms)):
            raise ValueError(f"{row}: times must be finite and at least 0")
        rows.append(row)
        if row.experts_ms >= row.alltoall_ms:
            break
    return Packing(kinds, tuple(rows))

# SPDX-License-Identifier: Apache-2.0
"""Expert packing: more experts on each rank, spread over fewer ranks, for an all-to-all that is shorter.

It is what Lina does for training (ATC'23, section 4.2, "Expert packing"): ideally the micro-ops of the experts and of
the all-to-all take equally long, and neither lane waits for the other. As an all-to-all mostly takes longer, the number
of experts on each rank is doubled until the experts' micro-op does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_fsmoe.terminal.tables import Table


@dataclass(frozen=True, slots=True)
class Packed:
    """What was compared for one number of experts per rank."""

    ep_size: int
    """The number of ranks over which the experts are spread."""
    experts_ms: float
    """The time of the experts' micro-op, with as many on each rank as that leaves."""
    alltoall_ms: float
    """The time of an all-to-all's micro-op among these ranks; 0 for one rank."""


@dataclass(frozen=True)
class Packing:
    """A choice of experts per rank and what it follows from."""

    num_experts: tuple[int, ...]
    """The numbers of experts of the layers, each once."""
    rows: tuple[Packed, ...]
    """What was compared, fewest experts per rank first. The last one is chosen."""

    @property
    def ep_size(self) -> int:
        """The chosen number of ranks over which the experts are spread."""
        return self.rows[-1].ep_size

    def experts_per_rank(self, ep_size: int) -> tuple[int, ...]:
        """Return how many experts of a layer a rank has, for each of :attr:`num_experts`."""
        return tuple(each // ep_size for each in self.num_experts)

    def table(self) -> Table:
        """Return what was compared, with a row for each number of experts per rank."""
        heads = ("experts per rank", "ep_size", "experts' micro-op [ms]", "all-to-all's micro-op [ms]")
        cells = []
        for row in self.rows:
            per_rank = " or ".join(map(str, self.experts_per_rank(row.ep_size)))
            cells.append((per_rank, str(row.ep_size), f"{row.experts_ms:.3f}", f"{row.alltoall_ms:.3f}"))
        return Table(heads, cells, has_rule=False)


def packings(ep_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of ranks that packing goes through: the most first, then each half of the one before, as far
    as experts and ranks divide.

    Args:
        ep_sizes: all numbers of ranks over which the experts can be spread; at least one.
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
    """Choose how many experts each rank has: doubled until their micro-op takes as long as the all-to-all's.

    Args:
        num_experts: the numbers of experts of the layers.
        ep_sizes: the numbers of ranks over which they can be spread.
        experts_ms: number of ranks -> the time of the experts' micro-op on one of them.
        alltoall_ms: number of ranks -> the time of an all-to-all's micro-op among them; not asked for one rank.

    Raises:
        ValueError: no number of ranks, one that does not divide the experts, or a time that is none.
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

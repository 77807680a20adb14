# SPDX-License-Identifier: Apache-2.0
"""Splits a capacity into chunks of whole slots, and bytes into micro-ops of one size. The planner and the execution
both use it, so predicted and real chunks are equal.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_fsmoe.planning.workload import MoEWork

MICRO_OP_BYTES = 30_000_000
"""The size of a micro-op in Lina (ATC'23, section 7.1: a partition size of 30 MB), in bytes."""


@lru_cache(maxsize=4096)
def chunk_bounds(capacity: int, degree: int) -> tuple[int, ...]:
    """Return the bounds of chunks that are as equal as whole slots allow. Chunks may be empty.

    Args:
        capacity: the slots per expert, C.
        degree: the number of chunks.

    Returns:
        The bounds, ascending from 0 to C: chunk i is [bounds[i], bounds[i + 1]).
    """
    return tuple((2 * capacity * place + degree) // (2 * degree) for place in range(degree + 1))


@lru_cache(maxsize=4096)
def chunk_shares(capacity: int | None, degree: int) -> tuple[float, ...]:
    """Return each chunk's share of the rows.

    Args:
        capacity: the slots per expert; ``None``: rows can be split anywhere.
        degree: the number of chunks.
    """
    if not capacity:
        return (1.0 / degree,) * degree
    return tuple((stop - start) / capacity for start, stop in itertools.pairwise(chunk_bounds(capacity, degree)))


def num_micro_ops(size_bytes: float, micro_op_bytes: int) -> int:
    """Return the number of micro-ops of at most ``micro_op_bytes`` for these bytes; at least 1."""
    return max(1, -int(-size_bytes // micro_op_bytes))


def micro_op_ends(size: int, count: int) -> tuple[int, ...]:
    """Return the ends of ``count`` micro-ops that are as equal as whole units allow (Lina, section 4.2)."""
    return tuple(size * place // count for place in range(1, count + 1))


def degree_by_bytes(moe: MoEWork, micro_op_bytes: int, max_degree: int) -> int:
    """Return the smallest number of chunks at which no all-to-all of a layer exceeds a micro-op.

    The number is the same in both phases, as their all-to-alls have the same bytes.

    Args:
        moe: the experts' part of the layer in one phase; without all-to-alls it has one chunk.
        micro_op_bytes: the bytes of a micro-op.
        max_degree: the largest number; the number of slots bounds it too.
    """
    size_bytes = max((each.size for each in moe.exchange), default=0.0)
    most = max_degree if moe.capacity is None else min(max_degree, moe.capacity)
    return max(1, min(most, num_micro_ops(size_bytes, micro_op_bytes)))

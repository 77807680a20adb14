# SPDX-License-Identifier: Apache-2.0
"""Where a capacity is cut into chunks: the same whole slots for the planner, who prices them, and for what is run."""

from __future__ import annotations

import itertools
from functools import lru_cache


@lru_cache(maxsize=4096)
def chunk_bounds(capacity: int, degree: int) -> tuple[int, ...]:
    """Cut a capacity into chunks that are as equal as whole slots allow; some may be empty.

    Args:
        capacity: slots per expert, C.
        degree: number of chunks.

    Returns:
        Rising from 0 to C: chunk i is [bounds[i], bounds[i + 1]).
    """
    return tuple((2 * capacity * place + degree) // (2 * degree) for place in range(degree + 1))


@lru_cache(maxsize=4096)
def chunk_shares(capacity: int | None, degree: int) -> tuple[float, ...]:
    """Return the share of the rows that each chunk has.

    Args:
        capacity: slots per expert; ``None``: rows can be cut anywhere.
        degree: number of chunks.
    """
    if not capacity:
        return (1.0 / degree,) * degree
    return tuple((stop - start) / capacity for start, stop in itertools.pairwise(chunk_bounds(capacity, degree)))

# SPDX-License-Identifier: Apache-2.0
"""This module cuts a capacity into chunks of whole slots, the same for the planner's prices and for the run."""

from __future__ import annotations

import itertools
from functools import lru_cache


@lru_cache(maxsize=4096)
def chunk_bounds(capacity: int, degree: int) -> tuple[int, ...]:
    """Cut a capacity into chunks that are as equal as whole slots allow; some may be empty.

    Args:
        capacity: the slots per expert, C.
        degree: the number of chunks.

    Returns:
        The bounds, rising from 0 to C: chunk i is [bounds[i], bounds[i + 1]).
    """
    return tuple((2 * capacity * place + degree) // (2 * degree) for place in range(degree + 1))


@lru_cache(maxsize=4096)
def chunk_shares(capacity: int | None, degree: int) -> tuple[float, ...]:
    """Return each chunk's share of the rows.

    Args:
        capacity: the slots per expert; ``None``: rows can be cut anywhere.
        degree: the number of chunks.
    """
    if not capacity:
        return (1.0 / degree,) * degree
    return tuple((stop - start) / capacity for start, stop in itertools.pairwise(chunk_bounds(capacity, degree)))

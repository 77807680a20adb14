# SPDX-License-Identifier: Apache-2.0
"""The cuts of a rank's tokens into chunks, for the forward and the backward together.

Chunk i of r holds the tokens ``[floor(i * S / r), floor((i + 1) * S / r))`` of every rank, with all choices of each.
The cuts of both phases together part the tokens into *segments*, so a chunk of either phase is a run of segments. How
many segments there are follows from the two degrees alone; how many tokens are in one follows from each rank's S.

Letters: S tokens on this rank, E experts of all ranks, T segments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np


@dataclass(frozen=True)
class TokenCuts:
    """The number of chunks in each phase, and the segments that follow from them."""

    forward: int
    backward: int

    @cached_property
    def _fractions(self) -> tuple[Fraction, ...]:
        """The cut positions of both phases as shares of the tokens, rising from 0 to 1."""
        found = {Fraction(i, degree) for degree in (self.forward, self.backward) for i in range(degree + 1)}
        return tuple(sorted(found))

    @cached_property
    def num_segments(self) -> int:
        """The number of segments, T."""
        return len(self._fractions) - 1

    @property
    def is_same(self) -> bool:
        """Whether both phases have the same chunks."""
        return self.forward == self.backward

    def chunks(self, degree: int) -> tuple[tuple[int, int], ...]:
        """Return [first, last) of the segments of every chunk, for one of the two degrees."""
        return self._chunks[degree]

    @cached_property
    def _chunks(self) -> dict[int, tuple[tuple[int, int], ...]]:
        found = {}
        for degree in (self.forward, self.backward):
            places = [self._fractions.index(Fraction(i, degree)) for i in range(degree + 1)]
            found[degree] = tuple(itertools.pairwise(places))
        return found

    def of_chunks(self, degree: int, counts_XT: np.ndarray) -> np.ndarray:
        """Return counts of segments, any shape with T last, as those of chunks."""
        return np.add.reduceat(counts_XT, [first for first, _ in self.chunks(degree)], axis=-1)

    def lengths(self, num_tokens: int) -> list[int]:
        """Return how many tokens of a rank with S tokens are in each segment."""
        bounds = [num_tokens * each.numerator // each.denominator for each in self._fractions]
        return [stop - start for start, stop in itertools.pairwise(bounds)]

    def chunk_of_segment(self, degree: int) -> np.ndarray:
        """Return the chunk of each segment, [T] int64, for one of the two degrees."""
        return np.repeat(np.arange(degree), [last - first for first, last in self.chunks(degree)])


@lru_cache(maxsize=256)
def token_cuts_of(forward: int, backward: int) -> TokenCuts:
    """Return the cuts for these degrees, which are worked out once."""
    return TokenCuts(forward, backward)

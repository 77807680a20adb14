# SPDX-License-Identifier: Apache-2.0
"""Says where a rank is in a job whose model is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stages:
    """Says where this rank is in a job of pipeline stages."""

    stage: int
    """The stage that this rank runs, counted from the front."""
    ranks: tuple[int, ...]
    """The rank of each stage, from the front, that has the same share of a batch as this one."""
    num_micro_batches: int
    received_bytes: Callable[[], tuple[int, int]]
    """Returns the bytes that this rank exchanges with the stage before it for each micro batch: activations that come,
    and gradients that go; zeros until it is known, and in the first stage."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.ranks)

# SPDX-License-Identifier: Apache-2.0
"""Gradients in a queue, the windows of a backward in which they can be sent, and what is sent in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ds_fsmoe.planning.block import Slice
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import Lane


@dataclass(frozen=True, slots=True)
class QueuedGradient:
    """The gradients of one layer and one kind, which wait in a queue until they are sent."""

    kind: str
    lanes: tuple[Lane, ...]
    size_bytes: int
    cost: LinearCost
    layer: int = -1
    """The layer in the order of the backward; -1: the gradients existed before."""
    tensors_bytes: tuple[int, ...] = ()
    """The bytes of its tensors, in the order in which they exist; empty: it is one tensor."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the backward during which gradients can be sent."""

    layer: int
    kind: Literal["moe", "dense"]
    num_pieces: int
    """How many pieces of the queue exist when the window opens."""
    extra_ms: Callable[[np.ndarray], np.ndarray]
    """Time of gradients sent in it -> how much longer the layer gets. The function never falls and is 0 for nothing."""
    room_ms: float = 0.0
    """The time in which no all-to-all waits, or is about to wait, for the link of the gradients."""


@dataclass(frozen=True)
class Partition:
    """The gradients that each window sends."""

    slices: tuple[tuple[Slice, ...], ...]
    """The slices of each window, one entry per window."""
    tail: tuple[Slice, ...]
    """The slices that are sent after the backward."""
    extra_ms: float
    """How much longer all layers get, including the tail."""

    @property
    def size_bytes(self) -> float:
        """The bytes of everything that is sent."""
        return sum(each.size_bytes for slices in (*self.slices, self.tail) for each in slices)

# SPDX-License-Identifier: Apache-2.0
"""Gradients sent slice by slice, in the order in which they exist: of one size wherever a link would be idle, or of
single tensors where no all-to-all waits, as Lina has it (ATC'23)."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ds_fsmoe.planning.block import Slice
from ds_fsmoe.planning.chunks import micro_op_ends, num_micro_ops
from ds_fsmoe.planning.gradient_queue import Partition, QueuedGradient, Window

MOST_SLICES = 100_000
"""The slices of all gradients of a backward, at the most."""


def of_one_size(pieces: Sequence[QueuedGradient], windows: Sequence[Window], chunk_bytes: int) -> Partition:
    """Send, while a window's link would be idle, one more slice of one size; the last may overrun.

    Args:
        pieces, windows: see :func:`~ds_fsmoe.planning.gradients.partition`.
        chunk_bytes: the size of a slice; the last one of a piece has the rest.
    """
    moment_ms = 1e-6 * max((each.cost.ms(each.size_bytes) for each in pieces), default=0.0) or 1e-9

    _check_number(sum(each.size_bytes for each in pieces), chunk_bytes)

    def cut(piece: QueuedGradient) -> list[int]:
        whole, rest = divmod(piece.size_bytes, chunk_bytes)
        return [chunk_bytes] * whole + ([rest] if rest else [])

    def may_begin(window: Window, before_ms: float) -> bool:
        # Idle is a link on which a moment more would cost nothing.
        return float(window.extra_ms(np.array([before_ms + moment_ms]))[0]) <= 0.5 * moment_ms

    return _one_by_one(pieces, windows, cut, may_begin)


def by_priority(pieces: Sequence[QueuedGradient], windows: Sequence[Window], chunk_bytes: int) -> Partition:
    """Send slices of single tensors as Lina's priority would (its sections 4.2 and 6.1), as a static list: one more
    while no all-to-all waits or is about to, so that one that comes waits for what is under way by then, at most.

    Args:
        pieces, windows: see :func:`~ds_fsmoe.planning.gradients.partition`.
        chunk_bytes: the most bytes of a slice; those of one tensor are equal.
    """

    _check_number(sum(each.size_bytes for each in pieces), chunk_bytes)

    def cut(piece: QueuedGradient) -> list[int]:
        tensors = piece.tensors_bytes or (piece.size_bytes,)
        ends = [(0, *micro_op_ends(each, num_micro_ops(each, chunk_bytes))) for each in tensors]
        return [stop - first for each in ends for first, stop in itertools.pairwise(each) if stop > first]

    return _one_by_one(pieces, windows, cut, lambda window, before_ms: before_ms < window.room_ms)


def _check_number(size_bytes: float, chunk_bytes: int) -> None:
    number = size_bytes // chunk_bytes
    if number > MOST_SLICES:
        raise ValueError(
            f"gradient_partition.chunk_bytes = {chunk_bytes}: {size_bytes / 1e9:.0f} GB of gradients would travel in "
            f"{number:.0f} slices: must be at least {math.ceil(size_bytes / MOST_SLICES)}"
        )


def _one_by_one(
    pieces: Sequence[QueuedGradient],
    windows: Sequence[Window],
    cut: Callable[[QueuedGradient], Sequence[int]],
    may_begin: Callable[[Window, float], bool],
) -> Partition:
    """Send slices in the order of the queue, each in the first window in which it may begin.

    Args:
        pieces, windows: see :func:`~ds_fsmoe.planning.gradients.partition`.
        cut: a piece -> the bytes of its slices.
        may_begin: a window, and the time of the slices before in it -> whether one more may begin there.
    """
    waiting: deque[Slice] = deque()
    costs = {each.kind: each.cost for each in pieces}

    def arrive(first: int, last: int) -> None:
        for piece in pieces[first:last]:
            waiting.extend(Slice(piece.kind, piece.lanes, size, piece.layer) for size in cut(piece))

    def ms(each: Slice) -> float:
        return costs[each.kind].ms(each.size_bytes)

    sent, total_ms, arrived = [], 0.0, 0
    for window in windows:
        arrive(arrived, window.num_pieces)
        arrived = max(arrived, window.num_pieces)
        here: list[Slice] = []
        here_ms = 0.0
        while waiting and may_begin(window, here_ms):
            here.append(waiting.popleft())
            here_ms += ms(here[-1])
        total_ms += float(window.extra_ms(np.array([here_ms]))[0]) if here else 0.0
        sent.append(tuple(here))
    arrive(arrived, len(pieces))
    return Partition(tuple(sent), tuple(waiting), total_ms + sum(map(ms, waiting)))

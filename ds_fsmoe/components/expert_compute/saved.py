# SPDX-License-Identifier: Apache-2.0
"""Keeps tensors of the forward's chunks for those of the backward."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_PLACE = operator.itemgetter(0)
_Tensors = tuple[torch.Tensor | None, ...]
"""``None`` among tensors is nothing, and comes back as ``None``."""


class _Saved:
    """Tensors by the place of their chunk, in the order of places.

    What was put here stays until this object is dropped, and may be read any number of times. What was given away and
    has come back is read once, so that memory falls while a backward proceeds.
    """

    def __init__(self) -> None:
        self._pieces: dict[Any, _Tensors] = {}

    def release(self) -> list[torch.Tensor | None]:
        """Give all tensors away, for somebody else to keep until :meth:`restore`."""
        released = [tensor for piece in self._pieces.values() for tensor in piece]
        self._pieces = {place: (None,) * len(piece) for place, piece in self._pieces.items()}
        return released

    def restore(self, tensors: Iterator[torch.Tensor | None]) -> None:
        """Take back what was given away, in that order."""
        self._pieces = {place: tuple(next(tensors) for _ in piece) for place, piece in self._pieces.items()}

    def first_of_each(self) -> list[torch.Tensor]:
        """The first tensor of every piece that is here."""
        return [piece[0] for piece in self._pieces.values() if piece[0] is not None]


class SavedActivations(_Saved):
    """What one forward call keeps: for each of its cuts [start, stop) of the capacity some tensors.

    The capacity is one dimension of every tensor, so a cut's tensors are [N, stop - start, ...] where it is 1. Of what
    is read once a piece goes when all its slots have been taken.
    """

    def __init__(self, dim: int = 1) -> None:
        """
        Args:
            dim: of the capacity.
        """
        super().__init__()
        self._dim = dim
        self._slots_left: dict[int, int] | None = None
        """First slot of a piece -> how many of its slots have not been taken; ``None`` while everything stays."""

    def put(self, start: int, stop: int, tensors: _Tensors) -> None:
        """Keep the tensors of a cut.

        Raises:
            ValueError: some of its slots are here already.
        """
        for first, last in self._pieces:
            if first < stop and start < last and start < stop and first < last:
                raise ValueError(f"slots [{start}, {stop}) were given twice: [{first}, {last}) came before")
        is_last = not self._pieces or next(reversed(self._pieces)) < (start, stop)
        self._pieces[start, stop] = tensors
        if not is_last:
            self._pieces = dict(sorted(self._pieces.items(), key=_PLACE))

    def restore(self, tensors: Iterator[torch.Tensor | None]) -> None:
        """See :meth:`_Saved.restore`."""
        super().restore(tensors)
        self._slots_left = {start: stop - start for start, stop in self._pieces}

    def take(self, start: int, stop: int) -> _Tensors:
        """The tensors of any cut: views where it lies inside one of the forward's, copies where it spans several.

        Raises:
            ValueError: slots that were never put, or that are gone.
        """
        if not self._pieces:
            raise ValueError(f"slots [{start}, {stop}): nothing has come through the forward yet")
        if start == stop:  # no slots: none of any piece
            return self._part(next(iter(self._pieces.values())), 0, 0)
        parts, reached = [], start
        for (first, last), tensors in list(self._pieces.items()):
            low, high = first if first > start else start, last if last < stop else stop
            if low < high and low == reached:
                self._note_taken(first, last, high - low)
                whole = (low, high) == (first, last)
                parts.append(tensors if whole else self._part(tensors, low - first, high - low))
                reached = high
        if reached != stop:
            known = ", ".join(f"[{first}, {last})" for first, last in self._pieces)
            raise ValueError(f"slots [{start}, {stop}): only {known} came through the forward")
        return parts[0] if len(parts) == 1 else _joined(parts, self._dim)

    def _note_taken(self, first: int, last: int, num_slots: int) -> None:
        if self._slots_left is None:
            return
        self._slots_left[first] -= num_slots
        if self._slots_left[first] < 0:
            raise ValueError(f"slots [{first}, {last}) are read a second time, and may be gone: restore them first")
        if self._slots_left[first] == 0:
            tensors = self._pieces[first, last]
            # An empty cut is still to be told how its tensors look: by the first piece, so that one is not ``None``.
            is_first = next(iter(self._pieces)) == (first, last)
            parts = self._part(tensors, 0, 0) if is_first else (None,) * len(tensors)
            self._pieces[first, last] = tuple([None if each is None else torch.empty_like(each) for each in parts])

    def _part(self, tensors: _Tensors, start: int, length: int) -> _Tensors:
        return tuple([None if each is None else each.narrow(self._dim, start, length) for each in tensors])


class SavedRows(_Saved):
    """What one forward call keeps of several experts: for each chunk some tensors [rows, ...].

    Within a chunk rows lie expert by expert. Where the backward has other chunks, its rows are picked from all of them
    by number.

    Args:
        order: [rows] int64, of each row in the backward's chunks its number among those of the forward; ``None``
            where the chunks are the same.
        bounds: the first row of each chunk of the backward, and last their number.
    """

    def __init__(self, order: torch.Tensor | None, bounds: Sequence[int]) -> None:
        super().__init__()
        self._order = order
        self._bounds = bounds
        self._whole: _Tensors | None = None
        self._left: set[int] | None = None
        """The chunks that have not been taken; ``None`` while everything stays."""

    def put(self, chunk: int, tensors: _Tensors) -> None:
        """Keep the tensors of a chunk of the forward.

        Raises:
            ValueError: the chunk is here already.
        """
        if chunk in self._pieces:
            raise ValueError(f"chunk {chunk} was given twice")
        self._pieces[chunk] = tensors

    def release(self) -> list[torch.Tensor | None]:
        """See :meth:`_Saved.release`."""
        self._whole = None
        return super().release()

    def restore(self, tensors: Iterator[torch.Tensor | None]) -> None:
        """See :meth:`_Saved.restore`."""
        super().restore(tensors)
        self._left = set(range(len(self._bounds) - 1))

    def take(self, chunk: int) -> _Tensors:
        """The tensors of a chunk of the backward.

        Raises:
            ValueError: nothing came through the forward, or what came is gone.
        """
        if not self._pieces:
            raise ValueError("nothing has come through the forward yet")
        if self._left is not None:
            if chunk not in self._left:
                raise ValueError(f"chunk {chunk} is read a second time, and may be gone: restore it first")
            self._left.remove(chunk)
        if self._order is None:
            tensors = self._pieces[chunk]
            if self._left is not None:
                self._pieces[chunk] = (None,) * len(tensors)
            return tensors
        if self._whole is None:
            self._whole = _joined(list(self._pieces.values()), dim=0)
            if self._left is not None:
                self._pieces = {each: (None,) * len(piece) for each, piece in self._pieces.items()}
        whole, order = self._whole, self._order[self._bounds[chunk] : self._bounds[chunk + 1]]
        if self._left is not None and not self._left:
            self._whole = None
        return tuple(None if each is None else each.index_select(0, order) for each in whole)


def _joined(pieces: Sequence[_Tensors], dim: int) -> _Tensors:
    return tuple([None if parts[0] is None else torch.cat(parts, dim) for parts in zip(*pieces, strict=True)])

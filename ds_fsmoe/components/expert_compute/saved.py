# SPDX-License-Identifier: Apache-2.0
"""Keeps tensors of the forward's chunks for the backward's chunks.

``written_call`` and ``autograd_call`` own one each.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch

_PLACE = operator.itemgetter(0)
_ROWS = -2
"""The dimension of slots, or of rows, of every tensor."""
_Tensors = tuple[torch.Tensor | None, ...]
"""``None`` among tensors is an empty place, and is returned as ``None``."""


class SavedTensors:
    """Keeps some tensors of one forward call for each of its chunks [start, stop) of slots, or of rows.

    A chunk's tensors are [..., stop - start, X]. They stay until this object is dropped, and may be read any number of
    times. Released and restored tensors are read once, so that memory falls during a backward: a piece is freed when
    all its slots have been taken.

    Args:
        order: [rows] int64, for each row of the backward its number in the forward; ``None`` where these are the same.
            With it, rows are picked from all pieces.
    """

    def __init__(self, order: torch.Tensor | None = None) -> None:
        self._order = order
        self._saved: dict[tuple[int, int], _Tensors] = {}
        self._whole: _Tensors | None = None
        """All pieces joined, while rows are picked from them."""
        self._left: dict[int, int] | None = None
        """First slot of a piece, or of the whole -> the slots that have not been taken; ``None`` while all are kept."""

    def put(self, start: int, stop: int, tensors: _Tensors) -> None:
        """Keep the tensors of a chunk.

        Raises:
            ValueError: some of its slots are saved already.
        """
        for first, last in self._saved:
            if first < stop and start < last and start < stop and first < last:
                raise ValueError(f"slots [{start}, {stop}) were saved twice: [{first}, {last}) before")
        is_last = not self._saved or next(reversed(self._saved)) < (start, stop)
        self._saved[start, stop] = tensors
        if not is_last:
            self._saved = dict(sorted(self._saved.items(), key=_PLACE))

    def release(self) -> list[torch.Tensor | None]:
        """Return all tensors, and keep none; the caller keeps them until :meth:`restore`."""
        released = [tensor for piece in self._saved.values() for tensor in piece]
        self._saved = {place: (None,) * len(piece) for place, piece in self._saved.items()}
        self._whole = None
        return released

    def restore(self, tensors: Iterator[torch.Tensor | None]) -> None:
        """Restore the released tensors, in that order."""
        self._saved = {place: tuple(next(tensors) for _ in piece) for place, piece in self._saved.items()}
        if self._order is None:
            self._left = {start: stop - start for start, stop in self._saved}
        else:
            self._left = {0: len(self._order)}

    def first_of_each(self) -> list[torch.Tensor]:
        """Return the first tensor of every piece that is not released."""
        return [piece[0] for piece in self._saved.values() if piece[0] is not None]

    def take(self, start: int, stop: int) -> _Tensors:
        """Return the tensors of any chunk: views where it is inside one of the forward's, copies where it spans
        several.

        Raises:
            ValueError: slots that were never saved, or that have been freed.
        """
        if not self._saved:
            raise ValueError(f"slots [{start}, {stop}): no forward has saved them yet")
        if start == stop:  # an empty chunk
            return _part(next(iter(self._saved.values())), 0, 0)
        if self._order is not None:
            return self._picked(start, stop, self._order)
        parts, reached = [], start
        for (first, last), tensors in list(self._saved.items()):
            low, high = first if first > start else start, last if last < stop else stop
            if low < high and low == reached:
                if self._left is not None and self._are_all_taken(first, last, high - low):
                    self._drop((first, last))
                whole = (low, high) == (first, last)
                parts.append(tensors if whole else _part(tensors, low - first, high - low))
                reached = high
        if reached != stop:
            known = ", ".join(f"[{first}, {last})" for first, last in self._saved)
            raise ValueError(f"slots [{start}, {stop}): the forward saved only {known}")
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _picked(self, start: int, stop: int, order: torch.Tensor) -> _Tensors:
        """Return the tensors of rows of the backward, picked from all of the forward."""
        is_last = self._left is not None and self._are_all_taken(0, len(order), stop - start)
        whole = self._whole
        if whole is None:
            whole = self._whole = _joined(list(self._saved.values()))
            for place in self._saved if self._left is not None else ():
                self._drop(place)
        if is_last:
            self._whole = None
        picked_R = order[start:stop]
        return tuple(None if each is None else each.index_select(0, picked_R) for each in whole)

    def _are_all_taken(self, first: int, last: int, num_slots: int) -> bool:
        """Count taken slots of [first, last); return True if none is left.

        Raises:
            ValueError: slots are taken a second time.
        """
        self._left[first] -= num_slots
        if self._left[first] < 0:
            raise ValueError(f"slots [{first}, {last}) are read a second time, and may be freed: restore them first")
        return self._left[first] == 0

    def _drop(self, place: tuple[int, int]) -> None:
        tensors = self._saved[place]
        # An empty chunk still needs the shape of tensors, from the first piece, so that piece does not become ``None``.
        is_first = next(iter(self._saved)) == place
        parts = _part(tensors, 0, 0) if is_first else (None,) * len(tensors)
        self._saved[place] = tuple([None if each is None else torch.empty_like(each) for each in parts])


def _part(tensors: _Tensors, start: int, length: int) -> _Tensors:
    return tuple([None if each is None else each.narrow(_ROWS, start, length) for each in tensors])


def _joined(pieces: Sequence[_Tensors]) -> _Tensors:
    return tuple([None if parts[0] is None else torch.cat(parts, _ROWS) for parts in zip(*pieces, strict=True)])

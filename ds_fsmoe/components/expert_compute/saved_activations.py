# SPDX-License-Identifier: Apache-2.0
"""Tensors kept by the cuts of the forward and read by those of the backward."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

import torch

_PLACE = operator.itemgetter(0, 1)


class SavedActivations:
    """What one forward call keeps: for each of its cuts [start, stop) of the capacity some tensors.

    The capacity is one dimension of every tensor, so a cut's tensors are [N, stop - start, ...] where it is 1. What was
    put here stays until this object is dropped, and may be read any number of times. What was given away and has come
    back is read once: a piece goes when all its slots have been taken, so that memory falls while a backward proceeds.
    """

    def __init__(self, dim: int = 1) -> None:
        """
        Args:
            dim: of the capacity.
        """
        self._dim = dim
        self._pieces: list[tuple[int, int, tuple[torch.Tensor | None, ...]]] = []
        self._slots_left: dict[int, int] | None = None
        """First slot of a piece -> how many of its slots have not been taken; ``None`` while everything stays."""

    def put(self, start: int, stop: int, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """Keep the tensors of a cut. ``None`` among them is nothing, and comes back as ``None``.

        Raises:
            ValueError: some of its slots are here already.
        """
        self.check_is_new(start, stop)
        bisect.insort(self._pieces, (start, stop, tensors), key=_PLACE)

    def check_is_new(self, start: int, stop: int) -> None:
        """Refuse a cut some of whose slots are here already.

        Raises:
            ValueError: they are.
        """
        for first, last, _ in self._pieces:
            if first < stop and start < last and start < stop and first < last:
                raise ValueError(f"slots [{start}, {stop}) were given twice: [{first}, {last}) came before")

    def release(self) -> list[torch.Tensor | None]:
        """Give all tensors away, for somebody else to keep until :meth:`restore`."""
        tensors = [tensor for _, _, of_piece in self._pieces for tensor in of_piece]
        self._pieces = [(start, stop, (None,) * len(of_piece)) for start, stop, of_piece in self._pieces]
        return tensors

    def first_of_each(self) -> list[torch.Tensor]:
        """The first tensor of every piece that is here."""
        return [of_piece[0] for _, _, of_piece in self._pieces if of_piece[0] is not None]

    def restore(self, tensors: Iterator[torch.Tensor | None]) -> None:
        """Take back what was given away, in that order."""
        self._pieces = [(start, stop, tuple(next(tensors) for _ in piece)) for start, stop, piece in self._pieces]
        self._slots_left = {start: stop - start for start, stop, _ in self._pieces}

    def take(self, start: int, stop: int) -> tuple[torch.Tensor | None, ...]:
        """The tensors of any cut: views where it lies inside one of the forward's, copies where it spans several.

        Raises:
            ValueError: slots that were never put, or that are gone.
        """
        if not self._pieces:
            raise ValueError(f"slots [{start}, {stop}): nothing has come through the forward yet")
        if start == stop:  # no slots: none of any piece
            return tuple([_narrow(tensor, self._dim, 0, 0) for tensor in self._pieces[0][2]])
        parts, reached = [], start
        for index, (first, last, tensors) in enumerate(self._pieces):
            low, high = first if first > start else start, last if last < stop else stop
            if low < high and low == reached:
                self._note_taken(index, high - low)
                whole = (low, high) == (first, last)
                parts.append(tensors if whole else self._part(tensors, low - first, high - low))
                reached = high
        if reached != stop:
            known = ", ".join(f"[{first}, {last})" for first, last, _ in self._pieces)
            raise ValueError(f"slots [{start}, {stop}): only {known} came through the forward")
        if len(parts) == 1:
            return parts[0]
        return tuple(None if each[0] is None else torch.cat(each, self._dim) for each in zip(*parts, strict=True))

    def _note_taken(self, index: int, num_slots: int) -> None:
        first, last, tensors = self._pieces[index]
        if self._slots_left is None:
            return
        self._slots_left[first] -= num_slots
        if self._slots_left[first] < 0:
            raise ValueError(f"slots [{first}, {last}) are read a second time, and may be gone: restore them first")
        if self._slots_left[first] == 0:
            # An empty cut is still to be told how its tensors look: by the first piece, so that one is not ``None``.
            parts = (None,) * len(tensors) if index else self._part(tensors, 0, 0)
            empty = tuple([None if each is None else torch.empty_like(each) for each in parts])
            self._pieces[index] = (first, last, empty)

    def _part(
        self, tensors: tuple[torch.Tensor | None, ...], start: int, length: int
    ) -> tuple[torch.Tensor | None, ...]:
        return tuple([_narrow(each, self._dim, start, length) for each in tensors])


def _narrow(tensor: torch.Tensor | None, dim: int, start: int, length: int) -> torch.Tensor | None:
    return None if tensor is None else tensor.narrow(dim, start, length)

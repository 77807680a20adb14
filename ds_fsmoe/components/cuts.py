# SPDX-License-Identifier: Apache-2.0
"""Tensors kept by the cuts of the forward and read by those of the backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class Cuts:
    """What one forward call keeps: for each of its cuts [start, stop) of the capacity some tensors.

    The capacity is dimension 1 of every tensor, so a cut's tensors are [N, stop - start, ...]. What was put here stays
    until this object is dropped, and may be read any number of times. What was given away and has come back is read
    once: a piece goes when all its slots have been taken, so that memory falls while a backward proceeds.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, tuple[torch.Tensor | None, ...]]] = []
        self._slots_left: dict[int, int] | None = None
        """First slot of a piece -> how many of its slots have not been taken; ``None`` while everything stays."""

    def put(self, start: int, stop: int, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """Keep the tensors of a cut. ``None`` among them is nothing, and comes back as ``None``.

        Raises:
            ValueError: some of its slots are here already.
        """
        for first, last, _ in self._pieces:
            if max(first, start) < min(last, stop):
                raise ValueError(f"slots [{start}, {stop}) were given twice: [{first}, {last}) came before")
        self._pieces.append((start, stop, tensors))
        self._pieces.sort(key=lambda piece: piece[:2])

    def release(self) -> list[torch.Tensor | None]:
        """Give all tensors away, for somebody else to keep until :meth:`restore`."""
        tensors = [tensor for _, _, of_piece in self._pieces for tensor in of_piece]
        self._pieces = [(start, stop, (None,) * len(of_piece)) for start, stop, of_piece in self._pieces]
        return tensors

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
            return tuple(None if tensor is None else tensor[:, :0] for tensor in self._pieces[0][2])
        parts, reached = [], start
        for index, (first, last, tensors) in enumerate(self._pieces):
            low, high = max(first, start), min(last, stop)
            if low < high and low == reached:
                self._note_taken(index, high - low)
                whole = (low, high) == (first, last)
                parts.append(tensors if whole else tuple(_narrow(each, low - first, high - low) for each in tensors))
                reached = high
        if reached != stop:
            known = ", ".join(f"[{first}, {last})" for first, last, _ in self._pieces)
            raise ValueError(f"slots [{start}, {stop}): only {known} came through the forward")
        if len(parts) == 1:
            return parts[0]
        return tuple(None if each[0] is None else torch.cat(each, dim=1) for each in zip(*parts, strict=True))

    def _note_taken(self, index: int, num_slots: int) -> None:
        first, last, tensors = self._pieces[index]
        if self._slots_left is None:
            return
        self._slots_left[first] -= num_slots
        if self._slots_left[first] < 0:
            raise ValueError(f"slots [{first}, {last}) are read a second time, and may be gone: restore them first")
        if self._slots_left[first] == 0:
            # Not ``None``: an empty cut is still to be told how its tensors look.
            empty = tuple(None if each is None else torch.empty_like(each[:, :0]) for each in tensors)
            self._pieces[index] = (first, last, empty)


def _narrow(tensor: torch.Tensor | None, start: int, length: int) -> torch.Tensor | None:
    return None if tensor is None else tensor.narrow(1, start, length)

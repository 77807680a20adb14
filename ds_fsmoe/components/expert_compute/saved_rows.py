# SPDX-License-Identifier: Apache-2.0
"""Tensors kept by the chunks of the forward and read by those of the backward, for several experts together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


class SavedRows:
    """What one forward call keeps of several experts: for each chunk some tensors [1, rows, ...].

    Within a chunk rows lie expert by expert. Where the backward has other chunks, its rows are picked from all of them
    by number. What was put here stays until this object is dropped, and may be read any number of times. What was
    given away and has come back is read once, so that memory falls while a backward proceeds.

    Args:
        order: [rows] int64, of each row in the backward's chunks its number among those of the forward; ``None``
            where the chunks are the same.
        bounds: the first row of each chunk of the backward, and last their number.
    """

    def __init__(self, order: torch.Tensor | None, bounds: Sequence[int]) -> None:
        self._order = order
        self._bounds = bounds
        self._pieces: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self._is_read_once = False
        self._whole: tuple[torch.Tensor | None, ...] | None = None
        self._left: set[int] = set()

    def put(self, chunk: int, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """Keep the tensors of a chunk of the forward. ``None`` among them is nothing, and comes back as ``None``.

        Raises:
            ValueError: the chunk is here already.
        """
        if chunk in self._pieces:
            raise ValueError(f"chunk {chunk} was given twice")
        self._pieces[chunk] = tensors

    def release(self) -> list[torch.Tensor | None]:
        """Give all tensors away, for somebody else to keep until :meth:`restore`."""
        released = [tensor for piece in self._pieces.values() for tensor in piece]
        self._pieces = {chunk: (None,) * len(piece) for chunk, piece in self._pieces.items()}
        self._whole = None
        return released

    def restore(self, tensors: Iterator[torch.Tensor | None]) -> None:
        """Take back what was given away, in that order."""
        self._pieces = {chunk: tuple(next(tensors) for _ in piece) for chunk, piece in self._pieces.items()}
        self._is_read_once, self._left = True, set(range(len(self._bounds) - 1))

    def first_of_each(self) -> list[torch.Tensor]:
        """The first tensor of every chunk that is here."""
        return [piece[0] for piece in self._pieces.values() if piece[0] is not None]

    def take(self, chunk: int) -> tuple[torch.Tensor | None, ...]:
        """The tensors of a chunk of the backward.

        Raises:
            ValueError: nothing came through the forward, or what came is gone.
        """
        if not self._pieces:
            raise ValueError("nothing has come through the forward yet")
        if self._is_read_once:
            if chunk not in self._left:
                raise ValueError(f"chunk {chunk} is read a second time, and may be gone: restore it first")
            self._left.remove(chunk)
        if self._order is None:
            tensors = self._pieces[chunk]
            if self._is_read_once:
                self._pieces[chunk] = (None,) * len(tensors)
            return tensors
        if self._whole is None:
            self._whole = tuple(map(_joined, zip(*self._pieces.values(), strict=True)))
            if self._is_read_once:
                self._pieces = {each: (None,) * len(piece) for each, piece in self._pieces.items()}
        whole, order = self._whole, self._order[self._bounds[chunk] : self._bounds[chunk + 1]]
        if self._is_read_once and not self._left:
            self._whole = None
        return tuple(None if each is None else each.index_select(1, order) for each in whole)


def _joined(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    return None if parts[0] is None else torch.cat(parts, dim=1)

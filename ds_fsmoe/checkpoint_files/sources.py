# SPDX-License-Identifier: Apache-2.0
"""Says where in files consecutive elements of a tensor are, and copies no others out of them, file by file.

Of a part of experts they are in the parts that another layout has saved. Experts that lie alike in both follow one
another, so ranges of one are ranges of the other. Else they are put together expert by expert, or by some rows: never
more of a parameter is in memory.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.checkpoint_files.numbering import stage_of_file
from ds_fsmoe.checkpoint_files.pieces import Group, Index, Keys, Piece
from ds_fsmoe.checkpoint_files.tags import CheckpointError

_OPEN_FILES = 1024
_ROWS = 64
"""The rows of a parameter of layout ``"innermost"`` that are put together at a time."""


@dataclass(frozen=True)
class Source:
    """Consecutive elements of a flattened tensor.

    Attributes:
        file: the file that has them, or the first of several.
        read: returns the tensor; of a mapped file no element is read by that.
        at: the first element.
        size: the number of elements.
        dtype: the data type to which they are rounded; ``None``: as they are.
    """

    file: str
    read: Callable[[], torch.Tensor]
    at: int
    size: int
    dtype: torch.dtype | None = None

    def take(self) -> torch.Tensor:
        """Return the elements: a view of the file where they are not rounded.

        Raises:
            CheckpointError: the tensor has not as many.
        """
        found = self.read().detach().reshape(-1)[self.at : self.at + self.size]
        if len(found) != self.size:
            raise CheckpointError(f"{self.file} has {len(found)} of {self.size} elements from {self.at} on")
        return found if self.dtype is None else found.to(self.dtype)


def joined(sources: Iterable[Source]) -> torch.Tensor:
    """Return the elements of sources, one behind the other: of a single one as :meth:`Source.take` returns them."""
    taken = [each.take() for each in sources]
    return taken[0] if len(taken) == 1 else torch.cat(taken or [torch.empty(0)])


class Copies:
    """Collects what is to be copied out of files, and copies file by file, so that each is opened once."""

    def __init__(self) -> None:
        self._all: list[tuple[Source, torch.Tensor]] = []

    def add(self, sources: Iterable[Source], target: torch.Tensor) -> None:
        """Have the elements of sources copied into a flat tensor, one behind the other."""
        at = 0
        for each in sources:
            self._all.append((each, target[at : at + each.size]))
            at += each.size

    def run(self) -> None:
        """Copy all that was added.

        Raises:
            CheckpointError: a file is damaged.
        """
        for source, target in sorted(self._all, key=lambda each: each[0].file):
            target.copy_(source.take())
        self._all.clear()


class OpenFiles:
    """Keeps the files of a folder open that were used last.

    Args:
        place: the folder.
        read: reads a file whose tensors stay in it until they are used.
    """

    def __init__(self, place: Path, read: Callable[[Path], Any]) -> None:
        self._place = place
        self._opened = lru_cache(_OPEN_FILES)(lambda name: read(place / name))

    def __call__(self, name: str) -> Any:
        """Return what a file holds."""
        return self._opened(name)

    def at(self, name: str, keys: Keys) -> Any:
        """Return what a file holds under keys.

        Raises:
            CheckpointError: it has nothing there.
        """
        found = self(name)
        try:
            for key in keys:
                found = found[key]
            return found
        except (KeyError, IndexError, TypeError):
            raise CheckpointError(f"{self._place / name} has no {keys[-1]!r}") from None


class SavedPieces:
    """Finds the pieces of parameters and states by their elements.

    Args:
        index: where they are; ``None`` where that was not written down.
        stage: the pipeline stage whose pieces count of what several have.
        files: the files.
        place: their folder, for messages.
    """

    def __init__(self, index: Index | None, stage: int, files: OpenFiles, place: Path) -> None:
        self._index, self._stage, self._files, self._place = index, stage, files, place

    @cached_property
    def _of(self) -> dict[str, list[tuple[Group, Piece]]]:
        """Maps the name of a parameter -> its pieces in order. It is large with many ranks, and not needed by all."""
        found: dict[str, list[tuple[Group, Piece]]] = {}
        groups = () if self._index is None else self._index.groups
        stages: dict[str, int] = {}
        known: set[tuple[str, int]] = set()
        for group in sorted(groups, key=lambda each: stage_of_file(each.file) != self._stage):
            number = stage_of_file(group.file)
            for piece in group.pieces:
                # Without ZeRO each rank that writes a file has all that is no expert's; each stage has what they share.
                if stages.setdefault(piece.name, number) == number and (piece.name, piece.first) not in known:
                    known.add((piece.name, piece.first))
                    found.setdefault(piece.name, []).append((group, piece))
        for each in found.values():
            each.sort(key=_first)
        return found

    def has(self, name: str, item: str) -> bool:
        """Return whether there is an item of a parameter."""
        return any(item in group.items for group, _ in self._of.get(name, ()))

    def sources(
        self, name: str, item: str, first: int, size: int, dtype: torch.dtype | None = None
    ) -> Iterator[Source]:
        """Return where the elements ``first`` to ``first + size`` of an item are.

        Args:
            name: the parameter's name in the files.
            item: the name of the state.
            first: the first element.
            size: the number of elements.
            dtype: see :class:`Source`.

        Raises:
            CheckpointError: some are missing.
        """
        pieces, at, end = self._of.get(name, ()), first, first + size
        for number in range(max(0, bisect.bisect_right(pieces, first, key=_first) - 1), len(pieces)):
            group, piece = pieces[number]
            if at >= end or piece.first > at:
                break
            stop = min(end, piece.first + piece.size)
            if item in group.items and stop > at:
                keys = group.items[item]
                yield Source(
                    group.file,
                    lambda file=group.file, keys=keys: self._files.at(file, keys),
                    piece.at + at - piece.first,
                    stop - at,
                    dtype,
                )
                at = stop
        if at < end:
            raise CheckpointError(f"{self._place} has {at - first} of the {size} elements of {item} of {name}")


def _first(found: tuple[Group, Piece]) -> int:
    return found[1].first


Saved = Callable[[int, int, int], Iterator[Source]]
"""Takes the number of a saved part, its first element and a number of elements -> where these are."""


def elements_of_part(
    was: ExpertPart, here: ExpertPart, shape: Sequence[int], first: int, size: int, saved: Saved
) -> Iterator[Source]:
    """Return where the elements ``first`` to ``first + size`` of a part are.

    Args:
        was: the first of the saved parts.
        here: the part that is wanted.
        shape: the shape of the whole parameter.
        first: the first element of the flattened part.
        size: the number of elements.
        saved: says where the elements of saved parts are.
    """
    if _lie_alike(was, here):
        count, index = (1, 0) if here.shard is None else (here.shard.count, here.shard.index)
        at, end = here.ep_rank * math.prod(here.part_shape(shape)) + first, first + size
        end += at - first
        of_part = math.prod(was.part_shape(shape))
        while at < end:
            number, start = divmod(at, of_part)
            taken = min(end - at, of_part - start)
            yield from saved(number * count + index, start, taken)
            at += taken
        return
    in_block = _expert if was.layout == "stacked" else _some_rows
    local = here.part_shape(shape)
    block = math.prod(local[1:]) * (local[0] // here.num_local if was.layout == "stacked" else _ROWS)
    for number in range(first // block, -(-(first + size) // block)):
        file, read = in_block(was, here, shape, number, saved)
        start, stop = max(first - number * block, 0), min(first + size - number * block, block)
        yield Source(file, read, start, stop - start)


def _lie_alike(was: ExpertPart, here: ExpertPart) -> bool:
    """Return whether the parts of all ranks, one behind the other, are the same in both."""
    if was.layout == "innermost":
        return was.ep_size == here.ep_size
    a, b = was.shard, here.shard
    if a is None or b is None:
        return a is b
    # What is whole in the first shard is zero in the others, whatever they have saved.
    return (a.count, a.dim, a.pieces) == (b.count, b.dim, b.pieces) and (b.dim is not None or not b.index)


def _expert(
    was: ExpertPart, here: ExpertPart, shape: Sequence[int], number: int, saved: Saved
) -> tuple[str, Callable[[], torch.Tensor]]:
    """Return the first file, and what reads this rank's shard of one of its experts."""
    part, place = divmod(here.experts[number], was.num_local)
    mine = was.part_shape(shape)
    one = (mine[0] // was.num_local, *mine[1:])
    count = 1 if was.shard is None else was.shard.count
    needed = count if was.shard is not None and was.shard.dim is not None else 1
    numel = math.prod(one)
    sources = [list(saved(part * count + each, place * numel, numel)) for each in range(needed)]

    def read() -> torch.Tensor:
        shards = [joined(each).view(one) for each in sources]
        whole = shards[0] if was.shard is None else was.shard.join(shards)
        return whole if here.shard is None else here.shard.cut(whole)

    return sources[0][0].file, read


def _some_rows(
    was: ExpertPart, here: ExpertPart, shape: Sequence[int], number: int, saved: Saved
) -> tuple[str, Callable[[], torch.Tensor]]:
    """Return the first file, and what reads this rank's experts in some rows."""
    rank, experts, theirs = shape[1] // was.num_experts, here.experts, was.num_local
    top, rows = number * _ROWS, min(_ROWS, shape[0] - number * _ROWS)
    width = rank * theirs
    parts = range(experts.start // theirs, (experts.stop - 1) // theirs + 1)
    sources = [list(saved(each, top * width, rows * width)) for each in parts]

    def read() -> torch.Tensor:
        found = []
        for part, each in zip(parts, sources, strict=True):
            mine = slice(max(experts.start - part * theirs, 0), experts.stop - part * theirs)
            found.append(joined(each).view(rows, rank, theirs)[..., mine])
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)

    return sources[0][0].file, read

# SPDX-License-Identifier: Apache-2.0
"""Finds the elements of a part of an expert parameter in the parts that another layout has saved.

Experts that lie alike in both follow one another, so ranges of one are ranges of the other. Else they are put together
expert by expert, or by some rows: never more of a parameter is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, Shard
from ds_fsmoe.checkpoint_files.sources import Source, joined

Saved = Callable[[int, int, int], Iterator[Source]]
"""Takes the number of a saved part, its first element and a number of elements -> where these are."""
_ROWS = 64
"""The rows of a parameter of layout ``"innermost"`` that are put together at a time."""


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
    shards = count if was.shard is not None and was.shard.dim is not None else 1
    numel = math.prod(one)
    sources = [list(saved(part * count + each, place * numel, numel)) for each in range(shards)]

    def read() -> torch.Tensor:
        whole = _whole(was.shard, [joined(each).view(one) for each in sources])
        return whole if here.shard is None else here.shard.cut(whole)

    return sources[0][0].file, read


def _whole(shard: Shard | None, shards: list[torch.Tensor]) -> torch.Tensor:
    return shards[0] if shard is None else shard.join(shards)


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

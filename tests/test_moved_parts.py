# SPDX-License-Identifier: Apache-2.0
"""Elements of a part are found in the parts of another layout, range by range, without the whole parameter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, Shard
from ds_fsmoe.checkpoint_files.pieces import (
    Group,
    Index,
    OpenFiles,
    Piece,
    SavedPieces,
    Source,
    elements_of_part,
    joined,
)
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from tests.taken_bytes import Taken

E, WIDTH = 4, 12


def parts_of(ep_size: int, shard: Shard | None, layout: str = "stacked") -> list[ExpertPart]:
    shards = [None] if shard is None else [replace(shard, index=index) for index in range(shard.count)]
    return [ExpertPart(layout, E, ep_size, rank, each) for rank in range(ep_size) for each in shards]


SHARDS = [None, Shard(2, 0, 1), Shard(2, 0, 2), Shard(2, 0, 1, pieces=2), Shard(3, 0, 1), Shard(2, 0, None)]
STACKED = [
    (parts_of(ep, was), parts_of(to, now))
    for ep, to in ((1, 4), (4, 2), (2, 2), (2, 1))
    for was in SHARDS
    for now in SHARDS
    if (was is not None and was.dim is None) == (now is not None and now.dim is None) or None in (was, now)
]
INNERMOST = [(parts_of(ep, None, "innermost"), parts_of(to, None, "innermost")) for ep in (1, 2, 4) for to in (1, 2, 4)]


@pytest.mark.parametrize(("was", "now"), STACKED + INNERMOST)
def test_every_range_of_every_part_is_that_of_the_whole(was: list[ExpertPart], now: list[ExpertPart]) -> None:
    torch.manual_seed(0)
    # More rows than are put together at a time.
    whole = torch.randn(E, WIDTH, 2 * WIDTH) if was[0].layout == "stacked" else torch.randn(150, 3 * E)
    tensors = [each.take(whole).contiguous().view(-1) for each in was]

    def saved(number: int, first: int, size: int) -> Iterator[Source]:
        middle = first + size // 2  # in two pieces, as two ranks would have them
        for start, stop in ((first, middle), (middle, first + size)):
            yield Source("file", lambda: tensors[number], start, stop - start)

    for each in now:
        wanted = each.take(was[0].join([each.take(whole) for each in was])).reshape(-1)
        for first, size in ((0, wanted.numel()), (5, 1), (wanted.numel() // 3, wanted.numel() // 2)):
            with Taken() as taken:
                parts = [source.take() for source in elements_of_part(was[0], each, whole.shape, first, size, saved)]
            assert torch.equal(torch.cat(parts), wanted[first : first + size])
            assert taken.largest_bytes <= max(WIDTH * 2 * WIDTH, 64 * 3 * E) * whole.itemsize


def index_of(num_parameters: int, num_ranks: int) -> Index:
    """The index of ZeRO 3: every rank has a piece of every parameter."""
    groups = (
        Group(
            f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            {"fp32": ("flat",)},
            {},
            {},
            tuple(Piece(f"layer.{each}", 2 * rank, 2, 2 * each) for each in range(num_parameters)),
        )
        for rank in range(num_ranks)
    )
    return Index("Adam", tuple(groups), {})


def lines_of(work: Callable[[], Any]) -> int:
    """The executed lines of this package's files."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line" and "ds_fsmoe" in frame.f_code.co_filename
        return trace

    sys.settrace(trace)
    work()
    sys.settrace(None)
    return count


def read_by_one_rank(num_parameters: int, num_ranks: int) -> int:
    index, place = index_of(num_parameters, num_ranks), Path("folder")

    def read() -> None:
        found = SavedPieces(index, 0, OpenFiles(place, lambda path: None), place)
        for each in range(num_parameters):
            assert [source.size for source in found.sources(f"layer.{each}", "fp32", 3, 2)] == [1, 1]

    return lines_of(read)


def test_the_work_with_pieces_grows_with_their_number_and_no_faster() -> None:
    few = read_by_one_rank(200, 8)
    assert read_by_one_rank(400, 8) <= 2.2 * few
    assert read_by_one_rank(200, 16) <= 2.2 * few


def test_elements_in_pieces_that_are_missing_are_named() -> None:
    index = index_of(1, 4)
    holed = replace(index, groups=tuple(each for at, each in enumerate(index.groups) if at != 2))
    files = OpenFiles(Path("folder"), lambda path: {"flat": torch.arange(2.0) + 2 * int(path.name.split("_")[3])})
    whole, parted = (SavedPieces(each, 0, files, Path("folder")) for each in (index, holed))
    assert joined(whole.sources("layer.0", "fp32", 1, 6)).tolist() == [1, 2, 3, 4, 5, 6]
    assert joined(parted.sources("layer.0", "fp32", 1, 3)).tolist() == [1, 2, 3]
    with pytest.raises(CheckpointError, match=r"has 3 of the 5 elements of fp32 of layer\.0"):
        list(parted.sources("layer.0", "fp32", 1, 5))

# SPDX-License-Identifier: Apache-2.0
"""Elements of a part are found in the parts of another layout, range by range, without the whole parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, Shard
from ds_fsmoe.checkpoint_files.pieces import Source, elements_of_part
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

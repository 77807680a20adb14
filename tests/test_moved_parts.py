# SPDX-License-Identifier: Apache-2.0
"""Parts of experts, cut into shards too, are joined to what they were cut from; elements of a part are found in those
of another layout, range by range, without the whole parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, Shard, of_one_expert
from ds_fsmoe.checkpoint_files.numbering import Numbering
from ds_fsmoe.checkpoint_files.pieces import Source, elements_of_part
from tests.covering import covering
from tests.taken_bytes import Taken

E, WIDTH = 4, 12
SIZES = ((1, 4), (4, 2), (2, 2), (2, 1))
"""The ranks over which experts were spread, and are now."""
SHARDS = [None, Shard(2, 0, 1), Shard(2, 0, 2), Shard(2, 0, 1, pieces=2), Shard(3, 0, 1), Shard(2, 0, None)]


def parts_of(ep_size: int, shard: Shard | None, layout: str) -> list[ExpertPart]:
    shards = [None] if shard is None else [replace(shard, index=index) for index in range(shard.count)]
    return [ExpertPart(layout, E, ep_size, rank, each) for rank in range(ep_size) for each in shards]


def may_move(sizes: tuple[int, int], was: Shard | None, now: Shard | None) -> bool:
    """Whether one parameter can have been cut like that and like this: a last bias has no dimension to be cut along."""
    return None in (was, now) or (was.dim is None) == (now.dim is None)


@pytest.mark.parametrize(
    ("layout", "sizes", "was", "now"),
    [
        *(("stacked", *case) for case in covering(SIZES, SHARDS, SHARDS, allowed=may_move)),
        *(("innermost", sizes, None, None) for sizes in SIZES),
    ],
)
def test_every_range_of_every_part_is_that_of_the_whole(
    layout: str, sizes: tuple[int, int], was: Shard | None, now: Shard | None
) -> None:
    torch.manual_seed(0)
    # More rows than are put together at a time.
    whole = torch.randn(E, WIDTH, 2 * WIDTH) if layout == "stacked" else torch.randn(150, 3 * E)
    before, after = (parts_of(*each, layout) for each in zip(sizes, (was, now), strict=True))
    cut = [each.take(whole) for each in before]
    assert {tuple(each.shape) for each in cut} == {before[0].part_shape(whole.shape)}
    assert before[0].whole_shape(cut[0].shape) == tuple(whole.shape)
    assert torch.equal(before[0].join(cut), whole)
    tensors = [each.contiguous().view(-1) for each in cut]

    def saved(number: int, first: int, size: int) -> Iterator[Source]:
        middle = first + size // 2  # in two pieces, as two ranks would have them
        for start, stop in ((first, middle), (middle, first + size)):
            yield Source("file", lambda: tensors[number], start, stop - start)

    for each in after:
        wanted = each.take(whole).reshape(-1)
        for first, size in ((0, wanted.numel()), (5, 1), (wanted.numel() // 3, wanted.numel() // 2)):
            with Taken() as taken:
                parts = [source.take() for source in elements_of_part(before[0], each, whole.shape, first, size, saved)]
            assert torch.equal(torch.cat(parts), wanted[first : first + size])
            assert taken.largest_bytes <= max(WIDTH * 2 * WIDTH, 64 * 3 * E) * whole.itemsize


def test_gate_and_value_are_cut_alike_and_the_last_bias_is_the_first_shards() -> None:
    gate, value = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    mine = Shard(2, 1, 1, pieces=2).take(torch.cat([gate, value], 1))
    assert torch.equal(mine, torch.cat([gate[:, 2:], value[:, 2:]], 1))
    bias = torch.randn(2, 5)
    assert torch.equal(Shard(2, 0, None).take(bias), bias)
    assert not Shard(2, 1, None).take(bias).any()


@pytest.mark.parametrize(("experts", "ep", "esp"), [(4, 2, 1), (4, 2, 2), (6, 3, 2), (6, 1, 3), (5, 5, 2)])
def test_numbers_of_shards_lead_to_each_shard_of_each_expert_once(experts: int, ep: int, esp: int) -> None:
    numbering = Numbering(experts, ep, esp)
    met = [numbering.meant(number) for number in range(experts * esp)]
    assert sorted(met) == [(expert, shard) for expert in range(experts) for shard in range(esp)]
    assert [numbering.number(*each) for each in met] == list(range(experts * esp))


def test_shards_that_are_cut_out_join_to_the_whole() -> None:
    whole = torch.randn(6, 12)
    for cut in (0, 1, "first", "whole"):
        shards = [of_one_expert(cut, shard, 3).take(whole[None])[0] for shard in range(3)]
        shard = of_one_expert(cut, 0, 3).shard
        found = shards[0] if shard is None else shard.join([each.unsqueeze(0) for each in shards])[0]
        assert torch.equal(found, whole)
    with pytest.raises(ValueError, match=r"shape \[1, 6, 12\]: dimension 2 does not divide into 5 shards"):
        of_one_expert(1, 0, 5).take(whole[None])

# SPDX-License-Identifier: Apache-2.0
"""On the test bed gloo's exchanges say first what they are ready for; what arrives is what gloo's own bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.bed import full_duplex
from tests.ranks import run_on_ranks

SIZES = ((3, 0, 5), (0, 0, 2), (1, 4, 0))
"""Rows from each rank (outer) to each (inner); some are none."""


def exchanges(rank: int) -> list[torch.Tensor]:
    """What arrives, of every kind of exchange that is measured."""
    world, found = dist.get_world_size(), []
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        sends = [SIZES[rank][to] for to in range(world)]
        receives = [SIZES[source][rank] for source in range(world)]
        given = torch.randint(100, (sum(sends), 3), generator=generator).to(dtype)
        arrived = given.new_empty(sum(receives), 3)
        dist.all_to_all_single(arrived, given, receives, sends)
        found.append(arrived)
        even = torch.randint(100, (2 * world, 3), generator=generator).to(dtype)
        arrived = torch.empty_like(even)
        work = dist.all_to_all_single(arrived, even, async_op=True)
        work.wait()
        found.append(arrived)
    # In a group of its own, of two ranks, numbered otherwise than in the job.
    pair = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        mine = torch.full((2, 2), float(rank))
        whole = torch.empty(4, 2)
        dist.all_gather_into_tensor(whole, mine, group=pair)
        swapped = torch.empty(2, 2)
        dist.all_to_all_single(swapped, mine, group=pair)
        found += [whole, swapped]
    return found


def compare(rank: int, world_size: int) -> list[str]:
    dist.barrier()
    wanted = exchanges(rank)
    posted: list[str] = []
    recv, send = dist.ProcessGroup.recv, dist.ProcessGroup.send

    def noted(kind: str, function: Any) -> Any:
        def posting(*args: Any) -> Any:
            posted.append(kind)
            return function(*args)

        return posting

    full_duplex.use_both_directions()
    dist.ProcessGroup.recv, dist.ProcessGroup.send = noted("receive", recv), noted("send", send)
    found = exchanges(rank)
    dist.ProcessGroup.recv, dist.ProcessGroup.send = recv, send
    assert all(torch.equal(ours, gloos) for ours, gloos in zip(found, wanted, strict=True))
    first = posted[: world_size + 1]
    return first


def test_what_arrives_is_what_gloo_brings_and_readiness_is_told_ahead_of_any_message(tmp_path: Path) -> None:
    for rank, posted in enumerate(run_on_ranks(compare, 3, tmp_path)):
        receives = sum(SIZES[source][rank] > 0 for source in range(3) if source != rank)
        assert posted[:receives] == ["receive"] * receives, f"rank {rank}"
        assert posted[receives] == "send", f"rank {rank}"


@pytest.mark.parametrize("function", ["all_to_all_single", "all_gather_into_tensor"])
def test_a_rank_alone_sends_nothing(function: str, tmp_path: Path) -> None:
    assert run_on_ranks(alone, 1, tmp_path, function) == [True]


def alone(rank: int, world_size: int, function: str) -> bool:
    full_duplex.use_both_directions()
    given = torch.arange(4.0)
    arrived = torch.empty(4)
    getattr(dist, function)(arrived, given)
    return torch.equal(arrived, given)

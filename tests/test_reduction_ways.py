# SPDX-License-Identifier: Apache-2.0
"""The ways to add gradients up: inside nodes first, and so that each rank gets the part that it updates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.distributed.groups import make
from ds_fsmoe.execution import node_links
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.gradients import reduction_algorithms
from ds_fsmoe.gradients.background_lane import BackgroundThreads
from ds_fsmoe.gradients.reduction_algorithms import (
    AllReduce,
    AllReduceByNodes,
    Range,
    ReduceScatter,
    ReduceScatterByNodes,
    ReductionAlgorithm,
    Stretch,
)
from ds_fsmoe.planning.groups import Communicators, regular
from ds_fsmoe.planning.schedule import GRAD, GRAD_GATHER, GRAD_SCATTER
from tests.ranks import run_on_ranks

# ---- the ways by themselves


def links(rank: int, world_size: int, per_node: int) -> NodeLinks:
    nodes = regular([each // per_node for each in range(world_size)])
    assert nodes is not None
    between = make(Communicators("test_inter", tuple(zip(*nodes, strict=True))))
    return NodeLinks(nodes, rank, between, make(Communicators("test_intra", nodes)))


class OneTensor:
    """Elements that lie in one tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def packed(self, ranges: Sequence[Range]) -> torch.Tensor:
        return torch.cat([self.values[first:stop] for first, stop in ranges] or [self.values[:0]])

    def put(self, ranges: Sequence[Range], sums: torch.Tensor) -> None:
        at = 0
        for first, stop in ranges:
            self.values[first:stop] = sums[at : at + stop - first]
            at += stop - first


def drawn_stretches(rng: random.Random, numel: int, num_ranks: int) -> list[Stretch]:
    """Owners in any order; some own nothing, some several stretches."""
    found, at = [], 0
    while at < numel:
        stop = min(numel, at + rng.randint(1, 9))
        found.append(Stretch(at, stop, rng.randrange(num_ranks)))
        at = stop
    return found


def sums(rank: int, world_size: int) -> int:
    """How many sums are right, by drawn owners, between drawn bounds."""
    rng, checked = random.Random(7), 0
    group = dist.group.WORLD
    for per_node in (2, 3):
        nodes = links(rank, world_size, per_node)
        for case in range(8):
            numel = rng.choice([1, 2, 5, 13, 64, 101])
            stretches = drawn_stretches(rng, numel, world_size)
            first = rng.randrange(numel)
            cut = rng.choice([(0, numel), (first, numel), (first, first + 1), (first, first)])
            generator = torch.Generator().manual_seed(case)
            of_ranks = torch.randint(-50, 50, (world_size, numel), generator=generator).double()
            for_all: list[ReductionAlgorithm] = [AllReduce(group), AllReduce(group, most=7), AllReduceByNodes(nodes)]
            for_owners: list[ReductionAlgorithm] = [
                ReduceScatter(group, stretches),
                ReduceScatter(group, stretches, most=7),
                ReduceScatterByNodes(nodes, stretches),
            ]
            owner_of = [each.owner for each in stretches for _ in range(each.first, each.stop)]
            for way in (*(for_all if cut[0] < cut[1] else ()), *for_owners):
                buffer = of_ranks[rank].clone()
                for step in way.steps(OneTensor(buffer), *cut).values():
                    step()
                wanted = of_ranks.sum(dim=0)
                for at, owner in enumerate(owner_of):
                    if not cut[0] <= at < cut[1]:
                        assert buffer[at] == of_ranks[rank, at], "what was not sent is as it was"
                    elif way in for_all or owner == rank:
                        assert buffer[at] == wanted[at], (case, str(way), at)
                checked += 1
    return checked


def crossing(rank: int, world_size: int) -> list[float]:
    """The elements that this rank sends to other nodes, of 120, by three ways, from what it gives to collectives.

    An all-reduce of m elements over g ranks is a ring: each rank sends 2m(g-1)/g to the next; in one over all ranks,
    whose neighbours in a node are neighbours in the ring, the last of each node sends to another node.
    """
    per_node, numel, found = 2, 120, []
    nodes, group = links(rank, world_size, per_node), dist.group.WORLD
    each = numel // world_size
    stretches = [Stretch(at * each, (at + 1) * each, at) for at in range(world_size)]
    exchange, all_reduce = node_links.exchange_sized, dist.all_reduce

    def noted_exchange(x: Any, sends: Any, receives: Any, group: Any) -> Any:
        others = zip(dist.get_process_group_ranks(group), sends, strict=True)
        found[-1] += sum(count for other, count in others if other // per_node != rank // per_node)
        return exchange(x, sends, receives, group)

    def noted_reduce(x: Any, group: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        if ranks[(ranks.index(rank) + 1) % len(ranks)] // per_node != rank // per_node:
            found[-1] += 2 * x.numel() * (len(ranks) - 1) / len(ranks)
        return all_reduce(x, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction_algorithms, "exchange_sized", noted_exchange)
        patch.setattr(dist, "all_reduce", noted_reduce)
        for way in (AllReduce(group), AllReduceByNodes(nodes), ReduceScatterByNodes(nodes, stretches)):
            found.append(0.0)
            for step in way.steps(OneTensor(torch.zeros(numel)), 0, numel).values():
                step()
    return found


def on_ranks(rank: int, world_size: int) -> tuple[int, list[float]]:
    return sums(rank, world_size), crossing(rank, world_size)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, list[float]]]:
    """Of six ranks."""
    return run_on_ranks(on_ranks, 6, tmp_path_factory.mktemp("ranks"))


def test_every_way_adds_up_exactly_where_the_sum_is_needed(of_ranks: list[tuple[int, list[float]]]) -> None:
    assert min(checked for checked, _ in of_ranks) >= 60


def test_between_three_nodes_of_two_ranks_4_and_2_fifths_of_a_flat_rings_bytes_are_sent(
    of_ranks: list[tuple[int, list[float]]],
) -> None:
    flat, levels, owners = (sum(crossed[way] for _, crossed in of_ranks[:2]) for way in range(3))
    assert levels / flat == pytest.approx(4 / 5)  # p(n - 1) / (np - 1) of n nodes of p ranks
    assert owners / flat == pytest.approx(2 / 5)


def test_what_one_rank_owns_is_added_up_for_all_and_what_several_nodes_own_is_not() -> None:
    def tasks(*owners: int) -> tuple[str, ...]:
        stretches = [Stretch(10 * at, 10 * at + 10, owner) for at, owner in enumerate(owners)]
        way = ReduceScatterByNodes(NodeLinks(((0, 1), (2, 3)), 0), stretches)
        return tuple(way.steps(OneTensor(torch.zeros(10 * len(owners))), 0, 10 * len(owners)))

    assert tasks(3) == (GRAD_SCATTER, GRAD, GRAD_GATHER)
    assert tasks(3, 3, 3, 1) == (GRAD_SCATTER, GRAD, GRAD_GATHER)
    # One link each way, or both of a node one way: never more than both links both ways.
    assert tasks(0, 2) == tasks(2, 3) == tasks(0, 1, 2, 3) == (GRAD_SCATTER, GRAD)


# ---- beside the caller


def test_the_next_message_is_added_up_inside_before_the_last_one_is_gathered() -> None:
    beside, order = BackgroundThreads(), []

    def steps(name: str) -> dict:
        return {kind: lambda kind=kind: order.append(f"{name} {kind}") for kind in (GRAD_SCATTER, GRAD, GRAD_GATHER)}

    waits = [beside.start(steps(name)) for name in "abc"]
    for wait in waits:
        wait()
    beside.close()
    inside = [each for each in order if not each.endswith(" GRAD")]
    scatters, gathers = f" {GRAD_SCATTER}", f" {GRAD_GATHER}"
    assert inside == ["a" + scatters, "b" + scatters, "a" + gathers, "c" + scatters, "b" + gathers, "c" + gathers]
    for name in "abc":
        assert [each for each in order if each[0] == name] == [f"{name} {kind}" for kind in steps(name)]


def test_a_step_that_fails_is_told_to_whoever_waits() -> None:
    beside = BackgroundThreads()
    wait = beside.start({GRAD_SCATTER: lambda: 1 // 0, GRAD: lambda: None})
    with pytest.raises(ZeroDivisionError):
        wait()
    beside.close()

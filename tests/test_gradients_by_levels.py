# SPDX-License-Identifier: Apache-2.0
"""Gradients that are added up inside nodes first, and those of which each rank gets the part that it updates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.distributed.groups import make
from ds_fsmoe.execution import node_links
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.gradients import reduction_algorithms
from ds_fsmoe.gradients.background_lane import BackgroundThreads
from ds_fsmoe.gradients.flat_buffers import FlatGradients, Scaling
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
from tests.gradient_cases import Run, train
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_gradients_against_stock import BY_RULE, STAGES, TOLERANCE, Pair, check, with_mode_off, with_stock

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


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


def sums(rank: int, world_size: int, per_node: int) -> int:
    rng, nodes, checked = random.Random(7), links(rank, world_size, per_node), 0
    for case in range(12):
        numel = rng.choice([1, 2, 5, 13, 64, 101])
        stretches = drawn_stretches(rng, numel, world_size)
        first = rng.randrange(numel)
        cut = rng.choice([(0, numel), (first, numel), (first, first + 1), (first, first)])
        of_ranks = torch.randint(-50, 50, (world_size, numel), generator=torch.Generator().manual_seed(case)).double()
        group = dist.group.WORLD
        assert group is not None
        every: list[tuple[ReductionAlgorithm, bool]] = [
            (AllReduce(group), False),
            (AllReduce(group, most=7), False),
            (AllReduceByNodes(nodes), False),
            (ReduceScatter(group, stretches), True),
            (ReduceScatter(group, stretches, most=7), True),
            (ReduceScatterByNodes(nodes, stretches), True),
        ]
        for way, to_owners in every:
            if cut[0] == cut[1] and not to_owners:
                continue
            buffer = of_ranks[rank].clone()
            for step in way.steps(OneTensor(buffer), *cut).values():
                step()
            wanted = of_ranks.sum(dim=0)
            for each in stretches:
                for at in range(each.first, each.stop):
                    if cut[0] <= at < cut[1] and (not to_owners or each.owner == rank):
                        assert buffer[at] == wanted[at], (case, str(way), at)
                    elif not cut[0] <= at < cut[1]:
                        assert buffer[at] == of_ranks[rank, at], "what was not sent is as it was"
            checked += 1
    return checked


@sampled(("world_size", "per_node"), [(4, 2), (6, 2), (6, 3)], kept=[1])
def test_every_way_adds_up_exactly_where_the_sum_is_needed(world_size: int, per_node: int, tmp_path: Path) -> None:
    assert min(run_on_ranks(sums, world_size, tmp_path, per_node)) >= 40


class Crossings:
    """Counts the elements that this rank sends to other nodes, from what it gives to collectives.

    An all-reduce of m elements over g ranks is a ring: each rank sends 2m(g-1)/g to the next; in one over all ranks,
    whose neighbours in a node are neighbours in the ring, the last of each node sends to another node.
    """

    def __init__(self, rank: int, per_node: int) -> None:
        self._rank, self._per_node = rank, per_node
        self.elements = 0.0

    def _node(self, rank: int) -> int:
        return rank // self._per_node

    def all_reduce(self, x: torch.Tensor, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        after = ranks[(ranks.index(self._rank) + 1) % len(ranks)]
        if self._node(after) != self._node(self._rank):
            self.elements += 2 * x.numel() * (len(ranks) - 1) / len(ranks)

    def exchange(self, sends: Sequence[int], group: dist.ProcessGroup) -> None:
        for other, count in zip(dist.get_process_group_ranks(group), sends, strict=True):
            if self._node(other) != self._node(self._rank):
                self.elements += count


def crossing(rank: int, world_size: int, per_node: int, numel: int) -> list[float]:
    nodes, group = links(rank, world_size, per_node), dist.group.WORLD
    assert group is not None
    each = numel // world_size
    stretches = [Stretch(at * each, (at + 1) * each, at) for at in range(world_size)]
    found = []
    exchange, all_reduce = node_links.exchange_sized, dist.all_reduce
    every = AllReduce(group), AllReduceByNodes(nodes), ReduceScatterByNodes(nodes, stretches)
    for way in every:
        counted = Crossings(rank, per_node)

        def noted_exchange(x, sends, receives, group, counted=counted):
            counted.exchange(sends, group)
            return exchange(x, sends, receives, group)

        def noted_reduce(x, group, counted=counted):
            counted.all_reduce(x, group)
            return all_reduce(x, group=group)

        reduction_algorithms.exchange_sized, dist.all_reduce = noted_exchange, noted_reduce
        try:
            for step in way.steps(OneTensor(torch.zeros(numel)), 0, numel).values():
                step()
        finally:
            reduction_algorithms.exchange_sized, dist.all_reduce = exchange, all_reduce
        found.append(counted.elements)
    return found


@sampled(("n", "p", "levels", "owners"), [(2, 2, 2 / 3, 1 / 3), (3, 2, 4 / 5, 2 / 5)], kept=[1])
def test_between_nodes_a_half_and_a_third_of_a_flat_rings_bytes_are_sent(
    n: int, p: int, levels: float, owners: float, tmp_path: Path
) -> None:
    of_ranks = run_on_ranks(crossing, n * p, tmp_path, p, 120)
    of_node = [sum(each[way] for each in of_ranks[:p]) for way in range(3)]
    assert of_node[1] / of_node[0] == pytest.approx(levels)
    assert levels == pytest.approx(p * (n - 1) / (n * p - 1))
    assert of_node[2] / of_node[0] == pytest.approx(owners)


def test_what_one_rank_owns_is_added_up_for_all_and_what_several_nodes_own_is_not() -> None:
    def tasks(*owners: int) -> tuple[str, ...]:
        stretches = [Stretch(10 * at, 10 * at + 10, owner) for at, owner in enumerate(owners)]
        way = ReduceScatterByNodes(NodeLinks(((0, 1), (2, 3)), 0), stretches)
        return tuple(way.steps(OneTensor(torch.zeros(10 * len(owners))), 0, 10 * len(owners)))

    assert tasks(3) == (GRAD_SCATTER, GRAD, GRAD_GATHER)
    assert tasks(3, 3, 3, 1) == (GRAD_SCATTER, GRAD, GRAD_GATHER)
    # One link each way, or both of a node one way: never more than both links both ways.
    assert tasks(0, 2) == tasks(2, 3) == tasks(0, 1, 2, 3) == (GRAD_SCATTER, GRAD)


def test_gradients_of_one_owner_do_not_come_all_at_once(tmp_path: Path) -> None:
    order = [[0, 3, 1, 4, 2, 5]]
    assert run_on_ranks(order_by_identity, 2, tmp_path) == order * 2


def order_by_identity(rank: int, world_size: int) -> list[int]:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(6)]
    number = {id(each): at for at, each in enumerate(parameters)}
    group = dist.group.WORLD
    assert group is not None
    flat = FlatGradients(
        *(GRAD, parameters, torch.float32, group, Scaling(), CPU), owners=lambda each: [(4, number[id(each)] // 3)]
    )
    return [number[id(each)] for each in flat.spread(parameters)]


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

    def fails() -> None:
        raise RuntimeError("the link is down")

    wait = beside.start({GRAD_SCATTER: fails, GRAD: lambda: None})
    with pytest.raises(RuntimeError, match="the link is down"):
        wait()
    beside.close()


# ---- in training


NODES = (("topology.ranks_per_node", 2), ("gradient_partition.levels", 2))


ALL_REDUCED = (("gradient_partition.collective", "all_reduce"),)
ROUND_ROBIN = (("zero_optimization.round_robin_gradients", True),)


def block(*more):
    return BY_RULE + NODES + more


def of_each_kind() -> list[Pair]:
    """One of each kind that has ranks send something else: to owners, for all, late, and to shards."""
    runs = [
        Run(0, mode="dense_only", block=block()),
        Run(1, mode="fixed_chunk", block=block()),
        Run(2, mode="adaptive", block=block(*ALL_REDUCED)),
        Run(2, block=block(), features=frozenset({"sometimes", "twice"})),
        Run(1, config=ROUND_ROBIN, block=block(), accumulation=3),
    ]
    [late] = without_clipping([Run(2, features=frozenset({"wanders"}), steps=9, block=block())])
    sharded = Run(1, features=frozenset({"gpt"}), block=(("esp_size", 2), *NODES))
    return [*with_stock(*runs), (late, replace(late, mode="", block=(), stage=0)), *with_mode_off(sharded)]


def on_two_nodes() -> list[Pair]:
    """Four ranks as two nodes, against stock, in everything that has an own path through the levels."""
    runs = [
        Run(stage, mode=mode, block=block()) for stage in STAGES for mode in ("adaptive", "fixed_chunk", "dense_only")
    ]
    for stage in STAGES:
        runs.append(Run(stage, block=block(), features=frozenset({"sometimes", "twice"})))
        runs.append(Run(stage, block=block(), accumulation=3))
        runs.append(Run(stage, mode="dense_only", loop="retained", accumulation=2, block=block()))
    for stage in (1, 2):
        runs.append(Run(stage, loop="coalesced", block=block()))
        runs.append(Run(stage, config=ROUND_ROBIN, block=block()))
        runs.append(Run(stage, block=block(*ALL_REDUCED)))
    pairs = with_stock(*runs)
    # By what is measured, after some steps.
    measured = [Run(stage, mode="unsaid", block=(("metrics", "off"), *NODES)) for stage in (0, 1)]
    pairs += with_stock(*measured)
    late = [Run(stage, features=frozenset({"wanders"}), steps=9, block=block()) for stage in STAGES]
    pairs += [(each, replace(each, mode="", block=(), stage=0)) for each in without_clipping(late)]
    sharded = [Run(stage, features=frozenset({"gpt"}), block=(("esp_size", 2), *NODES)) for stage in STAGES]
    return pairs + with_mode_off(*sharded)


def without_clipping(runs: Sequence[Run]) -> list[Run]:
    return [replace(each, config=(*each.config, ("gradient_clipping", 0.0))) for each in runs]


@sampled("pairs", [of_each_kind(), on_two_nodes()], kept=[0], ids=["of each kind", "all"])
def test_training_in_two_levels_equals_stock_to_rounding(pairs: list[Pair], tmp_path: Path) -> None:
    check(pairs, 4, tmp_path, TOLERANCE)


def ways_of(rank: int, world_size: int) -> dict[str, list[str]]:
    runs = {
        "stage 0": Run(0, block=BY_RULE + NODES),
        "stage 2": Run(2, block=BY_RULE + NODES),
        "for all": Run(2, block=block(*ALL_REDUCED)),
        "one level": Run(1, block=(*BY_RULE, NODES[0], ("gradient_partition.levels", 1))),
        "one node": Run(1, block=(*BY_RULE, ("topology.ranks_per_node", 4))),
        "stock's": Run(1, mode="off", block=(*BY_RULE, *NODES)),
    }
    return {name: sorted(set(train(run, rank).ways)) for name, run in runs.items()}


def test_gradients_travel_as_the_block_says(tmp_path: Path) -> None:
    # Experts of two layers are held by one rank of each node, so that there is one level.
    for found in run_on_ranks(ways_of, 4, tmp_path):
        assert found == {
            "stage 0": ["all-reduce", "all-reduce in two levels"],
            "stage 2": ["reduce-scatter", "reduce-scatter in two levels"],
            "for all": ["all-reduce", "all-reduce in two levels"],
            "one level": ["reduce-scatter"],
            "one node": ["reduce-scatter"],
            "stock's": [],
        }

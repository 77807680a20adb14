# SPDX-License-Identifier: Apache-2.0
"""How many communicators a rank holds and a job makes, counted as engines start on torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

import ds_fsmoe
from ds_fsmoe.components.alltoalls.two_steps import TwoStepAllToAll
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.components.hierarchical import BlockPaths, Nodes
from ds_fsmoe.distributed import groups as ours
from ds_fsmoe.distributed import nccl
from ds_fsmoe.distributed.groups import communicator_like, make_groups, passing_communicators
from ds_fsmoe.execution import counts_exchange
from ds_fsmoe.execution.counts_exchange import CountsExchange
from ds_fsmoe.execution.row_sizes import TokenChunks
from ds_fsmoe.layer.parts import exchange_in, node_links
from ds_fsmoe.layer.runtime import block_of
from ds_fsmoe.planning.groups import Groups, num_communicators
from tests.pretended_nccl import fake_ranks, pretend_nccl
from tests.race_cases import world_of
from tests.samples import sampled


@dataclass(frozen=True)
class Job:
    """Where an engine starts."""

    world: int
    ep: int
    esp: int = 1
    per_node: int = 8
    alltoall: str = "flat"
    mode: str = "auto"
    stage: int = 1
    rank: int = 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.world}-{self.ep}x{self.esp}-{self.per_node}-{self.alltoall}-{self.mode}-{self.stage}"

    @property
    def groups(self) -> Groups:
        """As the planner has them."""
        return Groups(self.world, self.per_node, ep=self.ep, esp=self.esp)


@dataclass
class Made:
    """What a start has made."""

    calls: int = 0
    held: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """(what it is for, ranks) of every communicator of this rank with others, in their order."""


class OneLayer(nn.Module):
    """An MoE layer between two others."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.moe = MoE(8, GPTFeedForward(8, 16), num_experts=ep, ep_size=ep, k=1)


def tell_own(held: list[Any], own: Any, group: Any = None) -> None:
    held[:] = [own] * len(held)


@contextmanager
def counted() -> Iterator[Made]:
    """Counts groups; what ranks tell each other is what this one says."""
    made, new_group = Made(), dist.new_group

    def counting(ranks: Any = None, *args: Any, **options: Any) -> Any:
        made.calls += 1
        of = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
        if dist.get_rank() in of and len(of) > 1:
            made.held.append((options.get("group_desc") or "", of))
        return new_group(ranks, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        # Behind this, DeepSpeed is as if it had not begun: other tests have groups of their own.
        patch.setattr(deepspeed.comm.comm, "cdb", None)
        # Compiled by DeepSpeed at its first process group, for a collective of inference only.
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        patch.setattr(dist, "new_group", counting)
        patch.setattr(dist, "all_gather_object", tell_own)
        yield made


def start(job: Job) -> Made:
    """Let an engine begin."""
    block = {
        "enabled": True,
        "ops": "reference",
        "alltoall": job.alltoall,
        "topology": {"ranks_per_node": job.per_node},
    }
    block |= {"esp_size": job.esp, "gradient_partition": {"mode": job.mode}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job.stage},
        "fsmoe": block,
    }
    with counted() as made, world_of(job.world, job.rank):
        deepspeed.init_distributed("fake")
        engine, *_ = ds_fsmoe.initialize(model=OneLayer(job.ep), config=config)
        engine.destroy()
    return made


SIX_LAYOUTS = [
    Job(8, 8),
    Job(16, 4, 2, per_node=4),
    Job(16, 16, alltoall="node_deduplicated"),
    Job(32, 16, alltoall="2dh", rank=11),
    Job(32, 1, stage=2),
    Job(16, 4, per_node=4, mode="off"),
]
# Of a large job -> the most that a rank may hold, and the most that all may make.
LARGE = {Job(64, 4, rank=17): (10, 100), Job(1024, 8): (8, 410)}


@sampled("job", [*LARGE, *SIX_LAYOUTS], kept=[1], drawn=3, ids=lambda job: job.name)
def test_an_engine_makes_what_the_planner_counts_and_few_in_a_large_job(job: Job) -> None:
    made = start(job)
    if job in LARGE:
        most_held, most_calls = LARGE[job]
        assert len(made.held) <= most_held
        assert made.calls <= most_calls
    assert len(made.held) == num_communicators(job.groups, job.mode != "off", job.alltoall), made.held


# ---- groups that are split off the default one


def made_by(patch: pytest.MonkeyPatch, rank: int, can_split: tuple[bool, ...]) -> list[tuple[str, str, Any]]:
    """What one of 8 ranks calls, in its order: (which function, what for, the ranks)."""
    calls: list[tuple[str, str, Any]] = []
    with fake_ranks(rank, 8):
        pretend_nccl(patch, reasons=can_split)
        new_group = dist.new_group

        def new(ranks: list[int], group_desc: str = "", **options: Any) -> Any:
            calls.append(("new_group", group_desc, ranks))
            return new_group(ranks, group_desc=group_desc, **options)

        def split(split_ranks: list[list[int]], group_desc: str, timeout: Any, pg_options: Any) -> Any:
            calls.append(("split_group", group_desc, split_ranks))
            own = next((each for each in split_ranks if rank in each), None)
            return None if own is None else new_group(own, group_desc=group_desc)

        patch.setattr(dist, "new_group", new)
        patch.setattr(dist, "split_group", split)
        patch.setattr(nccl, "can_split", lambda: can_split[rank])
        groups = make_groups(4, ranks_per_node=2, max_ctas=16)
        exchange_in(groups, TwoStepAllToAll())
        for kind in ("edp", "dp"):
            communicator_like(groups, kind)
            node_links(groups, kind, "gradients")
        with passing_communicators([[(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 2, 4, 6), (1, 3, 5, 7)]], "links") as made:
            assert [each.size() for each in made] == [2, 4]
    return calls


def test_groups_of_one_purpose_are_split_off_at_once_in_one_order_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for rank in range(8):
        with monkeypatch.context() as patch:
            found.append(made_by(patch, rank, (True,) * 8))
    assert all(each == found[0] for each in found)
    assert {function for function, _, _ in found[0]} == {"split_group"}
    purposes = [(purpose, str(ranks)) for _, purpose, ranks in found[0]]
    assert len(set(purposes)) == len(purposes)
    assert ("split_group", "fsmoe_ep", [[0, 1, 2, 3], [4, 5, 6, 7]]) in found[0]
    assert ("split_group", "fsmoe_a2a_intra", [[0, 1], [2, 3], [4, 5], [6, 7]]) in found[0]


def test_where_one_rank_cannot_split_all_make_one_group_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in (0, 5):
        with monkeypatch.context() as patch:
            found.append(made_by(patch, rank, (True,) * 5 + (False,) + (True,) * 2))
    assert found[0] == found[1]
    assert {function for function, _, _ in found[0]} == {"new_group"}


@pytest.mark.parametrize(("device", "splits"), [(0, True), (None, True), (0, False)])
def test_a_default_group_can_be_split_where_it_is_bound_and_its_backend_is_able_to(
    device: int | None, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = None if device is None else torch.device("cuda", device)
    world = SimpleNamespace(
        bound_device_id=bound, _get_backend=lambda device: SimpleNamespace(supports_splitting=splits)
    )
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    assert nccl.can_split() == (device is not None and splits)
    monkeypatch.delattr(dist, "split_group")
    assert not nccl.can_split(), "a torch without it"


# ---- what is computed again


def test_groups_that_were_made_are_found_without_laying_anything_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(3, 64):
        first = make_groups(8, ranks_per_node=8)
        for name in ("layout", "find_topology"):
            monkeypatch.setattr(ours, name, lambda *_, name=name, **__: pytest.fail(f"{name} is called again"))
        assert make_groups(8, ranks_per_node=8) is first


# ---- counts of rows


def numbers_received(ranks: int, patch: pytest.MonkeyPatch) -> int:
    """How many numbers a rank receives ahead of a call with 2DH, of 4 experts a rank and 6 segments."""
    received: list[torch.Tensor] = []
    with fake_ranks(1, ranks):
        groups = make_groups(ranks, ranks_per_node=4)
        exchange = exchange_in(groups, TwoStepAllToAll())
        send = lambda into, *_, **__: received.append(into)  # noqa: E731
        patch.setattr(counts_exchange, "dist", SimpleNamespace(all_to_all_single=send))
        counts_ET = torch.ones(4 * ranks, 6, dtype=torch.long)
        fault = torch.zeros((), dtype=torch.long)
        CountsExchange.begin(counts_ET, fault, block_of(groups), TokenChunks(2, 3), exchange.forwarded)
    return received[0].numel()


def test_counts_with_2dh_grow_as_the_ranks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (numbers_received(ranks, monkeypatch) for ranks in (16, 32))
    assert few < 16 * (1 + 4 * 6) + 16 * 6 + 1
    assert many <= 2.2 * few


@pytest.mark.parametrize(("ep", "esp", "per_node"), [(8, 1, 4), (6, 1, 2), (4, 2, 4)])
def test_each_rank_hears_of_all_rows_that_come_by_it(
    ep: int, esp: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all ranks send is delivered by hand, and compared with what they have counted."""
    world, cuts, each_E = ep * esp, TokenChunks(2, 1), 3
    counted = [torch.arange(each_E * ep * 2).reshape(-1, 2) * (7 + rank) % 11 for rank in range(world)]
    begun, pieces, hops = [], [], []
    for rank in range(world):
        sent: list[Any] = []
        with fake_ranks(rank, world), monkeypatch.context() as patch:
            groups = make_groups(ep, esp, ranks_per_node=per_node)
            exchange = exchange_in(groups, TwoStepAllToAll())

            def send(into: Any, out: Any, receives: Any, sends: Any, sent: list = sent, **_: Any) -> SimpleNamespace:
                sent[:] = [out.split(sends), receives]
                return SimpleNamespace(wait=lambda: None)

            patch.setattr(counts_exchange, "dist", SimpleNamespace(all_to_all_single=send))
            block = block_of(groups)
            fault = torch.zeros((), dtype=torch.long)
            begun.append(CountsExchange.begin(counted[rank], fault, block, cuts, exchange.forwarded))
            pieces.append(sent)
            nodes = Nodes.of(groups.topology.node_of_rank[each] for each in groups.ranks_of("ep"))
            ways = [BlockPaths(TwoStepAllToAll(), nodes, back) for back in (False, True)]
            hops.append([way.hop(step, groups.index_in("ep")) for way in ways for step in range(2)])
    for rank, (one, (_, receives)) in enumerate(zip(begun, pieces, strict=True)):
        arrived = [of_rank[0][rank] for of_rank in pieces]
        assert [len(each) for each in arrived] == receives
        one.received = torch.cat(arrived)
        sizes = one.wait()
        esp_index = one.block.esp_index
        of_ep = [counted[source] for source, (_, shard) in enumerate(one.block.places) if shard == esp_index]
        for chunk, found in enumerate(sizes.forward.chunks):
            rows = [of_rank.reshape(ep, each_E, 2)[:, :, chunk].sum(1).tolist() for of_rank in of_ep]
            there, back = hops[rank][:2], hops[rank][2:]
            for source, to in {pair for hop in there for pair in (*hop.pairs, *hop.received_pairs)}:
                assert found.between[source, to] == rows[source][to]
            for source, to in {pair for hop in back for pair in (*hop.pairs, *hop.received_pairs)}:
                assert found.back.between[source, to] == rows[to][source]

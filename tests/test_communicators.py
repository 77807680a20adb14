# SPDX-License-Identifier: Apache-2.0
"""How many communicators a rank holds and a job makes, counted as engines start on torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from ds_fsmoe.distributed import nccl
from ds_fsmoe.distributed.groups import make, make_groups
from ds_fsmoe.distributed.topology import Layout, layout, topology_of_size
from ds_fsmoe.layer.alltoall_tasks import exchange_in
from ds_fsmoe.layer.node_levels import node_links
from ds_fsmoe.planning.communicators import Communicators, communicators, kinds_of, num_held, of_deepspeed
from ds_fsmoe.planning.groups import Groups
from tests.pretended_nccl import Pretended, fake_ranks, pretend_nccl
from tests.race_cases import world_of


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
        patch.setattr(dist, "new_group", counting)
        patch.setattr(dist, "all_gather_object", lambda held, own, group=None: held.__setitem__(slice(None), [own] * len(held)))
        yield made


def start(job: Job) -> Made:
    """Let an engine begin."""
    block = {"enabled": True, "alltoall": job.alltoall, "topology": {"ranks_per_node": job.per_node}}
    block |= {"esp_size": job.esp, "gradient_partition": {"mode": job.mode}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job.stage},
        "fsmoe": block,
    }
    with world_of(job.world, job.rank), counted() as made:
        deepspeed.init_distributed("fake")
        engine, *_ = ds_fsmoe.initialize(model=OneLayer(job.ep), config=config)
        engine.destroy()
    return made


EIGHT_LAYOUTS = [
    Job(8, 8),
    Job(16, 4, per_node=4),
    Job(16, 4, 2, per_node=4),
    Job(16, 16, alltoall="once_per_node"),
    Job(32, 16, alltoall="2dh", rank=11),
    Job(64, 4, rank=17),
    Job(64, 4, mode="off"),
    Job(32, 1, stage=2),
]


@pytest.mark.parametrize("job", EIGHT_LAYOUTS, ids=lambda job: job.name)
def test_an_engine_makes_what_the_planner_counts(job: Job) -> None:
    made = start(job)
    assert len(made.held) == num_held(job.groups, job.mode != "off", job.alltoall), made.held


@pytest.mark.parametrize(("world", "ep", "held", "calls"), [(64, 4, 10, 100), (1024, 8, 8, 410)])
def test_a_rank_of_a_large_job_holds_few(world: int, ep: int, held: int, calls: int) -> None:
    made = start(Job(world, ep))
    print(len(made.held), made.calls)
    assert len(made.held) <= held
    assert made.calls <= calls

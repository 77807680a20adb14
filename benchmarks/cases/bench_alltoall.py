# SPDX-License-Identifier: Apache-2.0
"""The all-to-alls of the shelf, alone and in a layer: flat, by one leader per node (1dh), in two steps (2dh).

``cluster.py up --inter 50mbit --intra 200mbit``, then ``cluster.py run -- benchmarks/cases/bench_alltoall.py``. Experts
are spread over all ranks and not sharded, so the EP group lies on both kinds of links. Rows go to
``benchmarks/results/alltoall.csv`` and ``alltoall_layer.csv``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import Case, Effort, Grid, Variant, join_on_gloo, run_grid
from ds_fsmoe import registry
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.execution.pipeline import Pipeline
from ds_fsmoe.layer.alltoall_tasks import Exchange, exchange_in
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE


@dataclass(frozen=True)
class Message:
    """What each rank sends, its own part included."""

    kib: int


@dataclass(frozen=True)
class Layer:
    """C slots for each of E experts (one per rank) from every rank, of width M; experts of hidden width H."""

    C: int
    M: int
    H: int


ALONE = Grid("alltoall", tuple(Case(f"{kib} KiB", Message(kib)) for kib in (16, 256, 2048)))
IN_A_LAYER = Grid(
    "alltoall_layer", (Case("traffic and compute", Layer(256, 256, 2048)), Case("traffic", Layer(256, 256, 256)))
)


def all_ranks() -> FSMoEGroups:
    """One EP group."""
    return make_groups(dist.get_world_size())


def made(name: str) -> tuple[Exchange, Collectives]:
    """An all-to-all among all ranks."""
    groups = all_ranks()
    exchange = exchange_in(groups, registry.lookup("alltoall", name)())
    return exchange, Collectives(exchange.whole, groups.ep_group, None, exchange.legs)


def whole(name: str, message: Message) -> Callable[[], object]:
    """All of it, once."""
    x_RM = torch.randn(dist.get_world_size(), message.kib * 256 // dist.get_world_size())
    _, collectives = made(name)
    return lambda: collectives.to_experts(x_RM)


def part(name: str, kind: str, message: Message) -> Callable[[], object]:
    """One of its two tasks."""
    x_RM = torch.randn(dist.get_world_size(), message.kib * 256 // dist.get_world_size())
    _, collectives = made(name)
    return collectives.ready(kind, x_RM)


class Step:
    """Forward and backward in so many chunks, of the experts' part of a layer."""

    def __init__(self, name: str, lanes: Lanes, degree: int, layer: Layer) -> None:
        groups = all_ranks()
        exchange, collectives = made(name)
        plans = (
            PhasePlan(BlockPlan(degree, "paper"), groups.planned, backward, exchange.planned)
            for backward in (False, True)
        )
        torch.manual_seed(dist.get_rank())
        self.pipeline = Pipeline(lanes, collectives, *plans)
        self.experts = ExpertSet([GPTFeedForward(layer.M, layer.H)])
        self.num_experts, self.capacity = dist.get_world_size(), layer.C
        self.x_RM = torch.randn(self.num_experts * layer.C, layer.M, requires_grad=True)
        self.dy_RM = torch.randn(self.num_experts * layer.C, layer.M)

    def __call__(self) -> None:
        self.pipeline(self.x_RM, self.num_experts, self.capacity, self.experts).backward(self.dy_RM)


def main() -> None:
    args = join_on_gloo(__doc__, blocks=8)
    serial, lanes = make_lanes(torch.device("cpu"), overlap=False), make_lanes(torch.device("cpu"))
    effort = Effort(blocks=args.blocks, steps=2)
    alone = (
        *(Variant(name, partial(whole, name)) for name in ("flat", "1dh", "2dh")),
        Variant("2dh, inside the nodes", partial(part, "2dh", A2A_IN_NODE)),
        Variant("2dh, between nodes", partial(part, "2dh", A2A_IN)),
    )
    run_grid(ALONE, alone, "flat", effort, results=args.results)
    in_a_layer = (
        Variant("flat, one after another", partial(Step, "flat", serial, 1)),
        Variant("flat, 4 chunks", partial(Step, "flat", lanes, 4)),
        Variant("1dh, 4 chunks", partial(Step, "1dh", lanes, 4)),
        Variant("2dh, 4 chunks", partial(Step, "2dh", lanes, 4)),
    )
    run_grid(IN_A_LAYER, in_a_layer, "flat, 4 chunks", effort, results=args.results)
    lanes.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

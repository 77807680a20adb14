# SPDX-License-Identifier: Apache-2.0
"""The experts' part of one layer, forward and backward: chunks on lanes beside one task after another.

``cluster.py up --inter 50mbit --intra 200mbit``, then ``cluster.py run -- benchmarks/cases/bench_pipeline.py``. Experts
are spread over the nodes and sharded inside each (ep = nodes, esp = ranks per node). No gradients are reduced, and
there is no attention: what is measured is the overlap of a layer's own traffic and computation. Rows go to
``benchmarks/results/pipeline.csv``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import Case, Effort, Grid, Variant, join_on_gloo, run_grid
from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.shards import shard_expert
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.execution.pipeline import Pipeline
from ds_fsmoe.planning.block import BlockPlan, Links
from ds_fsmoe.planning.phase_plan import PhasePlan


@dataclass(frozen=True)
class Layer:
    """C slots for each of E experts (one per node) from every rank, of width M; experts of hidden width H."""

    C: int
    M: int
    H: int


GRID = Grid("pipeline", (Case("traffic and compute", Layer(256, 256, 2048)), Case("traffic", Layer(256, 256, 256))))


class Step:
    """Forward and backward in so many chunks."""

    def __init__(self, layer: Layer, lanes: Lanes, forward: int, backward: int, links: Links = "paper") -> None:
        world, nodes = dist.get_world_size(), self.num_nodes()
        ep, esp = nodes, world // nodes
        groups = make_groups(ep, esp)
        torch.manual_seed(0)
        expert = GPTFeedForward(layer.M, layer.H)
        if esp > 1:
            expert, _ = shard_expert(expert, groups.rank % esp, esp)
        self.experts = ExpertSet([expert])
        plans = (
            PhasePlan(BlockPlan(forward, links), groups.planned, backward=False),
            PhasePlan(BlockPlan(backward, links), groups.planned, backward=True),
        )
        self.pipeline = Pipeline(lanes, Collectives(FlatAllToAll().exchange, groups.ep_group, groups.esp_group), *plans)
        self.num_experts, self.capacity = ep, layer.C
        self.x_RM = torch.randn(ep * layer.C, layer.M, requires_grad=True)
        self.dy_RM = torch.randn(ep * layer.C, layer.M)

    @staticmethod
    def num_nodes() -> int:
        groups = make_groups()
        return max(groups.topology.node_of_rank) + 1

    def __call__(self) -> None:
        self.pipeline(self.x_RM, self.num_experts, self.capacity, self.experts).backward(self.dy_RM)


def main() -> None:
    args = join_on_gloo(__doc__, no_routers="every expert gets slots of a given number, and no tokens choose")
    serial, lanes = make_lanes(torch.device("cpu"), overlap=False), make_lanes(torch.device("cpu"))

    def made(*arguments: object) -> Callable[[Layer], Step]:
        return lambda layer: Step(layer, *arguments)

    variants = (
        Variant("one after another", made(serial, 1, 1)),
        Variant("2 chunks, one stream", made(lanes, 2, 2, "shared")),
        Variant("2 chunks, two links", made(lanes, 2, 2, "paper")),
        Variant("4 chunks, two links", made(lanes, 4, 4, "paper")),
        Variant("4 chunks, reduce first", made(lanes, 4, 4, "reduce_first")),
    )
    run_grid(GRID, variants, "one after another", Effort(blocks=args.blocks, steps=2), results=args.results)
    lanes.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

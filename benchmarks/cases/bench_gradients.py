# SPDX-License-Identifier: Apache-2.0
"""When gradients travel: training steps of one model with each mode of ``fsmoe.gradient_partition``, and with none.

``cluster.py up --inter 50mbit --intra 200mbit``, then ``cluster.py run -- benchmarks/cases/bench_gradients.py``.
Experts are spread over the nodes and sharded inside each (ep = nodes, esp = ranks per node). "not reduced" leaves all
gradients where they are: what a mode takes longer than that is what its gradients really cost, the delay of the
all-to-alls beside them included. Rows go to ``benchmarks/results/gradients.csv``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.routing import parsed
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.gradients.reduction import LOOKS

NOT_REDUCED = "not reduced"
MODES = ("off", "dense_only", "fixed_chunk", "adaptive")


@dataclass(frozen=True)
class Model:
    """``layers`` times: two dense layers M x M, then an MoE layer of one expert per node, of hidden width H; S tokens
    per rank, each to one expert."""

    layers: int
    S: int
    M: int
    H: int


GRID = Grid(
    "gradients",
    (
        Case("gradients fit", Model(layers=4, S=512, M=192, H=1536)),
        Case("gradients are more", Model(layers=4, S=256, M=256, H=1024)),
    ),
)


class Blocks(nn.Module):
    """The model."""

    def __init__(self, model: Model, ep_size: int) -> None:
        super().__init__()
        self.dense = nn.ModuleList(
            nn.Sequential(nn.Linear(model.M, model.M), nn.Tanh(), nn.Linear(model.M, model.M))
            for _ in range(model.layers)
        )
        self.moes = nn.ModuleList(
            MoE(
                model.M,
                ds_fsmoe.GPTFeedForward(model.M, model.H, activation="relu"),
                num_experts=ep_size,
                ep_size=ep_size,
                k=1,
                capacity_factor=1.0,
                use_rts=False,
            )
            for _ in range(model.layers)
        )

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss = torch.zeros(())
        for dense, moe in zip(self.dense, self.moes, strict=True):
            x_SM = x_SM + dense(x_SM)
            y_SM, aux_loss, _ = moe(x_SM)
            x_SM, loss = x_SM + y_SM, loss + 0.01 * aux_loss
        return loss + x_SM.square().mean()


class TrainingStep:
    """An engine over the model, and a step of it; the same weights and tokens whoever makes it."""

    def __init__(self, model: Model, mode: str, degree: int, chunk_bytes: int) -> None:
        topology = make_groups().topology
        ep_size = max(topology.node_of_rank) + 1
        esp_size = dist.get_world_size() // ep_size
        torch.manual_seed(0)
        module = Blocks(model, ep_size)
        gradients: dict[str, Any] = {"mode": "off" if mode == NOT_REDUCED else mode}
        if mode == "fixed_chunk":
            gradients["chunk_bytes"] = chunk_bytes
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
            "zero_allow_untested_optimizer": True,
            "fsmoe": {
                "enabled": True,
                "esp_size": esp_size,
                "schedule": "best",
                "pipeline_degree": {"forward": degree, "backward": degree},
                "gradient_partition": gradients,
            },
            "steps_per_print": 1_000_000,
        }
        self.engine = ds_fsmoe.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
        self.is_reduced = mode != NOT_REDUCED
        torch.manual_seed(dist.get_rank())
        self.x_SM = torch.randn(model.S, model.M)
        for _ in range(LOOKS):
            self()

    def __call__(self) -> None:
        self.engine.set_gradient_accumulation_boundary(self.is_reduced)
        self.engine.backward(self.engine(self.x_SM))
        if self.is_reduced:
            self.engine.step()
        else:
            self.engine.optimizer.zero_grad()

    def close(self) -> None:
        reduction = self.engine.fsmoe.reduction
        if reduction is not None and dist.get_rank() == 0:
            plan = reduction.reducer.plan
            print(f"{reduction.mode}: {plan.hidden() / max(1, sum(plan.sizes)):.0%} of the gradients in windows")
        self.engine.destroy()


def made(mode: str, degree: int, chunk_bytes: int) -> Callable[[Model], TrainingStep]:
    return lambda model: TrainingStep(model, mode, degree, chunk_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--degree", type=int, default=2, help="chunks of the MoE layers")
    parser.add_argument("--chunk-bytes", type=int, default=1 << 17, help="of fixed_chunk")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    variants = [Variant(mode, made(mode, args.degree, args.chunk_bytes)) for mode in (*MODES, NOT_REDUCED)]
    run_grid(GRID, variants, "off", Effort(blocks=args.blocks, steps=1, warmup=1), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

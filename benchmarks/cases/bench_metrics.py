# SPDX-License-Identifier: Apache-2.0
"""What metrics cost: training steps that tell DeepSpeed's monitors about routers, beside steps that do not.

``deepspeed --num_accelerators 2 benchmarks/cases/bench_metrics.py``. A block has as many steps as there are between two
that are looked at, so each has one. The monitor writes CSV files, in all variants. Rows go to
``benchmarks/results/metrics.csv``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.routing import parsed

EVERY = 10
BLOCKS: dict[str, dict[str, Any]] = {
    "off": {"metrics": "off"},
    "brief": {"metrics": "brief"},
    "detailed": {"metrics": "detailed"},
    "brief, every step": {"metrics": "brief", "metrics_every": 1},
}


@dataclass(frozen=True)
class Sizes:
    """A model of MoE layers: S tokens per rank of width M, E experts of hidden width H, each token to 2 of them."""

    layers: int
    S: int
    M: int
    H: int
    E: int = 8


GRID = Grid(
    "metrics",
    (
        Case("4 layers, 512 tokens of 128", Sizes(4, 512, 128, 512)),
        Case("4 layers, 2048 tokens of 256", Sizes(4, 2048, 256, 1024)),
        Case("8 layers of 64 experts, 512 tokens of 128", Sizes(8, 512, 128, 128, E=64)),
    ),
)


class Model(nn.Module):
    """MoE layers, one after another."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        expert = ds_fsmoe.GPTFeedForward(sizes.M, sizes.H)
        ep_size = dist.get_world_size()
        self.moes = nn.ModuleList(
            ds_fsmoe.MoE(sizes.M, expert, num_experts=sizes.E, ep_size=ep_size, k=2) for _ in range(sizes.layers)
        )

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        """The loss."""
        total = x_SM.new_zeros(())
        for moe in self.moes:
            y_SM, aux_loss, _ = moe(x_SM)
            x_SM, total = x_SM + y_SM, total + aux_loss
        return x_SM.square().mean() + 0.01 * total


class TrainingStep:
    """An engine whose monitor is on, and a step of it."""

    def __init__(self, folder: Path, block: dict[str, Any], sizes: Sizes) -> None:
        torch.manual_seed(0)
        model = Model(sizes)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_allow_untested_optimizer": True,
            "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": block["metrics"]},
            "fsmoe": {"enabled": True, "metrics_every": EVERY} | block,
            "steps_per_print": 1_000_000,
        }
        self.engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        torch.manual_seed(dist.get_rank())
        self.x_SM = torch.randn(sizes.S, sizes.M, device=self.engine.device)

    def __call__(self) -> None:
        self.engine.backward(self.engine(self.x_SM))
        self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8, help=f"of {EVERY} steps of each variant")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    with tempfile.TemporaryDirectory() as folder:
        variants = tuple(Variant(name, partial(TrainingStep, Path(folder), block)) for name, block in BLOCKS.items())
        run_grid(GRID, variants, baseline="off", effort=Effort(args.blocks, EVERY), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

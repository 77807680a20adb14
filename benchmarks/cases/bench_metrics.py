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

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.routing import parsed
from benchmarks.models.moe_steps import MoEModel, MoESteps

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


def training_step(folder: Path, block: dict[str, Any], sizes: Sizes) -> MoESteps:
    """An engine whose monitor is on."""
    torch.manual_seed(0)
    model = MoEModel(sizes.layers, sizes.M, sizes.H, sizes.E, k=2)
    monitor = {"enabled": True, "output_path": str(folder), "job_name": block["metrics"]}
    return MoESteps(model, sizes.S, sizes.M, {"metrics_every": EVERY} | block, csv_monitor=monitor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8, help=f"of {EVERY} steps of each variant")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    with tempfile.TemporaryDirectory() as folder:
        variants = tuple(Variant(name, partial(training_step, Path(folder), block)) for name, block in BLOCKS.items())
        run_grid(GRID, variants, baseline="off", effort=Effort(args.blocks, EVERY), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

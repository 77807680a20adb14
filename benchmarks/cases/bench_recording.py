# SPDX-License-Identifier: Apache-2.0
"""What recording the routing costs: training steps that record every choice, beside steps that do not.

``deepspeed --num_accelerators 2 benchmarks/cases/bench_recording.py``. Every layer, step and micro-batch is recorded,
by a thread that shares the cores with the training. Rows go to ``benchmarks/results/recording.csv``.
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

BLOCKS: dict[str, dict[str, Any]] = {
    "off": {},
    "choices": {"weights": False},
    "choices and weights": {"weights": True},
}


@dataclass(frozen=True)
class Sizes:
    """A model of MoE layers: S tokens per rank of width M, E experts of hidden width H, each token to k of them."""

    layers: int
    S: int
    M: int
    H: int
    E: int
    k: int


GRID = Grid(
    "recording",
    (
        Case("4 layers of 8 experts, k 2, 1024 tokens of 256", Sizes(4, 1024, 256, 1024, 8, 2)),
        Case("4 layers of 64 experts, k 8, 1024 tokens of 256", Sizes(4, 1024, 256, 128, 64, 8)),
    ),
)


def training_step(folder: Path, name: str, routing: dict[str, Any], sizes: Sizes) -> MoESteps:
    """An engine that records in a folder of its own, or nothing."""
    torch.manual_seed(0)
    model = MoEModel(sizes.layers, sizes.M, sizes.H, sizes.E, k=sizes.k, drop_tokens=False)
    if routing:
        routing = routing | {"record": str(folder / name)}
    return MoESteps(model, sizes.S, sizes.M, {"metrics": "off", "routing": routing})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="of 4 steps of each variant")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    with tempfile.TemporaryDirectory() as folder:
        variants = tuple(
            Variant(name, partial(training_step, Path(folder), name, routing)) for name, routing in BLOCKS.items()
        )
        run_grid(GRID, variants, baseline="off", effort=Effort(args.blocks, 4, 2), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Rows in bf16 and as 8-bit numbers (``fsmoe.comm_dtype``): what half the bytes gain, and what they cost in accuracy.

``cluster.py up --nodes 2 --ranks-per-node 2 --inter 25mbit --intra 100mbit``, then
``cluster.py run -- benchmarks/cases/bench_fp8.py``. A layer in bf16 whose experts are spread over all ranks, nothing
dropped; whole steps of an engine. Times go to ``benchmarks/results/fp8.csv``, errors to ``fp8_error.csv`` beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cases.bench_once import Sizes
from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.moe_steps import MoEModel, MoESteps

GRID = Grid(
    "fp8",
    (
        Case("k 8 of 64, width 512", Sizes(128, 512, 128, 64, 8)),
        Case("k 2 of 8, width 512", Sizes(256, 512, 512, 8, 2)),
    ),
)
FP8 = {"comm_dtype": "fp8"}
FLAT = {"alltoall": "flat", "pipeline_degree": {"forward": 2, "backward": 2}}
ONCE = {"alltoall": "node_deduplicated", "pipeline_degree": {"forward": 4, "backward": 4}}
WAYS: dict[str, dict[str, Any]] = {
    "flat": FLAT,
    "flat, dispatch in fp8": FLAT | {"comm_dtype": {"dispatch": "fp8"}},
    "flat, fp8": FLAT | FP8,
    "once": ONCE,
    "once, fp8": ONCE | FP8,
}


def training_step(block: dict[str, Any], sizes: Sizes) -> MoESteps:
    """An engine that runs its layer this way."""
    torch.manual_seed(0)
    model = MoEModel(1, sizes.M, sizes.H, sizes.E, k=sizes.k, drop_tokens=False)
    of_engine = {"metrics": "off", "topology": {"ranks_per_node": 2}} | block
    steps = MoESteps(model, sizes.S, sizes.M, of_engine, gradient_clipping=0.0, bf16={"enabled": True})
    steps.x_SM = steps.x_SM.bfloat16()
    return steps


def computed(block: dict[str, Any], sizes: Sizes) -> list[torch.Tensor]:
    """Return a layer's output, the tokens' gradient and an expert's, of given gradients of the output."""
    steps = training_step(block, sizes)
    moe, x_SM = steps.engine.module.moes[0], steps.x_SM.clone().requires_grad_()
    y_SM = moe(x_SM)[0]
    torch.manual_seed(100 + dist.get_rank())
    weights = [each for name, each in moe.named_parameters() if "deepspeed_experts.0." in name and each.dim() == 2]
    gradients = torch.autograd.grad(y_SM, [x_SM, weights[0]], torch.randn_like(y_SM))
    found = [each.detach().float() for each in (y_SM, *gradients)]
    steps.close()
    return found


def count_error(case: Case, name: str, results: Path) -> None:
    """Write how far results are from those of rows in bf16, as shares of their size (2-norms over all ranks)."""
    of_way = WAYS[name]
    wide = computed({key: value for key, value in of_way.items() if key != "comm_dtype"}, case.settings)
    narrow = computed(of_way, case.settings)
    squares = [[(a - b).square().sum(), b.square().sum()] for a, b in zip(narrow, wide, strict=True)]
    sums = torch.tensor(squares)
    dist.all_reduce(sums)
    shares = (sums[:, 0] / sums[:, 1]).sqrt().tolist()
    if dist.get_rank() == 0:
        row = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "grid": GRID.digest, "case": case.name}
        row |= {"settings": json.dumps(case.plain(), sort_keys=True), "variant": name}
        row |= dict(zip(("of_output", "of_tokens_gradient", "of_weights_gradient"), shares, strict=True))
        append_rows(results / "fp8_error.csv", tuple(row), [row])
        print(
            f"{case.name}, {name}: output {shares[0]:.2%}, tokens' gradient {shares[1]:.2%}, weights' {shares[2]:.2%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="of 1 step of each variant")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    for case in GRID.cases:
        for name, block in WAYS.items():
            if "comm_dtype" in block:
                count_error(case, name, args.results)
    variants = tuple(Variant(name, partial(training_step, block)) for name, block in WAYS.items())
    run_grid(GRID, variants, baseline="flat", effort=Effort(args.blocks, 1), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

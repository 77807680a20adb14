# SPDX-License-Identifier: Apache-2.0
"""What our layer costs or saves where there is nothing to overlap: one training step, ours beside stock's.

``deepspeed --num_accelerators 2 benchmarks/cases/bench_unchunked.py`` (or 1). All models live in the same processes and
take turns step by step, so a machine that gets slower or faster meanwhile does so for all. Rows go to
``benchmarks/results/unchunked.csv``. The memory of a step's tensors, which does not depend on the machine, is counted
once and goes to ``benchmarks/results/unchunked_memory.csv``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, check_columns, made_with
from benchmarks.harness.routing import parsed
from ds_fsmoe.layer.stock_layer import FSMoELayer
from tests.live_memory import LiveMemory

STEPS_PER_BLOCK = 4


@dataclass(frozen=True)
class Layer:
    """One MoE layer: S tokens per rank of width M, E experts of hidden width H, each token to k of them."""

    k: int
    dtype: str
    S: int = 2048
    M: int = 256
    H: int = 1024
    E: int = 8


GRID = Grid(
    "unchunked",
    tuple(
        # Without instructions for bf16 a processor takes ten times as long for it.
        Case(f"k = {k}, {dtype}", Layer(k, dtype, S=512 if dtype == "bf16" else 2048))
        for k, dtype in itertools.product((1, 2), ("fp32", "bf16"))
    ),
)


class TrainingStep:
    """An engine over one MoE layer, and a step of it; the same weights and tokens whoever makes it."""

    def __init__(self, layer: Layer, initialize: Any, enabled: bool) -> None:
        torch.manual_seed(0)
        expert = ds_fsmoe.GPTFeedForward(layer.M, layer.H, activation="relu")
        ranks = dist.get_world_size()
        model = MoE(layer.M, expert, num_experts=layer.E, ep_size=ranks, k=layer.k, capacity_factor=1.2, use_rts=False)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1 << 20},
            "fsmoe": {"enabled": enabled} | ({"autotune": False} if enabled else {}),
            "steps_per_print": 1_000_000,
        }
        if layer.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        self.engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        torch.manual_seed(dist.get_rank())
        parameter = next(self.engine.module.parameters())
        # As in a model, where something that learns comes before the layer.
        size = {"dtype": parameter.dtype, "device": parameter.device, "requires_grad": True}
        self.x_SM = torch.randn(layer.S, layer.M, **size)

    def __call__(self) -> None:
        self.x_SM.grad = None
        y_SM, aux_loss, _ = self.engine(self.x_SM)
        self.engine.backward(y_SM.float().square().mean() + 0.01 * aux_loss)
        self.engine.step()

    def peak_bytes(self) -> int:
        """Of the tensors that one more step makes, on this rank; those of before are not counted."""
        layers = [each for each in self.engine.module.modules() if isinstance(each, FSMoELayer)]
        self()
        with LiveMemory() as memory:
            for layer in layers:
                layer.fsmoe.attach(layer.pipeline.window, memory.in_every_thread())
            self()
        for layer in layers:
            layer.fsmoe.attach(layer.pipeline.window)
        return memory.peak

    def close(self) -> None:
        self.engine.destroy()


VARIANTS = (
    Variant("stock", lambda layer: TrainingStep(layer, deepspeed.initialize, enabled=False)),
    Variant("ours", lambda layer: TrainingStep(layer, ds_fsmoe.initialize, enabled=True)),
)


MEMORY_COLUMNS = (
    *("date", "commit", "hardware", "python", *PACKAGES, "ds_fsmoe", "ranks", "grid", "case", "settings", "variant"),
    *("unit", "peak", "times_stock"),
)


def measure_memory(file: Path) -> None:
    """The largest peak of any rank, per case and variant: as a table, and as rows of a file."""
    is_first = dist.get_rank() == 0
    if is_first:
        check_columns(file, MEMORY_COLUMNS)
    made, rows = made_with(PACKAGES), []
    for case in GRID.cases:
        peaks = {}
        for variant in VARIANTS:
            step = variant.make(case.settings)
            peak = torch.tensor([step.peak_bytes()])
            step.close()
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            peaks[variant.name] = peak.item() / 1e6
        settings = json.dumps(case.plain(), sort_keys=True)
        rows += [
            made
            | {"ranks": dist.get_world_size(), "grid": GRID.digest, "case": case.name, "settings": settings}
            | {"variant": name, "unit": "MB", "peak": f"{peak:.6g}", "times_stock": f"{peak / peaks['stock']:.4f}"}
            for name, peak in peaks.items()
        ]
    if is_first:
        append_rows(file, MEMORY_COLUMNS, rows)
        print(f"\n{'peak of the tensors of a step':<32} {'MB':>8}   times stock's")
        for row in rows:
            print(f"{row['case'] + ', ' + row['variant']:<32} {float(row['peak']):>8.4g}   {row['times_stock']}")
        print(f"rows in {file}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help=f"counted steps of each, in blocks of {STEPS_PER_BLOCK}")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    measure_memory(args.results / "unchunked_memory.csv")
    effort = Effort(math.ceil(args.steps / STEPS_PER_BLOCK), STEPS_PER_BLOCK)
    run_grid(GRID, VARIANTS, baseline="stock", effort=effort, results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

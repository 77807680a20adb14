# SPDX-License-Identifier: Apache-2.0
"""Attention and MoE layers on two levels of network: stock DeepSpeed beside every schedule, in one run (Table 5).

``cluster.py up --inter 25mbit --intra 100mbit``, then ``cluster.py run -- benchmarks/bench_layer.py``. The two layouts
are explained in ``layers.py``. Nobody is a straw man: all run at the ZeRO stage and bucket size that stock is fastest
with, and ``pipemoe_lina`` with its fastest slice size, by a sweep on the first case; ``tutel`` and its kin get the best
single degree, found in each case by trying all; ``fsmoe`` and ``best`` get what the autotuner chooses. Stock runs in
the node layout only with two fixes, so every case says that it is fixed: a flat view in its gather, for gloo, and a
capacity that it can cut where nothing is dropped. ``overlap_comm`` has no stream on a CPU and changes nothing there.

Rows go to ``benchmarks/results/layer.csv``; predictions, and what no schedule could beat, beside measurements to
``layer_predicted.csv``. ``--ablation`` measures the parts of ``fsmoe`` and ``best`` one by one (``ablation.csv``).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import RESULTS, Case, CaseResult, Effort, Grid, Variant, run_grid
from benchmarks.layer_steps import Found, Steps
from benchmarks.layers import Layer, Layout, Mpu, fix_capacity, fix_gather, ranks_per_node
from benchmarks.outcome import PACKAGES
from benchmarks.result_files import append_rows, made_with
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.step_prediction import StepTimes

PRESETS = ("deepspeed", "tutel", "tutel_improved", "pipemoe_lina", "fsmoe_no_iio", "fsmoe", "best")
COMMON_DEGREE = ("tutel", "tutel_improved", "pipemoe_lina")
TUNED = ("fsmoe_no_iio", "fsmoe", "best")
MAX_DEGREE = 4


def cases() -> tuple[Case, ...]:
    """24 of Table 4's kinds, each length, width and ratio with every capacity factor.

    Experts are much wider than in Table 4, and tokens narrower: processors multiply faster, for what such links send,
    than GPUs do. So communication has about the share of stock's step that it has in Table 2 (``bench_operations.py``).
    """
    found = []
    for i, ((L, M, ratio), f) in enumerate(
        itertools.product(itertools.product((64, 128), (64, 96), (48, 96)), (1.25, 2.5, None))
    ):
        B = 4 if (L, M) == (64, 64) else 2
        layer = Layer(B=B, L=L, M=M, ratio=ratio, f=f, ffn=("gpt", "mixtral")[i // 2 % 2])
        found.append(Case(f"{layer}, stock fixed", layer))
    return tuple(found)


def fastest(make: Callable[[Any], Steps], settings: list[Any], what: str) -> Any:
    """Which of some settings is the fastest; all ranks agree, because a step takes as long as its slowest rank."""
    times_s = []
    for each in settings:
        steps = make(each)
        times_s.append(steps.timed_s())
        steps.close()
    best = settings[int(np.argmin(times_s))]
    if dist.get_rank() == 0:
        tried = ", ".join(f"{each}: {time_s * 1e3:.0f} ms" for each, time_s in zip(settings, times_s, strict=True))
        print(f"{what}: {best} of {tried}", flush=True)
    return best


class Bench:
    """Makes the variants of a case."""

    def __init__(self, cache: str) -> None:
        self.mpu = Mpu(ranks_per_node())
        self.cache = cache
        self.found = {"node": Found(), "ranks": Found()}
        self.degree_of: dict[Layer, int] = {}
        self.predicted: dict[tuple[Layer, str], StepTimes] = {}
        """(layer, schedule), in the node layout."""

    def stock(self, layout: Layout, layer: Layer) -> Steps:
        return Steps(layer, layout, self.mpu, self.found[layout], None)

    def ours(self, layout: Layout, schedule: str, layer: Layer, gradients: str = "auto") -> Steps:
        found = self.found[layout]
        block: dict[str, Any] = {"schedule": schedule, "gradient_partition": {"mode": gradients}}
        if layout == "node":
            block["esp_size"] = ranks_per_node()
        if schedule == "pipemoe_lina":
            block["gradient_partition"] = {"mode": "fixed_chunk", "chunk_bytes": found.chunk_bytes}
        if schedule in COMMON_DEGREE:
            degree = self.common_degree(layout, layer)
            block["pipeline_degree"] = {"forward": degree, "backward": degree}
        elif schedule != "deepspeed":
            block["autotune"] = {"enabled": True, "cache_dir": self.cache, "watch_every": 0}
            block["pipeline_degree"] = {"max": MAX_DEGREE}
        steps = Steps(layer, layout, self.mpu, found, block)
        if "autotune" in block and layout == "node":
            self.predicted[layer, schedule] = steps.engine.fsmoe.autotune.step
        return steps

    def best_without(self, change: Callable[[BlockPlan], BlockPlan], layer: Layer) -> Steps:
        """``best`` with what it has chosen taken back in part."""
        steps = self.ours("node", "best", layer)
        steps.change_blocks(change)
        return steps

    def links_only(self, layer: Layer) -> Steps:
        """Traffic of both kinds at once, and nothing else of ``fsmoe``: one degree, gradients after the backward."""
        degree = self.common_degree("node", layer)
        steps = self.ours("node", "fsmoe", layer, gradients="off")
        steps.set_degree(degree)
        return steps

    def common_degree(self, layout: Layout, layer: Layer) -> int:
        """The fastest with one degree for both phases and one stream of traffic."""
        if layer not in self.degree_of:
            steps = self.ours(layout, "deepspeed", layer)
            times_s = []
            for degree in range(1, MAX_DEGREE + 1):
                steps.set_degree(degree)
                steps()
                times_s.append(steps.timed_s())
            steps.close()
            self.degree_of[layer] = 1 + int(np.argmin(times_s))
        return self.degree_of[layer]

    def sweep(self, layer: Layer) -> None:
        """What stock and ``pipemoe_lina`` are best with."""
        layouts: tuple[Layout, ...] = ("node", "ranks")
        for layout in layouts:
            options = [Found(stage, bucket) for stage in (0, 1, 2) for bucket in (1 << 16, 1 << 20)]
            make = partial(Steps, layer, layout, self.mpu, block=None)
            self.found[layout] = fastest(make, options, f"stock, {layout}")

        def with_chunk(found: Found) -> Steps:
            self.found["node"] = found
            return self.ours("node", "pipemoe_lina", layer)

        chunks = [replace(self.found["node"], chunk_bytes=1 << bits) for bits in (15, 17, 19, 21)]
        self.found["node"] = fastest(with_chunk, chunks, "pipemoe_lina")

    def variants(self) -> list[Variant]:
        return [
            Variant("stock", partial(self.stock, "node")),
            Variant("stock, best layout", partial(self.stock, "ranks")),
            *(Variant(name, partial(self.ours, "node", name)) for name in PRESETS),
            Variant("deepspeed, best layout", partial(self.ours, "ranks", "deepspeed")),
            Variant("best, best layout", partial(self.ours, "ranks", "best")),
        ]

    def ablation(self) -> list[Variant]:
        """Each part of ``fsmoe`` alone, and ``best`` without each of its own."""
        return [
            Variant("deepspeed", partial(self.ours, "node", "deepspeed")),
            Variant("pipeline only", partial(self.ours, "node", "fsmoe_no_iio", gradients="off")),
            Variant("two links only", self.links_only),
            Variant("gradients only", partial(self.ours, "node", "deepspeed", gradients="adaptive")),
            Variant("fsmoe", partial(self.ours, "node", "fsmoe")),
            Variant("best", partial(self.ours, "node", "best")),
            Variant("best, gathers first", partial(self.best_without, lambda block: replace(block, links="paper"))),
            Variant("best, dW at once", partial(self.best_without, lambda block: replace(block, late_dw=0))),
        ]

    def write_predictions(self, result: CaseResult, folder: Path) -> None:
        """Rows of predicted beside measured, on rank 0."""
        made, rows = made_with(PACKAGES), []
        measured_ms = {each.name: each.p50_ms for each in result.variants}
        for schedule in TUNED:
            step = self.predicted[result.case.settings, schedule]
            of_step = {"measured_ms": measured_ms[schedule], "uncut_measured_ms": measured_ms["deepspeed"]}
            of_step |= {"predicted_ms": step.chosen_ms, "uncut_predicted_ms": step.deepspeed_ms}
            of_step |= {"bound_ms": step.bound_ms}
            facts = {"ranks": dist.get_world_size(), "case": result.case.name, "variant": schedule}
            rows.append(made | facts | {name: f"{value:.5g}" for name, value in of_step.items()})
        append_rows(folder / "layer_predicted.csv", tuple(rows[0]), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--ablation", action="store_true", help="the parts of fsmoe and best, one by one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=100))
    fix_gather()
    fix_capacity()
    every = cases()
    chosen = every if args.only is None else tuple(every[i] for i in args.only)
    effort = Effort(args.blocks, steps=1, warmup=1)
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(cache)
        bench.sweep(chosen[0].settings)
        for case in chosen:
            if args.ablation:
                run_grid(Grid("ablation", (case,)), bench.ablation(), "deepspeed", effort, results=args.results)
                continue
            (result,) = run_grid(Grid("layer", (case,)), bench.variants(), "stock", effort, results=args.results)
            if dist.get_rank() == 0:
                bench.write_predictions(result, args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

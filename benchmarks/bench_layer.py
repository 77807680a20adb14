# SPDX-License-Identifier: Apache-2.0
"""Attention and MoE layers on two levels of network: stock DeepSpeed beside every schedule, in one run (Table 5).

``cluster.py up --inter 50mbit --intra 200mbit``, then ``cluster.py run -- benchmarks/bench_layer.py``. The two layouts
are explained in ``layers.py``. Nobody is a straw man: stock gets the ZeRO stage and bucket size, and ``pipemoe_lina``
the slice size, that are fastest in a sweep on the first case; ``tutel`` and its kin get the best single degree, found
in each case by trying all; ``fsmoe`` and ``best`` get what the autotuner chooses. Stock runs in the node layout only
with two fixes, so every case says that it is fixed: a flat view in its gather, for gloo, and a capacity that it can cut
where nothing is dropped. ``overlap_comm`` has no stream on a CPU and changes nothing there. Rows go to
``benchmarks/results/layer.csv``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ds_fsmoe
from benchmarks.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.layers import Layer, Layout, Model, Mpu, StockGroups, fix_capacity, fix_gather, ranks_per_node
from ds_fsmoe.planning.block import BlockPlan, equal_shares
from ds_fsmoe.reduction import LOOKS

PRESETS = ("deepspeed", "tutel", "tutel_improved", "pipemoe_lina", "fsmoe_no_iio", "fsmoe", "best")
COMMON_DEGREE = ("tutel", "tutel_improved", "pipemoe_lina")
MAX_DEGREE = 6


def cases() -> tuple[Case, ...]:
    """24 of Table 4's kinds, each length, width and ratio with every capacity factor."""
    found = []
    for i, ((L, M, ratio), f) in enumerate(
        itertools.product(itertools.product((64, 128), (128, 256), (2, 4)), (1.25, 2.5, None))
    ):
        layer = Layer(B=2 + i % 2 * 2, L=L, M=M, ratio=ratio, f=f, ffn=("gpt", "mixtral")[i // 2 % 2])
        found.append(Case(f"{layer}, stock fixed", layer))
    return tuple(found)


@dataclass(frozen=True)
class Found:
    """What the sweeps have found."""

    stage: int = 1
    bucket: int = 1 << 20
    chunk_bytes: int = 1 << 18


class Steps:
    """An engine over a model, and a step of it; the same tokens for everybody.

    Args:
        layer: sizes.
        layout: of the ranks.
        mpu: of the node layout.
        found: settings of stock, and of ``pipemoe_lina``.
        block: ``fsmoe``; ``None`` for stock.
        prepare: called with the model before an engine has it.
    """

    def __init__(
        self,
        layer: Layer,
        layout: Layout,
        mpu: Mpu | None,
        found: Found,
        block: dict[str, Any] | None,
        prepare: Callable[[Model], None] = lambda _: None,
    ) -> None:
        torch.manual_seed(dist.get_rank())
        stock = block is None
        mpu = mpu if layout == "node" else None
        self.groups = StockGroups()
        self.groups.put()
        module = Model(layer, layout, mpu, stock)
        prepare(module)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": found.stage if stock else 0, "reduce_bucket_size": found.bucket},
            "steps_per_print": 1_000_000,
        }
        if not stock:
            config["fsmoe"] = {"enabled": True} | block
        initialize: Any = deepspeed.initialize if stock else ds_fsmoe.initialize
        self.engine = initialize(model=module, model_parameters=list(module.parameters()), config=config, mpu=mpu)[0]
        self.groups.take()
        rows = layer.B * layer.L
        if layout == "ranks" or not stock:
            rows //= ranks_per_node()
        torch.manual_seed(dist.get_rank())
        self.x_SM = torch.randn(rows, layer.M)
        for _ in range(LOOKS if not stock else 1):
            self()

    def __call__(self) -> None:
        self.groups.put()
        self.engine.backward(self.engine(self.x_SM))
        self.engine.step()

    def timed_s(self, steps: int = 3) -> float:
        """The median of some steps, of the slowest rank."""
        times = []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            self()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(times)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.median())

    def set_degree(self, degree: int) -> None:
        """Of both phases."""
        for layer in self.engine.fsmoe.layers.values():
            inner = layer.deepspeed_moe
            forward, backward = (
                replace(plan, block=BlockPlan(equal_shares(degree), plan.block.links))
                for plan in (inner.pipeline.forward, inner.pipeline.backward)
            )
            inner.pipeline = replace(inner.pipeline, forward=forward, backward=backward)

    def close(self) -> None:
        self.engine.destroy()


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

    def stock(self, layout: Layout, layer: Layer) -> Steps:
        return Steps(layer, layout, self.mpu, self.found[layout], None)

    def ours(self, layout: Layout, schedule: str, layer: Layer) -> Steps:
        found = self.found[layout]
        block: dict[str, Any] = {"schedule": schedule}
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
        return Steps(layer, layout, self.mpu, found, block)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    # Compiled by DeepSpeed at its first process group on a CPU, for a collective of inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=100))
    fix_gather()
    fix_capacity()
    every = cases()
    grid = Grid("layer", every if args.only is None else tuple(every[i] for i in args.only))
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(cache)
        bench.sweep(grid.cases[0].settings)
        run_grid(grid, bench.variants(), "stock", Effort(args.blocks, steps=1, warmup=2), results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

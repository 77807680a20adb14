# SPDX-License-Identifier: Apache-2.0
"""Models in pipeline stages: stock DeepSpeed beside our schedules, whole ``train_batch`` calls (the paper's figure 8).

``cluster.py up --nodes 4 --ranks-per-node 1 --inter 100mbit``, then ``cluster.py run --
benchmarks/cases/bench_stages.py --only gpt2``, a job for each case. The first half of the ranks has the first stage;
experts of a stage are spread over all its ranks. ``tutel`` has the fastest of four numbers of chunks, ``fsmoe`` and
``best`` have the autotuner's, which tries plans by whole batches. Weights and text are the same for all, and so are
links: they have to be so slow that they and not the processors are what a batch waits for (the column
``machine_cpu_share``).

Rows go to ``benchmarks/results/stages.csv``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Case, Effort, Goal, Grid, Variant, run_grid
from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE
from benchmarks.harness.routing import parsed
from benchmarks.models.layer_steps import Found
from benchmarks.models.layers import TINY, Layer, begin
from benchmarks.models.pipeline_model import PipelineSteps

LEARNING_RATE = 0.05
"""Low enough that a difference in the last bits does not grow within a benchmark."""
MAX_DEGREE = 4
TRIALS = 2
"""Batches of each plan in a round: they take seconds, and with 1 few plans are tried."""
STOCK, TUTEL, FSMOE, BEST = "stock", "tutel", "fsmoe", "best"


@dataclass(frozen=True)
class Settings:
    """A model, cut into two stages; a rank reads B sequences in each of four micro-batches."""

    layer: Layer


CASES = {
    "gpt2": Case(
        "GPT2-like, 2 stages",
        Settings(Layer(B=1, L=128, M=512, ratio=4, f=1.25, ffn="gpt", E=4, k=2, layers=2)),
    ),
    # With fewer gradients for as many tokens; a batch is of four micro-batches here, and of many more in training.
    "gpt2-long": Case(
        "GPT2-like, longer, 2 stages",
        Settings(Layer(B=1, L=256, M=256, ratio=8, f=1.25, ffn="gpt", E=4, k=2, layers=2)),
    ),
    "mixtral": Case(
        "Mixtral-like, two blocks a stage",
        Settings(Layer(B=1, L=256, M=256, ratio=6, f=None, ffn="mixtral", E=4, k=2, layers=4)),
    ),
    "tiny": Case("tiny, 2 stages", Settings(TINY)),
}


class Stages:
    """Makes engines over models in stages, each as fast as it can be."""

    def variants(self) -> list[Variant]:
        """Return stock and ours by name."""
        return [
            Variant(STOCK, lambda settings: self._made(settings, None)),
            Variant("deepspeed", lambda settings: self._made(settings, {"schedule": "deepspeed", "autotune": False})),
            Variant(TUTEL, self._tutel),
            *(Variant(name, partial(self._tuned, name)) for name in (FSMOE, BEST)),
        ]

    def _made(self, settings: Settings, block: dict[str, Any] | None) -> PipelineSteps:
        return PipelineSteps(settings.layer, Found(), block, LEARNING_RATE)

    def _tutel(self, settings: Settings) -> PipelineSteps:
        steps = self._made(settings, {"schedule": TUTEL, "autotune": False, "num_chunks": 1})
        times_s = []
        for degree in range(1, MAX_DEGREE + 1):
            steps.set_degree(degree)
            times_s.append(_timed_s(steps))
        steps.set_degree(1 + int(np.argmin(times_s)))
        if dist.get_rank() == 0:
            print(f"tutel: {1 + int(np.argmin(times_s))} chunks of", [f"{each:.3f} s" for each in times_s], flush=True)
        return steps

    def _tuned(self, schedule: str, settings: Settings) -> PipelineSteps:
        block = {
            "schedule": schedule,
            "autotune": {"enabled": True, "trials": TRIALS, "watch_every": 0},
            "num_chunks": {"max": MAX_DEGREE},
        }
        steps = self._made(settings, block)
        steps.tune()
        return steps


def _timed_s(step: Callable[[], object], repeats: int = 3) -> float:
    """Return the median of some steps, of the slowest rank, after one that is not counted."""
    times = []
    step()
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def main() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=["gpt2", "gpt2-long", "mixtral"], choices=list(CASES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    begin()
    for name in args.only:
        goals = [Goal(FSMOE, at_least=1.2), Goal(BEST, at_least=0.98)] if args.blocks >= MIN_BLOCKS_TO_JUDGE else []
        effort = Effort(args.blocks, steps=1, warmup=1)
        run_grid(Grid("stages", (CASES[name],)), Stages().variants(), STOCK, effort, goals, args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

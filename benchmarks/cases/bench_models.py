# SPDX-License-Identifier: Apache-2.0
"""Whole models, trained on text: stock DeepSpeed beside every schedule (the paper's figures 6 and 7).

``cluster.py up --inter 25mbit --intra 100mbit``, then ``cluster.py run -- benchmarks/cases/bench_models.py``; other
numbers of ranks with ``--nodes`` and ``--ranks-per-node`` of ``up``. Layouts, fixes of stock and what each system may
choose are those of ``bench_layer.py``. The models have the blocks of GPT2-XL and Mixtral, scaled to the bed; all
variants begin with the same weights and see the same text, so their losses are printed side by side.

``--judged`` measures all four models in ten blocks or more, for intervals to judge by.

Rows go to ``benchmarks/results/models.csv``, losses to ``models_loss.csv``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.contenders import FEW_BLOCKS, Contenders, further
from benchmarks.models.language_model import LanguageModel, batches
from benchmarks.models.layer_steps import Steps
from benchmarks.models.layers import TINY, Layer, Layout, begin

LEARNING_RATE = 0.05
"""Low enough that a difference in the last bits, or of what is dropped, does not grow within a benchmark."""


@dataclass(frozen=True)
class Settings:
    """A model."""

    layer: Layer


def cases(smoke: bool = False) -> dict[str, Case]:
    """By a short name; an expert for each rank."""
    E = dist.get_world_size()
    if smoke:
        return {"tiny": Case(f"tiny, P {E}", Settings(replace(TINY, E=E)))}
    gpt = Layer(B=2, L=128, M=64, ratio=64, f=1.25, ffn="gpt", E=E, layers=4)
    mixtral = Layer(B=2, L=128, M=64, ratio=96, f=None, ffn="mixtral", E=E, layers=4)
    layers = {
        "gpt2": ("GPT2-XL-like", gpt),
        "mixtral": ("Mixtral-like", mixtral),
        "short": ("Mixtral-like", replace(mixtral, L=64)),
        "long": ("Mixtral-like", replace(mixtral, L=256)),
    }
    return {
        short: Case(f"{name}, L {layer.L}, P {E}, stock fixed", Settings(layer))
        for short, (name, layer) in layers.items()
    }


class Models(Contenders):
    """Makes language models where the other makes layers, and keeps what they lose."""

    def __init__(self, cache: str, is_smoke: bool = False) -> None:
        super().__init__(cache, is_smoke)
        self.made: dict[str, Steps] = {}

    def steps(self, layer: Layer, layout: Layout, block: dict[str, Any] | None) -> Steps:
        found = self.found[layout]
        read = batches(layer, layout)
        return Steps(layer, layout, self.mpu, found, block, make_model=LanguageModel, batches=read, lr=LEARNING_RATE)

    def variants(self) -> list[Variant]:
        """With the model's settings, and kept by name."""
        return [Variant(each.name, partial(self._kept, each)) for each in super().variants()]

    def _kept(self, variant: Variant, settings: Settings) -> Steps:
        steps: Any = variant.make(settings.layer)
        self.made[variant.name] = steps
        return steps

    def losses(self) -> dict[str, list[float]]:
        """Variant -> mean over all ranks, step by step. Collective; forgets them."""
        found = {}
        for name, steps in self.made.items():
            of_ranks = torch.stack(steps.losses)
            dist.all_reduce(of_ranks)
            found[name] = (of_ranks / dist.get_world_size()).tolist()
        self.made.clear()
        return found


def write_losses(case: Case, losses: dict[str, list[float]], folder: Path) -> None:
    """All of them to the file, and first and last beside stock's in a table. On rank 0."""
    made = made_with(PACKAGES)
    num_steps = min(map(len, losses.values()))
    rows = [
        made | {"case": case.name, "variant": name, "step": step, "loss": f"{values[step]:.6f}"}
        for name, values in losses.items()
        for step in range(num_steps)
    ]
    append_rows(folder / "models_loss.csv", tuple(rows[0]), rows)
    print(f"losses in nats per byte, steps 1 to {num_steps}, and how far they are from stock's at most")
    for name, values in losses.items():
        off = max(abs(value / theirs - 1) for value, theirs in zip(values, losses["stock"], strict=False))
        print(f"  {name:26} {values[0]:.4f}  {values[num_steps - 1]:.4f}  {off:.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, help=f"({FEW_BLOCKS}; {MIN_BLOCKS_TO_JUDGE} with --judged)")
    parser.add_argument("--judged", action="store_true", help="all four models unless --only says which, ten blocks")
    parser.add_argument("--only", nargs="*", help="gpt2, mixtral (these two, if left out), short, long")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    begin(200)
    every = cases(args.smoke)
    wanted = list(every) if args.smoke or (args.judged and args.only is None) else args.only or ["gpt2", "mixtral"]
    blocks = args.blocks or (MIN_BLOCKS_TO_JUDGE if args.judged else FEW_BLOCKS)
    effort = Effort(2 if args.smoke else blocks, steps=1, warmup=1, judged=args.judged)
    unknown = [name for name in wanted if name not in every]
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: the choices are {', '.join(every)}")
    with tempfile.TemporaryDirectory() as cache:
        models = Models(cache, args.smoke)
        for name in wanted:
            case = every[name]
            variants = models.variants()
            over = further(variants, args.judged)
            run_grid(Grid("models", (case,)), variants, "stock", effort, results=args.results, further=over)
            losses = models.losses()
            if dist.get_rank() == 0:
                write_losses(case, losses, args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

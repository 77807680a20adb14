# SPDX-License-Identifier: Apache-2.0
"""Inference under skew: forwards with each expert at home, and with experts that come and go as in Lina (ATC'23).

``cluster.py up --nodes 4 --ranks-per-node 1 --inter 50mbit``, then
``cluster.py run -- benchmarks/cases/bench_inference.py``. Every forward has other tokens, which choose what they are
told to: by topics, of which each batch has others, or as was recorded. Paths are profiled on other batches. Beside
Lina's scheduler there are its two ablations, and the bound of routing that is even. Times go to
``benchmarks/results/inference.csv``; median, 95th percentile, accuracy and loads to ``inference_tail.csv`` beside it.
"""

from __future__ import annotations

import argparse
import functools
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.harness.harness import RESULTS, Case, Effort, Goal, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.routed_model import Recorded, RoutedModel, Topics
from ds_fsmoe.observing.clock import HOST
from ds_fsmoe.planning.lina.popularity import PathProfile

MEDIAN_GOAL = 1.45
"""The goal is the median of the paper; of its 95th percentile that is 1.63."""
_PROFILED = 64
"""Batches of each rank of which paths are profiled."""
_BATCHES = 128
"""Batches that are made ahead, and taken in turn."""
_FIRST_STEP = 1000
"""Steps from which on batches are for inference: those before are for the profile."""


@dataclass(frozen=True)
class Sizes:
    """S tokens per rank of width M in L layers; E experts of hidden width H, each token to k of them."""

    S: int
    M: int
    H: int
    L: int
    E: int
    k: int
    routing: str
    """topics, with so much noise behind it, or the name of a recording."""


GRID = Grid(
    "inference",
    (
        Case("topics, k 1 of 4", Sizes(192, 256, 512, 6, 4, 1, "topics 0.2")),
        Case("topics, k 1 of 16", Sizes(192, 256, 512, 6, 16, 1, "topics 0.2")),
        Case("topics with more noise, k 1 of 16", Sizes(192, 256, 512, 6, 16, 1, "topics 0.5")),
        Case("topics, k 2 of 16", Sizes(96, 256, 512, 6, 16, 2, "topics 0.2")),
        Case("recorded gpt, k 2 of 8", Sizes(192, 256, 512, 4, 8, 2, "gpt")),
        Case("recorded olmoe, k 8 of 64", Sizes(96, 256, 128, 4, 64, 8, "olmoe")),
    ),
)
SMOKE = Grid("inference", (Case("smoke", Sizes(24, 16, 16, 3, 8, 1, "topics 0.2")),))

EVEN = "even routing"
WAYS: dict[str, dict[str, Any] | None] = {
    "at home": None,
    "lina": {},
    "lina, no estimate": {"estimate": False},
    "lina, no second phase": {"second_phase": False},
    EVEN: None,
}
FROM_HOME: dict[str, dict[str, Any] | None] = {"lina, weights from home": {"weights": "home"}}
"""For links on which weights that change do not take seconds a forward."""


def tokens_of(sizes: Sizes, is_profile: bool) -> Topics | Recorded:
    """What tokens choose: of a recording the last steps, and for the profile those before."""
    kind, _, noise = sizes.routing.partition(" ")
    if kind == "topics":
        return Topics(sizes.E, sizes.k, sizes.L, float(noise))
    return Recorded(kind, tuple(range(3, 6)) if is_profile else (6, 7))


@functools.lru_cache(maxsize=2)
def batches(sizes: Sizes, rank: int, is_even: bool) -> list[torch.Tensor]:
    """What the tokens of a rank choose in each forward, [S, L, k]; the same for all variants."""
    if is_even:
        first_S1 = np.arange(sizes.S)[:, None] * sizes.k + rank
        index_SK = torch.from_numpy((first_S1 + np.arange(sizes.k)) % sizes.E)
        return [index_SK.unsqueeze(1).expand(-1, sizes.L, -1)]
    source = tokens_of(sizes, is_profile=False)
    num = len(source.steps) if isinstance(source, Recorded) else _BATCHES
    return [torch.from_numpy(source.batch(sizes.S, _FIRST_STEP + step, rank)) for step in range(num)]


@functools.lru_cache(maxsize=1)
def profiles_of(sizes: Sizes) -> dict[str, PathProfile]:
    """Label -> profile of a layer, by batches that are not measured; the same on every rank."""
    source = tokens_of(sizes, is_profile=True)
    profiles = [PathProfile(sizes.E) for _ in range(sizes.L)]
    num_steps = len(source.steps) if isinstance(source, Recorded) else _PROFILED
    for step in range(num_steps):
        for rank in range(dist.get_world_size()):
            index_SLK = source.batch(256, step, rank)
            for layer, profile in enumerate(profiles):
                profile.add(index_SLK[:, max(0, layer - 3) : layer, 0], index_SLK[:, layer])
    return {f"L{layer:02d}": profile for layer, profile in enumerate(profiles)}


class Forwards:
    """Forwards of one variant; each has the next batch.

    Args:
        name: the variant.
        grid: the grid of the case.
        results: the folder for median and percentile.
        sizes: the settings of the case.
    """

    def __init__(self, name: str, grid: Grid, results: Path, sizes: Sizes) -> None:
        torch.manual_seed(0)
        model = RoutedModel(sizes.L, sizes.M, sizes.H, sizes.E)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
            "fsmoe": {
                "enabled": True,
                "ep_size": dist.get_world_size(),
                "metrics": "off",
                "autotune": {"enabled": False},
                "topology": {"ranks_per_node": max(1, dist.get_world_size() // 2)},
            },
        }
        self.engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        self._name, self._results, self._grid = name, results, grid.digest
        self._case = next(each.name for each in grid.cases if each.settings == sizes)
        self._batches = batches(sizes, dist.get_rank(), name == EVEN)
        self._x_SM = torch.randn(sizes.S, sizes.M)
        self._step = 0
        self._times_ms: list[float] = []
        self._open = ExitStack()
        self._open.enter_context(torch.no_grad())
        self.engine.eval()
        self._happened: Any = None
        if (options := (WAYS | FROM_HOME)[name]) is not None:
            profiles = None if options.get("estimate") is False else profiles_of(sizes)
            self._happened = self._open.enter_context(ds_fsmoe.inference(self.engine, profiles=profiles, **options))

    def __call__(self) -> None:
        index_SLK = self._batches[self._step % len(self._batches)]
        self._step += 1
        began_s = HOST.perf_counter()
        self.engine(self._x_SM, index_SLK)
        self._times_ms.append(1e3 * (HOST.perf_counter() - began_s))

    def close(self) -> None:
        """End the engine, and write what is not in the table of times."""
        self._open.close()
        self.engine.destroy()
        times_ms = torch.tensor(self._times_ms, dtype=torch.float64)
        dist.all_reduce(times_ms, dist.ReduceOp.MAX)
        # The first ones connect and allocate.
        middle, tail = np.percentile(times_ms.numpy()[len(times_ms) // 10 + 1 :], (50, 95))
        if dist.get_rank():
            return
        row = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "grid": self._grid, "case": self._case}
        row |= {"variant": self._name, "forwards": len(times_ms), "p50_ms": f"{middle:.3f}", "p95_ms": f"{tail:.3f}"}
        row |= dict.fromkeys(("accuracy", "accuracy_by_layer", "second_phases", "at_home", "fullest"), "")
        if self._happened is not None:
            records = [asdict(each) | {"accuracy": each.accuracy} for each in self._happened.layers.values()]
            counted = sum(each["counted"] for each in records)
            by_layer = ["" if each["accuracy"] is None else f"{each['accuracy']:.3f}" for each in records]
            row |= {"accuracy_by_layer": " ".join(by_layer), "second_phases": f"{self._happened.second_phases:.4f}"}
            if self._happened.accuracy is not None:
                row["accuracy"] = f"{self._happened.accuracy:.4f}"
            if counted:
                row["at_home"] = f"{sum(each['fullest_primary'] for each in records) / counted:.4f}"
                row["fullest"] = f"{sum(each['fullest'] for each in records) / counted:.4f}"
        append_rows(self._results / "inference_tail.csv", tuple(row), [row])
        print(f"{self._case}, {self._name}: p50 {middle:.1f} ms, p95 {tail:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12, help="of 8 forwards of each variant")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--from-home", action="store_true", help="weights that change are fetched over the links, too")
    parser.add_argument("--smoke", action="store_true", help="one small case, few forwards")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser, no_routers="tokens choose what they are told to")
    join()
    chosen = GRID.cases if args.only is None else tuple(GRID.cases[each] for each in args.only)
    grid = SMOKE if args.smoke else Grid(GRID.name, chosen)
    effort = Effort(2, 2, 1) if args.smoke else Effort(args.blocks, 8)
    goals = () if args.smoke else (Goal("lina", MEDIAN_GOAL),)
    ways = WAYS | FROM_HOME if args.from_home or args.smoke else WAYS
    variants = tuple(Variant(name, partial(Forwards, name, grid, args.results)) for name in ways)
    run_grid(grid, variants, baseline="at home", effort=effort, goals=goals, results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What the autotuner makes of the choice between all-to-alls: each way tuned, and the way that it chooses itself.

``cluster.py up --inter 25mbit --intra 100mbit``, then ``cluster.py run -- benchmarks/cases/bench_choice.py``. One layer
whose experts lie on all ranks, nothing dropped: k of E narrow experts, width 512; in place of attention it has a norm,
since with the few tokens that such links carry in a second its gradients alone would take longer than all tokens.
``flat`` and ``once`` run ``best`` with the all-to-all given, ``chosen`` leaves it open; ``once, tutel`` and ``once,
fsmoe`` differ from ``once`` by the schedule alone, with the same all-to-all and gradients. AutoEP, of the same package,
has a row where it can run.

``--old-grid`` takes the 24 layers of ``bench_layer.py`` instead, whose rows may travel alike in both ways (``dispatch``
is ``rows``). Give each case a job of its own (``--only``). Rows go to ``benchmarks/results/choice.csv``
(``choice_shared.csv`` on links that contend, ``choice_grid.csv`` with ``--old-grid``), what was predicted and chosen to
``choice_predicted.csv`` and so on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cases.bench_layer import cases as old_grid
from benchmarks.cases.bench_layer import links
from benchmarks.harness.harness import RESULTS, Case, CaseResult, Effort, Grid, Variant, run_grid
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.auto_ep import AutoEPSteps, can_run
from benchmarks.models.contenders import MAX_DEGREE
from benchmarks.models.layer_steps import Found, Steps
from benchmarks.models.layers import TINY, Layer, begin
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED

Prepare = Callable[[Any], None]
WAYS: dict[str, dict[str, Any]] = {
    "flat": {"alltoall": "flat"},
    "once": {"alltoall": NODE_DEDUPLICATED},
    "chosen": {"alltoall": "auto"},
}
BY_SCHEDULE: dict[str, dict[str, Any]] = {
    "once, tutel": {"alltoall": NODE_DEDUPLICATED, "schedule": "tutel"},
    "once, fsmoe": {"alltoall": NODE_DEDUPLICATED, "schedule": "fsmoe"},
}


def nothing(model: nn.Module) -> None:
    """Leave a model as it is."""


def without_attention(model: nn.Module) -> None:
    """Put a norm in place of the attention of each block: what learns ahead of a layer, and hardly any gradients."""
    attention = model.get_submodule("attention")
    assert isinstance(attention, nn.ModuleList)
    for number, each in enumerate(attention):
        attention[number] = nn.LayerNorm(each.layer.M)


def cases() -> tuple[Case, ...]:
    """Return layers with k from 1 to 8 of many experts, as wide as tokens are."""
    found = []
    for E, k, B in ((64, 8, 2), (16, 8, 2), (16, 4, 4), (8, 2, 4), (8, 1, 8)):
        layer = Layer(B=B, L=64, M=512, ratio=1, f=None, ffn="mixtral", E=E, k=k, layers=1)
        found.append(Case(f"{layer}, no attention, all ranks{links()}", layer))
    return tuple(found)


class Tuned:
    """Makes engines with what the autotuner chooses, and keeps what it expected of each.

    Args:
        cache: folder in which autotuners keep what they have measured.
    """

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self.expected: dict[tuple[Layer, str], dict[str, Any]] = {}
        """(layer, variant) -> what is known of its plan."""

    def make(self, name: str, layer: Layer, block: dict[str, Any], prepare: Prepare) -> Steps:
        """Return an engine whose plans have been measured, tried and kept.

        Args:
            name: the variant.
            layer: the sizes.
            block: what differs from other variants.
            prepare: what is done to the model beforehand.
        """
        common = {"schedule": "best", "dispatch": "unpadded", "gradient_partition": {"mode": "adaptive"}}
        tuning = {"autotune": {"enabled": True, "cache_dir": self._cache, "watch_every": 0}}
        whole = common | tuning | {"num_chunks": {"max": MAX_DEGREE}} | block
        steps = Steps(layer, "ranks", None, Found(), whole, prepare)
        (inner, *_) = steps.engine.fsmoe.inner_layers.values()
        plan, expected = inner.fsmoe.plan, steps.engine.fsmoe.autotune.result.step
        self.expected[layer, name] = {
            "alltoall": plan.alltoall,
            "degrees": f"{plan.forward.degree}+{plan.backward.degree}",
            "predicted_ms": f"{expected.chosen_ms:.5g}",
            "bound_ms": f"{expected.bound_ms:.5g}",
        }
        return steps

    def variants(self, ways: dict[str, dict[str, Any]], prepare: Prepare) -> list[Variant]:
        """Return a variant for each way."""
        return [Variant(name, partial(self.make, name, block=block, prepare=prepare)) for name, block in ways.items()]


def write_expected(result: CaseResult, tuned: Tuned, file: Path) -> None:
    """Append what was expected beside what was measured."""
    made, rows = made_with(PACKAGES), []
    for variant in result.variants:
        expected = tuned.expected.get((result.case.settings, variant.name))
        if expected is not None:
            facts = {"ranks": dist.get_world_size(), "case": result.case.name, "variant": variant.name}
            rows.append(made | facts | {"measured_ms": f"{variant.p50_ms:.5g}"} | expected)
    append_rows(file, tuple(rows[0]), rows)


def main() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="of one step of each variant")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--old-grid", action="store_true", help="the 24 layers of bench_layer.py")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer, as fast as can be, to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    begin()
    every = old_grid() if args.old_grid else cases()
    chosen = every if args.only is None else tuple(every[i] for i in args.only)
    if args.smoke:
        tiny = replace(TINY, f=None, ffn="mixtral")
        chosen = (Case(f"{tiny}, all ranks", tiny),)
    # Files of their own: a mean over two kinds of links, or over both grids, would mean nothing.
    name = "choice" + "_grid" * args.old_grid + "_shared" * bool(links())
    effort = Effort(2 if args.smoke else args.blocks, steps=1, warmup=1)
    with tempfile.TemporaryDirectory() as cache:
        for case in chosen:
            tuned = Tuned(cache)
            # The old grid asks which of two ways is chosen, and nothing else.
            ways = {each: WAYS[each] for each in ("flat", "chosen")} if args.old_grid else WAYS | BY_SCHEDULE
            prepare = nothing if args.old_grid else without_attention
            variants = tuned.variants(ways, prepare)
            if not args.old_grid and can_run(case.settings) is None:
                variants.append(Variant("AutoEP", partial(AutoEPSteps, found=Found(), prepare=prepare)))
            (result,) = run_grid(Grid(name, (case,)), variants, "flat", effort, results=args.results)
            if dist.get_rank() == 0:
                write_expected(result, tuned, args.results / f"{name}_predicted.csv")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

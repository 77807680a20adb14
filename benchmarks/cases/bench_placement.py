# SPDX-License-Identifier: Apache-2.0
"""A layer under skewed routing whose experts stay where they are, or move to where that makes steps shorter.

``cluster.py up --inter 25mbit --intra 100mbit``, then for each routing ``cluster.py run --
benchmarks/cases/bench_placement.py --routing hot_rank`` (``zipf_1.5``, ``rotating``, ``olmoe``, ...). All variants run
``best`` with what the autotuner has chosen under this routing; those that are placed then train until experts have
moved, if they do, and go on deciding while they are measured. Whole steps; nothing is dropped. Times go to
``placement.csv`` in the folder of the routing, how full the fullest rank was and what was said to
``placement_moves.csv`` beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cases.bench_choice import without_attention
from benchmarks.harness import routing
from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.contenders import MAX_DEGREE
from benchmarks.models.layer_steps import Found, Steps
from benchmarks.models.layers import TINY, Layer, begin
from ds_fsmoe.config.blocks import PlacementBlock
from ds_fsmoe.placement.watch import Event

EVERY = PlacementBlock().every
"""Steps of which loads are measured before each decision."""
WAYS: dict[str, dict[str, Any]] = {
    "stays": {},
    "balanced": {"placement": {"policy": "balanced", "moves_per_step": 4}},
}


def cases() -> tuple[Case, ...]:
    """Return layers of many narrow experts, whose rows or whose products take most of the time."""
    layers = {
        "rows": Layer(B=2, L=64, M=512, ratio=1, f=None, ffn="mixtral", E=16, k=4, layers=1),
        "products": Layer(B=4, L=64, M=512, ratio=4, f=None, ffn="mixtral", E=16, k=2, layers=1),
    }
    return tuple(Case(f"{layer}, no attention, all ranks, mostly {name}", layer) for name, layer in layers.items())


class Moving:
    """Makes engines whose plans are settled and whose experts have moved, and keeps what was decided.

    Args:
        cache: folder in which autotuners keep what they have measured.
    """

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self.events: dict[tuple[Layer, str], list[Event]] = {}
        """(layer, variant) -> what was decided, until it is measured and while it is."""

    def make(self, name: str, layer: Layer, block: dict[str, Any]) -> Steps:
        """Return an engine that is ready to be measured.

        Args:
            name: the variant.
            layer: the sizes.
            block: what differs from other variants.
        """
        common = {"schedule": "best", "dispatch": "unpadded", "gradient_partition": {"mode": "adaptive"}}
        tuning = {"autotune": {"enabled": True, "cache_dir": self._cache, "watch_every": 0}}
        whole = common | tuning | {"num_chunks": {"max": MAX_DEGREE}} | block
        steps = Steps(layer, "ranks", None, Found(), whole, without_attention)
        watch = steps.engine.fsmoe.placement_watch
        if watch is not None:
            events = self.events.setdefault((layer, name), [])
            watch.on_event.append(events.extend)
            for number in range(2 * EVERY + 12):
                routing.at_step(number)
                steps()
        return steps


def write_events(case: Case, moving: Moving, file: Path) -> None:
    """Append what was decided in each variant of a case."""
    made, rows = made_with(PACKAGES), []
    for name in WAYS:
        for event in moving.events.get((case.settings, name), ()):
            facts = {"case": case.name, "variant": name, "step": event.step, "balance": f"{event.balance:.4f}"}
            facts |= {"expected_balance": f"{event.expected_balance:.4f}", "swaps": event.num_swaps}
            # Of results that were measured when experts had replicas, the column stays.
            rows.append(made | facts | {"replicas": "", "why": event.why})
    if rows:
        append_rows(file, tuple(rows[0]), rows)


def main() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="of two steps of each variant")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer, as fast as can be, to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    begin()
    chosen = cases() if args.only is None else tuple(cases()[i] for i in args.only)
    if args.smoke:
        tiny = replace(TINY, f=None, ffn="mixtral")
        chosen = (Case(f"{tiny}, all ranks", tiny),)
    effort = Effort(2 if args.smoke else args.blocks, steps=1 if args.smoke else 2, warmup=1)
    with tempfile.TemporaryDirectory() as cache:
        for case in chosen:
            moving = Moving(cache)
            variants = [Variant(name, partial(moving.make, name, block=block)) for name, block in WAYS.items()]
            run_grid(Grid("placement", (case,)), variants, "stays", effort, results=args.results)
            if dist.get_rank() == 0:
                write_events(case, moving, args.results / "placement_moves.csv")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

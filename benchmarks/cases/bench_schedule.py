# SPDX-License-Identifier: Apache-2.0
"""The schedule by itself, where each rank has a core of its own: ours in DeepSpeed's order beside ``best``.

``cluster.py up --nodes 2 --ranks-per-node 1 --inter 100mbit``, then ``cluster.py run --
benchmarks/cases/bench_schedule.py --only gpt``; layers of the paper's grid go by number, as in ``bench_layer.py``. All
variants have the same layers in the same layout and send the same bytes; what differs is the order of tasks and when
gradients are sent. ``serial`` is DeepSpeed's order with gradients behind the backward, ``windows`` has gradients
beside the backward, ``best`` is what the autotuner keeps. With more ranks than cores, ranks wait for each other's
computation, which hides what an order gains.

Rows go to ``benchmarks/results/schedule.csv``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cases.bench_layer import cases
from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.routing import parsed
from benchmarks.models.contenders import Contenders
from benchmarks.models.whole_models import CASES, IN_A_ROW, Setting, Training, Whole, tiny

SERIAL = "serial"
STAGE = 1
MODELS = tuple(name for name, case in CASES.items() if STAGE in case.settings.stages)


def of_whole(model: Whole, cache: str) -> list[Variant]:
    """Return the variants of a whole model, with experts over all ranks."""
    base: dict[str, Any] = {"enabled": True, "schedule": "deepspeed", "autotune": False, "two_batch_overlap": "off"}
    if model.family != "gpt":
        base |= {"ep_size": dist.get_world_size(), "alltoall": "node_deduplicated"}
    tuned = {"schedule": "best", "autotune": {"enabled": True, "cache_dir": cache}, "two_batch_overlap": "auto"}
    added: dict[str, dict[str, Any]] = {
        SERIAL: {"gradient_partition": {"mode": "off"}},
        "windows": {"gradient_partition": {"mode": "adaptive"}},
        "best": {"gradient_partition": {"mode": "adaptive"}} | tuned,
    }

    def made(name: str, block: dict[str, Any]) -> Callable[[Whole], Training]:
        return lambda model: Training(model, Setting(STAGE), {"fsmoe": base | block}, f"ours, {name}")

    return [Variant(name, made(name, block)) for name, block in added.items()]


def of_layers(contenders: Contenders) -> list[Variant]:
    """Return the variants of a layer, with experts over all ranks."""
    ours = partial(contenders.ours, "ranks")
    return [
        Variant(SERIAL, lambda layer: ours("deepspeed", layer, gradients="off")),
        Variant("windows", lambda layer: ours("deepspeed", layer, gradients="adaptive")),
        Variant("best", lambda layer: ours("best", layer)),
    ]


def main() -> None:
    """Measure the models and layers that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}, or numbers of layers")
    parser.add_argument("--tiny", action="store_true", help="to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    with tempfile.TemporaryDirectory() as cache:
        for key in args.only:
            if key in MODELS:
                case = CASES[key]
                if args.tiny:
                    case = tiny(case)
                variants, in_a_row = of_whole(case.settings, cache), IN_A_ROW
            else:
                layer = cases()[int(key)].settings
                case, in_a_row = Case(f"{layer}, all ranks", layer), 1
                variants = of_layers(Contenders(cache))
            effort = Effort(args.blocks, steps=1, warmup=1, in_a_row=in_a_row)
            run_grid(Grid("schedule", (case,)), variants, SERIAL, effort, results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Where the gain of a whole model comes from: each rung adds one thing to the rung before, and is measured beside it.

``cluster.py up --inter 100mbit --intra 400mbit``, then ``cluster.py run -- benchmarks/cases/bench_ladder.py --only
gpt``. The rungs: stock at its fastest setting (as ``bench_one_word.py --sweep`` has found it); our layers with
DeepSpeed's schedule, for a Hugging Face model with experts over all ranks; each token once per node; gradients in
windows of the backward; the schedule that the autotuner keeps. A rung that a model cannot climb is left out: the GPT's
slots cross no node once, and at ZeRO 3 there are no windows.

Rows go to ``benchmarks/results/ladder.csv``; the column ``over`` names the rung before, and is empty for stock.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.routing import parsed
from benchmarks.models.sweeps import OFF, STOCK, found, sweep
from benchmarks.models.whole_models import CASES, IN_A_ROW, Setting, Training, Whole, tiny

LAYOUT, ONCE, WINDOWS, SCHEDULE = "ep_size", "once per node", "windows", "schedule"


def rungs(model: Whole, stage: int, ranks: int) -> dict[str, dict[str, Any]]:
    """Return each rung's ``fsmoe`` block, the lowest first.

    Args:
        model: the sizes.
        stage: of ZeRO.
        ranks: over which experts lie.
    """
    off: dict[str, Any] = {"enabled": True, "schedule": "deepspeed", "autotune": False, "two_batch_overlap": "off"}
    off |= {"gradient_partition": {"mode": "off"}}
    of_model: dict[str, dict[str, Any]] = {LAYOUT: {}, ONCE: {"alltoall": "node_deduplicated"}}
    if model.family == "gpt":
        del of_model[ONCE]
    else:
        off |= {"ep_size": ranks, "alltoall": "flat"}
    if stage < 3:
        of_model[WINDOWS] = {"gradient_partition": {"mode": "adaptive"}}
    of_model[SCHEDULE] = {"schedule": "best", "autotune": True, "two_batch_overlap": "auto"}
    blocks: dict[str, dict[str, Any]] = {}
    for name, added in of_model.items():
        off = off | added
        blocks[name] = off
    return blocks


def main() -> None:
    """Measure the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    for key in args.only:
        case = CASES[key]
        if args.tiny:
            case = tiny(case)
            sweep(case, args.results)
        setting = found(case, args.results).stock
        blocks = rungs(case.settings, setting.stage, dist.get_world_size())
        names = list(blocks)
        variants = [Variant(STOCK, _made(STOCK, setting, OFF))]
        variants += [Variant(name, _made(f"ours, {name}", setting, {"fsmoe": blocks[name]})) for name in names]
        over = {below: [above] for below, above in itertools.pairwise(names)}
        effort = Effort(args.blocks, steps=1, warmup=1, in_a_row=IN_A_ROW)
        run_grid(Grid("ladder", (case,)), variants, STOCK, effort, results=args.results, further=over)
    dist.destroy_process_group()


def _made(name: str, setting: Setting, more: dict[str, Any]) -> Callable[[Whole], Training]:
    return lambda model: Training(model, setting, more, name)


if __name__ == "__main__":
    main()

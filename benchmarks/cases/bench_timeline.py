# SPDX-License-Identifier: Apache-2.0
"""One step of stock's schedule and one of ours, task by task, and what the autotuner measured: for the report.

``cluster.py up --nodes 2 --ranks-per-node 1 --inter 25mbit``, where each rank has a core of its own, then ``cluster.py
run -- benchmarks/cases/bench_timeline.py``. Both are run by our runtime, in the node layout of ``models/layers.py``;
tasks are those of MoE layers and the gradients that travel in them. Of rank 0; rows go to
``benchmarks/results/timeline.csv`` and ``fits.csv``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cases.bench_layer import cases
from benchmarks.harness.cases import Case
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import RESULTS, append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.layer_steps import Found, Steps
from benchmarks.models.layers import TINY, Layer, Mpu, ranks_per_node
from ds_fsmoe.files.traces import MEASURED, rank_file

STEP, NUM_STEPS = 60, 9
"""The first that is traced, when plans have been tried and gradients planned, and how many are."""


def traced(layer: Layer, mpu: Mpu, block: dict[str, Any]) -> tuple[list[dict[str, Any]], Steps]:
    """The tasks of the traced step of this rank that is the median by its length, with times from the first task on.

    Collective.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = {"enabled": True, "start_step": STEP, "num_steps": NUM_STEPS, "path": folder}
        block = block | {"expert_tensor_parallel_size": ranks_per_node(), "trace": trace}
        steps = Steps(layer, "node", mpu, Found(), block)
        while steps.engine.global_steps < STEP + NUM_STEPS + 1:
            steps()
        found = json.loads(rank_file(Path(folder), dist.get_rank()).read_text())["traceEvents"]
    of_step: dict[int, list[dict[str, Any]]] = {}
    for each in found:
        if each.get("cat") == MEASURED:
            of_step.setdefault(each["args"]["step"], []).append(each)
    events = sorted(of_step.values(), key=length_us)[len(of_step) // 2]
    first_us = min(each["ts"] for each in events)
    tasks = [
        {
            "layer": each["args"]["layer"],
            "phase": each["args"]["phase"],
            "kind": each["args"]["kind"],
            "chunk": each["args"]["chunk"],
            "lane": each["args"]["lane"],
            "start_ms": f"{(each['ts'] - first_us) / 1e3:.3f}",
            "end_ms": f"{(each['ts'] + each['dur'] - first_us) / 1e3:.3f}",
        }
        for each in events
    ]
    return tasks, steps


def length_us(events: list[dict[str, Any]]) -> float:
    """The microseconds from the begin of the first task to the end of the last."""
    return max(each["ts"] + each["dur"] for each in events) - min(each["ts"] for each in events)


def fits(steps: Steps) -> list[dict[str, Any]]:
    """What the autotuner measured of the first layer, a row for each size, and the line through it."""
    return [
        {
            "operation": name,
            "unit": timing.unit,
            "size": f"{size:.6g}",
            "measured_ms": f"{time_ms:.4f}",
            "line_ms": f"{timing.cost.ms(size):.4f}",
            "r2": f"{timing.best_fit.r2:.4f}",
        }
        for name, timing in steps.engine.fsmoe.autotune.result.rows[0].profile.operations.items()
        for size, time_ms in zip(timing.sizes, timing.times_ms, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=int, default=4, help="number of the layer in bench_layer.py")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer, to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    mpu, made = Mpu(ranks_per_node()), made_with(PACKAGES)
    case = Case(str(TINY), TINY) if args.smoke else cases()[args.case]
    tuned = {"autotune": {"enabled": True, "watch_every": 0}, "num_chunks": {"max": 4}}
    tasks = []
    for schedule, block in (("deepspeed", {}), ("best", tuned)):
        found, steps = traced(case.settings, mpu, {"schedule": schedule} | block)
        tasks += [made | {"case": case.name, "variant": schedule} | each for each in found]
        lines = [made | {"case": case.name} | each for each in fits(steps)] if block else []
        steps.close()
    if dist.get_rank() == 0:
        append_rows(args.results / "timeline.csv", tuple(tasks[0]), tasks)
        append_rows(args.results / "fits.csv", tuple(lines[0]), lines)
        print(f"{len(tasks)} tasks and {len(lines)} measurements in {args.results}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

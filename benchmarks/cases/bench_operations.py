# SPDX-License-Identifier: Apache-2.0
"""The bed's own Table 2: what stock DeepSpeed's step spends its time on, operation by operation.

``cluster.py up --inter 25mbit --intra 100mbit``, then ``cluster.py run -- benchmarks/cases/bench_operations.py``. The
layers are those of ``bench_layer.py``, whose grid is chosen by the share of communication found here. Times are means
over the ranks and medians over the steps. Rows go to ``benchmarks/results/operations.csv``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from torch import nn

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cases.bench_layer import cases
from benchmarks.harness.cases import Case
from benchmarks.harness.result_files import RESULTS, append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.layer_steps import Found, Steps
from benchmarks.models.layers import TINY, Attention, Layer, Layout, Mpu, begin, ranks_per_node
from benchmarks.models.operations import COMMUNICATION, OTHER, Operations

NAMES: dict[type[nn.Module], str] = {
    Attention: "attention",
    TopKGate: "routing",
    Experts: "experts",
    MOELayer: "order",
}
PHASES = ("forward", "backward", "step")
OPERATIONS = (*COMMUNICATION, *dict.fromkeys(NAMES.values()), OTHER)
COLUMNS = ("ranks", "case", "layout", "phase", "operation", "ms", "share")


def measure(layer: Layer, layout: Layout, mpu: Mpu, num_steps: int) -> dict[tuple[str, str], float]:
    """(phase, operation) -> milliseconds of a step of stock DeepSpeed, all layers together. Collective."""
    steps = Steps(layer, layout, mpu, Found(stage=0), block=None)
    steps()
    engine = steps.engine
    operation_of = {module: NAMES[type(module)] for module in engine.module.modules() if type(module) in NAMES}
    found = []
    for _ in range(num_steps):
        steps.groups.put()
        operations = Operations()
        dist.barrier()
        with operations.watched(operation_of):
            with operations.phase("forward"):
                loss = engine(*next(steps.batches))
            with operations.phase("backward"):
                engine.backward(loss)
            with operations.phase("step"):
                engine.step()
        found.append([operations.times_s[phase, name] for phase in PHASES for name in OPERATIONS])
    steps.close()
    times_s = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(times_s)
    median_ms = (times_s / dist.get_world_size()).median(dim=0).values * 1e3
    keys = [(phase, name) for phase in PHASES for name in OPERATIONS]
    return dict(zip(keys, median_ms.tolist(), strict=True))


def table(of_case: str, layout: str, times_ms: dict[tuple[str, str], float]) -> str:
    """For people: phases down, operations across."""
    total_ms = sum(times_ms.values())
    seen = [name for name in OPERATIONS if any(times_ms[phase, name] > 0 for phase in PHASES)]
    lines = ["  ".join([f"{'ms':9}", *(f"{name:>14}" for name in seen)])]
    for phase in PHASES:
        lines.append("  ".join([f"{phase:9}", *(f"{times_ms[phase, name]:14.1f}" for name in seen)]))
    of_all = {name: sum(times_ms[phase, name] for phase in PHASES) / total_ms for name in seen}
    lines.append("  ".join([f"{'share':9}", *(f"{of_all[name]:14.1%}" for name in seen)]))
    share = sum(of_all.get(name, 0.0) for name in COMMUNICATION)
    return f"{of_case}, {layout}: {total_ms:.0f} ms, of which communication {share:.0%}\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--table2", action="store_true", help="those layers of bench_layer.py, for 25 and 50 Mbit/s")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer, to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    begin()
    mpu = Mpu(ranks_per_node())
    every = (Case(str(TINY), TINY),) if args.smoke else cases(args.table2)
    made = made_with(("torch", "deepspeed"))
    for case in every if args.only is None else [every[i] for i in args.only]:
        for layout in get_args(Layout):
            times_ms = measure(case.settings, layout, mpu, args.steps)
            if dist.get_rank():
                continue
            print(table(case.name, layout, times_ms), flush=True)
            total_ms = sum(times_ms.values())
            facts: dict[str, Any] = made | {"ranks": dist.get_world_size(), "case": case.name, "layout": layout}
            rows = [
                facts | {"phase": phase, "operation": name, "ms": f"{ms:.4g}", "share": f"{ms / total_ms:.4f}"}
                for (phase, name), ms in times_ms.items()
                if ms > 0
            ]
            append_rows(args.results / "operations.csv", (*made, *COLUMNS), rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

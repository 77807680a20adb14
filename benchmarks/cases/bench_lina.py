# SPDX-License-Identifier: Apache-2.0
"""Lina's training: its schedule with expert packing and without, beside stock's schedule and the fastest of ours.

``cluster.py up --inter 25mbit --intra 100mbit``, then ``cluster.py run -- benchmarks/cases/bench_lina.py``. The models
have the blocks of Qwen3-MoE, made from its configuration; all variants begin with the same weights, see the same tokens
and spread the experts over all ranks, but for the packed one, which spreads them over as many as packing chooses. A
micro-op of 30 MB takes 2.4 ms on the paper's links of 100 Gbit/s, and no layer here has so many: here it has 128 KiB,
which take 42 ms between these nodes. Whole steps go to ``benchmarks/results/lina.csv``; what the all-to-alls of a step
take, in all and in the backward, and their share of the step, to ``lina_alltoalls.csv`` beside it.

The paper (ATC'23, section 7.2) has steps 1.57 times as fast as DeepSpeed's on average, and all-to-alls of the backward
2.21 to 2.39 times as fast, packing included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cases.bench_hf import Model, Step
from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.layers import begin
from ds_fsmoe.execution.lanes import Observer, Together
from ds_fsmoe.gradients.reduction import OBSERVED_ROUNDS
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE, Schedule, Task

MICRO_OP_BYTES = 1 << 17
COUNTED_STEPS = 3
CASES = (
    Case("E 16, k 8, narrow", Model(B=2, L=64, M=64, H=32, E=16, k=8, layers=2, stage=2)),
    Case("E 16, k 2, wide", Model(B=2, L=64, M=64, H=1024, E=16, k=2, layers=2, stage=2)),
    Case("E 8, k 2, wider", Model(B=2, L=64, M=128, H=1024, E=8, k=2, layers=2, stage=0)),
)
TINY = Case("tiny", Model(B=1, L=16, M=32, H=32, E=8, k=2, layers=1, stage=1))


def ways(ranks: int, micro_op_bytes: int) -> dict[str, dict[str, Any]]:
    """Return the blocks of the variants, by name.

    Args:
        ranks: the number of ranks of the job.
        micro_op_bytes: the bytes of a micro-op.
    """
    spread, micro_ops = {"ep_size": ranks}, {"gradient_partition": {"chunk_bytes": micro_op_bytes}}
    return {
        "deepspeed": {"schedule": "deepspeed"} | spread,
        "lina, not packed": {"schedule": "lina"} | spread | micro_ops,
        "lina": {"schedule": "lina", "placement": "lina"} | micro_ops,
        "best": {"autotune": True} | spread,
    }


def made(block: dict[str, Any], model: Model) -> Step:
    """Return a step of an engine whose plans are settled."""
    return Step(
        model,
        {"fsmoe": {"enabled": True, "metrics": "off", "autotune": False} | block},
        None if "autotune" in block else OBSERVED_ROUNDS + 1,
    )


class AllToAlls(Observer):
    """Adds up what the all-to-alls of one layer take on this rank.

    Args:
        layer: the layer, which runs by the plan that it has now.
    """

    def __init__(self, layer: Any) -> None:
        self._forward = layer.pipeline.forward.schedule
        self._is_backward = False
        self._began_s: dict[int, float] = {}
        self.seconds = [0.0, 0.0]
        """What they took in the forward, and in the backward."""

    def start(self, schedule: Schedule, label: str) -> None:
        self._is_backward = schedule is not self._forward

    def begin(self, index: int, task: Task) -> None:
        if task.kind in (A2A_IN, A2A_OUT, A2A_IN_NODE, A2A_OUT_NODE):
            self._began_s[index] = time.perf_counter()

    def end(self, index: int, task: Task) -> None:
        if index in self._began_s:
            self.seconds[self._is_backward] += time.perf_counter() - self._began_s.pop(index)


def count(case: Case, name: str, make: Callable[[Model], Step], results: Path) -> None:
    """Write what the all-to-alls of a step take, of whichever rank they take longest."""
    step = make(case.settings)
    step()
    layers = list(step.engine.fsmoe.inner_layers.values())
    counted = [AllToAlls(each) for each in layers]
    for layer, observer in zip(layers, counted, strict=True):
        # One that plans gradients may still be looking at the windows.
        looking = layer.pipeline.observer
        layer.fsmoe.attach(layer.pipeline.window, observer if looking is None else Together(looking, observer))
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(COUNTED_STEPS):
        step()
    step_s = (time.perf_counter() - start_s) / COUNTED_STEPS
    forward_s, backward_s = (sum(each.seconds[phase] for each in counted) / COUNTED_STEPS for phase in (0, 1))
    found = torch.tensor([step_s, forward_s + backward_s, backward_s])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    step_ms, alltoall_ms, backward_ms = (1e3 * found).tolist()
    degrees, ep_size = layers[0].pipeline.degrees, layers[0].ep_size
    step.close()
    if dist.get_rank() == 0:
        row = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": case.name, "variant": name}
        row |= {"ep_size": ep_size, "degrees": "{} {}".format(*degrees), "step_ms": f"{step_ms:.4g}"}
        row |= {"alltoall_ms": f"{alltoall_ms:.4g}", "alltoall_backward_ms": f"{backward_ms:.4g}"}
        row |= {"alltoall_share": f"{alltoall_ms / step_ms:.4f}"}
        append_rows(results / "lina_alltoalls.csv", tuple(row), [row])
        print(
            f"{case.name}, {name}: ep_size {ep_size}, {degrees[0]} and {degrees[1]} chunks; all-to-alls "
            f"{alltoall_ms:.1f} of {step_ms:.1f} ms, {backward_ms:.1f} in the backward",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="of 2 steps of each variant")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--micro-op-bytes", type=int, default=MICRO_OP_BYTES)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, as fast as can be, to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    begin()
    cases = (TINY,) if args.smoke else CASES if args.only is None else tuple(CASES[each] for each in args.only)
    micro_op_bytes = 1 << 10 if args.smoke else args.micro_op_bytes
    makers = {name: partial(made, block) for name, block in ways(dist.get_world_size(), micro_op_bytes).items()}
    for case in cases:
        for name, make in makers.items():
            count(case, name, make, args.results)
        variants = tuple(Variant(name, make) for name, make in makers.items())
        effort = Effort(2, 1, 1) if args.smoke else Effort(args.blocks, 2)
        run_grid(Grid("lina", (case,)), variants, "deepspeed", effort, results=args.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How much longer an all-to-all takes beside gradients that travel when they like, and beside ours (Lina's figure).

``cluster.py up --inter 25mbit --intra 100mbit``, then ``cluster.py run -- benchmarks/cases/bench_interference.py``. A
step is an expert, here a pause of about an all-to-all's length that varies by a quarter, and the all-to-all that waits
for it. Gradients worth one and a half such pauses are to be summed meanwhile: in one all-reduce that starts with the
step on a communicator of its own ("uncoordinated"), or cut in slices, of which as many as fit go ahead of the
all-to-all on the same lane and the others behind it ("on the lane"). What is counted is the time from the end of the
expert to the end of the all-to-all, over its median alone. Rows go to ``benchmarks/results/interference.csv``.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.bed.full_duplex import use_both_directions
from benchmarks.harness.result_files import RESULTS, append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.layers import ranks_per_node
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.planning.schedule import A2A_OUT, EXPERT, GRAD, Lane, Schedule, Task

SLICES = 12
"""Of the gradients."""
WORTH = 1.5
"""Time of all gradients alone, in pauses."""
COLUMNS = ("ranks", "tokens_bytes", "gradients_bytes", "variant", "p5", "p50", "p95", "max", "step_ms", "steps")


class Traffic:
    """Messages between equal ranks of the nodes, and how long they take alone. Collective to make."""

    def __init__(self, tokens_bytes: int) -> None:
        inside = ranks_per_node()
        across = [list(range(first, dist.get_world_size(), inside)) for first in range(inside)]
        own = dist.get_rank() % inside
        self.of_tokens, self.of_gradients = ([dist.new_group(ranks) for ranks in across][own] for _ in range(2))
        self.tokens = torch.zeros(tokens_bytes // 4)
        self.received = torch.zeros_like(self.tokens)
        self.pause_s = self._median_s(self.send_tokens)
        per_byte = self._median_s(lambda: dist.all_reduce(self.tokens, group=self.of_gradients)) / tokens_bytes
        self.gradients = torch.zeros(int(WORTH * self.pause_s / per_byte) // 4 // SLICES * SLICES)

    def send_tokens(self) -> None:
        dist.all_to_all_single(self.received, self.tokens, group=self.of_tokens)

    def send_gradients(self, part: torch.Tensor | None = None) -> None:
        dist.all_reduce(self.gradients if part is None else part, group=self.of_gradients)

    def _median_s(self, send: Callable[[], None], times: int = 7) -> float:
        """Of the slowest rank."""
        took_s = torch.zeros(times)
        for i in range(times):
            dist.barrier()
            start_s = time.perf_counter()
            send()
            took_s[i] = time.perf_counter() - start_s
        dist.all_reduce(took_s, dist.ReduceOp.MAX)
        return float(took_s.median())


Step = Callable[[float], float]
"""Length of the pause in seconds -> how long the all-to-all took after it."""


def alone(traffic: Traffic) -> Step:
    """No gradients."""

    def step(pause_s: float) -> float:
        time.sleep(pause_s)
        start_s = time.perf_counter()
        traffic.send_tokens()
        return time.perf_counter() - start_s

    return step


def uncoordinated(traffic: Traffic) -> Step:
    """Gradients as soon as they are there."""

    def step(pause_s: float) -> float:
        sending = threading.Thread(target=traffic.send_gradients)
        sending.start()
        took_s = alone(traffic)(pause_s)
        sending.join()
        return took_s

    return step


def on_the_lane(traffic: Traffic) -> Step:
    """Slices of gradients on the lane of the all-to-all, in an order that is known beforehand."""
    lanes = make_lanes(torch.device("cpu"))
    ahead = int(SLICES / WORTH)
    slices = [Task(GRAD, Lane.INTER, i) for i in range(SLICES)]
    tokens = Task(A2A_OUT, Lane.INTER, after=(0,))
    schedule = Schedule((Task(EXPERT, Lane.COMPUTE), *slices[:ahead], tokens, *slices[ahead:]))
    parts, times_s = traffic.gradients.chunk(SLICES), {}

    def step(pause_s: float) -> float:
        def expert(_: Task) -> None:
            time.sleep(pause_s)
            times_s[EXPERT] = time.perf_counter()

        def send_tokens(_: Task) -> None:
            traffic.send_tokens()
            times_s[A2A_OUT] = time.perf_counter()

        bodies = {EXPERT: expert, A2A_OUT: send_tokens, GRAD: lambda task: traffic.send_gradients(parts[task.chunk])}
        lanes.run(schedule, bodies)
        return times_s[A2A_OUT] - times_s[EXPERT]

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens-bytes", type=int, default=1 << 18, help="of a rank's all-to-all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser, no_routers="its all-to-alls carry bytes of a given number, and no tokens choose")
    use_both_directions()
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    traffic = Traffic(args.tokens_bytes)
    steps = {"alone": alone(traffic), "uncoordinated": uncoordinated(traffic), "on the lane": on_the_lane(traffic)}
    generator = random.Random(0)  # the same pauses on every rank
    taken_s: dict[str, list[float]] = {name: [] for name in steps}
    whole_s: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.steps):
        pause_s = traffic.pause_s * generator.uniform(0.75, 1.25)
        for name, step in steps.items():
            dist.barrier()
            start_s = time.perf_counter()
            taken_s[name].append(step(pause_s))
            whole_s[name].append(time.perf_counter() - start_s)
    of_all = torch.tensor([[*taken_s.values()], [*whole_s.values()]])
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        made, base_s = made_with(("torch",)), float(of_all[0, 0].median())
        rows = []
        for name, took_s, step_s in zip(steps, of_all[0], of_all[1], strict=True):
            p5, p50, p95 = np.percentile(took_s / base_s, [5, 50, 95])
            found = {"p5": p5, "p50": p50, "p95": p95, "max": float(took_s.max()) / base_s}
            found["step_ms"] = float(step_s.median()) * 1e3
            facts = {"ranks": dist.get_world_size(), "tokens_bytes": args.tokens_bytes, "variant": name}
            facts |= {"gradients_bytes": traffic.gradients.nbytes, "steps": args.steps}
            rows.append(made | facts | {key: f"{value:.3f}" for key, value in found.items()})
            print(
                f"{name:14} all-to-all {p50:.2f} times as long ({p5:.2f} to {p95:.2f}), step {found['step_ms']:.1f} ms"
            )
        append_rows(args.results / "interference.csv", (*made, *COLUMNS), rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

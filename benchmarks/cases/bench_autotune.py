# SPDX-License-Identifier: Apache-2.0
"""What the autotuner's choices are worth: predicted against measured, and its degrees against all others, tried.

``cluster.py up --inter 50mbit --intra 200mbit``, then ``cluster.py run -- benchmarks/cases/bench_autotune.py``. Experts
are spread over the nodes and sharded inside each (ep = nodes, esp = ranks per node). A model is trained with
``fsmoe.autotune`` until it has chosen; then steps are run with the choice and with every degree up to ``--max-degree``,
in turn. The two phases do not touch each other, so the best pair is the best forward with the best backward; which that
is, half of the rounds decide, and what it takes, the other half, so that luck does not count as speed. Rows go to
``benchmarks/results/autotune.csv``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.cases.bench_gradients import Blocks, Model
from benchmarks.harness.harness import RESULTS
from benchmarks.harness.join import join
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.observing.step_timer import most_of
from ds_fsmoe.planning.block import BlockPlan

GRID = (
    Model(layers=2, S=512, M=192, H=1536),
    Model(layers=2, S=256, M=256, H=1024),
    Model(layers=2, S=1024, M=128, H=512),
    Model(layers=2, S=512, M=256, H=256),
    Model(layers=2, S=256, M=128, H=2048),
    Model(layers=2, S=128, M=256, H=512),
)
STAGE = Model(layers=8, S=256, M=128, H=512)
"""For what the stage costs."""
CHOSEN = 0
"""The choice, among degrees."""
CPU = torch.device("cpu")
COLUMNS = (
    *("layers", "S", "M", "H", "ranks", "stage_s", "forward", "backward", "predicted_ms", "isolated_ms", "measured_ms"),
    *("off", "isolated_off", "step_predicted_ms", "step_measured_ms", "step_off", "best_forward", "best_backward"),
    *("chosen_ms", "best_ms", "regret", "noise", "uncut_ms", "gain"),
)


@dataclass
class Job:
    """An engine that is tuned, and its steps."""

    engine: Any
    x_SM: torch.Tensor
    blocks: tuple[BlockPlan, BlockPlan]
    """(forward, backward) as chosen."""

    @classmethod
    def tuned(cls, model: Model, max_degree: int) -> Job:
        """Train until the stage has run."""
        topology = make_groups().topology
        ep_size = max(topology.node_of_rank) + 1
        torch.manual_seed(0)
        module = Blocks(model, ep_size)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
            "zero_allow_untested_optimizer": True,
            "fsmoe": {
                "enabled": True,
                "esp_size": dist.get_world_size() // ep_size,
                "autotune": {"enabled": True, "watch_every": 0},
                "pipeline_degree": {"max": max_degree},
                "gradient_partition": {"mode": "off"},
            },
            "steps_per_print": 1_000_000,
        }
        engine = ds_fsmoe.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
        torch.manual_seed(dist.get_rank())
        job = cls(engine, torch.randn(model.S, model.M), (BlockPlan(), BlockPlan()))
        for _ in range(3):
            job.step()
        pipeline = next(iter(engine.fsmoe.layers.values())).deepspeed_moe.pipeline
        job.blocks = pipeline.forward.block, pipeline.backward.block
        return job

    def step(self) -> None:
        self.engine.backward(self.engine(self.x_SM))
        self.engine.step()

    def timed(self, degree: int) -> list[float]:
        """A step with that degree in both phases, or with the choice: milliseconds of (forward phases, backward phases,
        all of it). Phases of the rank that waits least for others, all of it of the slowest."""
        plain = BlockPlan(degree, "reduce_first") if degree else None
        forward, backward = (plain or block for block in self.blocks)
        for layer in self.engine.fsmoe.inner_layers.values():
            layer.fsmoe.apply(replace(layer.fsmoe.plan, forward=forward, backward=backward))
        clock = self.engine.fsmoe.running.step_clock
        clock.start()
        self.step()
        found = clock.read()
        clock.stop()
        phases = [
            -sum(time_ms for label, time_ms in found.phases_ms.items() if label.endswith(name))
            for name in ("forward", "backward")
        ]
        forward_ms, backward_ms, step_ms = most_of([*phases, found.forward_ms + found.backward_ms], CPU)
        return [-forward_ms, -backward_ms, step_ms]


def measure(model: Model, max_degree: int, rounds: int) -> dict[str, Any]:
    """One row."""
    job = Job.tuned(model, max_degree)
    tuner = job.engine.fsmoe.autotune
    degrees = [CHOSEN, *range(1, max_degree + 1)]
    times_ms = np.array([[job.timed(degree) for degree in degrees] for _ in range(rounds)])  # [rounds, degrees, 3]
    job.engine.destroy()
    deciding, judging = (np.median(times_ms[half::2], axis=0) for half in (0, 1))
    best = deciding[1:, :2].argmin(axis=0)
    chosen_ms = judging[CHOSEN, :2].sum()
    best_ms = judging[1 + best[0], 0] + judging[1 + best[1], 1]
    measured_ms = float(np.median(times_ms[:, CHOSEN, :2].sum(axis=1)))
    step_ms = float(np.median(times_ms[:, CHOSEN, 2]))
    uncut_ms = float(np.median(times_ms[:, 1, :2].sum(axis=1)))
    predicted_ms, isolated_ms = (
        model.layers * sum(getattr(choice, name) for choice in tuner.rows[0].choices)
        for name in ("time_ms", "isolated_ms")
    )
    forward, backward = (choice.block.degree for choice in tuner.rows[0].choices)
    return asdict(model) | {
        "ranks": dist.get_world_size(),
        "stage_s": tuner.took_s,
        "forward": forward,
        "backward": backward,
        "predicted_ms": predicted_ms,
        "isolated_ms": isolated_ms,
        "measured_ms": measured_ms,
        "off": predicted_ms / measured_ms - 1,
        "isolated_off": isolated_ms / measured_ms - 1,
        "step_predicted_ms": tuner.step.chosen_ms,
        "step_measured_ms": step_ms,
        "step_off": tuner.step.chosen_ms / step_ms - 1,
        "best_forward": int(1 + best[0]),
        "best_backward": int(1 + best[1]),
        "chosen_ms": chosen_ms,
        "best_ms": best_ms,
        "regret": chosen_ms / best_ms - 1,
        "noise": abs(judging[CHOSEN, :2].sum() / deciding[CHOSEN, :2].sum() - 1),
        "uncut_ms": uncut_ms,
        "gain": uncut_ms / measured_ms,
    }


def shown(value: Any) -> str:
    """For the table and the file."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="of all degrees, at least 4")
    parser.add_argument("--max-degree", type=int, default=8)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the models to measure (all)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    models = [*GRID, STAGE]
    rows = []
    for number in range(len(models)) if args.only is None else args.only:
        row = {name: shown(value) for name, value in measure(models[number], args.max_degree, args.rounds).items()}
        rows.append(row)
        if dist.get_rank() == 0:
            print("  ".join(f"{name} {row[name]}" for name in COLUMNS), flush=True)
            made = made_with(("torch", "deepspeed"))
            append_rows(args.results / "autotune.csv", (*made, *COLUMNS), [made | row])
    if dist.get_rank() == 0 and len(rows) > 1:
        for name in ("off", "isolated_off", "step_off", "regret"):
            values = [abs(float(row[name])) if name != "regret" else float(row[name]) for row in rows]
            print(f"{name}: {np.mean(values):.1%} on average, {max(values):.1%} at worst")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

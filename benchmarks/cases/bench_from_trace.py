# SPDX-License-Identifier: Apache-2.0
"""Compares what ``ds_fsmoe plan --from-trace`` says of plans that a run did not have with those plans, run.

``cluster.py up --nodes 2 --ranks-per-node 2 --inter 25mbit --intra 100mbit``, then
``cluster.py run -- benchmarks/cases/bench_from_trace.py``. A model is trained by ``best`` with the autotuner, and its
run is recorded with a trace that has the steps in which plans are tried, too; another run, of given degrees, measures
nothing and has a trace only. Then every schedule, and ``best`` with given degrees, is run in turns by the plan that was
predicted for it. Rows go to ``benchmarks/results/from_trace.csv``, what was predicted beside what was measured to
``from_trace_predicted.csv``: before the run corrects the costs, after, and from the trace alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.harness.harness import RESULTS, Case, CaseResult, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.gradients.reduction import LOOKS
from ds_fsmoe.offline.plan.from_trace import Calibrated, calibrated
from ds_fsmoe.planning.layer_plan import LayerPlan
from ds_fsmoe.planning.what_if import Prediction, Ran, WhatIf

SCHEDULES = ("deepspeed", "tutel", "tutel_improved", "pipemoe_lina", "fsmoe_no_iio", "fsmoe", "best")
DEGREES = ((1, 1), (2, 2), (4, 2))
AS_IT_RAN = "as it ran"
MAX_DEGREE = 4
TRACED_FROM = 3
"""The step from which on the trace goes: what is tried is in it, too, which has chunks of other sizes."""
ALONE_DEGREES = (2, 4)
"""The degrees of the run that has a trace only: two, so that start-up can be told from the rest."""
ALONE = "_alone"
"""The ending of that run's folder."""
COLUMNS = ("raw_ms", "raw_off", "predicted_ms", "off", "trace_alone_ms", "trace_alone_off", "measured_ms", "plan")


@dataclass(frozen=True)
class Model:
    """``layers`` times: a norm and two dense layers M x M, then an MoE layer of E experts of hidden width H; S tokens
    per rank, each to k of them."""

    layers: int
    S: int
    M: int
    H: int
    E: int
    k: int
    in_nodes: bool
    """Whether experts are sharded inside nodes and spread over them in slots; else spread over all ranks in rows."""


CASES = (
    Case("sharded experts in slots", Model(layers=3, S=128, M=192, H=768, E=2, k=1, in_nodes=True)),
    Case("rows to all ranks", Model(layers=3, S=96, M=192, H=192, E=16, k=4, in_nodes=False)),
)


class Blocks(nn.Module):
    """The model."""

    def __init__(self, sizes: Model, ep_size: int) -> None:
        super().__init__()
        M = sizes.M
        self.dense = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(M), nn.Linear(M, M // 2), nn.Tanh(), nn.Linear(M // 2, M))
            for _ in range(sizes.layers)
        )
        # In slots there is room for all tokens of an even routing; in rows nothing is dropped.
        drop: dict[str, Any] = {"capacity_factor": 1.0, "use_rts": False} if sizes.in_nodes else {"drop_tokens": False}
        self.moes = nn.ModuleList(
            ds_fsmoe.MoE(
                M,
                ds_fsmoe.GPTFeedForward(M, sizes.H, activation="relu"),
                **{"num_experts": sizes.E, "ep_size": ep_size, "k": sizes.k, **drop},
            )
            for _ in range(sizes.layers)
        )

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        loss = torch.zeros(())
        for dense, moe in zip(self.dense, self.moes, strict=True):
            x_SM = x_SM + dense(x_SM)
            y_SM, aux_loss, _ = moe(x_SM)
            x_SM, loss = x_SM + y_SM, loss + 0.01 * aux_loss
        return loss + x_SM.square().mean()


class TrainingStep:
    """An engine over the model, and a step of it; the same weights and tokens whoever makes it.

    Args:
        block: of ours.
        ran: how layers are run; ``None``: as the engine chooses.
        sizes: of the model.
    """

    def __init__(self, block: dict[str, Any], ran: Ran | None, sizes: Model) -> None:
        topology = make_groups().topology
        num_nodes = max(topology.node_of_rank) + 1
        ep_size = num_nodes if sizes.in_nodes else dist.get_world_size()
        torch.manual_seed(0)
        module = Blocks(sizes, ep_size)
        of_engine: dict[str, Any] = {"enabled": True, "metrics": "off"}
        if sizes.in_nodes:
            of_engine["expert_tensor_parallel_size"] = dist.get_world_size() // num_nodes
        else:
            of_engine |= {"dispatch": "rows", "alltoall": "auto"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
            "zero_allow_untested_optimizer": True,
            "fsmoe": of_engine | block,
            "steps_per_print": 1_000_000,
        }
        self.engine = ds_fsmoe.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
        torch.manual_seed(dist.get_rank())
        self.x_SM = torch.randn(sizes.S, sizes.M)
        state = self.engine.fsmoe
        if ran is not None:
            for layer, pair, alltoall in zip(state.inner_layers.values(), ran.orders, ran.alltoalls, strict=True):
                layer.fsmoe.apply(LayerPlan(pair[0].plan(), pair[1].plan(), alltoall))
            for _ in range(LOOKS + 1):
                self()

    def __call__(self) -> None:
        self.engine.backward(self.engine(self.x_SM))
        self.engine.step()

    def close(self) -> None:
        """End the engine."""
        self.engine.destroy()


def record_both(folder: Path, num_steps: int, sizes: Model) -> None:
    """Record a run that is tuned, and beside it one of given degrees that measures nothing.

    Args:
        folder: of the first one.
        num_steps: of the first one, those in which it is tuned among them.
        sizes: of the model.
    """
    tuned = {"autotune": {"enabled": True, "watch_every": 0}, "num_chunks": {"max": MAX_DEGREE}}
    forward, backward = ALONE_DEGREES
    given = {"autotune": {"enabled": False}, "num_chunks": {"forward": forward, "backward": backward}}
    given |= {} if sizes.in_nodes else {"alltoall": "once_per_node"}
    for name, block, count in ((folder.name, tuned, num_steps), (folder.name + ALONE, given, 24)):
        trace = {"enabled": True, "start_step": TRACED_FROM, "num_steps": count - TRACED_FROM - 1}
        block |= {"schedule": "best", "record": {"dir": str(folder.with_name(name))}, "trace": trace}
        step = TrainingStep(block, None, sizes)
        for _ in range(count):
            step()
        step.close()


@dataclass(frozen=True)
class Wanted:
    """A plan to run, and what is predicted of it, in milliseconds."""

    name: str
    schedule: str
    ran: Ran
    raw_ms: float
    """The prediction by the costs as they were measured."""
    predicted_ms: float
    """By the costs as the run has corrected them."""
    alone_ms: float | None
    """By the run that has a trace only; ``None``: it did not have this all-to-all."""

    @property
    def block(self) -> dict[str, Any]:
        """What runs the schedule without measuring; its layers are then cut as the plan says."""
        found: dict[str, Any] = {"schedule": self.schedule, "autotune": {"enabled": False}}
        if self.schedule not in ("deepspeed", "best"):
            forward, backward = self.ran.degrees
            found["num_chunks"] = {"forward": forward, "backward": backward}
        return found


def wanted(found: Calibrated, alone: Calibrated) -> list[Wanted]:
    """Return what is to be run, by the predictions of a run."""
    raw, job = WhatIf(found.raw_job), found.what_if.job

    def each(name: str, schedule: str, prediction: Prediction) -> Wanted:
        def by(other: WhatIf) -> float:
            return other.of_schedule(schedule).as_ran(prediction.ran).step_ms

        ways = alone.what_if.job.kinds[0].ways
        is_known = all(each in ways for each in prediction.ran.alltoalls)
        alone_ms = by(alone.what_if) + alone.others_ms if is_known else None
        predicted_ms = found.step_of(prediction)
        return Wanted(name, schedule, prediction.ran, by(raw) + found.others_ms, predicted_ms, alone_ms)

    own = found.what_if.as_ran(found.ran)
    rows = [each(AS_IT_RAN, job.schedule, own)]
    rows += [each(name, name, found.what_if.by_schedule(name)) for name in SCHEDULES]
    rows += [each(f"{a} and {b} chunks", job.schedule, found.what_if.with_degrees(a, b)) for a, b in DEGREES]
    return rows


def write_predicted(result: CaseResult, rows: list[Wanted], file: Path) -> None:
    """Append what was predicted beside what was measured, and print it."""
    measured = {each.name: each.p50_ms for each in result.variants}
    made, written = made_with(PACKAGES), []
    for row in rows:
        took_ms = measured[row.name]
        forward, backward = row.ran.orders[0]
        plan = f"{forward.degree}+{backward.degree} {forward.links} {row.ran.alltoalls[0]}"
        predicted = row.raw_ms, row.predicted_ms, row.alone_ms
        cells = [
            text for ms in predicted for text in (("", "") if ms is None else (f"{ms:.1f}", f"{ms / took_ms - 1:+.1%}"))
        ]
        facts = dict(zip(COLUMNS, (*cells, f"{took_ms:.1f}", plan), strict=True))
        where = {"ranks": dist.get_world_size(), "case": result.case.name, "variant": row.name}
        written.append(made | where | facts)
        print(
            f"{row.name:18} {plan:32} measured {took_ms:7.1f}  predicted {cells[2]} {cells[3]}  "
            f"raw {cells[0]} {cells[1]}  trace alone {cells[4]} {cells[5]}",
            flush=True,
        )
    append_rows(file, tuple(written[0]), written)


def main() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="of one step of each variant")
    parser.add_argument("--steps", type=int, default=75, help="of the recorded run, those of the autotuner among them")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--keep", type=Path, help="folder in which the recorded runs stay")
    parser.add_argument("--again", action="store_true", help="by the runs that are in that folder")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    for case in CASES if args.only is None else [CASES[each] for each in args.only]:
        shared: list[Any] = [str(args.keep) if args.keep else tempfile.mkdtemp()]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        name = case.name.replace(" ", "_")
        if not args.again:
            record_both(folder / name, args.steps, case.settings)
        plans: list[Any] = [None]
        if dist.get_rank() == 0:
            plans = [wanted(calibrated(folder / name), calibrated(folder / f"{name}{ALONE}"))]
        dist.broadcast_object_list(plans)
        variants = [Variant(each.name, partial(TrainingStep, each.block, each.ran)) for each in plans[0]]
        effort = Effort(args.blocks, steps=1, warmup=1)
        (result,) = run_grid(Grid("from_trace", (case,)), variants, AS_IT_RAN, effort, results=args.results)
        if dist.get_rank() == 0:
            write_predicted(result, plans[0], args.results / "from_trace_predicted.csv")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

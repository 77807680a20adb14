# SPDX-License-Identifier: Apache-2.0
"""Two halves of a batch that take turns against the best plan for the whole batch, predicted and measured.

``cluster.py up --ranks-per-node 1 --inter 100mbit``, then ``cluster.py run -- benchmarks/cases/bench_halves.py
--only 0``, a job for each case. A Hugging Face model is trained with the autotuner, which tries plans for the whole
batch and plans in halves. Then steps are run in turns, in the same engine, by the fastest plan for the whole batch, by
the fastest in halves, and by the one that was kept, which is what a user gets. Rows go to
``benchmarks/results/halves.csv``; what was predicted beside what was measured, and the share of the step outside of the
experts' part, to ``benchmarks/results/halves_predicted.csv``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_fsmoe
from benchmarks.harness.harness import RESULTS, Case, CaseResult, Effort, Goal, Grid, Variant, run_grid
from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.hugging_face import Model, made
from ds_fsmoe.planning.block import LayerPlan
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.tuning.table import describe_plan
from ds_fsmoe.tuning.tuned_model import TunedModel, windows_of

WHOLE, HALVES, KEPT = "whole", "in halves", "kept"
COLUMNS = ("dense_share", "whole_ms", "halves_ms", "gain", "off", "whole_plan", "halves_plan", "kept_plan")


@dataclass(frozen=True)
class Halved(Model):
    """A model, and what is asked of its batches."""

    is_even: bool = True
    """Whether tokens are spread evenly over experts, as is predicted; else as routers with random weights choose."""
    checkpoints: bool = False
    """Whether blocks keep no activations and run again in the backward."""
    at_least: float = 0.0
    """What halves are to gain."""


CASES = (
    Case("attention a fifth", Halved("qwen3", layers=6, B=2, L=512, M=64, H=64, E=16, k=2, at_least=1.10)),
    Case("attention a half", Halved("olmoe", layers=6, B=2, L=640, M=32, H=32, E=16, k=2, heads=8, at_least=1.15)),
    Case("olmoe", Halved("olmoe", 6, 2, L=512, M=32, H=32, E=16, k=4, heads=8, vocabulary=1024, at_least=1.08)),
    Case("mixtral", Halved("mixtral", 6, 2, L=512, M=32, H=112, E=8, k=2, heads=4, vocabulary=1024, at_least=1.08)),
    Case("attention a fifth, checkpointed", Halved("qwen3", 6, B=2, L=512, M=64, H=64, E=16, k=2, checkpoints=True)),
    Case("routers' own choices", Halved("olmoe", 6, 2, L=512, M=32, H=32, E=16, k=4, heads=8, is_even=False)),
    Case("short", Halved("mixtral", layers=2, B=2, L=32, M=64, H=512, E=8, k=2)),
)


def evenly(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Give a layer's experts as many tokens each; weights stay the router's."""
    x_SM, index_SK, weights_SK = args
    experts = torch.arange(index_SK.numel(), device=index_SK.device) % module.fsmoe.total_experts
    return x_SM, experts.view_as(index_SK).to(index_SK.dtype), weights_SK


@dataclass(frozen=True)
class Way:
    """A plan that was tried."""

    plan: ModelPlan
    took_ms: float
    """The median of its steps."""


class Job:
    """A model in training, and the plans that were tried with it.

    Args:
        sizes: of the model.
        most_steps: in which plans have to be settled.
    """

    def __init__(self, sizes: Halved, most_steps: int = 300) -> None:
        module = made(sizes)
        if sizes.checkpoints:
            module.gradient_checkpointing_enable()
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": sizes.B,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
            "fsmoe": {
                "enabled": True,
                "ep_size": dist.get_world_size(),
                "autotune": {"enabled": True, "watch_every": 0},
                "metrics": "off",
            },
            "steps_per_print": 1_000_000,
        }
        self.engine = ds_fsmoe.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
        if sizes.is_even:
            for layer in self.engine.fsmoe.inner_layers.values():
                layer.register_forward_pre_hook(evenly)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._ids = torch.randint(sizes.vocabulary, (sizes.B, sizes.L), generator=generator)
        self.model: TunedModel | None = None
        self.ways: list[Way] = []
        self._tune(most_steps)

    def step(self) -> None:
        """Train on the batch."""
        self.engine.backward(self.engine(input_ids=self._ids, labels=self._ids).loss)
        self.engine.step()

    def _tune(self, most_steps: int) -> None:
        """Train until plans are settled, and note what was tried in each round but the last, which tries nothing."""
        tuner = self.engine.fsmoe.autotune
        of_rounds: list[Any] = []
        for _ in range(most_steps):
            self.step()
            rounds = tuner.trials
            if rounds is None:
                if tuner.is_settled:
                    break
                continue
            self.model = rounds.model
            if not of_rounds or of_rounds[-1][0] is not rounds.trials:
                of_rounds.append((rounds.trials, rounds.plans))
        else:
            raise RuntimeError(f"no plan was settled in {most_steps} steps")
        for trials, plans in of_rounds:
            self.ways += [
                Way(plan, statistics.median(times_ms))
                for plan, times_ms in zip(plans, trials.times_ms, strict=True)
                if times_ms
            ]
        self.settled = rounds_kept(self.engine)
        reduction = self.engine.fsmoe.reduction
        self.settled_windows = None if reduction is None else reduction.predicted_windows

    def fastest(self, in_halves: bool) -> ModelPlan:
        """Return the plan whose trials took least, the same on every rank."""
        return min((way for way in self.ways if way.plan.is_two_batch == in_halves), key=lambda way: way.took_ms).plan

    def use(self, plan: ModelPlan) -> None:
        """Run the layers by a plan from now on."""
        assert self.model is not None
        self.model.apply(plan, {})
        state = self.engine.fsmoe
        if state.reduction is not None:
            state.reduction.try_windows(windows_of(plan))

    def use_kept(self) -> None:
        """Run the layers as the autotuner has left them."""
        state = self.engine.fsmoe
        for label, plan in self.settled.items():
            state.inner_layers[label].fsmoe.apply(plan)
        if self.settled_windows is not None:
            state.reduction.try_windows(self.settled_windows)


def rounds_kept(engine: Any) -> dict[str, LayerPlan]:
    """Return the plan of each layer as the autotuner has left it."""
    return {label: layer.fsmoe.plan for label, layer in engine.fsmoe.inner_layers.items()}


def variants_of(job: Job) -> list[Variant]:
    """Return the ways to run a step. All run in one engine: each says first how."""
    whole, halves = job.fastest(False), job.fastest(True)

    def of(name: str, use: Callable[[], None]) -> Variant:
        def step() -> None:
            use()
            job.step()

        return Variant(name, lambda _: step)

    return [of(WHOLE, lambda: job.use(whole)), of(HALVES, lambda: job.use(halves)), of(KEPT, job.use_kept)]


def write_predicted(job: Job, result: CaseResult, file: Path) -> None:
    """Append what was predicted beside what was measured, and print it."""
    model = job.model
    assert model is not None
    plans = {WHOLE: job.fastest(False), HALVES: job.fastest(True)}
    predicted_ms = {name: model.predict(plan).chosen_ms for name, plan in plans.items()}
    measured_ms = {each.name: each.p50_ms for each in result.variants}
    gain, measured = (each[WHOLE] / each[HALVES] for each in (predicted_ms, measured_ms))
    dense_ms = job.engine.fsmoe.autotune.result.outcome.least_dense_ms
    kept = next(iter(job.settled.values()))
    cells = (
        "" if dense_ms is None else f"{dense_ms / measured_ms[WHOLE]:.2f}",
        *(f"{predicted_ms[name]:.1f}" for name in plans),
        f"{gain:.3f}",
        f"{gain / measured - 1:+.1%}",
        *(describe_plan(model.labels, plan) for plan in plans.values()),
        "in halves" if kept.is_two_batch else "whole",
    )
    facts = dict(zip(COLUMNS, cells, strict=True))
    row = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": result.case.name} | facts
    append_rows(file, tuple(row), [row])
    print("  ".join(f"{name} {text}" for name, text in facts.items()), flush=True)


def main() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="of each variant in a block")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to measure (all)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    for case in CASES if args.only is None else [CASES[each] for each in args.only]:
        job = Job(case.settings)
        goals = []
        if args.blocks >= MIN_BLOCKS_TO_JUDGE:
            goals = [Goal(KEPT, at_least=0.98, case=case.name)]
            goals += [Goal(HALVES, case.settings.at_least, case=case.name)] if case.settings.at_least else []
        effort = Effort(args.blocks, args.steps, warmup=1)
        (result,) = run_grid(Grid("halves", (case,)), variants_of(job), WHOLE, effort, goals, args.results)
        if dist.get_rank() == 0:
            write_predicted(job, result, args.results / "halves_predicted.csv")
        job.engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

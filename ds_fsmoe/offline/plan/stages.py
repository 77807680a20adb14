# SPDX-License-Identifier: Apache-2.0
"""Prints pipeline stages in ``ds_fsmoe plan``: a whole batch through all of them, next to the busiest stage."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ds_fsmoe.offline.models.model_layers import DenseStage, stages
from ds_fsmoe.offline.models.pipeline import PlannedPipeline, pipeline_of_layers, pipeline_of_model
from ds_fsmoe.offline.plan.report import STOCK, Report
from ds_fsmoe.planning.decide.bounds import step_bounds_ms
from ds_fsmoe.planning.decide.step_time import StagePlan, StageTimes, stage_times
from ds_fsmoe.terminal.tables import print_table

if TYPE_CHECKING:
    from ds_fsmoe.offline.plan.baselines import Baselines


def is_batch(args: argparse.Namespace) -> bool:
    """Return True if a whole batch is planned, and False for one micro-batch alone."""
    return (args.pp or 1) > 1 or args.micro_batches is not None


@dataclass(frozen=True)
class BatchReport:
    """Holds the plans of all stages by every system, and their batches."""

    alone: Report
    """The report of one stage."""
    pipeline: PlannedPipeline
    places: tuple[range, ...]
    """The blocks of each stage."""
    plans: Mapping[str, Sequence[StagePlan]]
    """System -> the plan of each stage."""

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches of the batch."""
        return self.alone.job.settings.num_micro_batches

    def batch_ms(self, name: str) -> float:
        """Return the ms of a batch by a system."""
        return self.pipeline.batch_ms([each.times for each in self.plans[name]], self.num_micro_batches)

    @cached_property
    def bound_ms(self) -> float:
        """Return the ms of a batch whose stages all take their lower bounds. A shorter part never makes the batch
        longer.
        """
        planner, least = self.alone.planner, []
        most = planner.settings.max_degree
        for work, plan in zip(self.pipeline.works, self.plans[self.alone.preset_name], strict=True):
            if isinstance(work, DenseStage):
                least.append(plan.times)
                continue
            layers = self.pipeline.zero.layers(STOCK, work)
            forward_ms, last_ms = step_bounds_ms(layers, planner.costs, most)
            bare = [replace(each, gradients=()) for each in layers]
            earlier_ms = step_bounds_ms(bare, planner.costs, most)[1]
            # Gradients lengthen a backward, or follow it; no stage waits for the latter.
            least.append(StageTimes(forward_ms, earlier_ms, earlier_ms, max(0.0, last_ms - earlier_ms)))
        return self.pipeline.batch_ms(least, self.num_micro_batches)

    def bubble_share(self, name: str) -> float:
        """Return the share of all stages' time that is idle."""
        shares = [row["bubble_share"] for row in self.rows(name)]
        return sum(shares) / len(shares)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the work of each stage by a system. Bytes and ms of sends are those of a batch, both ways. The rest
        of a batch, besides sends and own work, is its bubbles.
        """
        whole_ms, count, found = self.batch_ms(name), self.num_micro_batches, []
        for stage, plan in enumerate(self.plans[name]):
            sends_ms = self.pipeline.stage_sends_ms(stage, count)
            bubbles_ms = max(0.0, whole_ms - plan.times.busy_ms(count) - sends_ms)
            neighbours = (stage > 0) + (stage < len(self.places) - 1)
            found.append(
                {
                    "stage": stage,
                    "blocks": [self.places[stage][0], self.places[stage][-1]],
                    **asdict(plan.times),
                    "hidden_gradient_bytes": plan.hidden_bytes,
                    "later_gradient_bytes": plan.after_bytes,
                    "send_bytes": 2 * neighbours * count * self.pipeline.send_bytes,
                    "sends_ms": sends_ms,
                    "bubbles_ms": bubbles_ms,
                    "bubble_share": bubbles_ms / whole_ms,
                }
            )
        return found

    def of_stage(self) -> Report:
        """Return the report of the busiest stage, with its plans in the batch."""
        index = 0 if self.alone.stage is None else self.alone.stage.index
        plans = {name: of[index].plan or self.alone.plans[name] for name, of in self.plans.items()}
        times_ms = {name: self.alone.planner.phases_ms(plan) for name, plan in plans.items()}
        return replace(self.alone, plans=plans, times_ms=times_ms)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report in plain types."""
        batches_ms = {name: self.batch_ms(name) for name in self.plans}
        links = zip(self.pipeline.lanes, self.pipeline.sends_ms, strict=True)
        return {
            "num_micro_batches": self.num_micro_batches,
            "links": [{"lane": lane.value, "send_ms": send_ms} for lane, send_ms in links],
            "send_bytes": self.pipeline.send_bytes,
            "tied_ms": self.pipeline.tied_ms,
            "lower_bound_ms": self.bound_ms,
            "presets": {
                name: {
                    "batch_ms": batch_ms,
                    "bubble_share": self.bubble_share(name),
                    "over_deepspeed": batches_ms[STOCK] / batch_ms,
                    "over_tutel": batches_ms["tutel"] / batch_ms,
                    "stages": self.rows(name),
                }
                for name, batch_ms in batches_ms.items()
            },
        }


def batch_of(alone: Report) -> BatchReport:
    """Plan all stages of a model as every system would, given the report of one stage.

    Raises:
        ValueError: the cluster has no number for sends.
    """
    job, model = alone.job, alone.job.model
    if model.architecture is None:
        pipeline = pipeline_of_layers(job.cluster, job.groups, alone.layers, model.shape)
        size = len(alone.layers)
        places = tuple(range(size * each, size * (each + 1)) for each in range(job.groups.pp))
    else:
        parts, how = stages(model.architecture, job.groups.pp), (job.alltoall, job.recompute, job.fanout)
        pipeline = pipeline_of_model(job.cluster, model.architecture, job.groups, parts, model.shape, *how)
        places = tuple(each.places for each in parts)
    pipeline = replace(pipeline, zero=job.zero)
    plans = {
        name: pipeline.plan(alone.planner, name, {alone.layers: stage_times(alone.planner, plan)})
        for name, plan in alone.plans.items()
    }
    return BatchReport(alone, pipeline, places, plans)


def print_batch(found: BatchReport, bases: Baselines, is_default: bool) -> None:
    """Print the time of a batch by every system, and the stages by the shown one.

    Args:
        found: the batch.
        bases: the baselines.
        is_default: whether the number of micro-batches is the default.
    """
    count, num_stages = found.num_micro_batches, len(found.places)
    default = ", the default" if is_default else ""
    through = f" through {num_stages} stages, in DeepSpeed's order" if num_stages > 1 else ""
    print(f"\none batch of {count} micro-batches (--micro-batches {count}{default}){through}, without the optimizer")
    batches_ms = {name: found.batch_ms(name) for name in found.plans}
    rows = [(bases.label(name), each, f"{found.bubble_share(name):.1%}") for name, each in batches_ms.items()]
    if bases.stock is not None:
        rows.insert(0, (bases.stock_label, bases.stock_ms(batches_ms), ""))
    rows.append(("(lower bound)", found.bound_ms, ""))
    cells = [(name, f"{each:.2f}", bubbles, *bases.ratios(each, batches_ms)) for name, each, bubbles in rows]
    print_table(("system", "batch ms", "bubbles", *bases.heads), cells)
    _print_stages(found)


def _print_stages(found: BatchReport) -> None:
    print(f"\nthe stages by {found.alone.preset_name}: times of a micro-batch, sends and bubbles of a batch")
    heads = (
        *("stage", "blocks", "forward ms", "backward ms", "last ms", "gradients MB", "after ms", "sends MB", "ms"),
        *("bubbles ms", "share"),
    )
    rows = [
        (
            row["stage"] + 1,
            "{}-{}".format(*row["blocks"]),
            *(f"{row[name]:.2f}" for name in ("forward_ms", "backward_ms", "last_backward_ms")),
            f"{row['hidden_gradient_bytes'] / 1e6:.1f} + {row['later_gradient_bytes'] / 1e6:.1f}",
            f"{row['gradients_ms']:.2f}",
            f"{row['send_bytes'] / 1e6:.1f}",
            f"{row['sends_ms']:.2f}",
            f"{row['bubbles_ms']:.2f}",
            f"{row['bubble_share']:.1%}",
        )
        for row in found.rows(found.alone.preset_name)
    ]
    print_table(heads, rows)
    print("  gradients: concurrent with the last micro-batch's backward + after it, which takes after ms")
    pipeline = found.pipeline
    if pipeline.lanes:
        lanes = sorted({each.value for each in pipeline.lanes})
        print(
            f"  sends: {pipeline.send_bytes / 1000000.0:.2f} MB per micro-batch and direction over the "
            f"{' and the '.join(f'{each}-node' for each in lanes)} link, {pipeline.sends_ms[0]:.3f} ms from the "
            "first stage to the second; both stages wait"
        )
    if pipeline.tied_ms:
        print(
            "  the first and the last stage share the embedding: DeepSpeed reduces its gradients after all "
            f"backwards, in {pipeline.tied_ms:.2f} ms"
        )

# SPDX-License-Identifier: Apache-2.0
"""A batch of a model in pipeline stages under every system: what ``ds_fsmoe plan --pp`` prints and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_fsmoe.offline.models.model_layers import stages
from ds_fsmoe.offline.models.pipeline import Pipeline, StageWork, pipeline_of_layers, pipeline_of_model
from ds_fsmoe.offline.plan.report import STOCK, Report
from ds_fsmoe.planning.bounds import step_bounds_ms
from ds_fsmoe.planning.plan import Planner
from ds_fsmoe.planning.stage_plan import StagePlan, StageTimes, stage_times


@dataclass(frozen=True)
class BatchReport:
    """The plans of all stages by every system, and the batches that they make."""

    pipeline: Pipeline
    places: tuple[range, ...]
    """The blocks of each stage."""
    plans: Mapping[str, Sequence[StagePlan]]
    """System -> the plan of each stage."""
    num_micro_batches: int
    bound_ms: float
    """The batch of stages that all take what no plan can beat."""
    preset_name: str

    def batch_ms(self, name: str) -> float:
        """Return the time of a batch by a system."""
        return self.pipeline.batch_ms([each.times for each in self.plans[name]], self.num_micro_batches)

    def bubble_share(self, name: str) -> float:
        """Return the share of all stages' time in which they have nothing to do."""
        shares = [row["bubble_share"] for row in self.rows(name)]
        return sum(shares) / len(shares)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return what each stage does by a system. Bytes and times of sends are those of a batch, there and back; what
        is left of a batch beside them and the stage's own work are its bubbles."""
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

    def on_stage(self, report: Report) -> Report:
        """Return a report of one stage with the plans that it has in the batch."""
        index = 0 if report.stage is None else report.stage.index
        plans = {name: of_stages[index].plan or report.plans[name] for name, of_stages in self.plans.items()}
        times_ms = {name: report.phases_ms(plan) for name, plan in plans.items()}
        return replace(report, plans=plans, times_ms=times_ms)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report in plain types."""
        base_ms = {name: self.batch_ms(name) for name in ("deepspeed", "tutel")}
        links = zip(self.pipeline.lanes, self.pipeline.sends_ms, strict=True)
        return {
            "num_micro_batches": self.num_micro_batches,
            "links": [{"lane": lane.value, "send_ms": send_ms} for lane, send_ms in links],
            "send_bytes": self.pipeline.send_bytes,
            "tied_ms": self.pipeline.tied_ms,
            "lower_bound_ms": self.bound_ms,
            "presets": {
                name: {
                    "batch_ms": self.batch_ms(name),
                    "bubble_share": self.bubble_share(name),
                    "over_deepspeed": base_ms["deepspeed"] / self.batch_ms(name),
                    "over_tutel": base_ms["tutel"] / self.batch_ms(name),
                    "stages": self.rows(name),
                }
                for name in self.plans
            },
        }


def batch_report(report: Report, **how: Any) -> BatchReport:
    """Plan all stages of a model the way every system would, of which one stage has been planned.

    Args:
        report: of that stage; its settings have the number of micro-batches.
        how: ``alltoall``, ``recompute`` and ``crossings`` as the stage was planned with.

    Raises:
        ValueError: the cluster has no number for sends.
    """
    groups, settings, model = report.groups, report.settings, report.architecture
    if model is None:
        pipeline = pipeline_of_layers(report.cluster, groups, report.layers, report.shape)
        size = len(report.layers)
        places = tuple(range(size * each, size * (each + 1)) for each in range(groups.pp))
    else:
        parts = stages(model, groups.pp)
        pipeline = pipeline_of_model(report.cluster, model, groups, parts, report.shape, **how)
        places = tuple(each.places for each in parts)
    pipeline = replace(pipeline, zero=report.zero)
    planner = Planner(report.costs, settings)
    plans = {
        name: pipeline.plan(planner, name, {StageWork(report.layers): stage_times(planner, plan)})
        for name, plan in report.plans.items()
    }
    least = _least_times(pipeline, planner, plans[report.preset_name])
    bound_ms = pipeline.batch_ms(least, settings.num_micro_batches)
    return BatchReport(pipeline, places, plans, settings.num_micro_batches, bound_ms, report.preset_name)


def _least_times(pipeline: Pipeline, planner: Planner, found: Sequence[StagePlan]) -> list[StageTimes]:
    """Return what no plan of each stage can beat: a batch gets no longer when a part of it gets shorter."""
    settings = planner.settings
    least = []
    for work, plan in zip(pipeline.works, found, strict=True):
        if work.dense is not None:
            least.append(plan.times)
            continue
        layers = pipeline.zero.layers(STOCK, work.layers)
        forward_ms, last_ms = step_bounds_ms(layers, planner.costs, settings.max_degree)
        bare = [replace(each, gradients=()) for each in layers]
        earlier_ms = step_bounds_ms(bare, planner.costs, settings.max_degree)[1]
        # Gradients lengthen a backward, or follow it; nobody waits for these.
        least.append(StageTimes(forward_ms, earlier_ms, earlier_ms, max(0.0, last_ms - earlier_ms)))
    return least

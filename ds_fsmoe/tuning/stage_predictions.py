# SPDX-License-Identifier: Apache-2.0
"""Predicts whole batches of a job in pipeline stages: every stage predicts its own micro batches, and all of them share
what they have found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.distributed.fail_together import on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.stages import Stages
from ds_fsmoe.planning.model_plan import ModelPlan
from ds_fsmoe.planning.stage_batch import StageTimes, batch_ms
from ds_fsmoe.planning.step_time import StepTimes
from ds_fsmoe.tuning.table import Row, describe_plan
from ds_fsmoe.tuning.tuned_model import TunedModel


@dataclass(frozen=True)
class Foreseen:
    """The batches with one plan of each stage, as they are predicted; the same on every rank."""

    step: StepTimes
    stages: tuple[StageTimes, ...]
    """What each stage's own work takes, from the front."""
    name: str
    """What the stages run, for people."""


@dataclass(frozen=True)
class Candidate:
    """A plan to try."""

    plan: ModelPlan
    foreseen: Foreseen | None = None
    """What is predicted of batches through stages with it and the other stages' plans; ``None``: there are none."""


def rows_of_all_stages(rows: Sequence[Row], stages: Stages) -> list[Row]:
    """Return the rows of the layers of all stages, labelled with their stage, on every rank. Collective over all.

    Args:
        rows: those of this stage.
        stages: where this rank is.
    """
    found: dict[int, list[Row]] = {}
    for stage, own in on_every_rank((stages.stage, list(rows))):
        named = [replace(each, labels=tuple(f"stage{stage}/{label}" for label in each.labels)) for each in own]
        found.setdefault(stage, named)
    return [each for stage in sorted(found) for each in found[stage]]


@dataclass(frozen=True)
class _OfStage:
    """What one stage has to say of one plan."""

    times: StageTimes
    isolated: StageTimes
    without_gradients: StageTimes
    bound_ms: float
    name: str
    """What it runs, for people; empty where there are no layers."""


class BatchPredictor:
    """Predicts batches through stages. Every method is collective over all ranks of the job.

    Args:
        stages: where this rank is.
        model: the layers of this stage as they were measured; the same on all ranks of the stage.
        ends_ms: what was measured after the last micro batch: the sum of gradients on this stage, and the rest.
        sums_gradients: whether the gradients of this stage are ours to sum: then what is left of them is predicted.
    """

    def __init__(self, stages: Stages, model: TunedModel, ends_ms: tuple[float, float], sums_gradients: bool) -> None:
        self._stages = stages
        self._model = model
        self._reduction_ms, self._end_ms = ends_ms
        self._sums_gradients = sums_gradients

    def predict(self, plans: Sequence[ModelPlan]) -> list[Foreseen]:
        """Predict the batch with each plan of this stage, while every other stage runs its own plan of that number.

        Args:
            plans: as many as every other stage has; the last is DeepSpeed's schedule.

        Raises:
            MeasuringError: on every rank, if one has failed.
        """
        own: list[_OfStage] = []
        with raise_on_all_ranks(None, "predicting batches"):
            bound_ms = self._model.bound_ms(plans[0])
            own = [self._of_stage(plan, bound_ms) for plan in plans]
        of_stages: dict[int, list[_OfStage]] = {}
        for stage, found in on_every_rank((self._stages.stage, own)):
            of_stages.setdefault(stage, found)
        in_order = [of_stages[stage] for stage in range(self._stages.num_stages)]
        stock_ms = self._batch_ms([each[-1].times for each in in_order])
        gradients_ms = max(each[-1].times.gradients_ms for each in in_order)
        bound_ms = self._stages.num_micro_batches * max(each[0].bound_ms for each in in_order)
        foreseen = []
        for of_plan in zip(*in_order, strict=True):
            chosen_ms = self._batch_ms([each.times for each in of_plan])
            step = StepTimes(
                chosen_ms=chosen_ms,
                isolated_ms=self._batch_ms([each.isolated for each in of_plan]),
                deepspeed_ms=stock_ms,
                dense_ms=None,
                gradients_ms=gradients_ms,
                exposed_ms=max(0.0, chosen_ms - self._batch_ms([each.without_gradients for each in of_plan])),
                bound_ms=bound_ms,
            )
            foreseen.append(Foreseen(step, tuple(each.times for each in of_plan), _joined(of_plan)))
        return foreseen

    def _batch_ms(self, times: Sequence[StageTimes]) -> float:
        sends = self._model.measured.sends
        there_ms, back_ms = ([getattr(each, name) for each in sends] for name in ("activation_ms", "gradient_ms"))
        return batch_ms(times, self._stages.num_micro_batches, there_ms, back_ms)

    def _of_stage(self, plan: ModelPlan, bound_ms: float) -> _OfStage:
        times, isolated = (self._with_end(self._model.micro_batch(plan, each)) for each in (False, True))
        without = replace(times, last_backward_ms=times.backward_ms, gradients_ms=0.0)
        return _OfStage(times, isolated, without, bound_ms, describe_plan(self._model.labels, plan))

    def _with_end(self, times: StageTimes) -> StageTimes:
        left_ms = times.gradients_ms if self._sums_gradients else self._reduction_ms
        return replace(times, gradients_ms=left_ms, optimizer_ms=self._end_ms)


def _joined(of_stages: Sequence[_OfStage]) -> str:
    """Return what all stages run; only once where those with layers run alike."""
    named = {f"stage{stage}": each.name for stage, each in enumerate(of_stages) if each.name}
    if len(set(named.values())) == 1:
        return next(iter(named.values()))
    return "; ".join(f"{stage} in {name}" for stage, name in named.items())

# SPDX-License-Identifier: Apache-2.0
"""Puts the plans of pipeline stages together: each stage plans for its own layers, and all of them try the plans of one
number in the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ds_fsmoe.distributed.fail_together import on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.topology import Stages
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.stage_plan import StageTimes
from ds_fsmoe.planning.decide.step_time import StepTimes
from ds_fsmoe.tuning.table import Row, describe_plan
from ds_fsmoe.tuning.tuned_model import TunedModel

_T = TypeVar("_T")


@dataclass(frozen=True)
class OfStages:
    """What runs in all stages of a pipeline, the same on every rank."""

    name: str
    """What the stages run, for people."""
    step: StepTimes
    """What is predicted of the micro-batches of a step on the stage that takes longest, without sends and bubbles."""
    times: tuple[StageTimes, ...]
    """What is predicted of a micro-batch on each stage, from the front."""


@dataclass(frozen=True)
class Candidate:
    """A plan to try."""

    plan: ModelPlan
    of_stages: OfStages | None = None
    """What all stages run with it; ``None``: there are none."""


def rows_of_all_stages(rows: Sequence[Row], stages: Stages) -> list[Row]:
    """Return the rows of the layers of all stages, labelled with their stage, on every rank. Collective over all.

    Args:
        rows: those of this stage.
        stages: where this rank is.
    """
    named = [
        [replace(each, labels=tuple(f"stage{stage}/{label}" for label in each.labels)) for each in of_stage]
        for stage, of_stage in enumerate(_from_all_stages(list(rows), stages))
    ]
    return [each for of_stage in named for each in of_stage]


def candidates_of_all_stages(plans: Sequence[ModelPlan], model: TunedModel, stages: Stages) -> list[Candidate]:
    """Return the plans to try on this stage, of which every stage has as many: one with fewer repeats its first.
    Collective over all ranks.

    Args:
        plans: of this stage, DeepSpeed's schedule last.
        model: the layers of this stage.
        stages: where this rank is.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """
    own: list[tuple[str, StepTimes, StageTimes]] = []
    with raise_on_all_ranks(None, "predicting the plans of a stage"):
        own = [(describe_plan(model.labels, each), model.predict(each), model.micro_batch(each)) for each in plans]
    of_stages = _from_all_stages(own, stages)
    most = max(map(len, of_stages))
    together = zip(*(_as_many(each, most) for each in of_stages), strict=True)
    return [Candidate(plan, _joined(of_plan)) for plan, of_plan in zip(_as_many(plans, most), together, strict=True)]


def _from_all_stages(own: _T, stages: Stages) -> list[_T]:
    """Return what each stage has, from the front, on every rank: its ranks have the same."""
    of_stages = dict(reversed(on_every_rank((stages.stage, own))))
    return [of_stages[stage] for stage in range(stages.num_stages)]


def _as_many(of_plans: Sequence[_T], count: int) -> list[_T]:
    """Return what belongs to the plans of a stage for so many: the first again ahead of the last."""
    *others, stock = of_plans
    return [*others, *others[:1] * (count - len(of_plans)), stock]


def _joined(of_stages: Sequence[tuple[str, StepTimes, StageTimes]]) -> OfStages:
    """Return what all stages run; the name only once where those with layers run alike."""
    names, steps, times = zip(*of_stages, strict=True)
    named = {f"stage{stage}": name for stage, name in enumerate(names) if name}
    if len(set(named.values())) == 1:
        name = next(iter(named.values()))
    else:
        name = "; ".join(f"{stage} in {name}" for stage, name in named.items())
    longest = max(steps, key=lambda each: each.chosen_ms)
    # What is dense was seen of single micro-batches of one stage.
    return OfStages(name, replace(longest, dense_ms=None), times)

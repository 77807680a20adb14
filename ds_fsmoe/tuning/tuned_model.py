# SPDX-License-Identifier: Apache-2.0
"""Holds the layers of one engine as they were measured: plans are searched for them and applied to them.

:class:`~ds_fsmoe.tuning.autotune.Autotune` makes one after each measuring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.fail_together import on_every_rank, raise_on_all_ranks
from ds_fsmoe.distributed.topology import Stages, world_size_now
from ds_fsmoe.observing.predicted import MeasuredPredictor
from ds_fsmoe.observing.step_timer import DenseTimes
from ds_fsmoe.planning.block import LayerPlan, Slice
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.gradient_plan import WindowBytes
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner
from ds_fsmoe.planning.decide.plan_requests import PlanRequest
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.decide.step_time import StageTimes, StepTimes, other_esp_sizes, predict_step, stage_times
from ds_fsmoe.tuning.measure import Measured
from ds_fsmoe.tuning.table import Row, describe_plan, measured_job

if TYPE_CHECKING:
    from ds_fsmoe.layer.runtime import LayerRuntime
    from ds_fsmoe.layer.stock_layer import FSMoELayer


def windows_of(plan: ModelPlan) -> list[WindowBytes]:
    """Return the gradients that a plan sends in each window, in the order of the backward: at most those that there
    are by then."""
    if plan.sending == "at_once":
        totals: dict[str, float] = {}
        for each in (gradient for layer in plan.layers for gradient in layer.gradients):
            totals[each.kind] = totals.get(each.kind, 0.0) + each.size_bytes
        everything = tuple(totals.items())
        return [WindowBytes(everything, everything)] * len(plan.backward)

    def bytes_of(slices: Sequence[Slice]) -> tuple[tuple[str, float], ...]:
        return tuple((each.kind, each.size_bytes) for each in slices)

    return [WindowBytes(bytes_of(each.moe_slices), bytes_of(each.dense_slices)) for each in plan.backward]


class TunedModel:
    """Holds the layers of one engine as they were measured: plans are searched for them and applied to them.

    Args:
        block: the options of the stage.
        running: the lanes and groups of the layers.
        layers: the layers by label, in the order of the forward.
        measured: the measurements of the layers.
        gradients: the kind and bytes of every buffer that we reduce.
        tensors_bytes: kind of gradient -> the bytes of its tensors.
        dense_ms: the time of the rest of the model, forward and backward, without sums of gradients; ``None``: not
            observed.
        can_split: whether batches may be split into two sub-batches.
        num_micro_batches: of a step, the last of which sends the gradients.
        in_stages: whether these are the layers of a pipeline's stage.
        sums_each: whether each micro-batch sends gradients, and not the last one alone.
    """

    def __init__(
        self,
        block: FSMoEBlock,
        running: LayerRuntime,
        layers: Mapping[str, FSMoELayer],
        measured: Measured,
        gradients: Sequence[tuple[str, int]],
        tensors_bytes: Mapping[str, Sequence[int]],
        dense_ms: DenseTimes | None,
        can_split: bool = False,
        num_micro_batches: int = 1,
        in_stages: bool = False,
        sums_each: bool = False,
    ) -> None:
        self.measured = measured
        self._layers = layers
        self._num_micro_batches = 1 if sums_each else num_micro_batches
        self._num_steps = num_micro_batches if sums_each else 1
        # Where a step has one micro-batch, what was seen has waited too.
        self._wait_ms = 0.0 if dense_ms is None or in_stages else dense_ms.wait_ms
        labels = [label for label in layers if label in measured.kind_of]
        self.job = measured_job(measured, block, running, labels, tensors_bytes, num_micro_batches)
        costs = [self.job.costs_of(kind, next(iter(kind.alltoalls))) for kind in map(self.job.kind_of, labels[:1])]
        of_gradients = costs[0].backward if costs else {}
        self._gradients_ms = sum(of_gradients[kind].ms(size) for kind, size in gradients if kind in of_gradients)
        totals: dict[str, int] = {}
        for kind, size in gradients:
            if kind in of_gradients:
                totals[kind] = totals.get(kind, 0) + size
        self._rest_ms = (0.0, 0.0) if dense_ms is None else dense_ms[:2]
        self._dense_ms = None if dense_ms is None else sum(self._rest_ms)
        self.job = replace(self.job, rest_ms=self._rest_ms, gradients_bytes=totals)
        asked = block.pipeline_degree
        forward, backward = (None if each == "auto" else each for each in (asked.forward, asked.backward))
        settings = replace(self.job.settings, num_micro_batches=self._num_micro_batches)
        space = settings.space(block.schedule)
        self.search = Search(
            Planner({}, settings),
            PlanRequest(
                self.job.options(self.job.mode, self._rest_ms),
                space if (forward, backward) == (None, None) else space.with_degrees(forward, backward, running.links),
                self.job.mode,
                running.links,
                self.job.unchunked,
                can_split,
                # A system that was named is run as it is.
                may_send_anyhow=block.schedule == BEST and self.job.mode == "adaptive",
            ),
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of the layers in the order of the forward."""
        return self.job.labels

    def apply(self, plan: ModelPlan, predictors: dict[str, MeasuredPredictor]) -> None:
        """Run the layers by a plan from now on."""
        measured = self.measured
        for index, label in enumerate(self.labels):
            kind, alltoall = measured.kind_of[label], plan.alltoalls[index]
            forward, backward = (each.order.plan() for each in plan.choices(index))
            option = kind.options[alltoall]
            plan_of_layer = LayerPlan(
                forward,
                backward,
                option.subject.alltoall,
                measured.reduces(kind),
                plan.is_two_batch,
                option.is_unpadded,
            )
            self._layers[label].fsmoe.apply(plan_of_layer)
            if plan.is_two_batch:
                # A sub-batch is predicted with the other one in its idle time, which no layer alone can be.
                predictors.pop(label, None)
                continue
            predictors[label] = MeasuredPredictor(
                self.job.costs_of(self.job.kind_of(label), alltoall),
                measured.slowed.contention(),
                measured.is_serial,
                forward.degree == backward.degree,
                kind.sizes_with(alltoall).capacity,
                kind.sizes.crossings,
            )

    def predict(self, plan: ModelPlan) -> StepTimes:
        """Predict the time of a step with a plan."""
        search, count = self.search, self._num_micro_batches
        step = predict_step(search.planner, plan, search.request.options, self._dense_ms, self._gradients_ms, count)
        return step.repeated(self._num_steps).longer(self._wait_ms)

    def micro_batch(self, plan: ModelPlan) -> StageTimes:
        """Predict the time of a micro-batch in a pipeline's stage with a plan."""
        if not plan.layers:
            return StageTimes(*self._rest_ms, self._rest_ms[1])
        return stage_times(self.search.planner, plan).times

    def sharded_ms(self) -> dict[int, float]:
        """Return ESP size -> the predicted time of the experts' parts of a step, by the cluster's numbers; empty where
        those were not measured."""
        job, search, cluster = self.job, self.search, self.measured.cluster
        if world_size_now() == 1 or cluster is None:
            return {}
        counted = [
            (len(kind.labels), kind.groups, kind.shape, job.costs_of(kind, next(iter(kind.alltoalls))))
            for kind in job.kinds
        ]
        per_node = self.measured.topology.ranks_per_node
        return other_esp_sizes(search.planner, search.request.space, cluster, counted, per_node)


# ---- the plans of pipeline stages: each stage plans for its own layers, and all of them try the plans of one number in
# the same batches


_T = TypeVar("_T")


@dataclass(frozen=True)
class OfStages:
    """Holds what runs in all stages of a pipeline, the same on every rank."""

    name: str
    """What the stages run, for people."""
    step: StepTimes
    """What is predicted of the micro-batches of a step on the stage that takes longest, without sends and bubbles."""
    times: tuple[StageTimes, ...]
    """What is predicted of a micro-batch on each stage, from the front."""


@dataclass(frozen=True)
class Candidate:
    """Holds a plan to try."""

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
    """Return the value of each stage, from the front, on every rank: its ranks have the same."""
    of_stages = dict(reversed(on_every_rank((stages.stage, own))))
    return [of_stages[stage] for stage in range(stages.num_stages)]


def _as_many(of_plans: Sequence[_T], count: int) -> list[_T]:
    """Return so many values of the plans of a stage: the first is repeated ahead of the last."""
    *others, stock = of_plans
    return [*others, *others[:1] * (count - len(of_plans)), stock]


def _joined(of_stages: Sequence[tuple[str, StepTimes, StageTimes]]) -> OfStages:
    """Join what all stages run; the name occurs only once where those with layers run alike."""
    names, steps, times = zip(*of_stages, strict=True)
    named = {f"stage{stage}": name for stage, name in enumerate(names) if name}
    if len(set(named.values())) == 1:
        name = next(iter(named.values()))
    else:
        name = "; ".join(f"{stage} in {name}" for stage, name in named.items())
    longest = max(steps, key=lambda each: each.chosen_ms)
    # What is dense was seen of single micro-batches of one stage.
    return OfStages(name, replace(longest, dense_ms=None), times)

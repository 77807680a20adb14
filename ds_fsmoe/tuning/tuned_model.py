# SPDX-License-Identifier: Apache-2.0
"""Holds the layers of one engine as they were measured: plans are searched for them and applied to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.observing.predicted import MeasuredPredictor
from ds_fsmoe.observing.step_timer import DenseTimes
from ds_fsmoe.planning.block import LayerPlan, Slice
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.gradient_plan import WindowBytes
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner, Settings, mode_of
from ds_fsmoe.planning.decide.presets import BEST
from ds_fsmoe.planning.decide.stage_plan import StageTimes, stage_times
from ds_fsmoe.planning.decide.step_time import StepTimes, other_esp_sizes, predict_step
from ds_fsmoe.planning.job.larger_ep import larger_ep_sizes
from ds_fsmoe.tuning.as_data import measured_job
from ds_fsmoe.tuning.measure import Measured

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


FORWARDS_WATCHED = 2
"""The number of the forward whose backward tells what the rest of the model takes, see ``StepClock``."""


class TunedModel:
    """Holds the layers of one engine as they were measured: plans are searched for them and applied to them.

    Args:
        block: the options of the stage.
        running: the lanes and groups of the layers.
        layers: the layers by label, in the order of the forward.
        measured: what was measured of them.
        gradients: the kind and bytes of every buffer that we reduce.
        tensors_bytes: kind of gradient -> the bytes of its tensors.
        dense_ms: what the rest of the model takes, forward and backward: gradients included, which were not hidden
            when it was measured; ``None``: not seen.
        can_split: whether batches may be cut into halves.
        num_micro_batches: of a step, the last of which sends the gradients.
        in_stages: whether these are the layers of a pipeline's stage, whose backwards were seen without gradients.
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
        self._schedule = block.schedule
        self._layers = layers
        self.labels = [label for label in layers if label in measured.kind_of]
        contention = measured.slowed.contention()
        settings = Settings(
            contention,
            max_degree=block.pipeline_degree.max,
            gradient_solver=block.gradient_partition.solver,
            chunk_bytes=block.gradient_partition.asked_bytes,
            is_serial=measured.is_serial,
            shared_link=running.one_link is not None,
            num_micro_batches=1 if sums_each else num_micro_batches,
        )
        costs = [next(iter(each.values())) for each in measured.options(self.labels[:1], (0.0, 0.0), {})]
        of_gradients = costs[0].costs.backward if costs and costs[0].costs else {}
        self._gradients_ms = sum(of_gradients[kind].ms(size) for kind, size in gradients if kind in of_gradients)
        # What was seen is the second backward, with the gradients only where a step ends there.
        has_none = in_stages or (num_micro_batches > FORWARDS_WATCHED and not sums_each)
        in_backward_ms = 0.0 if has_none else self._gradients_ms
        self._num_micro_batches = 1 if sums_each else num_micro_batches
        self._num_steps = num_micro_batches if sums_each else 1
        # Where a step has one micro-batch, what was seen has waited too.
        self._wait_ms = 0.0 if dense_ms is None or in_stages else dense_ms.wait_ms
        self._rest_ms = (0.0, 0.0) if dense_ms is None else (dense_ms[0], max(0.0, dense_ms[1] - in_backward_ms))
        rest_ms = self._rest_ms
        self._dense_ms = None if dense_ms is None else sum(rest_ms)
        totals: dict[str, int] = {}
        for kind, size in gradients:
            if kind in of_gradients:
                totals[kind] = totals.get(kind, 0) + size
        asked = block.pipeline_degree
        forward, backward = (None if each == "auto" else each for each in (asked.forward, asked.backward))
        space = settings.space(block.schedule)
        mode = mode_of(block.schedule, block.gradient_partition.mode)
        self.search = Search(
            Planner({}, settings),
            measured.options(self.labels, rest_ms, totals, tensors_bytes if mode == "micro_ops" else None),
            space if (forward, backward) == (None, None) else space.with_degrees(forward, backward, running.links),
            mode,
            running.links,
            [layers[label].fsmoe.is_uncut for label in self.labels],
            can_split,
            # A system that was named is run as it is.
            may_send_anyhow=block.schedule == BEST and mode == "adaptive",
        )

    def apply(self, plan: ModelPlan, predictors: dict[str, MeasuredPredictor]) -> None:
        """Run the layers by a plan from now on."""
        measured = self.measured
        for index, label in enumerate(self.labels):
            kind, alltoall = measured.kind_of[label], plan.alltoalls[index]
            forward, backward = (each.order.plan() for each in plan.choices(index))
            plan_of_layer = LayerPlan(forward, backward, alltoall, measured.reduces(kind), plan.in_halves)
            self._layers[label].fsmoe.apply(plan_of_layer)
            if plan.in_halves:
                # A half's run is predicted with the other half in its pauses, which no layer alone can be.
                predictors.pop(label, None)
                continue
            predictors[label] = MeasuredPredictor(
                measured.costs_of(kind, alltoall),
                measured.slowed.contention(),
                measured.is_serial,
                forward.degree == backward.degree,
                kind.sizes.capacity,
                kind.sizes.crossings,
            )

    def predict(self, plan: ModelPlan) -> StepTimes:
        """Predict what a step with a plan takes."""
        search, count = self.search, self._num_micro_batches
        step = predict_step(search.planner, plan, search.options, self._dense_ms, self._gradients_ms, count)
        return step.repeated(self._num_steps).longer(self._wait_ms)

    def micro_batch(self, plan: ModelPlan) -> StageTimes:
        """Predict what a micro batch takes in a pipeline's stage with a plan."""
        if not plan.layers:
            return StageTimes(*self._rest_ms, self._rest_ms[1])
        return stage_times(self.search.planner, plan).times

    def other_layouts(self) -> tuple[dict[int, float], dict[int, float]]:
        """Predict what other layouts of the same ranks would take, by the cluster's numbers where those were measured.

        Returns:
            ESP size -> the time of the experts' parts of a step; EP size -> the time of a step, the size as it is
            first, then larger ones.
        """
        measured, search = self.measured, self.search
        if world_size_now() == 1 or measured.cluster is None:
            return {}, {}
        counted = [
            (len(kind.labels), kind.pipeline.forward.groups, kind.sizes, measured.costs_of(kind, next(iter(kind.ways))))
            for kind in measured.kinds
        ]
        per_node = measured.topology.ranks_per_node
        sharded = other_esp_sizes(search.planner, search.space, measured.cluster, counted, per_node)
        choices = {label: measured.kind_of[label].subject.sizes.num_choices or None for label in self.labels}
        job = measured_job(measured, search, self._schedule, {}, self._num_micro_batches, choices)
        return sharded, larger_ep_sizes(job, measured.cluster)

# SPDX-License-Identifier: Apache-2.0
"""What the phases of a layer should take, with the sizes of each call, to be laid beside what they take.

The schedule that is run carries no sizes, because they are of no importance to what is run. Here it is given those of a
call and played against a clock: that of a cluster, or of what was measured here. Nothing of it is computed while the
phase runs: the trace asks when it is written, a timed step when it is over.

Letters: E experts of all ranks, C slots per expert, M width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ds_fsmoe.config import ConfigError, shown
from ds_fsmoe.planning.call_shape import CallShape, call_timeline
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.layer_costs import LayerCosts
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import Schedule, Task
from ds_fsmoe.planning.timeline import Contention, Timeline
from ds_fsmoe.planning.workload import AllToAll, kind_costs
from ds_fsmoe.runtime.lanes import Observer
from ds_fsmoe.runtime.pipeline import Experts, Hook, Parcel, Pipeline
from ds_fsmoe.runtime.spans import Recorder
from ds_fsmoe.runtime.step_times import StepClock
from ds_fsmoe.runtime.trace import Tracer
from ds_fsmoe.runtime.whole import WholeExperts

if TYPE_CHECKING:
    from ds_fsmoe.runtime.gradients import GradientReducer


def shape_of(x_RM: torch.Tensor, num_experts: int, capacity: int, experts: Experts | WholeExperts) -> CallShape:
    """Return the shape of a call of a :class:`Pipeline`."""
    matrices = [each.numel() for each in experts.parameters if each.dim() > 1]
    width, dtype_bytes = x_RM.shape[-1], x_RM.element_size()
    return CallShape(num_experts, capacity, width, dtype_bytes, len(matrices), sum(matrices))


_MOST_KEPT = 256
"""Timelines of one kind of layer, for calls of as many sizes."""


class Predicts(Protocol):
    """Knows what phases of a layer should take."""

    def timeline(self, schedule: Schedule, plan: PhasePlan, shape: CallShape) -> Timeline:
        """One phase of one call.

        Args:
            schedule: what is run of the plan, gradients that travel with it included.
            plan: of the phase.
            shape: of the call.

        Raises:
            ValueError: a number is missing.
        """


Predictors = Callable[[], Mapping[str, Predicts]]
"""Gives, label of a layer -> who predicts its phases as of now; none before anything has been measured."""


class Predictor:
    """What phases of layers should take on a cluster.

    Args:
        name_or_path: of the cluster, as ``fsmoe.trace.cluster`` has it.

    Raises:
        ValueError: there is no such cluster, or its file is wrong.
    """

    def __init__(self, name_or_path: str) -> None:
        self._name = name_or_path
        self._cluster: Cluster = load_cluster(name_or_path)
        self._predictors: dict[tuple[Groups, AllToAll], MeasuredPredictor] = {}

    def of(self, groups: Groups, alltoall: AllToAll = "flat") -> MeasuredPredictor:
        """Return the predictor of phases in these groups.

        Raises:
            ConfigError: the cluster lacks a number for one of them.
        """
        key = groups, alltoall
        if key not in self._predictors:
            try:
                costs = kind_costs(self._cluster, groups, alltoall)
            except ValueError as error:
                raise ConfigError(f"fsmoe.trace.cluster = {shown(self._name)}: {error}") from error
            written = LayerCosts.written(costs, self._cluster.host_ms)
            self._predictors[key] = MeasuredPredictor(written, self._cluster.contention)
        return self._predictors[key]

    def timeline(self, schedule: Schedule, plan: PhasePlan, shape: CallShape) -> Timeline:
        """See :class:`Predicts`."""
        return self.of(plan.groups, plan.alltoall).timeline(schedule, plan, shape)


@dataclass
class MeasuredPredictor:
    """What the phases of one layer should take, by what its tasks cost."""

    costs: LayerCosts
    contention: Contention
    is_serial: bool = False
    same_chunks: bool = True
    """Whether the backward has the chunks of the forward."""
    _timelines: dict[tuple, Timeline] = field(default_factory=dict)

    def timeline(self, schedule: Schedule, plan: PhasePlan, shape: CallShape) -> Timeline:
        """See :class:`Predicts`."""
        key = schedule, plan, shape
        if key not in self._timelines:
            if len(self._timelines) >= _MOST_KEPT:  # a capacity that follows the tokens
                self._timelines.clear()
            if not self.costs.is_per_launch:  # experts are one product of all their weights, as they were measured
                shape = replace(shape, num_products=1, num_weights=max(1, shape.num_weights))
            how = self.same_chunks, self.contention, self.is_serial
            self._timelines[key] = call_timeline(schedule, plan, shape, self.costs, *how)
        return self._timelines[key]


@dataclass(frozen=True)
class PredictedPipeline(Pipeline):
    """Runs as any other. In steps that are traced it tells the tracer what each phase should take; in those that are
    timed it gives the clock the phases, with what is needed to predict them."""

    tracer: Tracer | None = None
    predictor: Predicts | None = None
    """Of all layers, for the trace."""
    predictors: Predictors = dict
    """Of what was measured here: for the trace where there is no other."""
    clock: StepClock | None = None

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        tracer: Tracer | None,
        predictor: Predictor | None,
        predictors: Predictors = dict,
        clock: StepClock | None = None,
    ) -> PredictedPipeline:
        """That pipeline, with predictions.

        Raises:
            ConfigError: the cluster lacks a number that they need.
        """
        if predictor is not None:
            predictor.of(pipeline.forward.groups, pipeline.forward.alltoall)
        return cls(**vars(pipeline), tracer=tracer, predictor=predictor, predictors=predictors, clock=clock)

    def __call__(
        self,
        x_RM: torch.Tensor,
        num_experts: int,
        capacity: int,
        experts: Experts | WholeExperts,
        hook: Hook | None = None,
    ) -> torch.Tensor:
        """See :class:`Pipeline`."""
        if isinstance(experts, WholeExperts) and not experts.is_timed and self.clock is not None:
            return replace(self, clock=None)(x_RM, num_experts, capacity, experts, hook)
        is_heard = self.clock is not None and self.clock.is_listening
        if not is_heard and (self.tracer is None or not self.tracer.is_recording):
            return super().__call__(x_RM, num_experts, capacity, experts, hook)
        # Of this call alone: another one may come before its backward.
        sizes = shape_of(x_RM, num_experts, capacity, experts)
        window = None if self.window is None else _Watched(self.window)
        observer = _OfCall(self, sizes, window)
        of_call = replace(self, tracer=None, clock=None, observer=observer, window=window)
        return of_call(x_RM, num_experts, capacity, experts, hook)


class _Watched:
    """The window of a layer's backward, and how large what it gave to be sent is."""

    def __init__(self, window: Any) -> None:
        self._window: GradientReducer = window
        self.slices_bytes: tuple[int, ...] = ()

    def open(self, label: str) -> Sequence[Parcel]:
        parcels = self._window.open(label)
        flats = self._window.flats
        self.slices_bytes = tuple((each.stop - each.first) * flats[each.flat].element_bytes for each in parcels)
        return parcels

    def send(self, parcel: Any) -> None:
        self._window.send(parcel)

    def close(self) -> None:
        self._window.close()


class _OfCall(Observer):
    """Passes on what it is told, and says ahead of a run what is needed to predict it."""

    def __init__(self, pipeline: PredictedPipeline, sizes: CallShape, window: _Watched | None) -> None:
        self._pipeline = pipeline
        self._observer = pipeline.observer or pipeline.tracer
        self._plans = {"forward": pipeline.forward, "backward": pipeline.backward}
        self._sizes = sizes
        self._window = window
        self._recorder: Recorder | None = None
        """Of the run that is under way."""

    def start(self, schedule: Schedule, label: str) -> None:
        pipeline, sizes = self._pipeline, self._sizes
        plan = self._plans[label.rpartition("/")[2]]
        if plan.backward and self._window is not None:
            sizes = replace(sizes, slices_bytes=self._window.slices_bytes)
        if pipeline.tracer is not None and pipeline.tracer.is_recording:
            predictor = pipeline.predictor or pipeline.predictors().get(pipeline.label)
            if predictor is not None:
                pipeline.tracer.expect(partial(predictor.timeline, schedule, plan, sizes))
        if self._observer is not None:
            self._observer.start(schedule, label)
        if pipeline.clock is not None:
            self._recorder = pipeline.clock.run(schedule, label, (pipeline.label, plan, sizes))

    def begin(self, index: int, task: Task) -> None:
        if self._observer is not None:
            self._observer.begin(index, task)
        if self._recorder is not None:
            self._recorder.begin(index, task)

    def end(self, index: int, task: Task) -> None:
        if self._recorder is not None:
            self._recorder.end(index, task)
        if self._observer is not None:
            self._observer.end(index, task)

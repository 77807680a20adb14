# SPDX-License-Identifier: Apache-2.0
"""What the phases of a layer should take, with the sizes of each call, to be laid beside what they take.

The schedule that is run carries no sizes, because they are of no importance to what is run. Here it is given those of a
call and played against a clock: that of a cluster, or of what was measured here. Nothing of it is computed while the
phase runs: the trace asks when it is written, a timed step when it is over.

Letters: E experts of all ranks, C slots per expert, M width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ds_fsmoe.config import ConfigError, shown
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Schedule, Task
from ds_fsmoe.planning.timeline import Timeline, simulate
from ds_fsmoe.planning.workload import AllToAll, MoEWork, Shape, Work, kind_costs, layer_work
from ds_fsmoe.runtime.lanes import Observer
from ds_fsmoe.runtime.pipeline import Experts, Hook, Parcel, PhasePlan, Pipeline
from ds_fsmoe.runtime.spans import Recorder
from ds_fsmoe.runtime.step_times import StepClock
from ds_fsmoe.runtime.trace import Tracer
from ds_fsmoe.runtime.whole import WholeExperts

if TYPE_CHECKING:
    from ds_fsmoe.runtime.gradients import GradientReducer


@dataclass(frozen=True, slots=True)
class CallSizes:
    """What one call of a layer moves and multiplies, on one rank."""

    num_experts: int
    """E."""
    capacity: int
    """C."""
    width: int
    """M."""
    dtype_bytes: int
    """Of an element of what is sent, as the layer gives it; a hook may send something else."""
    num_products: int
    """Matrices of this rank's experts."""
    num_weights: int
    """Elements of those."""
    slices_bytes: tuple[int, ...] = ()
    """Of the gradients that travel in the same run, in their order."""

    @classmethod
    def of(cls, x_RM: torch.Tensor, num_experts: int, capacity: int, experts: Experts | WholeExperts) -> CallSizes:
        """Those of a call of a :class:`Pipeline`."""
        matrices = [each.numel() for each in experts.parameters if each.dim() > 1]
        width, dtype_bytes = x_RM.shape[-1], x_RM.element_size()
        return cls(num_experts, capacity, width, dtype_bytes, len(matrices), sum(matrices))


def moe_work(groups: Groups, backward: bool, sizes: CallSizes, alltoall: AllToAll = "flat") -> MoEWork:
    """The experts' part of a layer, uncut, with the sizes of a call."""
    # Every slot travels, with a token or without: as many tokens as slots, each sent once.
    slots = sizes.num_experts * sizes.capacity
    shape = Shape(
        B=groups.mp,
        L=max(1, slots),
        M=sizes.width,
        H=groups.esp,
        E=sizes.num_experts,
        K=1,
        capacity_factor=None,
        heads=1,
        dtype_bytes=sizes.dtype_bytes,
    )
    layer = layer_work(shape, groups, alltoall)
    moe = (layer.backward if backward else layer.forward).moe
    # Each expert here meets its slots of all ranks that share it: those of esp ranks, and of all that send it tokens.
    rows = sizes.capacity * groups.ep * groups.esp
    flops, launches = 2 * rows * sizes.num_weights, max(1, sizes.num_products)

    def expert(work: Work | None, times: int = 1) -> Work | None:
        return work and replace(work, size=times * flops, launches=times * launches)

    return replace(
        moe, expert=expert(moe.expert, 1 + backward), expert_dx=expert(moe.expert_dx), expert_dw=expert(moe.expert_dw)
    )


def sized(schedule: Schedule, plan: PhasePlan, sizes: CallSizes) -> Schedule:
    """The same tasks in the same order, each as large as it is in a call."""
    moe = moe_work(plan.groups, plan.backward, sizes, plan.alltoall)
    work_of = {each.kind: each for each in (*moe.enter, *moe.gather, *moe.reduce, *moe.leave)}
    work_of |= {each.kind: each for each in (moe.expert, moe.expert_dx, moe.expert_dw) if each is not None}
    # Where the capacity is really cut: into whole slots.
    shares = [(stop - start) / max(1, sizes.capacity) for start, stop in plan.cutting(sizes.capacity).chunks]

    def with_size(task: Task) -> Task:
        if task.kind in (GRAD, EXPERT_GRAD):
            return replace(task, size=sizes.slices_bytes[task.chunk])
        work = work_of.get(task.kind)
        return task if work is None else replace(task, size=work.size * shares[task.chunk], launches=work.launches)

    return Schedule(tuple(map(with_size, schedule.tasks)))


_MOST_KEPT = 4096
"""Timelines of all layers together."""


class Predicts(Protocol):
    """Knows what phases of a layer should take."""

    def timeline(self, schedule: Schedule, plan: PhasePlan, sizes: CallSizes) -> Timeline:
        """One phase of one call.

        Args:
            schedule: what is run of the plan, gradients that travel with it included.
            plan: of the phase.
            sizes: of the call.

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
        self._costs: dict[tuple[Groups, AllToAll], Mapping[str, LinearCost]] = {}
        self._timelines: dict[Any, Timeline] = {}

    def costs(self, groups: Groups, alltoall: AllToAll = "flat") -> Mapping[str, LinearCost]:
        """What each kind of task costs in these groups.

        Raises:
            ConfigError: the cluster lacks a number for one of them.
        """
        key = groups, alltoall
        if key not in self._costs:
            try:
                self._costs[key] = kind_costs(self._cluster, groups, alltoall)
            except ValueError as error:
                raise ConfigError(f"fsmoe.trace.cluster = {shown(self._name)}: {error}") from error
        return self._costs[key]

    def timeline(self, schedule: Schedule, plan: PhasePlan, sizes: CallSizes) -> Timeline:
        """One phase of one call.

        Args:
            schedule: what is run of the plan.
            plan: of the phase.
            sizes: of the call.
        """
        key = schedule, plan, sizes
        if key not in self._timelines:
            if len(self._timelines) >= _MOST_KEPT:  # a capacity that follows the tokens
                self._timelines.clear()
            cluster = self._cluster
            self._timelines[key] = simulate(
                *(sized(schedule, plan, sizes), self.costs(plan.groups, plan.alltoall)),
                *(cluster.contention, cluster.host_ms),
            )
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
            predictor.costs(pipeline.forward.groups, pipeline.forward.alltoall)
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
        sizes = CallSizes.of(x_RM, num_experts, capacity, experts)
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

    def __init__(self, pipeline: PredictedPipeline, sizes: CallSizes, window: _Watched | None) -> None:
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

# SPDX-License-Identifier: Apache-2.0
"""What the phases of a layer should take, with the sizes of each call, to be laid beside what they take.

The schedule that is run carries no sizes, because they are of no importance to what is run. Here it is given those of a
call and played against a clock: that of a cluster, or of what was measured here. Nothing of it is computed while the
phase runs: the trace asks when it is written, a timed step when it is over.

Letters: E experts of all ranks, C slots per expert, M width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ds_fsmoe.config.reading import ConfigError, shown
from ds_fsmoe.planning.call_shape import CallShape, call_timeline
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.layer_costs import LayerCosts
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import Schedule
from ds_fsmoe.planning.timeline import Contention, Timeline
from ds_fsmoe.planning.workload import AllToAll, kind_costs

if TYPE_CHECKING:
    pass


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

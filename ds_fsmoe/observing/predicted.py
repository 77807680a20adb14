# SPDX-License-Identifier: Apache-2.0
"""Predicts how long the phases of a layer take, from the sizes of each call, to compare with the measured times.

The call observer and the autotuner call it. A schedule has no sizes, because running it needs none. Here it receives
the sizes of a call and is simulated with costs: those of a cluster, or those measured here. This costs no time while
the phase runs: the trace asks when it is written, a timed step when it is over.

Letters: E experts of all ranks, C slots per expert, M width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ds_fsmoe.config.reading import ConfigError, shown
from ds_fsmoe.planning.call_shape import CallShape, call_timeline
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.cost import LayerCosts
from ds_fsmoe.planning.groups import Fanout, Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import Schedule
from ds_fsmoe.planning.timeline import Contention, Timeline
from ds_fsmoe.planning.workload import AllToAll, kind_costs

_MOST_KEPT = 256
"""The most timelines kept for one kind of layer, one for each set of call sizes."""


Predictors = Callable[[], Mapping[str, "MeasuredPredictor"]]
"""Returns label of a layer -> predictor of its phases as of now; empty before anything has been measured."""


class Predictor:
    """Predicts phases of layers on a cluster.

    Args:
        name_or_path: the cluster, written as in ``fsmoe.trace.cluster``.

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
        """Predict one phase of one call; see :meth:`MeasuredPredictor.timeline`."""
        return self.of(plan.groups, plan.alltoall).timeline(schedule, plan, shape)


@dataclass
class MeasuredPredictor:
    """Predicts the phases of one layer from the costs of its tasks."""

    costs: LayerCosts
    contention: Contention
    is_serial: bool = False
    same_chunks: bool = True
    """Whether the backward has the same chunks as the forward."""
    capacity: int | None = None
    """The slots per expert, or the rows of the fullest rank, that the layer was planned for; ``None``: not known."""
    fanout: Fanout | None = None
    """The crossings of a token for each of its choices, where it crosses once per node: a call does not tell them."""
    _timelines: dict[tuple, Timeline] = field(default_factory=dict)

    def timeline(self, schedule: Schedule, plan: PhasePlan, shape: CallShape) -> Timeline:
        """Predict one phase of one call.

        Args:
            schedule: the tasks of the plan, with the gradients that are sent with them.
            plan: the plan of the phase.
            shape: the sizes of the call.

        Raises:
            ValueError: a number is missing.
        """
        key = schedule, plan, shape
        if key not in self._timelines:
            if len(self._timelines) >= _MOST_KEPT:  # a capacity that follows the tokens
                self._timelines.clear()
            if shape.crossings is None:
                shape = replace(shape, crossings=self.fanout)
            if not self.costs.is_per_launch:  # experts are one product of all their weights, as they were measured
                shape = replace(shape, num_products=1, num_weights=max(1, shape.num_weights))
            how = self.same_chunks, self.contention, self.is_serial
            self._timelines[key] = call_timeline(schedule, plan, shape, self.costs, *how)
        return self._timelines[key]

# SPDX-License-Identifier: Apache-2.0
"""What the phases of a layer should take, with the sizes of each call, to be laid beside what they take.

The schedule that is run carries no sizes, because they are of no importance to what is run. Here it is given those of a
call and played against a clock: that of a cluster, or of what was measured here. Nothing of it is computed while the
phase runs: the trace asks when it is written, a timed step when it is over.

Letters: E experts of all ranks, C slots per expert, M width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ds_fsmoe.config import ConfigError, shown
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Schedule, Task
from ds_fsmoe.planning.timeline import Timeline, simulate
from ds_fsmoe.planning.workload import AllToAll, MoEWork, Shape, Work, kind_costs, layer_work
from ds_fsmoe.runtime.pipeline import PhasePlan


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
            costs = self.costs(plan.groups, plan.alltoall)
            self._timelines[key] = simulate(
                sized(schedule, plan, sizes), costs, contention=cluster.contention, host_ms=cluster.host_ms
            )
        return self._timelines[key]

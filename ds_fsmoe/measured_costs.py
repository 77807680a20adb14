# SPDX-License-Identifier: Apache-2.0
"""Phases of a layer played with what its tasks cost here, slowed by one another as they are here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from ds_fsmoe.planning.cost import Cost
from ds_fsmoe.planning.schedule import HOLD, Lane, Schedule
from ds_fsmoe.planning.timeline import IDEAL, Contention, Timeline, simulate
from ds_fsmoe.predicted import CallSizes, sized
from ds_fsmoe.runtime.pipeline import PhasePlan

MOST_KEPT = 256
"""Timelines of one layer, for calls of as many sizes."""


class LayerCosts(Protocol):
    """What the planner has to know of a layer; see :class:`~ds_fsmoe.runtime.profiler.LayerProfile`."""

    @property
    def task_ms(self) -> float: ...

    @property
    def draws(self) -> bool: ...

    @property
    def splits(self) -> bool: ...

    @property
    def costs_more_cut_anew(self) -> bool: ...

    @property
    def doubt(self) -> float: ...

    def costs(self, backward: bool, same_cuts: bool = True) -> dict[str, Cost]: ...

    def issue_ms(self, backward: bool, same_cuts: bool = True) -> dict[str, float]: ...


@dataclass(frozen=True)
class Machine:
    """How lanes run tasks."""

    is_serial: bool = False
    """One after another."""
    issues_ahead: bool = False
    """Whether one thread hands out the tasks of all lanes, ahead of them, as to a GPU: then what that takes adds up
    over lanes. Else a lane does its tasks itself, and each bears its own cost."""
    contention: Contention = IDEAL
    """How much lanes slow each other down."""

    def timeline(
        self, schedule: Schedule, plan: PhasePlan, sizes: CallSizes, profile: LayerCosts, same_cuts: bool = True
    ) -> Timeline:
        """The experts' part of a layer in one phase.

        Args:
            schedule: what is run of the plan.
            plan: of the phase.
            sizes: of the call; the experts as one product of all their weights, as they were measured.
            profile: what tasks cost.
            same_cuts: whether the backward has the chunks of the forward.
        """
        costs = profile.costs(plan.backward, same_cuts)
        if not self.issues_ahead:
            costs = {kind: cost if kind == HOLD else cost.plus(profile.task_ms) for kind, cost in costs.items()}
        tasks = sized(schedule, plan, sizes).tasks
        # Measured are whole operations, with all their launches.
        tasks = tuple(replace(task, launches=min(1, task.launches)) for task in tasks)
        if self.is_serial:
            tasks = tuple(replace(task, lane=Lane.COMPUTE) for task in tasks)
        host_ms = profile.issue_ms(plan.backward, same_cuts) if self.issues_ahead else 0.0
        return simulate(Schedule(tasks), costs, IDEAL if self.is_serial else self.contention, host_ms)

    def predict_ms(self, plan: PhasePlan, sizes: CallSizes, profile: LayerCosts, same_cuts: bool = True) -> float:
        """How long it takes, without gradients in it."""
        return self.timeline(plan.schedule, plan, sizes, profile, same_cuts).makespan_ms


@dataclass
class MeasuredPredictor:
    """What the phases of one layer should take, as it was measured and is run."""

    machine: Machine
    profile: LayerCosts
    same_cuts: bool
    _timelines: dict[tuple, Timeline] = field(default_factory=dict)

    def timeline(self, schedule: Schedule, plan: PhasePlan, sizes: CallSizes) -> Timeline:
        """One phase of one call.

        Args:
            schedule: what is run of the plan.
            plan: of the phase.
            sizes: of the call.
        """
        key = schedule, plan, sizes
        if key not in self._timelines:
            if len(self._timelines) >= MOST_KEPT:  # a capacity that follows the tokens
                self._timelines.clear()
            whole = replace(sizes, num_products=1, num_weights=max(1, sizes.num_weights))
            self._timelines[key] = self.machine.timeline(schedule, plan, whole, self.profile, self.same_cuts)
        return self._timelines[key]

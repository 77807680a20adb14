# SPDX-License-Identifier: Apache-2.0
"""Predicts a recorded job with another plan: another schedule, degree or all-to-all. The tuner and ``ds_fsmoe plan
--from-trace`` call it.

A step is the forwards and backwards of its micro-batches, without the optimizer. Schedules, degrees and timed
all-to-alls are planned from the job's own costs. For other changes,
:func:`~ds_fsmoe.planning.job.other_ranks.on_other_ranks` makes another job first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_fsmoe.planning.block import Links
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner, mode_of
from ds_fsmoe.planning.decide.plan_requests import Degree, PlanRequest, SearchSpace
from ds_fsmoe.planning.decide.presets import BEST, preset
from ds_fsmoe.planning.job.recorded_costs import RecordedJob
from ds_fsmoe.planning.workload import ALLTOALLS_OF_BEFORE, UNPADDED

_TURNS = 22
"""The halvings by which a number is found that explains a measured time."""
_MOST_TIMES = 4.0
"""The most by which gradients may take longer than they were measured to."""


@dataclass(frozen=True)
class Ran:
    """Records how the layers of a run were run, in the sequence of the forward."""

    orders: tuple[tuple[Order, Order], ...]
    """For each layer the way to run its forward and its backward."""
    alltoalls: tuple[str, ...]
    """For each layer the name of its all-to-all."""

    @property
    def degrees(self) -> tuple[int, int]:
        """Return the largest number of chunks of any layer, (forward, backward)."""
        forward, backward = (max((each[phase].degree for each in self.orders), default=1) for phase in (0, 1))
        return forward, backward


@dataclass(frozen=True)
class Prediction:
    """Holds a plan and the predicted times of a step with it."""

    plan: ModelPlan
    forward_ms: float
    """The time of all forwards of a step."""
    backward_ms: float
    """The time of all backwards of a step, with gradients."""
    isolated_ms: float
    """The time of both if lanes did not slow each other down."""

    @property
    def step_ms(self) -> float:
        """Return the ms of both phases."""
        return self.forward_ms + self.backward_ms

    @property
    def phases_ms(self) -> tuple[float, float]:
        """Return the ms of (forward, backward)."""
        return self.forward_ms, self.backward_ms

    @property
    def ran(self) -> Ran:
        """Return how the plan runs its layers."""
        return Ran(self.plan.orders, self.plan.alltoalls)


def ran_of(job: RecordedJob, rows: Sequence[Mapping[str, Any]]) -> Ran:
    """Return how the layers of a job were run.

    Args:
        job: the job.
        rows: the ``layers`` of the run's plans: layer, phase, degree, order and all-to-all of each.

    Raises:
        ValueError: a layer of the job is missing.
    """
    of_phase = {(row["layer"], row["phase"]): row for row in rows}
    orders, alltoalls = [], []
    for label in job.labels:
        found = [of_phase.get((label, phase)) for phase in ("forward", "backward")]
        if None in found:
            raise ValueError(f"the run's plans do not contain {label}")
        forward, backward = (
            Order(row["degree"], row["order"], row.get("conversions", "links")) for row in found if row is not None
        )
        orders.append((forward, backward))
        ways, row = job.kind_of(label).alltoalls, found[0] or {}
        planned = ALLTOALLS_OF_BEFORE.get(str(row.get("alltoall")), row.get("alltoall"))
        by_kind = next((name for name, way in ways.items() if way.planned == planned), next(iter(ways)))
        alltoalls.append(row["way"] if row.get("way") in ways else by_kind)
    return Ran(tuple(orders), tuple(alltoalls))


def with_dispatch_of(job: RecordedJob, ran: Ran) -> tuple[RecordedJob, Ran]:
    """Return a job whose layers have the dispatch with which they ran, and no other; and how they ran, in its words.

    Args:
        job: the job.
        ran: how it was run.
    """
    name_of = dict(zip(job.labels, ran.alltoalls, strict=True))
    kinds = []
    for kind in job.kinds:
        rows = next((kind.alltoalls[name_of[each]].rows for each in kind.labels if each in name_of), None)
        ways = {
            name.removeprefix(UNPADDED): replace(way, rows=None)
            for name, way in kind.alltoalls.items()
            if (way.rows is None) == (rows is None)
        }
        kinds.append(replace(kind, shape=rows or kind.shape, alltoalls=ways))
    names = tuple(each.removeprefix(UNPADDED) for each in ran.alltoalls)
    return replace(job, kinds=tuple(kinds), _costs={}), replace(ran, alltoalls=names)


class WhatIf:
    """Predicts steps of a recorded job.

    Args:
        job: the job, with costs.
        rest_ms: the ms of one micro-batch outside the experts' parts, (forward, backward); by default what the
            job recorded.
    """

    def __init__(self, job: RecordedJob, rest_ms: tuple[float, float] | None = None) -> None:
        self.job = job
        self.rest_ms = rest_ms or job.rest_ms or (0.0, 0.0)
        options, space = job.options(job.mode, self.rest_ms), job.settings.space(job.schedule)
        self._planner = Planner({}, job.settings)
        self._request = PlanRequest(options, space, job.mode, job.links, job.unchunked)

    @property
    def must_match(self) -> bool:
        """Return True if both phases need the same degree, by the job's schedule or because experts draw random
        numbers.
        """
        uses_rng = any(self.job.costs_of(kind, next(iter(kind.alltoalls))).uses_rng for kind in self.job.kinds)
        return uses_rng or self._request.space.common_degree

    def by_schedule(self, schedule: str) -> Prediction:
        """Predict a schedule by name, with the degrees that it chooses itself.

        Raises:
            ValueError: the schedule is unknown.
        """
        return self.of_schedule(schedule).with_degrees(None, None)

    def of_schedule(self, schedule: str) -> WhatIf:
        """Return predictions for the same job with another schedule, including its mode of sending gradients.

        Raises:
            ValueError: the schedule is unknown.
        """
        if schedule == self.job.schedule:
            return self
        links: Links = "reduce_first" if schedule == BEST else preset(schedule).links
        changed = replace(self.job, schedule=schedule, mode=mode_of(schedule), links=links, _costs={})
        return WhatIf(changed, self.rest_ms)

    def with_degrees(self, forward: Degree, backward: Degree) -> Prediction:
        """Predict the job's own schedule with these degrees; ``None``: the one that it chooses."""
        space = self._request.space.with_degrees(forward, backward, self.job.links)
        return self._predict(Search(self._planner, replace(self._request, space=space)).fastest())

    def as_ran(self, ran: Ran) -> Prediction:
        """Predict the job as it was run."""
        way = replace(self._request, space=SearchSpace(()), alltoalls=ran.alltoalls, orders=ran.orders)
        return self._predict(self._planner.plan(way))

    def with_rest_of(self, measured_ms: tuple[float, float], ran: Ran) -> WhatIf:
        """Return predictions whose rest explains the measured times of the run.

        The difference between measurement and prediction counts as rest, which no plan changes. The rest is at least 0.

        Args:
            measured_ms: the ms of all forwards, and of all backwards, of a step.
            ran: how the job was run.
        """
        rest_ms = [0.0, 0.0]
        for phase in (0, 1):

            def predicted_ms(each_ms: float, phase: int = phase) -> float:
                tried_ms = (each_ms, 0.0) if phase == 0 else (0.0, each_ms)
                return WhatIf(self.job, tried_ms).as_ran(ran).phases_ms[phase]

            rest_ms[phase] = _least_that_takes(predicted_ms, measured_ms[phase], measured_ms[phase])
        return WhatIf(self.job, (rest_ms[0], rest_ms[1]))

    def with_gradients_of(self, backward_ms: float, ran: Ran) -> WhatIf:
        """Return predictions whose cost of gradients explains the measured backwards of the run.

        Args:
            backward_ms: the ms of all backwards of a step.
            ran: how the job was run.
        """

        def predicted_ms(factor: float) -> float:
            return WhatIf(replace(self.job, gradient_factor=factor, _costs={}), self.rest_ms).as_ran(ran).backward_ms

        if not self.job.gradients_bytes or self.job.mode == "off":
            return self
        factor = _least_that_takes(predicted_ms, backward_ms, _MOST_TIMES)
        return WhatIf(replace(self.job, gradient_factor=factor, _costs={}), self.rest_ms)

    def _predict(self, plan: ModelPlan) -> Prediction:
        count = self.job.micro_batches
        forward_ms, backward_ms = self._planner.phases_ms(plan)
        # Gradients are sent after the last micro-batch.
        if count > 1:
            backward_ms += (count - 1) * self._planner.phases_ms(plan.without_gradients())[1]
        isolated_ms = plan.step_ms({}, is_serial=self.job.settings.is_serial)
        return Prediction(plan, count * forward_ms, backward_ms, count * isolated_ms)


def _least_that_takes(predicted_ms: Callable[[float], float], wanted_ms: float, most: float) -> float:
    """Return the least number from 0 to ``most`` whose prediction reaches ``wanted_ms``, or ``most``."""
    low, high = 0.0, most
    for _ in range(_TURNS):
        middle = (low + high) / 2
        low, high = (low, middle) if predicted_ms(middle) >= wanted_ms else (middle, high)
    return high

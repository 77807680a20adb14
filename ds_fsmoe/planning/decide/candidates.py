# SPDX-License-Identifier: Apache-2.0
"""Selects the plans to try: the one with the shortest predicted time, and similar ones. The engine's tuner measures
them.

How long experts wait for tokens depends on which rank is late. No prediction knows that, so measured steps may make the
final choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_fsmoe.planning.decide.plan import ModelPlan, Planner
from ds_fsmoe.planning.decide.plan_requests import MIN_GAIN, Kind, Near, PlanRequest, requests_to_plan
from ds_fsmoe.planning.decide.plan_two_batch import plan_two_batch


@dataclass(frozen=True)
class Search:
    """Plans the requested step in several forms, and selects the plans to try."""

    planner: Planner
    request: PlanRequest

    def fastest(self) -> ModelPlan:
        """Return the plan with the shortest predicted time. Two-batch overlap has to gain more than
        :data:`~ds_fsmoe.planning.decide.plan_requests.MIN_GAIN`.
        """
        return self._fastest(self._plans("whole", "halves"))

    def _fastest(self, plans: Sequence[ModelPlan]) -> ModelPlan:
        """Return the first plan, which has whole micro-batches, or the first one with two-batch overlap if that
        gains enough.
        """
        whole, two_batch = plans[0], next((each for each in plans if each.is_two_batch), None)
        if two_batch is None or self.planner.step_ms(two_batch) >= (1 - MIN_GAIN) * self.planner.step_ms(whole):
            return whole
        return two_batch

    def whole(self) -> ModelPlan:
        """Return the fastest plan without two-batch overlap."""
        return self._plans("whole")[0]

    def best_two_batch(self) -> ModelPlan | None:
        """Return the fastest plan with two-batch overlap, or None if it cannot be used."""
        return next(iter(self._plans("halves")), None)

    def candidates(self) -> list[ModelPlan]:
        """Return the plans to try, without duplicates.

        The first has the shortest prediction. Then come the best plan without two-batch overlap, and the best plan
        without contention of lanes. Then come the best plan with each other all-to-all, and both phases unchunked and
        in two, three and four chunks, in each allowed order. Where two-batch overlap is allowed, its best plan follows,
        with one and two chunks.
        """
        plans = self._plans("whole", "isolated", "alltoall", "given", "halves")
        return _distinct([self._fastest(plans), *plans])

    def to_try(self, stage: int | None = None, most: int | None = None) -> list[ModelPlan]:
        """Return the plans to try, DeepSpeed's schedule last. A stage without layers has one plan, twice.

        Args:
            stage: the index of a pipeline stage; ``None``: no pipeline. Behind the first stage, gradients sent after
                the backward are concurrent with the backwards of earlier stages. There the second plan sends all of
                them so, where that is allowed. The first stage combines it with its best.
            most: the number of plans besides DeepSpeed's, which have the shortest predictions; ``None``: all.
        """
        stock = self.stock()
        if not self.request.options:
            return [stock, stock]
        best, *others = self.candidates()
        others = others if most is None else sorted(others, key=self.planner.batch_ms)
        if stage is not None and self.request.may_send_anyhow:
            others.insert(0, self.late(best) if stage else best)
        return [best, *others[: None if most is None else most - 1], stock]

    def late(self, plan: ModelPlan) -> ModelPlan:
        """Return the plan with all gradients sent after the backward; the plan itself if that is not allowed."""
        return next(iter(self._plans("late", near=(plan, plan, plan))), plan)

    def stock(self) -> ModelPlan:
        """Return the plan of DeepSpeed's schedule."""
        return self._plans("stock")[0]

    def refinements(self, kept: ModelPlan, forward: ModelPlan, backward: ModelPlan) -> list[ModelPlan]:
        """Return the neighbours of the fastest plan tried, which comes first.

        Args:
            kept: the fastest plan.
            forward, backward: the plan with the fastest forward and the one with the fastest backward.
        """
        return _distinct(self._plans("near", near=(kept, forward, backward)))

    def _plans(self, *kinds: Kind, near: Near | None = None) -> list[ModelPlan]:
        """Return the plans of the requests of these kinds that are possible."""
        found: list[ModelPlan] = []
        for way in requests_to_plan(self.request, *kinds, near=near):
            if way.kind == "late":
                plan = near[0].sending_at_the_end()
            elif way.sending == "at_once":
                plan = found[0].sending_at_once()
            elif way.sending == "at_the_end":
                plan = found[0].sending_at_the_end()
            else:
                plan = plan_two_batch(self.planner, way) if way.is_two_batch else self.planner.plan(way)
            if plan is not None:
                found.append(plan)
        return found


def _distinct(plans: Sequence[ModelPlan]) -> list[ModelPlan]:
    """Return each distinct plan once. The placement of gradients follows from what is compared."""
    found: dict[tuple, ModelPlan] = {}
    for plan in plans:
        found.setdefault((plan.is_two_batch, plan.alltoalls, plan.orders, plan.sending), plan)
    return list(found.values())

# SPDX-License-Identifier: Apache-2.0
"""Plans that are worth trying: the one with the shortest predicted time and similar ones.

How long experts wait for tokens depends on which rank is late, which no prediction knows, so measured steps may make
the final choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_fsmoe.planning.decide.plan import ModelPlan, Planner
from ds_fsmoe.planning.decide.plan_requests import MIN_GAIN, Kind, Near, PlanRequest, requests_to_plan
from ds_fsmoe.planning.decide.plan_two_batch import plan_two_batch


@dataclass(frozen=True)
class Search:
    """Plans the ways to run a step, and says which are worth trying."""

    planner: Planner
    request: PlanRequest

    def fastest(self) -> ModelPlan:
        """Return the plan with the shortest predicted time; one in halves where it gains more than
        :data:`~ds_fsmoe.planning.decide.plan_requests.MIN_GAIN`."""
        return self._fastest(self._plans("whole", "halves"))

    def _fastest(self, plans: Sequence[ModelPlan]) -> ModelPlan:
        """Return the first plan, which has whole micro-batches, or the first one in halves."""
        whole, halves = plans[0], next((each for each in plans if each.is_two_batch), None)
        if halves is None or self.planner.step_ms(halves) >= (1 - MIN_GAIN) * self.planner.step_ms(whole):
            return whole
        return halves

    def whole(self) -> ModelPlan:
        """Return the fastest plan of those that run a micro-batch as a whole."""
        return self._plans("whole")[0]

    def best_two_batch(self) -> ModelPlan | None:
        """Return the fastest plan in halves, or ``None`` where there can be none."""
        return next(iter(self._plans("halves")), None)

    def candidates(self) -> list[ModelPlan]:
        """Return plans to try: first the one with the shortest prediction; then the best one that runs micro-batches as
        a whole, and if lanes did not slow each other down; the best with each other all-to-all; both phases uncut and
        in two, three and four chunks, in each allowed order; and where micro-batches may be run in halves, the best of
        these, and halves in one and two chunks."""
        plans = self._plans("whole", "isolated", "alltoall", "given", "halves")
        return _distinct([self._fastest(plans), *plans])

    def to_try(self, stage: int | None = None) -> list[ModelPlan]:
        """Return plans to try, DeepSpeed's schedule last; of a stage without layers there is one way, twice.

        Args:
            stage: of a pipeline, from the front. Behind the first, gradients after the backward travel beside the
                backwards of the stages before: there the second plan sends all of them so, where that may be. The first
                stage meets it with its best.
        """
        stock = self.stock()
        if not self.request.options:
            return [stock, stock]
        best, *others = self.candidates()
        if stage is not None and self.request.may_send_anyhow:
            others.insert(0, self.late(best) if stage else best)
        return [best, *others, stock]

    def late(self, plan: ModelPlan) -> ModelPlan:
        """Return a plan with all its gradients after the backward, or the plan itself where it may not send them so."""
        return next(iter(self._plans("late", near=(plan, plan, plan))), plan)

    def stock(self) -> ModelPlan:
        """Return the plan of DeepSpeed's schedule."""
        return self._plans("stock")[0]

    def refinements(self, kept: ModelPlan, forward: ModelPlan, backward: ModelPlan) -> list[ModelPlan]:
        """Return neighbours of the fastest plan tried, which comes first.

        Args:
            kept: the fastest plan.
            forward, backward: the plan with the fastest forward and the one with the fastest backward.
        """
        return _distinct(self._plans("near", near=(kept, forward, backward)))

    def _plans(self, *kinds: Kind, near: Near | None = None) -> list[ModelPlan]:
        """Return the plans of the ways of these kinds, but for those that cannot be."""
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
    """Return each distinct way to run the layers once; where gradients are placed follows from it."""
    found: dict[tuple, ModelPlan] = {}
    for plan in plans:
        found.setdefault((plan.is_two_batch, plan.alltoalls, plan.orders, plan.sending), plan)
    return list(found.values())

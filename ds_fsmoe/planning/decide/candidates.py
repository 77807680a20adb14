# SPDX-License-Identifier: Apache-2.0
"""Plans that are worth trying: the one with the shortest predicted time and similar ones.

How long experts wait for tokens depends on which rank is late, which no prediction knows, so measured steps may make
the final choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.planning.block import Links
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.gradients import Mode
from ds_fsmoe.planning.decide.plan import ModelPlan, Planner
from ds_fsmoe.planning.decide.plan_halves import plan_in_halves, run_in_halves
from ds_fsmoe.planning.decide.rules import Proposal, may_be_chosen
from ds_fsmoe.planning.decide.search import MIN_GAIN, SearchSpace
from ds_fsmoe.planning.timeline import IDEAL
from ds_fsmoe.planning.workload import Layer

TRIED_DEGREES = (1, 2, 3, 4)
"""The numbers of chunks to try besides those with the best prediction. More chunks seldom help."""
HALVES_DEGREES = (1, 2)
"""The numbers of chunks of a half to try besides."""
_Orders = tuple[Order, Order]


@dataclass(frozen=True)
class Search:
    """The choices from which all plans of one model are made."""

    planner: Planner
    options: Sequence[Mapping[str, Layer]]
    """For each layer, name of an all-to-all -> the layer with it; the one in use comes first."""
    space: SearchSpace
    mode: Mode
    links: Links
    """The task order of layers whose degrees are given."""
    uncut: Sequence[bool]
    """For each layer, whether it may not be cut."""
    can_split: bool = False
    """Whether micro-batches may be run in two halves that take turns."""
    may_send_anyhow: bool = False
    """Whether gradients may also be sent at once or at the end, where whole steps show that to be faster."""

    def fastest(self, space: SearchSpace | None = None) -> ModelPlan:
        """Return the plan with the shortest predicted time; one in halves where it gains more than
        :data:`~ds_fsmoe.planning.decide.search.MIN_GAIN`.

        Args:
            space: the allowed choices, if not all.
        """
        return self._faster(self.whole(space), self.in_halves(space))

    def _faster(self, whole: ModelPlan, halves: ModelPlan | None) -> ModelPlan:
        if halves is None or self.planner.step_ms(halves) >= (1 - MIN_GAIN) * self.planner.step_ms(whole):
            return whole
        return halves

    def whole(self, space: SearchSpace | None = None, planner: Planner | None = None) -> ModelPlan:
        """Return the fastest plan of those that run a micro-batch as a whole.

        Args:
            space: the allowed choices, if not all.
            planner: the planner that predicts times, if not this one's.
        """
        return (planner or self.planner).plan_options(self.options, self._spaces(space or self.space), self.mode)

    def in_halves(self, space: SearchSpace | None = None, degree: int | None = None) -> ModelPlan | None:
        """Return the fastest plan in halves, or ``None`` where there can be none.

        Args:
            space: the allowed choices, if not all.
            degree: the chunks of a half, if they are given.
        """
        # With one lane there is nothing that a half could hide behind.
        if not self.can_split or self.planner.settings.is_serial:
            return None
        return plan_in_halves(self.planner, self.options, self._spaces(space or self.space), self.mode, degree=degree)

    def _spaces(self, space: SearchSpace) -> list[SearchSpace]:
        """Return the choices that are allowed to each layer."""
        return [space.uncut(self.links) if uncut else space for uncut in self.uncut]

    def candidates(self) -> list[ModelPlan]:
        """Return plans to try: first the one with the shortest prediction; then the best one that runs micro-batches as
        a whole, and if lanes did not slow each other down; the best with each other all-to-all; both phases uncut and
        in two, three and four chunks, in each allowed order; and where micro-batches may be run in halves, the best of
        these, and halves in one and two chunks."""
        isolated = Planner(self.planner.costs, replace(self.planner.settings, contention=IDEAL))
        whole = self.whole()
        halves = [self.in_halves(degree=each) for each in (None, *HALVES_DEGREES)]
        fastest = self._faster(whole, halves[0])
        found = [fastest, whole, self._again(self.whole(planner=isolated)), *self._by_alltoall()]
        if self.space.asked == (None, None) and self.space.micro_op_bytes is None:
            orders = dict.fromkeys(order for backward in (False, True) for order in self.space.orders(backward))
            # More lanes at once take more of the processors, which is hard to predict where ranks share them.
            links = dict.fromkeys([self.links, *(order.links for order in orders)])
            tried = [Order(degree, each) for each in links for degree in TRIED_DEGREES]
            open_degrees = {order.degree for order in orders}
            found += [
                self.whole(self.space.with_orders(each, each))
                for each in tried
                if each.degree in open_degrees and (each.degree > 1 or each.links == self.links)
                if self._may_run(each)
            ]
        return _distinct([*found, *(each for each in halves if each is not None)])

    def _may_run(self, order: Order) -> bool:
        """Return whether the rules allow an order in both phases of all layers that may be cut, with any all-to-all."""
        layers = [each for of, uncut in zip(self.options, self.uncut, strict=True) if not uncut for each in of.values()]
        phases = [
            (work.moe, backward) for each in layers for backward, work in enumerate((each.forward, each.backward))
        ]
        return all(may_be_chosen(Proposal(order, moe, bool(backward))) for moe, backward in phases)

    def to_try(self, stage: int | None = None) -> list[ModelPlan]:
        """Return plans to try, DeepSpeed's schedule last; of a stage without layers there is one way, twice.

        Args:
            stage: of a pipeline, from the front. Behind the first, gradients after the backward travel beside the
                backwards of the stages before: there the second plan sends all of them so, where that may be. The first
                stage meets it with its best.
        """
        stock = self.stock()
        if not self.options:
            return [stock, stock]
        best, *others = self.candidates()
        if stage is not None and self.may_send_anyhow:
            others.insert(0, best.sending_at_the_end() if stage and best.has_gradients else best)
        return [best, *others, stock]

    def stock(self) -> ModelPlan:
        """Return DeepSpeed's schedule: no layer is cut, tokens are exchanged as they are now, and gradients follow the
        backward."""
        names = [next(iter(each)) for each in self.options]
        uncut = [self.planner.settings.space("deepspeed")] * len(self.options)
        return self.planner.plan_options(self.options, uncut, "off", names)

    def _by_alltoall(self) -> list[ModelPlan]:
        """Return the fastest plan with each all-to-all, where there are several: layers that lack it keep their own."""
        names = dict.fromkeys(name for each in self.options for name in each)
        if len(names) < 2:
            return []
        spaces = self._spaces(self.space)
        with_each = [[name if name in each else next(iter(each)) for each in self.options] for name in names]
        return [self.planner.plan_options(self.options, spaces, self.mode, used) for used in with_each]

    def refinements(self, kept: ModelPlan, forward: ModelPlan, backward: ModelPlan) -> list[ModelPlan]:
        """Return neighbours of the fastest plan tried, which comes first: one that combines the fastest forward with
        the fastest backward, and where that may be, the fastest with all gradients at once and with all at the end:
        what they cost a layer beside them is predicted from two operations at a time, and not what they fill between
        others.

        Args:
            kept: the fastest plan.
            forward, backward: the plan with the fastest forward and the one with the fastest backward.
        """

        def is_open(index: int, order: Order, backward: bool) -> bool:
            # One of the two may be DeepSpeed's schedule, whose degree a schedule by name need not have.
            layer = self.options[index][kept.alltoalls[index]]
            ways = self.space.orders_of((layer.backward if backward else layer.forward).moe, backward)
            return self.uncut[index] or kept.in_halves or order.degree in {each.degree for each in ways}

        def joined(index: int) -> _Orders:
            own, first, second = (each.choices(index) for each in (kept, forward, backward))
            pair = first[0].order, second[1].order
            layer = self.options[index][kept.alltoalls[index]]
            must_match = self.space.common_degree or bool(layer.costs and layer.costs.uses_rng)
            is_allowed = forward.alltoalls[index] == backward.alltoalls[index] == kept.alltoalls[index]
            is_allowed = is_allowed and forward.in_halves == backward.in_halves == kept.in_halves
            is_allowed = is_allowed and all(
                is_open(index, each, phase) for phase, each in zip((False, True), pair, strict=True)
            )
            if not is_allowed or (must_match and pair[0].degree != pair[1].degree):
                return own[0].order, own[1].order
            return pair

        count = range(len(self.options))
        near = [[_orders(kept, index) for index in count], [joined(index) for index in count]]
        found = _distinct([self._run_as(kept.alltoalls, orders, kept.in_halves) for orders in near])
        if self.may_send_anyhow and kept.has_gradients:
            found += [found[0].sending_at_once(), found[0].sending_at_the_end()]
        return found

    def _again(self, plan: ModelPlan) -> ModelPlan:
        """Return the same plan with the times of this planner."""
        return self._run_as(plan.alltoalls, [_orders(plan, index) for index in range(len(self.options))])

    def _run_as(self, alltoalls: Sequence[str], orders: Sequence[_Orders], in_halves: bool = False) -> ModelPlan:
        if in_halves:
            spaces = self._spaces(self.space)
            return run_in_halves(self.planner, self.options, spaces, self.mode, alltoalls, orders)
        spaces = [space.with_orders(*each) for space, each in zip(self._spaces(self.space), orders, strict=True)]
        return self.planner.plan_options(self.options, spaces, self.mode, alltoalls)


def _orders(plan: ModelPlan, index: int) -> _Orders:
    forward, backward = plan.choices(index)
    return forward.order, backward.order


def _distinct(plans: Sequence[ModelPlan]) -> list[ModelPlan]:
    """Return each distinct way to run the layers once; gradients follow from it."""
    found: dict[tuple, ModelPlan] = {}
    for plan in plans:
        key = plan.in_halves, plan.alltoalls, tuple(_orders(plan, index) for index in range(len(plan.layers)))
        found.setdefault(key, plan)
    return list(found.values())

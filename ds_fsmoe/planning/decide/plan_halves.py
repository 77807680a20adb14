# SPDX-License-Identifier: Apache-2.0
"""The plan of a step whose micro-batch is run in two halves that take turns.

While one half's tokens travel the other computes, so that fewer chunks are needed than in a whole micro-batch, and all
layers have the same: whole steps are simulated with each of a few ways to run a half, and the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.degree import smallest_of_best
from ds_fsmoe.planning.decide.gradients import Mode
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner
from ds_fsmoe.planning.decide.search import MIN_GAIN, SearchSpace, in_turns
from ds_fsmoe.planning.halves import half_layer
from ds_fsmoe.planning.workload import Layer, MoEWork

IN_MOE = (1.0, 0.5, 0.0)
"""Shares of gradients to try inside the MoE part of the next layer."""


def halves_orders(space: SearchSpace, moe: MoEWork, backward: bool) -> tuple[Order, ...]:
    """Return the ways in which a space lets one half of a layer run, smaller degrees first.

    Args:
        space: what may be chosen from.
        moe: what one half has of the layer's MoE part.
        backward: whether the phase is the backward.
    """
    asked = space.asked[backward]
    if asked is not None:
        return in_turns(asked, moe)
    return tuple(sorted(space.orders_of(moe, backward, in_halves=True), key=lambda each: each.degree))


def plan_in_halves(
    planner: Planner,
    options: Sequence[Mapping[str, Layer]],
    spaces: SearchSpace | Sequence[SearchSpace],
    mode: Mode,
    *,
    degree: int | None = None,
) -> ModelPlan | None:
    """Plan a step in halves; see :meth:`~ds_fsmoe.planning.decide.plan.Planner.plan_options` for the first arguments.

    Args:
        planner: with the costs and settings.
        options: layer by layer, name of an all-to-all -> the layer with it; another than the first is taken where the
            step gains more than :data:`~ds_fsmoe.planning.decide.search.MIN_GAIN`.
        spaces: what may be chosen from.
        mode: when gradients are sent in a step that is not run in halves. With ``adaptive`` they are also tried beside
            what lies between layers, and each layer's in the next one.
        degree: the chunks of each half, if they are given.

    Returns:
        The plan; ``None`` where there are no layers, or rules allow none.
    """
    of_layers = [spaces] * len(options) if isinstance(spaces, SearchSpace) else list(spaces)
    if not options:
        return None
    found: list[ModelPlan] = []
    for used in _namings(options):
        unsplit = [planner.plan_options(options, of_layers, each, used) for each in _modes(mode)]
        layers = unsplit[0].layers
        ways = [_ways(layer, space, degree) for layer, space in zip(layers, of_layers, strict=True)]
        if not all(of_phase for each in ways for of_phase in each):
            continue
        must_match = any(space.common_degree for space in of_layers) or any(map(_uses_rng, layers))
        min_gain = max((each.min_gain for each in of_layers), default=0.0)
        found.append(_Halves(planner, _sendings(unsplit, mode), ways, must_match, min_gain).best())
    if not found:
        return None
    first, best = found[0], min(found, key=planner.step_ms)
    return best if planner.step_ms(best) < (1 - MIN_GAIN) * planner.step_ms(first) else first


def run_in_halves(
    planner: Planner,
    options: Sequence[Mapping[str, Layer]],
    spaces: Sequence[SearchSpace],
    mode: Mode,
    names: Sequence[str],
    orders: Sequence[tuple[Order, Order]],
) -> ModelPlan:
    """Return the plan in halves with the given ways to run each layer, forward and backward; gradients follow from it.

    Args:
        planner, options, spaces, mode: see :func:`plan_in_halves`.
        names: the all-to-all of each layer.
        orders: how each layer is run.
    """
    unsplit = [planner.plan_options(options, spaces, each, names) for each in _modes(mode)]
    plans = [assembled(planner, each, orders) for each in _sendings(unsplit, mode)]
    return min(plans, key=planner.step_ms)


def _ways(layer: Layer, space: SearchSpace, degree: int | None) -> tuple[tuple[Order, ...], tuple[Order, ...]]:
    """Return the ways to run a half of a layer forward and backward, with a degree that is given if that can be."""
    half = half_layer(layer)
    forward, backward = (
        tuple(each for each in ways if each.degree == degree) or ways
        for ways in (halves_orders(space, half.forward.moe, False), halves_orders(space, half.backward.moe, True))
    )
    return forward, backward


def _uses_rng(layer: Layer) -> bool:
    return bool(layer.costs and layer.costs.uses_rng)


def _modes(mode: Mode) -> tuple[Mode, ...]:
    return (mode, "dense_only") if mode == "adaptive" else (mode,)


def _sendings(unsplit: Sequence[ModelPlan], mode: Mode) -> list[ModelPlan]:
    """Return plans that differ in when gradients are sent: those given, and where they may be sent at any time, each
    layer's in the next one.

    Where a half's traffic is hidden already, what fits into a window of a whole micro-batch may be too much at once.
    """
    return [*unsplit, *(unsplit[0].sending_in_next(share) for share in IN_MOE if mode == "adaptive")]


def _namings(options: Sequence[Mapping[str, Layer]]) -> list[list[str]]:
    """Return each all-to-all for all layers that have it, first the one in use."""
    names = dict.fromkeys(name for each in options for name in each)
    found = [[next(iter(each)) for each in options]]
    found += [[name if name in each else next(iter(each)) for each in options] for name in names]
    return [list(each) for each in dict.fromkeys(map(tuple, found))]


@dataclass(frozen=True)
class _Halves:
    """The plans in halves of layers whose all-to-alls are given."""

    planner: Planner
    bases: Sequence[ModelPlan]
    """One or more plans of the same layers, not in halves, which differ in their gradients only."""
    open_orders: Sequence[tuple[tuple[Order, ...], tuple[Order, ...]]]
    """Layer by layer, the ways to run a half forward and backward."""
    must_match: bool
    min_gain: float

    def best(self) -> ModelPlan:
        """Return the fastest: when gradients are sent first, then degrees, then once more when gradients are sent."""
        forward, backward = (
            list(dict.fromkeys(order for each in self.open_orders for order in each[phase])) for phase in (0, 1)
        )
        base = min(self.bases, key=lambda each: self.planner.step_ms(self._plan(each, forward[0], backward[0])))
        if self.must_match:
            pairs = [(each, each) for each in forward if each in backward]
            chosen = self._pick(base, pairs or [(forward[0], backward[0])])
        else:
            chosen = self._pick(base, [(each, backward[0]) for each in forward], of_phase=0)
            chosen = self._pick(base, [(chosen[0], each) for each in backward], of_phase=1)
        return min((self._plan(base, *chosen) for base in self.bases), key=self.planner.step_ms)

    def _pick(
        self, base: ModelPlan, pairs: Sequence[tuple[Order, Order]], of_phase: int | None = None
    ) -> tuple[Order, Order]:
        """Return the ways with which a phase, or the step, is the fastest: the first unless another gains enough."""
        plans = [self._plan(base, *each) for each in pairs]
        times_ms = [
            sum(of_step) if of_phase is None else of_step[of_phase] for of_step in map(self.planner.phases_ms, plans)
        ]
        best = smallest_of_best(times_ms)
        return pairs[best] if times_ms[best] < (1 - self.min_gain) * times_ms[0] else pairs[0]

    def _plan(self, base: ModelPlan, forward: Order, backward: Order) -> ModelPlan:
        pairs = [(_nearest(forward, ways[0]), _nearest(backward, ways[1])) for ways in self.open_orders]
        return assembled(self.planner, base, pairs)


def _nearest(wanted: Order, ways: Sequence[Order]) -> Order:
    """Return the order that is wanted, or of those that a layer allows the one with the most chunks up to as many."""
    if wanted in ways:
        return wanted
    fewer = [each for each in ways if each.degree <= wanted.degree]
    return max(fewer, key=lambda each: (each.degree, each.links == wanted.links), default=ways[0])


def assembled(planner: Planner, base: ModelPlan, orders: Sequence[tuple[Order, Order]]) -> ModelPlan:
    """Return the plan in halves with the all-to-alls and the gradients of a plan that is not.

    Args:
        planner: with the costs.
        base: the other plan.
        orders: the ways to run a half of each layer, forward and backward.
    """
    ways = zip(base.layers, orders, strict=True)
    pairs = [planner.choose(half_layer(layer), SearchSpace.fixed(*order)) for layer, order in ways]
    forward = tuple(pair[0].order.plan() for pair in pairs)
    sent = zip(base.backward, pairs[::-1], strict=True)
    backward = tuple(pair[1].order.plan(each.moe_slices, each.dense_slices) for each, pair in sent)
    choices = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs[::-1])
    return replace(
        base,
        forward=forward,
        backward=backward,
        forward_choices=choices[0],
        backward_choices=choices[1],
        in_halves=True,
    )

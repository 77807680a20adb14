# SPDX-License-Identifier: Apache-2.0
"""Plans of deep models, whose layers are of few kinds: each kind is planned once, in the middle of the model.

Placing gradients in windows takes most of the planner's time, and it grows with the layers. In the middle of a model a
layer's backward sends what the layer before it has left, and leaves as much itself, so that one layer tells what all of
its kind take. What does not fit there is added up, and sent at the end. That comes within two hundredths of the whole
plan where gradients are as even as layers, and within a tenth where a head or an embedding has many more. Where no kind
makes up half the layers, and where a system places gradients by a rule, which takes no time, all layers are planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.planning.block import Slice
from ds_fsmoe.planning.cost import Cost
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner, mode_of, plan_by_name
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import Gradient, Layer


@dataclass(frozen=True)
class ComposedPlan:
    """A step as a sum of parts that are planned alone."""

    parts: tuple[tuple[ModelPlan, int], ...]
    """The plans, and how often each counts."""
    tail: tuple[Slice, ...] = ()
    """The gradients that are sent after all of them."""

    def times_ms(
        self, costs: Mapping[str, Cost], contention: Contention = IDEAL, host_ms: float = 0.0
    ) -> tuple[float, float]:
        """Predict the times of forward and backward; see :meth:`ModelPlan.timelines`."""
        forward_ms = backward_ms = 0.0
        for plan, count in self.parts:
            forward, backward = plan.timelines(costs, contention, host_ms)
            forward_ms += count * forward.makespan_ms
            backward_ms += count * backward.makespan_ms
        return forward_ms, backward_ms + sum(costs[each.kind].ms(each.size_bytes) for each in self.tail)

    def without_gradients(self) -> ComposedPlan:
        """Return the same plan for layers whose gradients are not summed over ranks."""
        return ComposedPlan(tuple((plan.without_gradients(), count) for plan, count in self.parts))

    def accumulating(self, micro_batches: int) -> ComposedPlan:
        """Return the plan of a step of several micro-batches, of which the last one's backward sends gradients."""
        earlier = tuple((plan, (micro_batches - 1) * count) for plan, count in self.without_gradients().parts)
        return self if micro_batches == 1 else ComposedPlan((*self.parts, *earlier), self.tail)


def plan_composed(planner: Planner, name: str, layers: Sequence[Layer], exact: bool = False) -> ComposedPlan:
    """Plan a step the way a named system would, each kind of layer once where that system places gradients in windows.

    Args:
        planner: with the costs; layers have none of their own.
        name: the system.
        layers: the layers in the order of the forward.
        exact: whether every layer is planned even there.

    Raises:
        ValueError: no such name, with those there are.
    """
    if exact or mode_of(name) != "adaptive":
        return ComposedPlan(((plan_by_name(planner, name, layers), 1),))
    # In the order of the backward: each layer with the gradients that the one before it has left.
    backward = layers[::-1]
    left: list[tuple[Gradient, ...]] = [(), *(each.gradients for each in backward[:-1])]
    kinds = Counter((replace(each, gradients=()), carried) for each, carried in zip(backward, left, strict=True))
    if 2 * max(kinds.values(), default=0) < len(layers):
        return ComposedPlan(((plan_by_name(planner, name, layers), 1),))
    parts: list[tuple[ModelPlan, int]] = []
    rest: list[tuple[Slice, int]] = [
        (Slice(each.kind, each.lanes, each.size_bytes), 1) for each in (backward[-1].gradients if backward else ())
    ]
    for (layer, carried), count in kinds.items():
        plan = plan_by_name(planner, name, (layer,), carried)
        parts.append((replace(plan, tail=()), count))
        rest += [(each, count) for each in plan.tail]
    return ComposedPlan(tuple(parts), _merged(rest))


def _merged(slices: Sequence[tuple[Slice, int]]) -> tuple[Slice, ...]:
    """Return what is left over in one slice of each kind."""
    found: dict[str, Slice] = {}
    for each, count in slices:
        before = found[each.kind].size_bytes if each.kind in found else 0
        found[each.kind] = replace(each, size_bytes=before + count * each.size_bytes)
    return tuple(found.values())

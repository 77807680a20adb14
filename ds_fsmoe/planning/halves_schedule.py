# SPDX-License-Identifier: Apache-2.0
"""The schedule of a model whose micro-batch is run in two halves that take turns, over all its layers.

In the order of each phase, layer by layer: what lies between two layers, of the first half, and what brings its tokens
to the experts; the same of the second half; the rest of the first half's MoE part; the rest of the second's. So a half
goes straight on from one layer to the next. In the backward the halves change names, as what came last goes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_fsmoe.planning.block import BlockPlan, MoEPart, Passed, Slice, add_after, add_work
from ds_fsmoe.planning.halves import NUM_HALVES
from ds_fsmoe.planning.schedule import ATTENTION, SOFTMAX, Draft, Lane, Schedule
from ds_fsmoe.planning.workload import BlockWork, Layer, MoEWork, Work


@dataclass(frozen=True)
class Turns:
    """How two halves take turns. The default is what is run: halves of the batch; the others are simulated only."""

    first_share: Mapping[str, float] = field(default_factory=dict)
    """Kind of what lies between layers -> the share that the half has that is first in the forward, 1/2 if it is not
    there."""
    is_carried: bool = True
    """Whether a half goes straight on from one layer to the next; else both are waited for at every layer's end."""

    def share(self, work: Work, backward: bool, half: int) -> float:
        """Return the part of an operation between layers that a half has, counted in the order of the phase."""
        share = self.first_share.get(work.kind, 0.5)
        return share if bool(half) == backward else 1.0 - share


BY_BATCH = Turns()


def by_sequence(layers: Sequence[Layer], of_half: Sequence[Layer]) -> Turns:
    """Return the turns of halves of a sequence, of which the first has less of causal attention.

    Args:
        layers: the layers.
        of_half: the same layers for samples of half the length.
    """

    def total(kind: str, of: Sequence[Layer]) -> float:
        return sum(each.size for layer in of for each in layer.forward.before if each.kind == kind)

    totals = {kind: (total(kind, of_half), total(kind, layers)) for kind in (ATTENTION, SOFTMAX)}
    return Turns({kind: half / whole for kind, (half, whole) in totals.items() if whole})


def half_moe(moe: MoEWork) -> MoEWork:
    """Return what one half has of a MoE part; of slots, half of them rounded up."""
    capacity = None if moe.capacity is None else max(1, math.ceil(moe.capacity / NUM_HALVES))
    share = 1 / NUM_HALVES if capacity is None or not moe.capacity else capacity / moe.capacity

    def of(works: Sequence[Work]) -> tuple[Work, ...]:
        return tuple(replace(each, size=each.size * share) for each in works)

    (expert,) = of((moe.expert,))
    return MoEWork(of(moe.enter), of(moe.gather), expert, of(moe.reduce), of(moe.leave), capacity)


def half_layer(layer: Layer) -> Layer:
    """Return the MoE part of one half of a layer, without gradients."""
    forward, backward = (BlockWork((), half_moe(each.moe), ()) for each in (layer.forward, layer.backward))
    return replace(layer, forward=forward, backward=backward, gradients=())


def halves_schedule(
    layers: Sequence[Layer],
    plans: Sequence[BlockPlan],
    phase: Literal["forward", "backward"],
    tail: Sequence[Slice] = (),
    forward_plans: Sequence[BlockPlan] = (),
    turns: Turns = BY_BATCH,
) -> Schedule:
    """Return the schedule of all layers, in the order in which the phase runs them.

    A layer that recomputes runs its forward again for both halves in turns, when the half that is first in the backward
    comes to it. Collectives between layers are those of the user's model, which wait on the computing lane.

    Args:
        layers: in the order of the phase: the backward begins with the last.
        plans: one per layer, each of one half; gradients travel in the run of the second one.
        phase: the phase.
        tail: gradient slices that are sent after all layers.
        forward_plans: one per layer, in the same order; needed if layers recompute.
        turns: how halves take turns.
    """
    writer = _Writer(phase, turns)
    for index, (layer, plan) in enumerate(zip(layers, plans, strict=True)):
        again = (layer.forward, forward_plans[index]) if layer.recompute and phase == "backward" else None
        writer.add(index, getattr(layer, phase), plan, again)
    return writer.finish(tail, len(layers))


@dataclass
class _Behind:
    """What follows the MoE part of a layer, which goes with the next layer."""

    layer: int
    works: tuple[Work, ...]
    plan: BlockPlan
    done: list[int] = field(default_factory=list)


class _Writer:
    def __init__(self, phase: str, turns: Turns) -> None:
        self._backward, self._turns = phase == "backward", turns
        self._draft, self._passed = Draft(), Passed()
        self._last: list[tuple[int, ...]] = [()] * NUM_HALVES
        self._behind: _Behind | None = None

    def add(
        self, index: int, work: BlockWork, plan: BlockPlan, again: tuple[BlockWork, BlockPlan] | None = None
    ) -> None:
        """Append a layer.

        Args:
            index: its number in the phase.
            work: what it does in the phase.
            plan: of one half.
            again: what it runs once more ahead of that, and the plan of a half of it.
        """
        moe, parts = half_moe(work.moe), []
        remade: tuple[int, ...] = ()
        for half in range(NUM_HALVES):
            self._go_on(half)
            if again is not None and half == 0:
                remade = self._run_again(index, *again)
            self._last[half] = tuple(dict.fromkeys((*self._last[half], *remade)))
            for each in self._halved(work.before, half):
                self._last[half] = (add_work(self._draft, each, index, self._last[half], half),)
            of_half = plan if half else replace(plan, moe_slices=(), dense_slices=())
            part = MoEPart(self._draft, moe, of_half, index, self._last[half], half * plan.degree)
            part.enter(gathers=not (half and plan.links == "reduce_first"))
            parts.append(part)
        for half, part in enumerate(parts):
            self._last[half] = part.rest(self._passed)
        self._passed.experts[index] = tuple(task for part in parts for task in part.weights_done)
        if self._turns.is_carried:
            self._behind = _Behind(index, work.after, plan)
        else:
            last = add_after(self._draft, work.after, plan, index, self._joined(), self._passed)
            self._passed.layer[index] = last
            self._last = [last] * NUM_HALVES

    def _run_again(self, index: int, work: BlockWork, plan: BlockPlan) -> tuple[int, ...]:
        """Append a layer's forward of both halves, which run to their ends, and return the tasks that end it."""
        ends: list[int] = []
        parts, plan = [], replace(plan, moe_slices=(), dense_slices=())
        for half in range(NUM_HALVES):
            last = self._last[0]
            # The halves have the names of the backward, in which the second one was the first in the forward.
            for each in self._halved(work.before, 1 - half):
                last = (add_work(self._draft, each, index, last, half),)
            part = MoEPart(self._draft, half_moe(work.moe), plan, index, last, half * plan.degree)
            part.enter(gathers=not (half and plan.links == "reduce_first"))
            parts.append(part)
        lasts = [part.rest(Passed()) for part in parts]
        for half, last in enumerate(lasts):
            ends += add_after(self._draft, self._halved(work.after, 1 - half), plan, index, last, Passed(), half)
        return tuple(dict.fromkeys(ends))

    def finish(self, tail: Sequence[Slice], layer: int) -> Schedule:
        """Append what is left, and return the schedule."""
        self._catch_up()
        last = self._joined()
        for index, each in enumerate(tail):
            self._draft.add(each.kind, *each.lanes, chunk=index, size=each.size_bytes, after=last, layer=layer)
        return self._draft.finish()

    def _catch_up(self) -> None:
        for half in range(NUM_HALVES):
            self._go_on(half)

    def _go_on(self, half: int) -> None:
        """Append what a half has to do behind the layer before; the second one's has its gradients beside it."""
        behind = self._behind
        if behind is None:
            return
        plan = behind.plan if half else replace(behind.plan, moe_slices=(), dense_slices=())
        works, last = self._halved(behind.works, half), self._last[half]
        self._last[half] = add_after(self._draft, works, plan, behind.layer, last, self._passed, half)
        behind.done += self._last[half]
        if half:
            self._passed.layer[behind.layer] = tuple(dict.fromkeys(behind.done))
            self._behind = None

    def _joined(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(task for last in self._last for task in last))

    def _halved(self, works: Sequence[Work], half: int) -> tuple[Work, ...]:
        return tuple(
            replace(
                each,
                size=each.size * self._turns.share(each, self._backward, half),
                lanes=each.lanes if Lane.COMPUTE in each.lanes else (*each.lanes, Lane.COMPUTE),
            )
            for each in works
        )

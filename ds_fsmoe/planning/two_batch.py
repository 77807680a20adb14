# SPDX-License-Identifier: Apache-2.0
"""Two halves of a micro-batch that take turns: while the tokens of one travel, the other computes.

A half's run of a layer is in two parts with a pause between them: what brings tokens to the experts, then experts and
what brings results back. In the pause the other half computes, and at the end nothing is waited for until the results
are needed. So both halves go ``enter a, enter b, experts a, experts b``, layer by layer and forward and backward alike,
and a half's attention, or whatever else lies between two layers, comes ahead of its ``enter``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_fsmoe.planning.block import BlockPlan, GradientDependencies, MoEPart, Slice, add_after, add_work
from ds_fsmoe.planning.schedule import HOLD, Draft, Lane, Schedule, Task
from ds_fsmoe.planning.workload import BlockWork, Layer, MoEWork, Work

NUM_SUB_BATCHES = 2


def entering_first(schedule: Schedule, kinds: Collection[str]) -> tuple[Schedule, int]:
    """Return the same tasks with those that bring tokens to the experts ahead of all others, and how many they are.

    Args:
        schedule: the tasks.
        kinds: of the tasks that go ahead, such as those of :func:`entering`.

    Raises:
        ValueError: such a task needs the result of another one.
    """
    tasks = schedule.tasks

    def enters(task: Task) -> bool:
        # A lane that is held is held as long as what holds it.
        return task.kind in kinds or (task.kind == HOLD and enters(tasks[task.after[0]]))

    def needs(index: int) -> tuple[int, ...]:
        # What needs a second lane waits for what was issued there before it, which now comes behind.
        if tasks[index].kind not in kinds:
            return tasks[index].after
        return tuple(each for each in tasks[index].after if each not in overtaken.get(index, ()) or enters(tasks[each]))

    last: dict[Lane, int] = {}
    overtaken: dict[int, set[int]] = {}
    for index, task in enumerate(tasks):
        if task.kind == HOLD and task.lane in last:
            overtaken.setdefault(task.after[0], set()).add(last[task.lane])
        last[task.lane] = index
    order = sorted(range(len(tasks)), key=lambda index: not enters(tasks[index]))
    place = {index: at for at, index in enumerate(order)}
    moved = [replace(tasks[index], after=tuple(place[each] for each in needs(index))) for index in order]
    return Schedule(tuple(moved)), sum(map(enters, tasks))


def entering(moe: MoEWork, gathers: bool = True) -> frozenset[str]:
    """Return the kinds of tasks that bring tokens to the experts, with or without those that gather them there."""
    return frozenset(each.kind for each in moe.ahead if gathers or not each.is_inner)


# ---- the schedule of a model, over all its layers
#
# In the order of each phase, layer by layer: what lies between two layers, of the first half, and what brings its
# tokens to the experts; the same of the second half; the rest of the first half's MoE part; the rest of the second's.
# So a half goes straight on from one layer to the next. In the backward the halves change names, as what came last goes
# first.


def sub_batch_moe(moe: MoEWork) -> MoEWork:
    """Return what one half has of a MoE part; of slots, half of them rounded up."""
    capacity = None if moe.capacity is None else max(1, math.ceil(moe.capacity / NUM_SUB_BATCHES))
    share = 1 / NUM_SUB_BATCHES if capacity is None or not moe.capacity else capacity / moe.capacity

    part = moe.each(lambda stage: replace(stage, size=stage.size * share))
    return replace(part, expert=replace(moe.expert, size=moe.expert.size * share), capacity=capacity)


def sub_batch_layer(layer: Layer) -> Layer:
    """Return the MoE part of one half of a layer, without gradients."""
    forward, backward = (BlockWork((), sub_batch_moe(each.moe), ()) for each in (layer.forward, layer.backward))
    return replace(layer, forward=forward, backward=backward, gradients=())


def two_batch_schedule(
    layers: Sequence[Layer],
    plans: Sequence[BlockPlan],
    phase: Literal["forward", "backward"],
    tail: Sequence[Slice] = (),
    forward_plans: Sequence[BlockPlan] = (),
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
    """
    writer = _Writer()
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
    def __init__(self) -> None:
        self._draft, self._dependencies = Draft(), GradientDependencies()
        self._last: list[tuple[int, ...]] = [()] * NUM_SUB_BATCHES
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
        moe, parts = sub_batch_moe(work.moe), []
        remade: tuple[int, ...] = ()
        for sub_batch in range(NUM_SUB_BATCHES):
            self._add_behind(sub_batch)
            if again is not None and sub_batch == 0:
                remade = self._run_again(index, *again)
            self._last[sub_batch] = tuple(dict.fromkeys((*self._last[sub_batch], *remade)))
            for each in _of_sub_batch(work.before):
                self._last[sub_batch] = (add_work(self._draft, each, index, self._last[sub_batch], sub_batch),)
            of_half = plan if sub_batch else replace(plan, moe_slices=(), dense_slices=())
            part = MoEPart(self._draft, moe, of_half, index, self._last[sub_batch], sub_batch * plan.degree)
            part.enter(gathers=not (sub_batch and plan.links == "reduce_first"))
            parts.append(part)
        for sub_batch, part in enumerate(parts):
            self._last[sub_batch] = part.rest(self._dependencies)
        self._dependencies.experts[index] = tuple(task for part in parts for task in part.weights_done)
        self._behind = _Behind(index, work.after, plan)

    def _run_again(self, index: int, work: BlockWork, plan: BlockPlan) -> tuple[int, ...]:
        """Append a layer's forward of both halves, which run to their ends, and return the tasks that end it."""
        ends: list[int] = []
        parts, plan = [], replace(plan, moe_slices=(), dense_slices=())
        for sub_batch in range(NUM_SUB_BATCHES):
            last = self._last[0]
            for each in _of_sub_batch(work.before):
                last = (add_work(self._draft, each, index, last, sub_batch),)
            part = MoEPart(self._draft, sub_batch_moe(work.moe), plan, index, last, sub_batch * plan.degree)
            part.enter(gathers=not (sub_batch and plan.links == "reduce_first"))
            parts.append(part)
        lasts = [part.rest(GradientDependencies()) for part in parts]
        for sub_batch, last in enumerate(lasts):
            ends += add_after(
                self._draft, _of_sub_batch(work.after), plan, index, last, GradientDependencies(), sub_batch
            )
        return tuple(dict.fromkeys(ends))

    def finish(self, tail: Sequence[Slice], layer: int) -> Schedule:
        """Append what is left, and return the schedule."""
        for sub_batch in range(NUM_SUB_BATCHES):
            self._add_behind(sub_batch)
        last = tuple(dict.fromkeys(task for of_half in self._last for task in of_half))
        for index, each in enumerate(tail):
            self._draft.add(each.kind, *each.lanes, chunk=index, size=each.size_bytes, after=last, layer=layer)
        return self._draft.finish()

    def _add_behind(self, sub_batch: int) -> None:
        """Append what a half has to do behind the layer before; the second one's has its gradients beside it."""
        behind = self._behind
        if behind is None:
            return
        plan = behind.plan if sub_batch else replace(behind.plan, moe_slices=(), dense_slices=())
        works, last = _of_sub_batch(behind.works), self._last[sub_batch]
        self._last[sub_batch] = add_after(self._draft, works, plan, behind.layer, last, self._dependencies, sub_batch)
        behind.done += self._last[sub_batch]
        if sub_batch:
            self._dependencies.layer[behind.layer] = tuple(dict.fromkeys(behind.done))
            self._behind = None


def _of_sub_batch(works: Sequence[Work]) -> tuple[Work, ...]:
    """Return what one half has of what lies between layers, on the computing lane as well."""
    return tuple(
        replace(
            each,
            size=each.size / NUM_SUB_BATCHES,
            lanes=each.lanes if Lane.COMPUTE in each.lanes else (*each.lanes, Lane.COMPUTE),
        )
        for each in works
    )

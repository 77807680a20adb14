# SPDX-License-Identifier: Apache-2.0
"""Builds schedules for two-batch overlap: while the tokens of one sub-batch are sent, the other computes. The
planner and the execution use it; :mod:`~ds_fsmoe.planning.block` schedules whole micro-batches.

A sub-batch runs a layer in two parts with a pause between them. The first sends tokens to the experts; the second has
the experts and sends the results back. In the pause the other sub-batch computes. At the end, results are awaited only
when they are needed. So the sub-batches run ``enter a, enter b, experts a, experts b``, layer by layer, in forward and
backward. A sub-batch's attention, or any other operation between two layers, comes ahead of its ``enter``.
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
    """Return the same tasks with those that send tokens to the experts ahead of all others, and the number of these.

    Args:
        schedule: the tasks.
        kinds: the kinds of the tasks that go ahead, such as those of :func:`entering`.

    Raises:
        ValueError: such a task needs the result of one that does not go ahead.
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
    """Return the kinds of tasks that send tokens to the experts, with or without the gathers."""
    return frozenset(each.kind for each in moe.ahead if gathers or not each.is_inner)


# ---- the schedule of a model, over all its layers
#
# In the order of each phase, layer by layer: the operations between two layers of the first sub-batch, and the sends of
# its tokens to the experts; the same of the second; the rest of the first's MoE part; the rest of the second's. So a
# sub-batch continues directly with the next layer. In the backward the sub-batches swap, as the last one goes first.


def sub_batch_moe(moe: MoEWork) -> MoEWork:
    """Return the MoE part of one sub-batch; its slots are half of all, rounded up."""
    capacity = None if moe.capacity is None else max(1, math.ceil(moe.capacity / NUM_SUB_BATCHES))
    share = 1 / NUM_SUB_BATCHES if capacity is None or not moe.capacity else capacity / moe.capacity

    part = moe.each(lambda stage: replace(stage, size=stage.size * share))
    return replace(part, expert=replace(moe.expert, size=moe.expert.size * share), capacity=capacity)


def sub_batch_layer(layer: Layer) -> Layer:
    """Return the MoE part of one sub-batch of a layer, without gradients."""
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

    A layer that recomputes runs its forward again for both sub-batches, when the first one in the backward reaches it.
    Collectives between layers are those of the user's model, which wait on the computing lane.

    Args:
        layers: the layers in the order of the phase; the backward begins with the last.
        plans: one per layer, each of one sub-batch; gradients are sent in the run of the second one.
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
    """Holds what follows the MoE part of a layer; it is appended with the next layer."""

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
            index: the index of the layer in the phase.
            work: the operations of the layer in the phase.
            plan: the plan of one sub-batch.
            again: the recomputed forward, with the plan of a sub-batch; ``None``: no recomputation.
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
        """Append a layer's whole forward of both sub-batches, and return the tasks that end it."""
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
        """Append what follows the layer before in one sub-batch; the second one has the gradients."""
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
    """Return the operations of one sub-batch between layers, which occupy the computing lane as well."""
    return tuple(
        replace(
            each,
            size=each.size / NUM_SUB_BATCHES,
            lanes=each.lanes if Lane.COMPUTE in each.lanes else (*each.lanes, Lane.COMPUTE),
        )
        for each in works
    )

# SPDX-License-Identifier: Apache-2.0
"""Holds all decisions about a training step as data that is printed, simulated and run. The planner makes it;
training, ``ds_fsmoe plan`` and the reports read it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_fsmoe.planning.block import BlockPlan, Slice, model_schedule
from ds_fsmoe.planning.cost import Cost, LayerCosts
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.search import Choice
from ds_fsmoe.planning.schedule import EXPERT_PARAMETERS, GRADIENT_TASKS, PARAMETERS, Schedule, Task
from ds_fsmoe.planning.timeline import IDEAL, Contention, Timeline, play
from ds_fsmoe.planning.two_batch import two_batch_schedule
from ds_fsmoe.planning.workload import Layer

Sending = Literal["placed", "at_once", "at_the_end"]


@dataclass(frozen=True)
class ModelPlan:
    """Holds all decisions about a training step."""

    layers: tuple[Layer, ...]
    """The layers in the order of the forward; the tuples below are in the order of their phase."""
    forward: tuple[BlockPlan, ...]
    backward: tuple[BlockPlan, ...]
    tail: tuple[Slice, ...]
    """The gradients that are sent after the backward."""
    forward_choices: tuple[Choice, ...]
    backward_choices: tuple[Choice, ...]
    alltoalls: tuple[str, ...] = ()
    """The names of the all-to-alls in the order of the forward; empty if there was no choice."""
    alltoalls_ms: tuple[Mapping[str, float], ...] = field(default=(), compare=False)
    """All-to-all -> the time of both phases of the layer with it."""
    is_two_batch: bool = False
    """Whether the two sub-batches of a micro-batch alternate; the plans of layers are then those of one sub-batch."""
    sending: Sending = "placed"
    """How gradients got into windows: placed where they cost least; all that there are when one opens; or none, so that
    they follow the backward."""
    sums_each: bool = False
    """Whether gradients are summed over ranks in every micro-batch, and not in the last one alone."""

    @property
    def orders(self) -> tuple[tuple[Order, Order], ...]:
        """Return the (forward, backward) orders of each layer, in the sequence of the forward."""
        pairs = zip(self.forward_choices, reversed(self.backward_choices), strict=True)
        return tuple((forward.order, backward.order) for forward, backward in pairs)

    def choices(self, index: int) -> tuple[Choice, Choice]:
        """Return the forward and backward choices of a layer, counted from the front."""
        return self.forward_choices[index], self.backward_choices[-1 - index]

    def blocks(self, index: int) -> tuple[BlockPlan, BlockPlan]:
        """Return the forward and backward plans of a layer, counted from the front."""
        return self.forward[index], self.backward[-1 - index]

    def sending_in_next(self, in_moe: float = 1.0) -> ModelPlan:
        """Return the plan with each layer's gradients sent during the next layer of the backward: a share ``in_moe``
        in its MoE part, the rest behind it.
        """

        def slices(index: int, share: float) -> tuple[Slice, ...]:
            gradients = self.layers[-1 - index].gradients if share else ()
            return tuple(Slice(each.kind, each.lanes, share * each.size_bytes, index) for each in gradients)

        backward = [
            replace(
                block,
                moe_slices=slices(index - 1, in_moe) if index else (),
                dense_slices=slices(index - 1, 1 - in_moe) if index else (),
            )
            for index, block in enumerate(self.backward)
        ]
        last = tuple(replace(each, newest_layer=-1) for each in slices(len(backward) - 1, 1.0))
        return replace(self, backward=tuple(backward), tail=last)

    def sending_at_once(self) -> ModelPlan:
        """Return the plan with all existing gradients sent as soon as a layer's backward begins."""
        return replace(self.sending_in_next(), sending="at_once")

    def sending_at_the_end(self) -> ModelPlan:
        """Return the plan with all gradients sent after the backward."""
        whole: dict[str, Slice] = {}
        for each in (gradient for layer in self.layers for gradient in layer.gradients):
            before = whole.get(each.kind, Slice(each.kind, each.lanes, 0))
            whole[each.kind] = replace(before, size_bytes=before.size_bytes + each.size_bytes)
        return replace(self.without_gradients(), tail=tuple(whole.values()), sending="at_the_end")

    @property
    def has_gradients(self) -> bool:
        """Return True if gradients are reduced over ranks in a step with this plan."""
        return any(layer.gradients for layer in self.layers)

    def without_gradients(self) -> ModelPlan:
        """Return the plan for layers whose gradients are not reduced over ranks."""
        backward = tuple(replace(each, moe_slices=(), dense_slices=()) for each in self.backward)
        return replace(self, backward=backward, tail=())

    def earlier(self) -> ModelPlan:
        """Return the plan for a micro-batch that does not end a step."""
        found = self if self.sums_each else self.without_gradients()
        tail = tuple(each for each in found.tail if each.kind not in (PARAMETERS, EXPERT_PARAMETERS))
        once = [each.sharing is not None and not each.sharing.in_all for each in self.layers]
        if not any(once) and tail == found.tail:
            return found
        layers = (
            replace(each, sharing=None) if is_once else each for each, is_once in zip(self.layers, once, strict=True)
        )
        return replace(found, layers=tuple(layers), tail=tail)

    @property
    def tail_bytes(self) -> float:
        """Return the bytes of the gradients that are sent after the backward."""
        return sum(each.size_bytes for each in self.tail if each.kind in GRADIENT_TASKS)

    def schedules(self) -> tuple[Schedule, Schedule]:
        """Return the schedules of the forward and of the backward."""
        backward, recomputed = (self.layers[::-1], self.backward), self.forward[::-1]
        if self.is_two_batch:
            return (
                two_batch_schedule(self.layers, self.forward, "forward"),
                two_batch_schedule(*backward, "backward", self.tail, recomputed),
            )
        return (
            model_schedule(self.layers, self.forward, "forward"),
            model_schedule(*backward, "backward", self.tail, recomputed),
        )

    def timelines(
        self,
        costs: Mapping[str, Cost],
        contention: Contention = IDEAL,
        host_ms: float = 0.0,
        is_serial: bool = False,
    ) -> tuple[Timeline, Timeline]:
        """Simulate both phases, and return their timelines.

        Args:
            costs: kind of task -> cost, for layers without costs of their own.
            contention: how lanes slow each other down.
            host_ms: the host time of a launch in ms, for the same layers.
            is_serial: whether all tasks run one after another.
        """
        written = LayerCosts.written(costs, host_ms)
        forward, backward = (
            self._timeline(schedule, phase == 1, written, contention, is_serial)
            for phase, schedule in enumerate(self.schedules())
        )
        return forward, backward

    def _timeline(
        self, schedule: Schedule, backward: bool, written: LayerCosts, contention: Contention, is_serial: bool
    ) -> Timeline:
        layers = self.layers[::-1] if backward else self.layers
        same = [a.degree == b.degree for a, b in zip(self.forward[::-1], self.backward, strict=True)]
        work_ms, launch_ms = [], []
        for task in schedule.tasks:
            # The tail comes after the last layer.
            at = min(task.layer, len(layers) - 1)
            costs, host_ms = (layers[at].costs or written).of(backward, not backward or same[at])
            if task.kind not in costs:
                raise ValueError(f"no cost for {task.kind}; costs exist for {', '.join(sorted(costs))}")
            work_ms.append(costs[task.kind].ms(task.size, task.launches))
            launch_ms.append(task.launches * _host_ms(host_ms, task))
        issue_ms = list(itertools.accumulate(launch_ms))
        if is_serial:
            return play(schedule.in_one_lane(), work_ms, issue_ms)
        return play(schedule, work_ms, issue_ms, contention)

    def step_ms(
        self,
        costs: Mapping[str, Cost],
        contention: Contention = IDEAL,
        host_ms: float = 0.0,
        is_serial: bool = False,
    ) -> float:
        """Predict the ms of a step's forward and backward."""
        return sum(each.makespan_ms for each in self.timelines(costs, contention, host_ms, is_serial))


def _host_ms(host_ms: float | Mapping[str, float], task: Task) -> float:
    if not isinstance(host_ms, Mapping):
        return host_ms
    if not task.launches:
        return 0.0
    if task.kind not in host_ms:
        raise ValueError(f"no host cost for {task.kind}; host costs exist for {', '.join(sorted(host_ms))}")
    return host_ms[task.kind]

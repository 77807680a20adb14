# SPDX-License-Identifier: Apache-2.0
"""Holds the plan of one layer's expert part in one phase, as data that is simulated and executed. The engine makes
one per layer and phase; :mod:`~ds_fsmoe.planning.block` builds its schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ds_fsmoe.planning.block import BlockPlan, Links, Slice, block_schedule
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Lane, Schedule
from ds_fsmoe.planning.two_batch import entering, entering_first
from ds_fsmoe.planning.workload import AllToAll, BlockWork, MoEWork, Shape, layer_work


@dataclass(frozen=True)
class PhasePlan:
    """Describes how the experts' part of a layer runs in one phase."""

    block: BlockPlan
    groups: Groups
    backward: bool
    alltoall: AllToAll = "flat"
    """The all-to-all: one task or, with ``"2dh"``, two on two lanes if the EP groups cross both kinds of links."""
    is_two_batch: bool = False
    """Whether the two sub-batches of a micro-batch alternate; this is then the plan of one sub-batch."""
    narrow: tuple[bool, bool] = (False, False)
    """Whether rows are converted for dispatch, and for combine; in the backward gradients take these wires back."""

    @cached_property
    def schedule(self) -> Schedule:
        """Return the tasks of the plan, without gradient slices."""
        return self.sending(())

    def sending(self, slices: tuple[tuple[str, ...], ...]) -> Schedule:
        """Return the tasks of the plan with these slices of gradients, in this order.

        Args:
            slices: the kinds of tasks of each slice: GRAD or EXPERT_GRAD, and those inside the node if it has two
                levels.
        """
        if slices not in self._schedules:
            self._schedules[slices] = self._schedule(slices)
        return self._schedules[slices]

    def paused(self, slices: tuple[tuple[str, ...], ...] = (), is_second: bool = False) -> tuple[Schedule, int]:
        """Return the tasks of :meth:`sending`, those that send tokens to the experts first, and the number of these.

        Between these and the others, the other sub-batch computes.

        Args:
            slices: see :meth:`sending`.
            is_second: whether the sub-batch is the second in this phase. If the other one's reduces precede its
                gathers,
                these come behind the pause.
        """
        key = slices, is_second
        if key not in self._paused:
            reduces_ahead = self.block.links == "reduce_first"
            # Within a sub-batch all reduces come behind all gathers.
            schedule = self._schedule(slices, "paper") if reduces_ahead else self.sending(slices)
            self._paused[key] = entering_first(schedule, entering(self._moe, not (reduces_ahead and is_second)))
        return self._paused[key]

    @cached_property
    def _paused(self) -> dict[tuple[tuple[tuple[str, ...], ...], bool], tuple[Schedule, int]]:
        return {}

    @cached_property
    def _schedules(self) -> dict[tuple[tuple[str, ...], ...], Schedule]:
        return {}

    @cached_property
    def _moe(self) -> MoEWork:
        # Sizes are of no importance to what is run, so those of one row stand for all.
        sizes = Shape(B=self.groups.mp, L=1, M=1, H=self.groups.esp, E=self.groups.ep, K=1, heads=1)
        work = layer_work(sizes, self.groups, self.alltoall, narrow=self.narrow)
        return (work.backward if self.backward else work.forward).moe

    def _schedule(self, slices: tuple[tuple[str, ...], ...], links: Links | None = None) -> Schedule:
        lanes = gradient_lanes(self.groups)
        sent = tuple(
            Slice(kind, lanes[kind], 1.0, inside=tuple(each for each in tasks if each != kind))
            for tasks in slices
            for kind in tasks
            if kind in lanes
        )
        block = replace(self.block, links=links or self.block.links, moe_slices=sent, dense_slices=())
        return block_schedule(BlockWork((), self._moe, ()), block)


def gradient_lanes(groups: Groups) -> dict[str, tuple[Lane, ...]]:
    """Return kind of gradient -> the lane on which its slices are sent in a layer's schedule.

    If a group uses both kinds of links, only the slower one counts. The slices need a fraction of the other, and
    reserving it would delay the layer's own traffic. Experts of this layer may have no ranks to be reduced over, while
    experts of a layer with another ``ep_size`` have some.
    """
    at = groups.placements
    return {GRAD: at["dp"].lanes[:1], EXPERT_GRAD: (at["edp"].lanes or at["dp"].lanes)[:1]}

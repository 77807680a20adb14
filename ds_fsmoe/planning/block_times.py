# SPDX-License-Identifier: Apache-2.0
"""How long a layer takes in one phase, for many ways of running it at once.

By the closed form where it holds (independent links, the orders it speaks of), else by playing the schedules, all of
them together. Both give what ``timeline.simulate`` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ds_fsmoe.planning.batch import Template, makespans_ms
from ds_fsmoe.planning.block import BlockPlan, Links, Slice, block_schedule, equal_shares
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.degree import NOTHING, Load, Phase, bounds_ms
from ds_fsmoe.planning.schedule import HOLD, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import BlockWork, MoEWork, Work


@dataclass(frozen=True, slots=True)
class Order:
    """A way to run a layer in equal chunks."""

    degree: int
    links: Links = "paper"
    late_dw: int = 0
    held_dw: int = 0
    carried_dw: int = 0

    def plan(self, moe_slices: tuple[Slice, ...] = (), dense_slices: tuple[Slice, ...] = ()) -> BlockPlan:
        """The same with the gradients that travel meanwhile."""
        put_off = self.late_dw, self.held_dw, self.carried_dw
        return BlockPlan(equal_shares(self.degree), self.links, *put_off, moe_slices, dense_slices)


class BlockTimes:
    """One layer in one phase on one cluster."""

    def __init__(
        self,
        work: BlockWork,
        costs: Mapping[str, LinearCost],
        contention: Contention = IDEAL,
        host_ms: float = 0.0,
        grad_lanes: tuple[Lane, ...] = (Lane.INTER,),
    ) -> None:
        """
        Args:
            work: what the layer does.
            costs: kind -> cost.
            contention: how lanes slow each other down.
            host_ms: what a launch costs the host.
            grad_lanes: the links that gradients cross.
        """
        self.work, self.costs, self.contention, self.host_ms, self.grad_lanes = (
            work,
            costs,
            contention,
            host_ms,
            grad_lanes,
        )
        moe = work.moe
        self.is_papers = (
            grad_lanes == (Lane.INTER,)
            and not any(Lane.INTER in each.lanes for each in (*work.before, *work.after))
            and len(moe.enter) == 1
            and all(each.lanes == (Lane.INTER,) for each in (*moe.enter, *moe.leave))
            and all(each.lanes == (Lane.INTRA,) for each in (*moe.gather, *moe.reduce))
        )
        """Whether its groups lie as the paper's do: all-to-alls and gradients between nodes, the rest inside."""
        self._ideal = self.is_papers and contention == IDEAL and not host_ms
        self._before_ms, self._after_ms = (self._sum_ms(each) for each in (work.before, work.after))

    def _sum_ms(self, works: Sequence[Work]) -> float:
        return sum(self.costs[each.kind].ms(each.size, each.launches) for each in works)

    @property
    def after_ms(self) -> float:
        """What follows the MoE part takes so long alone: the window beside it."""
        return self._after_ms

    def has_closed_form(self, order: Order) -> bool:
        """Whether this order needs no simulation."""
        return self._ideal and not order.late_dw and (order.links != "reduce_first" or order.degree < 2)

    def phase(self, links: Links = "paper", grad_ms: float = 0.0) -> Phase:
        """The MoE part as the closed form knows it."""
        moe = self.work.moe
        load = {
            name: Load(self.costs[works[0].kind], works[0].size, works[0].launches) if works else NOTHING
            for name, works in (("a2a", moe.enter), ("gather", moe.gather), ("reduce", moe.reduce))
        }
        expert = Load(self.costs[moe.expert.kind], moe.expert.size, moe.expert.launches)
        return Phase(expert=expert, grad_ms=grad_ms, links="shared" if links == "shared" else "paper", **load)

    def times_ms(
        self, orders: Sequence[Order], moe_grad_ms: np.ndarray | float = 0.0, dense_grad_ms: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Times of the layer.

        Args:
            orders: the ways to run it.
            moe_grad_ms: [slices], time of the gradients in the window of the MoE part; 0: none.
            dense_grad_ms: [slices], the same for the window beside the rest of the layer.

        Returns:
            [orders, slices], in ms.
        """
        moe_grad_ms, dense_grad_ms = np.broadcast_arrays(*np.atleast_1d(moe_grad_ms, dense_grad_ms))
        result_ms = np.empty((len(orders), len(moe_grad_ms)))
        rest = []
        for index, order in enumerate(orders):
            if self.has_closed_form(order):
                through, row, links = bounds_ms(self.phase(order.links), order.degree)
                moe_ms = np.maximum(through + moe_grad_ms, max(row, links))
                result_ms[index] = self._before_ms + moe_ms + np.maximum(self._after_ms, dense_grad_ms)
            else:
                rest.append(index)
        if rest:
            self._simulate([orders[index] for index in rest], moe_grad_ms, dense_grad_ms, result_ms, rest)
        return result_ms

    def linear_program(self, order: Order, moe_grad_ms: float, dense_grad_ms: float) -> _LinearProgram:
        """Per task of this order: its time without its size, its time for all tokens, its chunk, what it waits for."""
        alpha_ms, size_ms, cut = self._slots()
        form, windows = _form(self.work), (moe_grad_ms > 0, dense_grad_ms > 0)
        template, slots, chunks = _template(form, order, self.grad_lanes, *windows)
        fixed_ms = np.concatenate([alpha_ms + np.where(cut, 0.0, size_ms), [0.0, moe_grad_ms, dense_grad_ms]])
        scaled_ms = np.concatenate([np.where(cut, size_ms, 0.0), np.zeros(3)])
        return fixed_ms[slots].tolist(), scaled_ms[slots].tolist(), chunks, template.after

    def _slots(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per operation: start-up in ms, the rest in ms, whether it is cut."""
        whole = _works(self.work)
        return (
            np.array([self.costs[each.kind].alpha_ms * each.launches for each, _ in whole]),
            np.array([self.costs[each.kind].beta_ms * each.size for each, _ in whole]),
            np.array([is_cut for _, is_cut in whole]),
        )

    def _simulate(
        self,
        orders: Sequence[Order],
        moe_grad_ms: np.ndarray,
        dense_grad_ms: np.ndarray,
        result_ms: np.ndarray,
        rows: Sequence[int],
    ) -> None:
        alpha_ms, size_ms, cut = self._slots()
        form = _form(self.work)
        # A slice that is not there must not hold up a lane: candidates with and without one are different orders.
        for has_moe, has_dense in sorted({*zip(moe_grad_ms > 0, dense_grad_ms > 0, strict=True)}):
            columns = np.flatnonzero(((moe_grad_ms > 0) == has_moe) & ((dense_grad_ms > 0) == has_dense))
            grads_ms = np.stack([np.zeros(len(columns)), moe_grad_ms[columns], dense_grad_ms[columns]])
            jobs = []
            for order in orders:
                template, slots, _ = _template(form, order, self.grad_lanes, bool(has_moe), bool(has_dense))
                slot_ms = alpha_ms + np.where(cut, size_ms / order.degree, size_ms)
                slot_ms = np.repeat(slot_ms[:, None], len(columns), axis=1)
                jobs.append((template, np.concatenate([slot_ms, grads_ms])[slots]))
            for row, times_ms in zip(rows, makespans_ms(jobs, self.contention, self.host_ms), strict=True):
                result_ms[row, columns] = times_ms


_LinearProgram = tuple[list[float], list[float], list[int], tuple[tuple[int, ...], ...]]


def _works(block: BlockWork) -> list[tuple[Work, bool]]:
    """Every operation, and whether it is cut."""
    moe = block.moe
    split = [each for each in (moe.expert_dx, moe.expert_dw) if each is not None]
    cut = [*moe.enter, *moe.gather, moe.expert, *split, *moe.reduce, *moe.leave]
    return [
        *((each, False) for each in block.before),
        *((each, True) for each in cut),
        *((each, False) for each in block.after),
    ]


_Form = tuple[tuple[tuple[tuple[Lane, ...], int], ...], ...]


def _form(block: BlockWork) -> _Form:
    """What of a block decides its order: the lanes of its operations, and their launches."""
    moe = block.moe
    split = tuple(each for each in (moe.expert_dx, moe.expert_dw) if each is not None)
    parts = (block.before, moe.enter, moe.gather, (moe.expert,), split, moe.reduce, moe.leave, block.after)
    return tuple(tuple((each.lanes, each.launches) for each in part) for part in parts)


@lru_cache(maxsize=4096)
def _template(
    form: _Form, order: Order, grad_lanes: tuple[Lane, ...], has_moe: bool, has_dense: bool
) -> tuple[Template, np.ndarray, list[int]]:
    """The order of a block of this form, and per task the place of its time (the operations as ``_works`` lists them,
    then nothing, the MoE window's slice, the other window's) and its chunk."""
    names = iter(range(sum(map(len, form))))
    parts = [tuple(Work(str(next(names)), lanes, 0.0, launches) for lanes, launches in part) for part in form]
    before, enter, gather, (expert,), split, reduce, leave, after = parts
    moe = MoEWork(enter, gather, expert, reduce, leave, *split)
    count = sum(map(len, form))
    slices = [
        (Slice(str(count + place), grad_lanes, 0.0),) if there else ()
        for place, there in ((1, has_moe), (2, has_dense))
    ]
    schedule = block_schedule(BlockWork(before, moe, after), order.plan(*slices))
    slots = [count if task.kind == HOLD else int(task.kind) for task in schedule.tasks]
    return Template.of(schedule), np.array(slots), [min(task.chunk, order.degree - 1) for task in schedule.tasks]

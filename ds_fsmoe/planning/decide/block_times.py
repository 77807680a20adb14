# SPDX-License-Identifier: Apache-2.0
"""Computes the time of a layer in one phase, for many orders at once. The search over plans uses it.

It uses the closed form where that is exact (independent links, the orders it covers). Otherwise it simulates all
schedules together (:mod:`~ds_fsmoe.planning.batch`). Both give the result of ``timeline.simulate``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ds_fsmoe.planning.batch import Job, Template, makespans_ms
from ds_fsmoe.planning.block import BlockPlan, Conversions, Links, Slice, block_schedule
from ds_fsmoe.planning.chunks import chunk_shares
from ds_fsmoe.planning.cost import Cost, HostCost, LinearCost
from ds_fsmoe.planning.decide.degree import NOTHING, Load, Phase, bounds_ms
from ds_fsmoe.planning.schedule import HOLD, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import BlockWork, MoEWork, Stage, Work


@dataclass(frozen=True, slots=True)
class Order:
    """Describes how a layer is run: the number of chunks and the order of the tasks."""

    degree: int
    links: Links = "paper"
    conversions: Conversions = "links"
    """Where rows are converted for narrow wires."""

    def plan(self, moe_slices: tuple[Slice, ...] = (), dense_slices: tuple[Slice, ...] = ()) -> BlockPlan:
        """Return this order as a plan with the gradient slices that are sent during it."""
        return BlockPlan(self.degree, self.links, moe_slices, dense_slices, self.conversions)


_ORDERS: Mapping[Links, str] = {
    "shared": "links in turn",
    "paper": "links side by side",
    "reduce_first": "reduces first",
}


def order_words(degree: int, links: Links, conversions: Conversions = "links") -> str:
    """Return the words for the order of a layer's tasks, the same in the log and on a run's page."""
    words = "one after another" if degree == 1 else _ORDERS.get(links, links)
    return words if conversions == "links" else f"{words}, conversions beside experts"


class BlockTimes:
    """Computes the times of one layer in one phase on one cluster."""

    def __init__(
        self,
        work: BlockWork,
        costs: Mapping[str, Cost],
        contention: Contention = IDEAL,
        host_ms: HostCost = 0.0,
        grad_lanes: tuple[Lane, ...] = (Lane.INTER,),
        is_serial: bool = False,
    ) -> None:
        """Initialize with the layer and its costs.

        Args:
            work: the operations of the layer.
            costs: kind of task -> cost.
            contention: how lanes slow each other down.
            host_ms: the host time of a launch, or kind -> the host time of a launch of that kind.
            grad_lanes: the links that gradients use.
            is_serial: whether all tasks run one after another, on any lane.
        """
        self.work, self.costs, self.grad_lanes, self.is_serial = work, costs, grad_lanes, is_serial
        # With one lane there is no contention; the cost of issuing stays.
        self.contention, self.host_ms = IDEAL if is_serial else contention, host_ms
        self._papers = _papers_stages(work.moe)
        self.is_papers = (
            grad_lanes == (Lane.INTER,)
            and not any(Lane.INTER in each.lanes for each in (*work.before, *work.after))
            and self._papers is not None
            and all(isinstance(costs[each.kind], LinearCost) for each in work.moe.stages)
        )
        """Whether it has the FSMoE paper's stages on its links: inter-node for all-to-alls and gradients, else
        intra-node."""
        self._ideal = self.is_papers and not is_serial and self.contention == IDEAL and not host_ms
        self._before_ms, self._after_ms = (self._sum_ms(each) for each in (work.before, work.after))
        self.bottlenecks: dict[tuple[Order, float], str] = {}
        """Way to run the layer and time of gradients in its MoE part -> the lane that it waits for; filled only by
        the search."""
        self._form = _form(work)
        self._known_ms: dict[tuple[Order, float], float] = {}
        self._chunks_ms: dict[int, np.ndarray] = {}

    def _sum_ms(self, works: Sequence[Work]) -> float:
        return sum(self.costs[each.kind].ms(each.size, each.launches) for each in works)

    @property
    def after_ms(self) -> float:
        """Return the time in ms of everything after the MoE part when it runs alone: the length of the dense window."""
        return self._after_ms

    def has_closed_form(self, order: Order) -> bool:
        """Return True if the closed form covers this order, so that no simulation is needed."""
        capacity = self.work.moe.capacity
        is_even = not capacity or capacity % order.degree == 0
        return self._ideal and is_even and (order.links != "reduce_first" or order.degree < 2)

    def phase(self, links: Links = "paper", grad_ms: float = 0.0) -> Phase:
        """Return the MoE part in the terms of the closed form; the layer must be one with :attr:`is_papers`."""
        assert self._papers is not None
        load = {
            name: NOTHING if each is None else Load(self.costs[each.kind], each.size, each.launches)
            for name, each in zip(("a2a", "gather", "expert", "reduce"), self._papers, strict=True)
        }
        return Phase(grad_ms=grad_ms, links="shared" if links == "shared" else "paper", **load)

    def with_ms(self, orders: Sequence[Order], moe_grad_ms: float) -> np.ndarray:
        """Return the times of the layer with ``moe_grad_ms`` of gradients in the window of the MoE part, [orders],
        in ms.

        Results are cached, because many plans of one layer choose among the same orders.
        """
        known = self._known_ms
        new = [order for order in dict.fromkeys(orders) if (order, moe_grad_ms) not in known]
        if new:
            found_ms = self.times_ms(new, moe_grad_ms)[:, 0].tolist()
            known.update(zip([(order, moe_grad_ms) for order in new], found_ms, strict=True))
        return np.array([known[order, moe_grad_ms] for order in orders])

    def times_ms(
        self, orders: Sequence[Order], moe_grad_ms: np.ndarray | float = 0.0, dense_grad_ms: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Return the times of the layer.

        Args:
            orders: the orders to compare.
            moe_grad_ms: [slices], the ms of the gradients in the window of the MoE part; 0: none.
            dense_grad_ms: [slices], the ms of the gradients in the window of the rest of the layer.

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

    def _simulate(
        self,
        orders: Sequence[Order],
        moe_grad_ms: np.ndarray,
        dense_grad_ms: np.ndarray,
        result_ms: np.ndarray,
        rows: Sequence[int],
    ) -> None:
        # A missing slice must not delay a lane: candidates with and without one are different orders.
        for has_moe, has_dense in sorted({*zip(moe_grad_ms > 0, dense_grad_ms > 0, strict=True)}):
            columns = np.flatnonzero(((moe_grad_ms > 0) == has_moe) & ((dense_grad_ms > 0) == has_dense))
            jobs = []
            for order in orders:
                chunk_ms = np.repeat(self._chunk_ms(order.degree)[:, None], len(columns), axis=1)
                jobs.append(self._job(order, chunk_ms, moe_grad_ms[columns], dense_grad_ms[columns]))
            for row, times_ms in zip(rows, makespans_ms(jobs, self.contention), strict=True):
                result_ms[row, columns] = times_ms

    def _job(self, order: Order, chunk_ms: np.ndarray, moe_grad_ms: np.ndarray, dense_grad_ms: np.ndarray) -> Job:
        """Return the candidates of one order. In each window, either all candidates have gradients or none has."""
        there = bool(moe_grad_ms[0] > 0), bool(dense_grad_ms[0] > 0)
        template, slots = _template(self._form, order, self.grad_lanes, *there, self.is_serial)
        slot_ms = np.concatenate([chunk_ms, np.stack([np.zeros_like(moe_grad_ms), moe_grad_ms, dense_grad_ms])])
        return template, slot_ms[slots], self._issue_ms(slots, len(chunk_ms), template.launched)

    def _chunk_ms(self, degree: int) -> np.ndarray:
        """Return the ms of all operations in the order of :func:`_works`, chunk by chunk where they are chunked."""
        if degree not in self._chunks_ms:
            shares = chunk_shares(self.work.moe.capacity, degree)
            times_ms: list[float] = []
            for each, is_chunked in _works(self.work):
                cost = self.costs[each.kind]
                times_ms += [cost.ms(each.size * share, each.launches) for share in (shares if is_chunked else (1.0,))]
            self._chunks_ms[degree] = np.array(times_ms)
        return self._chunks_ms[degree]

    def _issue_ms(self, slots: np.ndarray, count: int, launched: np.ndarray) -> np.ndarray:
        """Return the ms at which the host has issued each task of a template."""
        if not isinstance(self.host_ms, Mapping):
            return self.host_ms * launched
        degree = (count - len(self.work.before) - len(self.work.after)) // len(self.work.moe.stages)
        of_slots = [
            self.host_ms.get(each.kind, 0.0) * each.launches
            for each, is_chunked in _works(self.work)
            for _ in range(degree if is_chunked else 1)
        ]
        launch_ms = max(self.host_ms.values(), default=0.0)
        return np.cumsum(np.array([*of_slots, 0.0, launch_ms, launch_ms])[slots])


@dataclass(frozen=True)
class PhaseTimes:
    """Computes the mean times of one layer's MoE part in one phase, over micro-batches."""

    same: BlockTimes
    """The times if the backward has the same chunks as the forward."""
    other: BlockTimes | None = None
    """The times if the backward has other chunks than the forward; ``None``: that makes no difference."""
    isolated: BlockTimes | None = None
    """The times with the same chunks and without contention between lanes; ``None``: there is no contention."""
    grad_ms: float = 0.0
    """The time of the gradients that are sent in it."""
    num_micro_batches: int = 1
    """Of which the last one sends them; all are cut alike."""

    @property
    def grads_ms(self) -> tuple[float, ...]:
        """Return the ms of gradients for which :meth:`mean_ms` needs times."""
        return (self.grad_ms,) if self.num_micro_batches == 1 else (self.grad_ms, 0.0)

    def of(self, same_chunks: bool) -> BlockTimes:
        """Return the times for a backward with the same chunks as the forward, or with others."""
        return self.same if same_chunks or self.other is None else self.other

    def mean_ms(self, orders: Sequence[Order], same_chunks: bool = True) -> np.ndarray:
        """Return the mean time of a micro-batch for each order, [orders], in ms."""
        return self.mean_of(self.of(same_chunks), orders)

    def mean_of(self, times: BlockTimes, orders: Sequence[Order]) -> np.ndarray:
        """Return the mean time of a micro-batch for each order by the given times, [orders], in ms."""
        last_ms = times.with_ms(orders, self.grad_ms)
        if self.num_micro_batches == 1 or not self.grad_ms:
            return last_ms
        earlier_ms = times.with_ms(orders, 0.0)
        return earlier_ms + (last_ms - earlier_ms) / self.num_micro_batches


def learn(wanted: Mapping[BlockTimes, tuple[Collection[Order], Collection[float]]]) -> None:
    """Compute the times that :meth:`BlockTimes.with_ms` will need, for many layers together.

    A simulation of many candidates takes hardly longer than one of few.

    Args:
        wanted: the times of a layer -> the orders, and the ms of gradients in the window of its MoE part.
    """
    forms: dict[tuple, int] = {}
    # Layers of one form are candidates for one order, which is compiled once.
    alike: dict[tuple, list[tuple[BlockTimes, float]]] = {}
    for times, (orders, grads_ms) in wanted.items():
        host = id(times.host_ms) if isinstance(times.host_ms, Mapping) else times.host_ms
        form = times.contention, host, times._form, times.grad_lanes, times.is_serial
        number = forms.setdefault(form, len(forms))
        for order in orders:
            if not times.has_closed_form(order):
                for each_ms in grads_ms:
                    if (order, each_ms) not in times._known_ms:
                        alike.setdefault((number, order, each_ms > 0), []).append((times, each_ms))
    jobs: dict[Contention, list[tuple[Job, Order, list[tuple[BlockTimes, float]]]]] = {}
    for (_, order, _), columns in alike.items():
        first, grads_ms = columns[0][0], np.array([each_ms for _, each_ms in columns])
        chunks_ms = np.stack([times._chunk_ms(order.degree) for times, _ in columns], axis=1)
        job = first._job(order, chunks_ms, grads_ms, np.zeros_like(grads_ms))
        jobs.setdefault(first.contention, []).append((job, order, columns))
    for contention, of_contention in jobs.items():
        found = makespans_ms([job for job, _, _ in of_contention], contention)
        for (_, order, columns), times_ms in zip(of_contention, found, strict=True):
            for (times, each_ms), time_ms in zip(columns, times_ms.tolist(), strict=True):
                times._known_ms[order, each_ms] = time_ms


def _works(block: BlockWork) -> list[tuple[Work, bool]]:
    """Return every operation and whether it is chunked."""
    return [
        *((each, False) for each in block.before),
        *((each, True) for each in block.moe.stages),
        *((each, False) for each in block.after),
    ]


def _papers_stages(moe: MoEWork) -> tuple[Stage, Stage | None, Work, Stage | None] | None:
    """Return the (dispatch, gather, experts, reduce) of a layer with the stages of the FSMoE paper's figure 2, or None.

    The layer must have no other stages, that paper's links, and equal all-to-alls.
    """
    gather, reduce = moe.ahead[1:], moe.behind[:-1]
    between = (*moe.ahead[:1], *moe.behind[-1:])
    links = [[(each.lanes, each.is_inner) for each in stages] for stages in (between, gather, reduce)]
    # Experts are sharded or they are not: both gather and reduce, or neither.
    inner = [((Lane.INTRA,), True)] * len(gather)
    if links != [[((Lane.INTER,), False)] * 2, inner, inner] or len(gather) > 1:
        return None
    if len({(each.size, each.launches) for each in between}) > 1:
        return None
    return between[0], next(iter(gather), None), moe.expert, next(iter(reduce), None)


_Form = tuple[tuple[Work, ...], ...]


def _form(block: BlockWork) -> _Form:
    """Return what determines the order of a block: its operations without their kinds and sizes."""
    moe = block.moe
    parts = (block.before, moe.ahead, (moe.expert,), moe.behind, block.after)
    return tuple(tuple(replace(each, kind="", size=0.0) for each in part) for part in parts)


@lru_cache(maxsize=4096)
def _template(
    form: _Form, order: Order, grad_lanes: tuple[Lane, ...], has_moe: bool, has_dense: bool, is_serial: bool
) -> tuple[Template, np.ndarray]:
    """Return the compiled schedule of a block of this form, and for each task the index of its time.

    Times are in the order of :func:`_works`, chunk by chunk where operations are chunked. Then come a zero, the slice
    of the MoE window and the slice of the dense window.
    """
    names = itertools.count()
    parts = [tuple(replace(each, kind=str(next(names))) for each in part) for part in form]
    before, ahead, (expert,), behind, after = parts
    are_chunked, first = [], 0
    block = BlockWork(before, MoEWork(ahead, expert, behind), after)
    starts: dict[str, int] = {}
    for each, is_chunked in _works(block):
        starts[each.kind] = first
        first += order.degree if is_chunked else 1
        are_chunked.append(is_chunked)
    slices = [
        (Slice(str(-place), grad_lanes, 0.0),) if there else () for place, there in ((1, has_moe), (2, has_dense))
    ]
    schedule = block_schedule(block, order.plan(*slices))
    if is_serial:
        schedule = schedule.in_one_lane()
    is_chunked_kind = dict(zip(starts, are_chunked, strict=True))

    def time_index(kind: str, chunk: int) -> int:
        if kind == HOLD:
            return first
        if kind not in starts:
            return first - int(kind)
        return starts[kind] + (chunk if is_chunked_kind[kind] else 0)

    return Template.of(schedule), np.array([time_index(task.kind, task.chunk) for task in schedule.tasks])

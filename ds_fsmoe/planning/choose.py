# SPDX-License-Identifier: Apache-2.0
"""Which of several ways to run a layer is the fastest, and what that is due to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.planning.block import Slice, block_schedule
from ds_fsmoe.planning.block_times import BlockTimes, Order
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.degree import BOTTLENECKS, STREAM, bounds_ms, choose_slsqp, paper_case, smallest_of_best
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.timeline import simulate

_TIMED = "a gradient of so many ms"
LANE_NAMES = {Lane.COMPUTE: "computation", Lane.INTRA: "intra-node link", Lane.INTER: "inter-node link"}


@dataclass(frozen=True, slots=True)
class Choice:
    """How a layer is run in one phase, and why so."""

    order: Order
    time_ms: float
    """Of the whole layer, attention included."""
    runner_up: int | None
    """The best other degree; ``None`` if only one was allowed."""
    margin: float
    """How much longer the runner-up takes, as a share of the chosen one's time."""
    bottleneck: str
    paper_case: int | None
    """The case (1 to 4) of the paper's figure 4; ``None`` where its figure does not speak of such a layer."""

    def explain(self) -> str:
        """One sentence."""
        case = "" if self.paper_case is None else f" (case {self.paper_case} of the paper)"
        runner = "no other was allowed" if self.runner_up is None else f"{self.runner_up} takes {self.margin:+.1%}"
        late = f", {self.order.late_dw} late weight gradients" if self.order.late_dw else ""
        return (
            f"degree {self.order.degree}{late}: {self.time_ms:.3f} ms, bound by the {self.bottleneck}{case}; {runner}"
        )


def choose(times: BlockTimes, orders: Sequence[Order], moe_grad_ms: float = 0.0, dense_grad_ms: float = 0.0) -> Choice:
    """The fastest of ``orders``; of equally fast ones the first.

    Args:
        times: the layer.
        orders: the ways to run it, smaller degrees first.
        moe_grad_ms: time of the gradients that travel in its MoE part.
        dense_grad_ms: and beside the rest of it.
    """
    times_ms = times.times_ms(orders, moe_grad_ms, dense_grad_ms)[:, 0]
    return _choice(times, orders, times_ms, smallest_of_best(times_ms), moe_grad_ms)


def choose_as_the_paper(
    times: BlockTimes, orders: Sequence[Order], moe_grad_ms: float = 0.0, dense_grad_ms: float = 0.0
) -> Choice:
    """The degree that the paper's algorithm 1 finds, where it applies: two links side by side, each with its own
    collectives, and any degree. Otherwise the exact choice. The time is the true one at that degree."""
    papers = [Order(degree) for degree in range(1, len(orders) + 1)]
    if not times.is_papers or len(orders) < 2 or list(orders) != papers:
        return choose(times, orders, moe_grad_ms, dense_grad_ms)
    times_ms = times.times_ms(orders, moe_grad_ms, dense_grad_ms)[:, 0]
    degree = choose_slsqp(times.phase(grad_ms=moe_grad_ms), max(each.degree for each in orders)).degree
    index = next(i for i, each in enumerate(orders) if each.degree == degree)
    return _choice(times, orders, times_ms, index, moe_grad_ms)


def _choice(times: BlockTimes, orders: Sequence[Order], times_ms: np.ndarray, index: int, moe_grad_ms: float) -> Choice:
    order, time_ms = orders[index], float(times_ms[index])
    others = [i for i, each in enumerate(orders) if each.degree != order.degree]
    runner = min(others, key=lambda i: times_ms[i], default=None)
    margin = 0.0 if runner is None or not time_ms else float(times_ms[runner]) / time_ms - 1.0
    case = None
    if times.is_papers and order.links == "paper" and not order.late_dw:
        case = paper_case(times.phase(grad_ms=moe_grad_ms), order.degree)
    return Choice(
        order,
        time_ms,
        None if runner is None else orders[runner].degree,
        margin,
        _bottleneck(times, order, moe_grad_ms),
        case,
    )


def _bottleneck(times: BlockTimes, order: Order, moe_grad_ms: float) -> str:
    if times.has_closed_form(order):
        chains_ms = bounds_ms(times.phase(order.links, moe_grad_ms), order.degree)
        name = BOTTLENECKS[chains_ms.index(max(chains_ms))]
        return STREAM if order.links == "shared" and name == BOTTLENECKS[0] else name
    # Of what the end waits for, the lane with most of it.
    slices = (Slice(_TIMED, times.grad_lanes, moe_grad_ms),) if moe_grad_ms else ()
    schedule = block_schedule(times.work, order.plan(slices))
    costs = {**times.costs, _TIMED: LinearCost(0.0, 1.0)}
    path = simulate(schedule, costs, times.contention, times.host_ms).critical_path()
    share_ms = {lane: sum(span.end_ms - span.start_ms for span in path if span.task.lane is lane) for lane in Lane}
    return LANE_NAMES[max(share_ms, key=share_ms.__getitem__)]

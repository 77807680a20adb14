# SPDX-License-Identifier: Apache-2.0
"""Chooses how the MoE part of a layer runs in forward and backward, with the reasons. The planner calls it once per
kind of layer; :mod:`~ds_fsmoe.planning.decide.block_times` computes the times.

Every degree and order that a system leaves open is priced in both phases. A chunked plan has to gain more than the
error of measurements. Phases whose experts draw random numbers, and systems with one degree, have the same chunks in
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.planning.block import Slice, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order, PhaseTimes
from ds_fsmoe.planning.decide.degree import BOTTLENECKS, STREAM, bounds_ms, choose_slsqp, paper_case, smallest_of_best
from ds_fsmoe.planning.decide.plan_requests import Degree, SearchSpace
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.timeline import simulate

LANE_NAMES = {Lane.COMPUTE: "computation", Lane.INTRA: "intra-node link", Lane.INTER: "inter-node link"}
_TIMED = "a gradient of so many ms"


@dataclass(frozen=True)
class Choice:
    """Holds the chosen order of a layer's MoE part in one phase, and the reasons for it."""

    order: Order
    time_ms: float
    """The predicted time, with the gradients that are sent in it; of several micro-batches the mean."""
    isolated_ms: float
    """The predicted time if lanes did not slow each other down."""
    unchunked_ms: float
    """The time of the first way with one chunk, which is stock's schedule if that may be chosen."""
    runner_up: Degree
    """The best other degree, the other phase being what it is or, where both have to be alike, as this one; ``None`` if
    there was none."""
    runner_up_ms: float | None
    """The time of this phase with the runner-up: less if the other phase takes more or a cut does not gain enough."""
    auto_degree: int
    """The degree that would have been chosen without a request."""
    auto_ms: float
    both_ms: float = 0.0
    """The predicted time of both phases."""
    runner_up_both_ms: float | None = None
    """The predicted time of both phases with the runner-up."""
    bottleneck: str = ""
    paper_case: int | None = None
    """The case (1 to 4) of the paper's figure 4; ``None`` where its figure does not speak of such a layer."""

    def explain(self) -> str:
        """Return the choice and its reasons in one sentence."""
        case = "" if self.paper_case is None else f" (case {self.paper_case} of the paper)"
        runner = "no other number was allowed"
        if self.runner_up is not None and self.runner_up_ms is not None:
            margin = self.runner_up_ms / self.time_ms - 1.0 if self.time_ms else 0.0
            runner = f"{chunks_text(self.runner_up)} {'take' if self.runner_up > 1 else 'takes'} {margin:+.1%}"
        return (
            f"{chunks_text(self.order.degree)}: the MoE part takes {self.time_ms:.3f} ms, bound by the "
            f"{self.bottleneck}{case}; {runner}"
        )


def chunks_text(number: int) -> str:
    """Return a number of chunks in words."""
    return f"{number} chunk{'s' * (number > 1)}"


class _Phase:
    """Holds the best order of every degree in one phase."""

    def __init__(self, times: PhaseTimes, orders: Sequence[Order], min_gain: float) -> None:
        self._differs = times.other is not None
        self._best: dict[tuple[int, bool], tuple[float, Order]] = {}
        base = orders[0] if orders[0].degree == 1 else Order(1, orders[0].links)
        self.unchunked_ms = float(times.mean_ms([base])[0])
        """The time of the first way with one chunk, over which others have to gain."""
        places: dict[int, list[int]] = {}
        for place, order in enumerate(orders):
            places.setdefault(order.degree, []).append(place)
        self.degrees = list(places)
        for same_chunks in (True, False) if self._differs else (True,):
            times_ms = times.mean_ms(orders, same_chunks).tolist()
            for degree, at in places.items():
                best = at[smallest_of_best([times_ms[place] for place in at])]
                if degree == 1 and times_ms[best] >= (1 - min_gain) * self.unchunked_ms:
                    best = at[0]
                self._best[degree, same_chunks] = times_ms[best], orders[best]

    def ms(self, degree: int, same_chunks: bool) -> float:
        return self._best[degree, same_chunks or not self._differs][0]

    def order(self, degree: int, same_chunks: bool) -> Order:
        return self._best[degree, same_chunks or not self._differs][1]


def choose(
    forward: PhaseTimes,
    backward: PhaseTimes,
    space: SearchSpace,
    *,
    uses_rng: bool = False,
    relative_residual: float = 0.0,
) -> tuple[Choice, Choice]:
    """Choose how the MoE part of a layer runs in forward and backward.

    Args:
        forward, backward: the times of the phases.
        space: the allowed choices.
        uses_rng: whether both phases need the same chunks.
        relative_residual: the deviation of measurements from the fitted costs, as a share.
    """
    times = forward, backward
    # A gain that is smaller than what the costs are off by is none.
    min_gain = max(space.min_gain, relative_residual) if space.min_gain else 0.0
    open_phases = [_open_phase(phase, bool(number), space, min_gain) for number, phase in enumerate(times)]
    phases = [
        open_phase if order is None or not space.orders else _Phase(phase, [order], min_gain)
        for open_phase, phase, order in zip(open_phases, times, space.asked, strict=True)
    ]
    must_match = space.common_degree or uses_rng
    auto = _best_pair(open_phases[0], open_phases[1], min_gain, must_match)
    chosen = _best_pair(phases[0], phases[1], min_gain, must_match)
    if space.solver == "slsqp" and space.asked == (None, None) and not must_match:
        chosen = _papers(forward, open_phases[0], chosen[0]), _papers(backward, open_phases[1], chosen[1])
    same, auto_same = chosen[0] == chosen[1], auto[0] == auto[1]
    both_ms = sum(phase.ms(degree, same) for phase, degree in zip(phases, chosen, strict=True))
    choices = []
    for number, (phase, open_phase, degree) in enumerate(zip(phases, open_phases, chosen, strict=True)):
        others = _others(number, chosen, phases, open_phases, must_match)
        runner_up = min(others, key=lambda each: sum(others[each]), default=None)
        order, of_phase = phase.order(degree, same), times[number]
        found_ms = phase.ms(degree, same)
        alone_ms = found_ms
        if of_phase.isolated is not None:
            alone_ms = float(of_phase.mean_of(of_phase.isolated, [order])[0])
        choices.append(
            Choice(
                order,
                found_ms,
                alone_ms,
                open_phase.unchunked_ms,
                runner_up,
                None if runner_up is None else others[runner_up][0],
                auto[number],
                open_phase.ms(auto[number], auto_same),
                both_ms,
                None if runner_up is None else sum(others[runner_up]),
                _bottleneck(of_phase.of(same), order, of_phase.grad_ms),
                _case(of_phase.of(same), order, of_phase.grad_ms),
            )
        )
    return choices[0], choices[1]


def _open_phase(times: PhaseTimes, backward: bool, space: SearchSpace, min_gain: float) -> _Phase:
    """Return all orders that a space allows in one phase."""
    return _Phase(times, list(space.orders_of(times.same.work.moe, backward, costs=times.same.costs)), min_gain)


def _papers(times: PhaseTimes, phase: _Phase, exact: int) -> int:
    """Return the degree of the paper's algorithm 1 where it applies, otherwise ``exact``. It needs two parallel
    links, each with its own collectives, and any degree.
    """
    degrees = phase.degrees
    is_papers = all(phase.order(each, True) == Order(each) for each in degrees)
    if not times.same.is_papers or len(degrees) < 2 or not is_papers:
        return exact
    return choose_slsqp(times.same.phase(grad_ms=times.grad_ms), max(degrees))


def _others(
    number: int, chosen: tuple[int, int], phases: Sequence[_Phase], open_phases: Sequence[_Phase], must_match: bool
) -> dict[int, tuple[float, float]]:
    """Return every other degree of a phase -> (the ms of this phase, the ms of the other phase).

    Args:
        number: the index of the phase.
        chosen: the degrees of both phases.
        phases: the given orders of both phases.
        open_phases: all allowed orders of both phases.
        must_match: whether the other phase has to have the same degree, unless other degrees are given.
    """
    other = 1 - number
    moves = must_match and (phases[other] is open_phases[other] or chosen[0] == chosen[1])
    found = {}
    for degree in open_phases[number].degrees:
        of_other = degree if moves else chosen[other]
        if degree == chosen[number] or (moves and degree not in open_phases[other].degrees):
            continue
        same = degree == of_other
        of_other_ms = (open_phases if moves else phases)[other].ms(of_other, same)
        found[degree] = open_phases[number].ms(degree, same), of_other_ms
    return found


def _best_pair(forward: _Phase, backward: _Phase, min_gain: float, must_match: bool) -> tuple[int, int]:
    """Return the degrees with the least total time, if they gain enough over degree 1."""
    f_degrees, b_degrees = np.array(forward.degrees)[:, None], np.array(backward.degrees)[None]
    same = f_degrees == b_degrees
    f_ms, b_ms = (
        np.where(
            same, *(np.array([phase.ms(each, alike) for each in phase.degrees]).reshape(shape) for alike in (1, 0))
        )
        for phase, shape in ((forward, (-1, 1)), (backward, (1, -1)))
    )
    times_ms = f_ms + b_ms
    if must_match:
        # Two different ones that are both asked for stay what they are.
        is_open = same if same.any() else np.ones_like(same)
        uncut = is_open & (f_degrees == 1) & (b_degrees == 1)
        uncut_ms = forward.unchunked_ms + backward.unchunked_ms
        is_open = is_open & (uncut | (not uncut.any()) | (times_ms < (1 - min_gain) * uncut_ms))
    else:
        f_gains, b_gains = (
            (degrees == 1) | (1 not in phase.degrees) | (phase_ms < (1 - min_gain) * phase.unchunked_ms)
            for phase, degrees, phase_ms in ((forward, f_degrees, f_ms), (backward, b_degrees, b_ms))
        )
        is_open = f_gains & b_gains
    at = np.flatnonzero(is_open)
    best = at[smallest_of_best(times_ms.ravel()[at].tolist())]
    return forward.degrees[best // len(backward.degrees)], backward.degrees[best % len(backward.degrees)]


def _case(times: BlockTimes, order: Order, grad_ms: float) -> int | None:
    if times.is_papers and order.links == "paper":
        return paper_case(times.phase(grad_ms=grad_ms), order.degree)
    return None


def _bottleneck(times: BlockTimes, order: Order, grad_ms: float) -> str:
    if times.has_closed_form(order):
        chains_ms = bounds_ms(times.phase(order.links, grad_ms), order.degree)
        name = BOTTLENECKS[chains_ms.index(max(chains_ms))]
        return STREAM if order.links == "shared" and name == BOTTLENECKS[0] else name
    if (order, grad_ms) in times.bottlenecks:
        return times.bottlenecks[order, grad_ms]
    # Of what the end waits for, the lane with most of it.
    slices = (Slice(_TIMED, times.grad_lanes, grad_ms),) if grad_ms else ()
    schedule = block_schedule(times.work, order.plan(slices))
    costs = {**times.costs, _TIMED: LinearCost(0.0, 1.0)}
    path = simulate(schedule, costs, times.contention).critical_path()
    share_ms = {lane: sum(span.end_ms - span.start_ms for span in path if span.task.lane is lane) for lane in Lane}
    times.bottlenecks[order, grad_ms] = LANE_NAMES[max(share_ms, key=share_ms.__getitem__)]
    return times.bottlenecks[order, grad_ms]

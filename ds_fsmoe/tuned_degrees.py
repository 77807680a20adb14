# SPDX-License-Identifier: Apache-2.0
"""Which degrees and orders a layer is run with, from what its tasks cost here: every candidate is simulated, with the
sizes of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.measured_costs import LayerCosts, Machine
from ds_fsmoe.planning.block import ORDERS, BlockPlan, Links
from ds_fsmoe.planning.block_times import Order
from ds_fsmoe.planning.degree import smallest_of_best
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.presets import BEST, late_choices, preset
from ds_fsmoe.planning.timeline import IDEAL
from ds_fsmoe.planning.workload import AllToAll
from ds_fsmoe.predicted import CallSizes
from ds_fsmoe.runtime.pipeline import PhasePlan

MARGIN = 0.03
"""``best`` cuts a layer where that is predicted to gain more than this share of its time; less is lost in the noise."""

Degree = int | None
"""``None``: to be chosen."""


@dataclass(frozen=True)
class Ways:
    """What may be chosen from."""

    orders: Callable[[bool, bool], Sequence[Order]]
    """(backward, whether weight gradients can be put off) -> ways to run a layer, smaller degrees first; of the same
    degree, the first wins where others are not faster."""
    is_common: bool = False
    """Whether both phases have to have one degree."""
    margin: float = 0.0
    """What a degree above 1 has to gain."""
    may_be_uneven: bool = False
    """Whether chunks may have different sizes."""

    @classmethod
    def of(cls, schedule: str, max_degree: int, one_wire: bool = False) -> Ways:
        """Those of a schedule by name.

        Args:
            schedule: as in ``fsmoe.schedule``.
            max_degree: the largest to be considered.
            one_wire: whether both links are one wire, so that ``best`` takes them for one lane.
        """
        if schedule == BEST:
            orders = ("shared",) if one_wire else ORDERS
            return cls(
                lambda backward, splits: tuple(_open(max_degree, orders, backward and splits)),
                margin=MARGIN,
                may_be_uneven=True,
            )
        switches = preset(schedule)
        return cls(lambda backward, _: switches.orders(max_degree, backward), switches.pipeline == "common")

    def uncut(self, links: Links) -> Ways:
        """For layers that may not be cut.

        Args:
            links: their order, where none of these ways leaves a layer uncut.
        """

        def orders(backward: bool, splits: bool) -> Sequence[Order]:
            return [each for each in self.orders(backward, splits) if each.degree == 1] or [Order(1, links)]

        return replace(self, orders=orders)


def _open(max_degree: int, links: Sequence[Links], may_put_off: bool) -> Iterable[Order]:
    # Stock's schedule; on lanes of their own, its collectives leave the other link to gradients.
    yield Order(1, links[-1])
    for degree in range(2, max_degree + 1):
        # Holding back beyond the layer's own end means nothing to a layer run alone.
        late = sorted({0, *(late for late, _, _ in late_choices(degree))}) if may_put_off else (0,)
        yield from (Order(degree, order, each) for each in late for order in links)


@dataclass(frozen=True)
class PhaseChoice:
    """How a layer is run in one phase."""

    block: BlockPlan
    time_ms: float
    """Predicted, of the experts' part."""
    isolated_ms: float
    """The same if lanes did not slow each other down."""
    uncut_ms: float
    """The same with degree 1."""
    runner_up: Degree
    """The best other degree, the other phase being what it is or, where both have to be alike, as this one; ``None`` if
    there was none."""
    runner_up_ms: float | None
    """What this phase takes with it: it may be less, where the other phase takes more or a cut does not gain enough."""
    auto_degree: int
    """What would have been chosen, had nothing been asked for."""
    auto_ms: float
    both_ms: float = 0.0
    """Predicted, of both phases."""
    runner_up_both_ms: float | None = None
    """The same with the runner-up."""


class _Phase:
    """Every degree's best way in one phase."""

    def __init__(self, price: Callable[[Order, bool], float], orders: Sequence[Order], differs: bool) -> None:
        """
        Args:
            price: (order, whether both phases are cut alike) -> ms.
            orders: to choose from, smaller degrees first.
            differs: whether it matters that they are.
        """
        self._differs = differs
        self._best: dict[tuple[int, bool], tuple[float, Order]] = {}
        self.degrees = list(dict.fromkeys(order.degree for order in orders))
        for degree in self.degrees:
            of_degree = [order for order in orders if order.degree == degree]
            for same_cuts in (True, False) if differs else (True,):
                times_ms = [price(order, same_cuts) for order in of_degree]
                at = smallest_of_best(times_ms)
                self._best[degree, same_cuts] = times_ms[at], of_degree[at]

    def ms(self, degree: int, same_cuts: bool) -> float:
        return self._best[degree, same_cuts or not self._differs][0]

    def order(self, degree: int, same_cuts: bool) -> Order:
        return self._best[degree, same_cuts or not self._differs][1]


def choose_degrees(
    groups: Groups,
    sizes: CallSizes,
    profile: LayerCosts,
    machine: Machine,
    ways: Ways,
    asked: tuple[Degree, Degree] = (None, None),
    links: Links = "paper",
    alltoall: AllToAll = "flat",
) -> tuple[PhaseChoice, PhaseChoice]:
    """How a layer is run forward and backward.

    Args:
        groups: of the layer.
        sizes: of a call.
        profile: what its tasks cost.
        machine: how they are run.
        ways: what may be chosen from.
        asked: degrees for (forward, backward) that are not to be chosen.
        links: the order in which a layer is run whose degree is asked for.
        alltoall: in one task or in two.
    """
    open_phases, phases = [], []
    alone = replace(machine, contention=IDEAL)
    for backward, degree in zip((False, True), asked, strict=True):

        def price(order: Order, same_cuts: bool, backward: bool = backward) -> float:
            return machine.predict_ms(PhasePlan(order.plan(), groups, backward, alltoall), sizes, profile, same_cuts)

        differs = backward and profile.costs_more_cut_anew
        # More chunks than slots gain nothing.
        orders = [each for each in ways.orders(backward, profile.splits) if each.degree <= max(1, sizes.capacity)]
        open_phases.append(_Phase(price, orders, differs))
        phases.append(open_phases[-1] if degree is None else _Phase(price, [Order(degree, links)], differs))
    must_match = ways.is_common or profile.draws
    # A gain that is smaller than what the lines are off by is none.
    margin = max(ways.margin, profile.doubt) if ways.margin else 0.0
    auto = _best_pair(open_phases[0], open_phases[1], margin, must_match)
    chosen = _best_pair(phases[0], phases[1], margin, must_match)
    same, auto_same = chosen[0] == chosen[1], auto[0] == auto[1]
    both_ms = sum(phase.ms(degree, same) for phase, degree in zip(phases, chosen, strict=True))
    choices = []
    for number, (phase, open_phase, degree, auto_degree) in enumerate(
        zip(phases, open_phases, chosen, auto, strict=True)
    ):
        plan = PhasePlan(phase.order(degree, same).plan(), groups, bool(number), alltoall)
        others = _others(number, chosen, phases, open_phases, must_match)
        runner_up = min(others, key=lambda each: sum(others[each]), default=None)
        choices.append(
            PhaseChoice(
                plan.block,
                phase.ms(degree, same),
                alone.predict_ms(plan, sizes, profile, same),
                open_phase.ms(1, True),
                runner_up,
                None if runner_up is None else others[runner_up][0],
                auto_degree,
                open_phase.ms(auto_degree, auto_same),
                both_ms,
                None if runner_up is None else sum(others[runner_up]),
            )
        )
    return choices[0], choices[1]


def _others(
    number: int, chosen: tuple[int, int], phases: Sequence[_Phase], open_phases: Sequence[_Phase], must_match: bool
) -> dict[int, tuple[float, float]]:
    """Every other degree of a phase -> what it takes, and what the other phase takes then.

    Args:
        number: of the phase.
        chosen: degrees of both.
        phases: what is asked for of both.
        open_phases: all that could be.
        must_match: whether the other phase has to have the same degree, where that is not asked for.
    """
    other = 1 - number
    moves = must_match and phases[other] is open_phases[other]
    found = {}
    for degree in open_phases[number].degrees:
        of_other = degree if moves else chosen[other]
        if degree == chosen[number] or (moves and degree not in open_phases[other].degrees):
            continue
        same = degree == of_other
        found[degree] = open_phases[number].ms(degree, same), phases[other].ms(of_other, same)
    return found


def _best_pair(forward: _Phase, backward: _Phase, margin: float, must_match: bool) -> tuple[int, int]:
    """The degrees whose phases take the least together, where they gain enough over degree 1."""
    pairs = [(f, b) for f in forward.degrees for b in backward.degrees]
    if must_match:
        # Two different ones that are both asked for stay what they are.
        pairs = [pair for pair in pairs if pair[0] == pair[1]] or pairs

    def phases_ms(pair: tuple[int, int]) -> tuple[float, float]:
        same = pair[0] == pair[1]
        return forward.ms(pair[0], same), backward.ms(pair[1], same)

    def gains(pair: tuple[int, int]) -> bool:
        if must_match:
            return pair == (1, 1) or (1, 1) not in pairs or sum(phases_ms(pair)) < (1 - margin) * sum(phases_ms((1, 1)))
        return all(
            degree == 1 or 1 not in phase.degrees or time_ms < (1 - margin) * phase.ms(1, True)
            for phase, degree, time_ms in zip((forward, backward), pair, phases_ms(pair), strict=True)
        )

    pairs = [pair for pair in pairs if gains(pair)]
    return pairs[smallest_of_best([sum(phases_ms(pair)) for pair in pairs])]

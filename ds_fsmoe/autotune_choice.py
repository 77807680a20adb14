# SPDX-License-Identifier: Apache-2.0
"""What the autotuner makes of its measurements: how each layer is run, and what a step should take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ds_fsmoe.autotune_subjects import Kind, Way
from ds_fsmoe.measured_costs import Machine
from ds_fsmoe.planning.block import BlockPlan, Links, equal_shares
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.timeline import IDEAL
from ds_fsmoe.runtime.chunking import cut
from ds_fsmoe.runtime.corun import Slowdowns
from ds_fsmoe.runtime.link_times import REDUCE_SCATTER, LinkTimes, Reduces
from ds_fsmoe.runtime.pipeline import PhasePlan
from ds_fsmoe.runtime.profiler import LayerProfile
from ds_fsmoe.runtime.topology import Topology, world_size_now
from ds_fsmoe.step_prediction import (
    Bounds,
    StepTimes,
    bounds_of,
    idle_ms,
    layer_times,
    predict_step,
    sharded_ms,
)
from ds_fsmoe.tuned_degrees import MARGIN, Degree, PhaseChoice, Ways, choose_degrees
from ds_fsmoe.uneven_chunks import best_sizes

if TYPE_CHECKING:
    from ds_fsmoe.reduction import Reduction


_MANY_SLOTS = 1000
"""Chunks that are cut alike of so many count as of one size."""
TRIED_DEGREES = (1, 2, 3, 4)
"""Besides those that are predicted to be fastest. More chunks than these seldom gain."""


@dataclass(frozen=True)
class Choice:
    """For equal layers."""

    alltoall: str
    phases: tuple[PhaseChoice, PhaseChoice]
    """(forward, backward)."""
    alltoalls_ms: Mapping[str, float]
    """All-to-all -> what both phases take with it."""


def uncut(kind: Kind, way: Way) -> list[PhasePlan]:
    """Forward and backward as stock runs them, with an all-to-all."""
    groups = kind.pipeline.forward.groups
    return [PhasePlan(BlockPlan(), groups, backward, way.planned) for backward in (False, True)]


@dataclass(frozen=True)
class Found:
    """What was measured."""

    ways: Mapping[str, Mapping[str, Way]]
    """Kind of layer -> its all-to-alls."""
    profiles: Mapping[tuple[str, str], LayerProfile]
    """(kind, all-to-all) -> what tasks cost."""
    links: LinkTimes
    slowed: Slowdowns

    def flat(self, kind: Kind) -> LayerProfile:
        """With the all-to-all that was run until now."""
        return self.profiles[kind.subject.kind, next(iter(self.ways[kind.subject.kind]))]

    def flat_ms(self, kind: Kind, machine: Machine) -> float:
        """Both phases uncut, with that."""
        way = next(iter(self.ways[kind.subject.kind].values()))
        return sum(machine.predict_ms(plan, kind.sizes, self.flat(kind)) for plan in uncut(kind, way))

    def bounds(self, kind: Kind, machine: Machine) -> Bounds:
        """What no schedule and no all-to-all can be faster than."""
        found = [
            bounds_of(machine, uncut(kind, way), kind.sizes, self.profiles[kind.subject.kind, name])
            for name, way in self.ways[kind.subject.kind].items()
        ]
        return Bounds(min(each.bound_ms for each in found), min(each.sent_ms for each in found))

    def reduces(self, kind: Kind) -> Reduces:
        """How its reduce-scatters are done."""
        return self.links.reduces.get(kind.subject.link_name(REDUCE_SCATTER), ())


def choose(
    kind: Kind, found: Found, machine: Machine, ways: Ways, asked: tuple[Degree, Degree], links: Links
) -> Choice:
    """How equal layers are run.

    Args:
        kind: the layers.
        found: what was measured.
        machine: that it is for.
        ways: what may be chosen from.
        asked: degrees given by hand.
        links: the order of layers with such degrees.
    """
    groups = kind.pipeline.forward.groups
    if kind.layer.fsmoe.is_uncut:
        ways, asked = ways.uncut(links), (None, None)
    pairs = {
        name: choose_degrees(
            groups, kind.sizes, found.profiles[kind.subject.kind, name], machine, ways, asked, links, way.planned
        )
        for name, way in found.ways[kind.subject.kind].items()
    }
    times_ms = {name: sum(phase.time_ms for phase in pair) for name, pair in pairs.items()}
    first, best = next(iter(times_ms)), min(times_ms, key=times_ms.__getitem__)
    chosen = best if times_ms[best] < (1 - MARGIN) * times_ms[first] else first
    return Choice(chosen, pairs[chosen], times_ms)


def candidates(
    kinds: Sequence[Kind],
    found: Found,
    machine: Machine,
    ways: Ways,
    asked: tuple[Degree, Degree],
    links: Links,
) -> list[list[Choice]]:
    """Ways to run all layers, worth being tried: what is predicted to be the fastest, which stands first; what would
    be if lanes did not slow each other down; and both phases uncut, and in two, three and four chunks, in each of the
    orders that may be chosen.

    Args:
        kinds: of layers, each of which has its part in every candidate.
        found, machine, ways, asked, links: see :func:`choose`.
    """

    def fastest(machine: Machine, asked: tuple[Degree, Degree], links: Links = links) -> list[Choice]:
        return [choose(kind, found, machine, ways, asked, links) for kind in kinds]

    tried = [fastest(machine, asked), fastest(replace(machine, contention=IDEAL), asked)]
    if asked == (None, None):
        largest = min((kind.sizes.capacity for kind in kinds), default=0)
        orders = [order for backward in (False, True) for order in ways.orders(backward, False)]
        open_degrees = {order.degree for order in orders}
        degrees = [d for d in TRIED_DEGREES if d in open_degrees and d <= max(1, largest)]
        tried += [fastest(machine, (d, d)) for d in degrees]
        # More lanes at once take more of the processors, which is hard to predict where ranks share them.
        others = dict.fromkeys(order.links for order in orders if order.links != links)
        tried += [fastest(machine, (d, d), other) for other in others for d in degrees if d > 1]
    # Those found by the other clock, timed by this one.
    return _timed_once(tried, kinds, found, machine)


def refinements(
    kinds: Sequence[Kind],
    kept: Sequence[Choice],
    halves: tuple[Sequence[Choice], Sequence[Choice]],
    found: Found,
    machine: Machine,
    ways: Ways,
) -> list[list[Choice]]:
    """Neighbours of the plan that was the fastest of those tried, which stands first: with the forward and the backward
    that were, each by itself, the fastest; both with more or fewer weight gradients put off, and with chunks of other
    sizes. How long experts wait for tokens hangs on which rank is late, and no prediction knows that.

    Args:
        kinds: of layers.
        kept: how each is run by the fastest plan.
        halves: likewise, by the plan with the fastest forward, and by that with the fastest backward.
        found, machine, ways: see :func:`choose`.
    """

    def of_both(kind: Kind, own: Choice, first: Choice, second: Choice) -> Choice:
        degrees = first.phases[0].block.degree, second.phases[1].block.degree
        must_match = ways.is_common or found.flat(kind).draws
        if first.alltoall != second.alltoall or (must_match and degrees[0] != degrees[1]):
            return own
        return replace(first, phases=(first.phases[0], second.phases[1]))

    def with_late(kind: Kind, own: Choice, late_of: Callable[[int], int]) -> Choice:
        block = own.phases[1].block
        late = late_of(block.degree)
        splits = found.profiles[kind.subject.kind, own.alltoall].splits
        if not any(
            (order.degree, order.links, order.late_dw) == (block.degree, block.links, late)
            for order in ways.orders(True, splits)
        ):
            return own
        return replace(own, phases=(own.phases[0], replace(own.phases[1], block=replace(block, late_dw=late))))

    def in_uneven_chunks(kind: Kind, own: Choice) -> Choice:
        profile, way = found.profiles[kind.subject.kind, own.alltoall], found.ways[kind.subject.kind][own.alltoall]
        if not ways.may_be_uneven or profile.draws:
            return own
        groups = kind.pipeline.forward.groups
        plans = [PhasePlan(phase.block, groups, i == 1, way.planned) for i, phase in enumerate(own.phases)]
        blocks = [best_sizes(plan, kind.sizes, profile, machine) or plan.block for plan in plans]
        if blocks[0].degree == blocks[1].degree:
            # Alike, so that the backward finds what it needs in one piece; by what suits the longer phase.
            blocks[0] = replace(blocks[0], shares=blocks[1].shares)
        first, second = (replace(phase, block=block) for phase, block in zip(own.phases, blocks, strict=True))
        return replace(own, phases=(first, second))

    near = [list(kept), [of_both(*each) for each in zip(kinds, kept, *halves, strict=True)]]
    bases = tuple(near)
    for late_of in (lambda _: 0, lambda _: 1, lambda degree: degree):
        late = [[with_late(*each, late_of) for each in zip(kinds, plan, strict=True)] for plan in bases]
        near += late
    near += [[in_uneven_chunks(*each) for each in zip(kinds, plan, strict=True)] for plan in (*bases, *late)]
    return _timed_once(near, kinds, found, machine)


def describe_choice(kind: Kind, choice: Choice) -> str:
    """For one line of a table: chunks and order of both phases, and the layers they are for."""
    phases = " and ".join(_describe_block(phase.block) for phase in choice.phases)
    way = "" if choice.alltoall == "flat" else f" {choice.alltoall}"
    return f"{kind.labels[0]}.. {phases}{way}" if len(kind.labels) > 1 else f"{kind.labels[0]} {phases}{way}"


def _describe_block(block: BlockPlan) -> str:
    equal = cut(_MANY_SLOTS, block.shares) == cut(_MANY_SLOTS, equal_shares(block.degree))
    sizes = "" if equal else f" ({' '.join(f'{share:.0%}' for share in block.shares)})"
    return f"{block.degree}{sizes} {block.links}" + (f" {block.late_dw} late dW" if block.late_dw else "")


def _timed_once(
    plans: Sequence[Sequence[Choice]], kinds: Sequence[Kind], found: Found, machine: Machine
) -> list[list[Choice]]:
    """Each plan once, with the times that are predicted for it."""
    distinct: dict[tuple, Sequence[Choice]] = {}
    for choices in plans:
        key = tuple((each.alltoall, *(phase.block for phase in each.phases)) for each in choices)
        distinct.setdefault(key, choices)
    return [
        [
            replace(choice, phases=_timed(kind, choice, found, machine))
            for kind, choice in zip(kinds, choices, strict=True)
        ]
        for choices in distinct.values()
    ]


def _timed(kind: Kind, choice: Choice, found: Found, machine: Machine) -> tuple[PhaseChoice, PhaseChoice]:
    alone = replace(machine, contention=IDEAL)
    profile, way = found.profiles[kind.subject.kind, choice.alltoall], found.ways[kind.subject.kind][choice.alltoall]
    same_cuts = choice.phases[0].block.shares == choice.phases[1].block.shares
    timed = []
    for backward, phase in zip((False, True), choice.phases, strict=True):
        plan = PhasePlan(phase.block, kind.pipeline.forward.groups, backward, way.planned)
        times_ms = [each.predict_ms(plan, kind.sizes, profile, same_cuts) for each in (machine, alone)]
        timed.append(replace(phase, time_ms=times_ms[0], isolated_ms=times_ms[1]))
    return timed[0], timed[1]


def other_esp_sizes(
    kinds: Sequence[Kind], found: Found, machine: Machine, ways: Ways, cluster: Cluster, topology: Topology
) -> dict[int, float]:
    """ESP size -> predicted time of all layers' experts' parts; of each by the cluster's numbers, so that they can be
    compared with one another."""
    of_sizes: dict[int, float] = {}
    if not kinds or world_size_now() == 1:
        return of_sizes
    groups = kinds[0].pipeline.forward.groups
    for esp_size in range(1, topology.ranks_per_node + 1):
        if groups.stage % (groups.ep * esp_size):
            continue
        times_ms = [
            sharded_ms(cluster, kind.pipeline.forward.groups, kind.sizes, found.flat(kind), machine, ways, esp_size)
            for kind in kinds
        ]
        if all(each is not None for each in times_ms):
            counts = [len(kind.labels) for kind in kinds]
            of_sizes[esp_size] = sum(count * (each or 0.0) for count, each in zip(counts, times_ms, strict=True))
    return of_sizes


def predict(
    kinds: Sequence[Kind],
    choices: Sequence[Choice],
    found: Found,
    machine: Machine,
    dense_ms: tuple[float, float] | None,
    reduction: Reduction | None,
) -> StepTimes:
    """A step of all layers.

    Args:
        kinds, choices, found, machine: see :func:`choose`.
        dense_ms: what the rest of the model takes, forward and backward.
        reduction: of the gradients, if we do it.
    """
    layers, gradients_ms = [], 0.0
    for kind, choice in zip(kinds, choices, strict=True):
        measured, planned = found.profiles[kind.subject.kind, choice.alltoall], kind.pipeline.backward
        way = found.ways[kind.subject.kind][choice.alltoall]
        plan = replace(planned, block=choice.phases[1].block, alltoall=way.planned)
        same_cuts = choice.phases[0].block.shares == choice.phases[1].block.shares
        room_ms = idle_ms(machine, plan, kind.sizes, measured, same_cuts)
        uncut_ms = found.flat_ms(kind, machine)
        layers.append(layer_times(choice.phases, len(kind.labels), uncut_ms, room_ms, found.bounds(kind, machine)))
    if kinds and reduction is not None:
        costs = found.flat(kinds[0]).costs(backward=True)
        for flat in reduction.reducer.flats:
            if flat.kind in costs:
                gradients_ms += costs[flat.kind].ms(flat.numel * flat.element_bytes)
    return predict_step(layers, dense_ms, gradients_ms, reduction is not None)

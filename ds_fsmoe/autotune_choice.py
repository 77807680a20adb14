# SPDX-License-Identifier: Apache-2.0
"""What the autotuner makes of its measurements: how each layer is run, and what a step should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ds_fsmoe.autotune_subjects import Kind, Way
from ds_fsmoe.measured_costs import Machine
from ds_fsmoe.planning.block import BlockPlan, Links
from ds_fsmoe.planning.cluster import Cluster
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

if TYPE_CHECKING:
    from ds_fsmoe.reduction import Reduction


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
        plan = replace(planned, block=choice.phases[1].block)
        room_ms = idle_ms(machine, plan, kind.sizes, measured)
        uncut_ms = found.flat_ms(kind, machine)
        layers.append(layer_times(choice.phases, len(kind.labels), uncut_ms, room_ms, found.bounds(kind, machine)))
    if kinds and reduction is not None:
        costs = found.flat(kinds[0]).costs(backward=True)
        for flat in reduction.reducer.flats:
            if flat.kind in costs:
                gradients_ms += costs[flat.kind].ms(flat.numel * flat.element_bytes)
    return predict_step(layers, dense_ms, gradients_ms, reduction is not None)

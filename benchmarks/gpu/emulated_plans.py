# SPDX-License-Identifier: Apache-2.0
"""Layers on clusters whose links are emulated: what is timed of them, the lines through that, and every preset's plan.

A layer is one in the middle of many, as in the paper: its own gradients are the next one's business, and those of the
one before travel in its backward.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.gpu.emulated_layer import CUT, DTYPES, KINDS, Computation, whole_tasks
from benchmarks.gpu.emulated_links import modern_node
from benchmarks.simulations.paper import steady_state
from ds_fsmoe.observing.device_time import Delay, elapsed_ms
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.cluster import Cluster, load_cluster
from ds_fsmoe.planning.cost import Fit, LinearCost, fit
from ds_fsmoe.planning.decide.plan import Planner, plan_by_name
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import HOLD, Schedule
from ds_fsmoe.planning.timeline import Timeline
from ds_fsmoe.planning.workload import Shape, kind_costs

PHASES = ("forward", "backward")
CUT_SHARES, WHOLE_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0), (1 / 4, 1 / 2, 3 / 4, 1.0)
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
AHEAD_MS = 2.0
"""A pause before what is timed: a GPU has been given all of it by then."""


@dataclass(frozen=True)
class Configuration:
    """A layer on a cluster. Of a layer that is not ``timed`` nothing is used for fitting."""

    cluster: str
    shape: Shape
    timed: bool = False

    def __str__(self) -> str:
        s = self.shape
        factor = "no drop" if s.capacity_factor is None else f"f {s.capacity_factor:g}"
        return f"{self.cluster}: {s.ffn} B {s.B} L {s.L} M {s.M} H {s.H} {factor}"

    @property
    def groups(self) -> Groups:
        """As in the paper: attention and experts are split within a node, experts spread over nodes."""
        cluster = CLUSTERS[self.cluster]
        nodes, gpus = cluster.num_nodes, cluster.gpus_per_node
        return Groups(nodes * gpus, gpus, mp=gpus, esp=gpus, ep=nodes, dp=nodes)

    @property
    def widths(self) -> Configuration:
        """What a layer with other tokens has in common with it."""
        return Configuration(self.cluster, replace(self.shape, B=1, L=1, capacity_factor=1.0))


CLUSTERS: dict[str, Cluster] = {name: load_cluster(name) for name in ("testbed_a", "testbed_b")}
CLUSTERS["modern"] = modern_node()
_A, _B = Shape(4, 1024, 2048, 6144, 6), Shape(2, 1024, 2048, 4096, 8)
_MIXTRAL = Shape(4, 4096, 4096, 14336, 8, ffn="mixtral", heads=32, kv_heads=8, dtype_bytes=2)
_SMALL = Shape(2, 64, 128, 256, 6, heads=8)
FULL = (
    Configuration("testbed_a", _A, timed=True),
    Configuration("testbed_a", replace(_A, B=2, M=4096, H=8192, heads=32, ffn="mixtral"), timed=True),
    Configuration("testbed_a", replace(_A, B=2, L=2048, capacity_factor=2.4)),
    Configuration("testbed_a", replace(_A, L=2048, M=1024, H=4096, capacity_factor=None)),
    Configuration("testbed_b", _B, timed=True),
    Configuration("testbed_b", replace(_B, B=4, L=512, capacity_factor=2.4)),
    Configuration("testbed_b", replace(_B, B=1, M=4096, H=12288, heads=32, ffn="mixtral")),
    Configuration("modern", _MIXTRAL, timed=True),
    Configuration("modern", replace(_MIXTRAL, B=2, capacity_factor=1.0)),
    Configuration("modern", replace(_MIXTRAL, B=2, M=6144, H=16384, heads=48)),
)
QUICK = (
    Configuration("testbed_a", _SMALL, timed=True),
    Configuration("testbed_b", replace(_SMALL, B=32, L=32, E=8)),
    Configuration("modern", replace(_SMALL, E=8, ffn="mixtral", heads=16, kv_heads=8, dtype_bytes=2), timed=True),
)


Points = dict[str, tuple[list[float], list[float]]]
"""Kind -> sizes and times in ms."""


def time_computation(computation: Computation, delay: Delay, go_on: Callable[[], bool]) -> Points:
    """What a rank computes, each kind alone and at several sizes.

    Args:
        computation: of the rank.
        delay: of its device.
        go_on: whether there is time for another round, when there have been enough.
    """
    parts = [(kind, *computation.of(kind, s)) for kind in KINDS for s in (CUT_SHARES if kind in CUT else WHOLE_SHARES)]
    rounds: list[list[float]] = []
    while len(rounds) <= FEWEST_ROUNDS or (len(rounds) <= MOST_ROUNDS and go_on()):
        rounds.append([elapsed_ms(delay.device, done, lambda: delay(AHEAD_MS), delay.host) for _, _, done in parts])
    found: Points = {kind: ([], []) for kind in KINDS}
    # The first round loads kernels.
    for (kind, size, _), times_ms in zip(parts, zip(*rounds[1:], strict=True), strict=True):
        found[kind][0].append(size)
        found[kind][1].append(statistics.median(times_ms))
    return found


@dataclass
class Lines:
    """Fitted costs: of each layer that was timed, and of all with numbers of the same type together."""

    own: dict[Configuration, dict[str, Fit]] = field(default_factory=dict)
    pooled: dict[int, dict[str, Fit]] = field(default_factory=dict)

    @classmethod
    def of(cls, points: Mapping[Configuration, Points]) -> Lines:
        lines = cls()
        for configuration, found in points.items():
            lines.own[configuration.widths] = {kind: fit(*each) for kind, each in found.items()}
        for dtype_bytes in {each.shape.dtype_bytes for each in points}:
            alike = [found for each, found in points.items() if each.shape.dtype_bytes == dtype_bytes]
            lines.pooled[dtype_bytes] = {
                kind: fit(*([value for found in alike for value in found[kind][i]] for i in range(2)))
                for kind in alike[0]
            }
        return lines

    def held_out(self, configuration: Configuration) -> str:
        """What of it was not timed: nothing (""), "tokens", or its "widths"."""
        return "" if configuration.timed else "tokens" if configuration.widths in self.own else "widths"

    def costs(self, configuration: Configuration) -> dict[str, LinearCost]:
        """Kind -> what it costs to compute."""
        fits = self.own.get(configuration.widths) or self.pooled[configuration.shape.dtype_bytes]
        return {kind: each.cost for kind, each in fits.items() if isinstance(each.cost, LinearCost)}

    def named(self) -> list[tuple[str, str, Fit]]:
        """What was timed, kind, line."""
        groups = [(f"{key.cluster}, M {key.shape.M} H {key.shape.H}", fits) for key, fits in self.own.items()]
        groups += [(f"all in {DTYPES[dtype_bytes]}", fits) for dtype_bytes, fits in self.pooled.items()]
        return [(of, kind, line) for of, fits in groups for kind, line in fits.items()]


@dataclass(frozen=True)
class Planned:
    """What a preset does with a layer; each is (forward, backward)."""

    blocks: tuple[BlockPlan, BlockPlan]
    schedules: tuple[Schedule, Schedule]
    timelines: tuple[Timeline, Timeline]

    def ms(self, phase: str) -> float:
        return sum(each.makespan_ms for each in of_phase(phase, self.timelines))

    def text(self, phase: str) -> str:
        return " | ".join(map(_plan_text, of_phase(phase, self.blocks)))


def of_phase(phase: str, pair: Sequence[Any]) -> list[Any]:
    """Of (forward, backward) one, or both for a step."""
    return list(pair) if phase == "step" else [pair[PHASES.index(phase)]]


def _plan_text(block: BlockPlan) -> str:
    slices = ""
    if block.moe_slices or block.dense_slices:
        slices = f", {len(block.moe_slices)} + {len(block.dense_slices)} slices"
    return f"{block.degree} {block.links}{slices}"


def link_costs(configuration: Configuration) -> Mapping[str, LinearCost]:
    """Kind -> what a task on a link takes; what is computed is in there too, and not to be used."""
    return kind_costs(CLUSTERS[configuration.cluster], configuration.groups)


def plan_all(configuration: Configuration, computing: Mapping[str, LinearCost], task_ms: float) -> dict[str, Planned]:
    """Every preset's plan of a layer, and how long it should take.

    Args:
        configuration: the layer.
        computing: kind -> what it costs to compute.
        task_ms: what a task takes besides.
    """
    links = link_costs(configuration)
    costs = {kind: cost.plus(task_ms) for kind, cost in {**links, **computing}.items()} | {HOLD: links[HOLD]}
    layer = whole_tasks(configuration.shape, configuration.groups)
    planner, found = Planner(costs), {}
    for name in NAMES:
        plan = plan_by_name(planner, name, steady_state(layer), layer.gradients)
        found[name] = Planned((plan.forward[0], plan.backward[0]), plan.schedules(), plan.timelines(costs))
    return found

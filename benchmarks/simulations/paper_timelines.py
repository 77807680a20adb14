# SPDX-License-Identifier: Apache-2.0
"""The timelines that the paper draws, by name: figure 3 (four systems) and figure 4 (four bottlenecks)."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulations.paper import load_bed, steady_state
from ds_fsmoe.planning.block import BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.plan import Planner
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.decide.presets import Switches
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD, REDUCE, Lane
from ds_fsmoe.planning.timeline import Timeline, simulate
from ds_fsmoe.planning.workload import BlockWork, MoEWork, Shape, Stage, Work, layer_work


@dataclass(frozen=True, slots=True)
class _System:
    title: str
    degree: int
    switches: Switches


_FIGURE_3 = {
    "3a": _System("figure 3(a), one task after the other", 1, Switches()),
    "3b": _System("figure 3(b), tutel_improved", 4, Switches("common", "shared", "dense_only")),
    "3c": _System(
        "figure 3(c), fsmoe without a partition of the gradient", 4, Switches("per_phase", "paper", "dense_only")
    ),
    "3d": _System("figure 3(d), fsmoe", 4, Switches("per_phase", "paper", "adaptive")),
}
# Times of one chunk of two, in ms: all-to-all, gather, expert, reduce; and the gradient's.
_FIGURE_4 = {
    "4.1": ("the link between nodes", (2.0, 1.0, 1.0, 1.0), 4.0),
    "4.2": ("the experts", (1.0, 0.5, 4.0, 0.5), 1.0),
    "4.3": ("the all-to-alls", (3.0, 1.0, 1.0, 1.0), 1.0),
    "4.4": ("the link inside a node", (1.0, 3.0, 1.0, 3.0), 1.0),
}
NAMES = (*_FIGURE_3, *_FIGURE_4)


def timeline(name: str) -> tuple[str, Timeline]:
    """Return the titles and timelines of a figure.

    Figure 3 shows the backward of a layer on testbed B with the gradients of the layer before it; figure 4
    the MoE part alone, in two chunks.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name in _FIGURE_3:
        return _figure_3(_FIGURE_3[name])
    if name in _FIGURE_4:
        what, chunk_ms, grad_ms = _FIGURE_4[name]
        return f"figure 4, case {name[-1]}: bound by {what}", _figure_4(chunk_ms, grad_ms)
    raise ValueError(f"no timeline is called {name!r}: the choices are {', '.join(NAMES)}")


def _figure_3(system: _System) -> tuple[str, Timeline]:
    bed = load_bed("b")
    layer = layer_work(Shape(2, 512, 4096, 8192, bed.num_experts, 2, 2.4, "gpt", 32), bed.groups)
    order = Order(system.degree, system.switches.links)
    space = SearchSpace.fixed(order, order)
    options = [{"": each} for each in steady_state(layer)]
    request = PlanRequest(options, space, system.switches.gradients, carried=layer.gradients)
    return system.title, Planner(bed.costs).plan(request).timelines(bed.costs)[1]


def _figure_4(chunk_ms: tuple[float, float, float, float], grad_ms: float) -> Timeline:
    degree = 2
    costs = dict.fromkeys((A2A_IN, A2A_OUT, GATHER, REDUCE, EXPERT, GRAD), LinearCost(0.0, 1.0))
    a, g, e, s = (degree * each for each in chunk_ms)
    moe = MoEWork(
        (Stage(A2A_IN, (Lane.INTER,), a), Stage(GATHER, (Lane.INTRA,), g, is_inner=True)),
        Work(EXPERT, (Lane.COMPUTE,), e),
        (Stage(REDUCE, (Lane.INTRA,), s, is_inner=True), Stage(A2A_OUT, (Lane.INTER,), a)),
    )
    plan = BlockPlan(degree, "paper", moe_slices=(Slice(GRAD, (Lane.INTER,), grad_ms),))
    return simulate(block_schedule(BlockWork((), moe, ()), plan), costs)

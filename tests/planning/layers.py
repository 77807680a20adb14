# SPDX-License-Identifier: Apache-2.0
"""Layers for the tests of the planning room: by hand, at random, and in every way that groups can lie."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from ds_fsmoe.planning.block import BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order, PhaseTimes
from ds_fsmoe.planning.decide.degree import Load, Phase
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.decide.presets import Switches
from ds_fsmoe.planning.decide.search import Choice, choose
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    ATTENTION,
    EXPERT,
    EXPERT_GRAD,
    GATHER,
    GRAD,
    HOLD,
    MP_GATHER,
    MP_REDUCE,
    ORDER,
    REDUCE,
    RESTORE,
    ROUTE,
    SOFTMAX,
    Lane,
    Schedule,
)
from ds_fsmoe.planning.timeline import simulate
from ds_fsmoe.planning.workload import BlockWork, Layer, MoEWork, Shape, Stage, Work, layer_work

KINDS = (
    *(A2A_IN, A2A_OUT, A2A_IN_NODE, A2A_OUT_NODE, GATHER, REDUCE, EXPERT, GRAD, EXPERT_GRAD),
    *(MP_GATHER, MP_REDUCE, ATTENTION, SOFTMAX, ROUTE, ORDER, RESTORE),
)
SHAPE = Shape(B=2, L=12, M=8, H=24, E=8, K=2, capacity_factor=1.5, heads=2)

LAYOUTS: dict[str, tuple[Groups, str]] = {
    "the paper's": (Groups(8, 4, mp=4, esp=4, ep=2), "flat"),
    "all-to-all between nodes only": (Groups(4, 1, ep=4), "flat"),
    "all-to-all over both links": (Groups(8, 4, ep=8), "flat"),
    "2dh": (Groups(8, 4, ep=8), "2dh"),
    "2dh with sharded experts": (Groups(8, 4, mp=2, esp=2, ep=4), "2dh"),
    "no sharding": (Groups(8, 4, mp=4, ep=8), "flat"),
    "no expert parallelism": (Groups(8, 4, mp=4, esp=4), "flat"),
    "one node": (Groups(4, 4, mp=2, esp=2, ep=2), "flat"),
    "experts sharded over nodes": (Groups(8, 2, mp=2, esp=4, ep=2), "flat"),
    "model parallelism over nodes": (Groups(8, 2, mp=4, esp=2, ep=4), "flat"),
    "one rank": (Groups(1, 4), "flat"),
}
"""Name -> groups, algorithm of the all-to-all."""


def layer_of(layout: str, shape: Shape = SHAPE, recompute: bool = False) -> Layer:
    """A layer with its groups in this layout."""
    groups, alltoall = LAYOUTS[layout]
    return layer_work(shape, groups, alltoall, recompute)


def grad_lanes_of(layout: str) -> tuple[Lane, ...]:
    """The links that dense gradients cross, or would cross."""
    return LAYOUTS[layout][0].placements["dp"].lanes or (Lane.INTER,)


def plan_by_switches(planner: Planner, switches: Switches, layers: Sequence[Layer]) -> ModelPlan:
    """The plan of a system with these switches, whether it is a preset or not."""
    settings = planner.settings
    space = SearchSpace.of(switches, settings.max_degree, micro_op_bytes=settings.micro_op_bytes)
    space = replace(space, solver=settings.solver)
    return planner.plan(PlanRequest([{"": each} for each in layers], space, switches.gradients))


def random_costs(rng: random.Random, alphas: float = 0.3) -> dict[str, LinearCost]:
    """A cost for every kind, with which a layer of ``SHAPE`` takes milliseconds; some start-ups and slopes are 0."""
    costs = {}
    for kind in KINDS:
        unit = 1e-4 if kind in (EXPERT, ATTENTION) else 3e-3
        slope = rng.choice([0.0, *[unit * rng.random()] * 7])
        costs[kind] = LinearCost(rng.choice([0.0, alphas * rng.random()]), slope)
    costs[A2A_OUT], costs[A2A_OUT_NODE] = costs[A2A_IN], costs[A2A_IN_NODE]
    costs[HOLD] = LinearCost(0.0, 0.0)
    return costs


def bare_block(phase: Phase) -> tuple[BlockWork, dict[str, LinearCost]]:
    """The MoE part alone, its groups lying as the paper's do."""
    inter, intra = (Lane.INTER,), (Lane.INTRA,)
    moe = MoEWork(
        (
            Stage(A2A_IN, inter, phase.a2a.size, phase.a2a.launches, group="ep"),
            Stage(GATHER, intra, phase.gather.size, phase.gather.launches, is_inner=True, group="esp"),
        ),
        Work(EXPERT, (Lane.COMPUTE,), phase.expert.size, phase.expert.launches),
        (
            Stage(REDUCE, intra, phase.reduce.size, phase.reduce.launches, is_inner=True, group="esp"),
            Stage(A2A_OUT, inter, phase.a2a.size, phase.a2a.launches, group="ep"),
        ),
    )
    costs = {A2A_IN: phase.a2a.cost, A2A_OUT: phase.a2a.cost, GATHER: phase.gather.cost, EXPERT: phase.expert.cost}
    costs |= {REDUCE: phase.reduce.cost, GRAD: LinearCost(phase.grad_ms, 0.0)}
    return BlockWork((), moe, ()), costs


def choice_of(times: BlockTimes, orders: list[Order], grad_ms: float = 0.0, solver: str = "exact") -> Choice:
    """What is chosen of these orders for one phase alone."""
    phase = PhaseTimes(times, grad_ms=grad_ms)
    return choose(phase, phase, SearchSpace(tuple(orders), solver=solver))[0]


def bare_schedule(phase: Phase, degree: int, with_gradient: bool = True) -> Schedule:
    """The schedule of ``bare_block``, the gradient as one slice behind the last tokens that come in."""
    slices = (Slice(GRAD, (Lane.INTER,), 0.0),) if with_gradient else ()
    return block_schedule(bare_block(phase)[0], BlockPlan(degree, phase.links, moe_slices=slices))


def simulated_ms(phase: Phase, degree: int, with_gradient: bool = True) -> float:
    """Time of ``bare_schedule``, played."""
    return simulate(bare_schedule(phase, degree, with_gradient), bare_block(phase)[1]).makespan_ms


def by_hand_ms(phase: Phase, degree: int) -> float:
    """The same from the paper's figure 3 and nothing else: end times, task by task."""
    a, g, e, s = (
        each.launches * each.cost.alpha_ms + each.size / degree * each.cost.beta_ms
        for each in (phase.a2a, phase.gather, phase.expert, phase.reduce)
    )
    shared = phase.links == "shared"
    inter = intra = compute = 0.0
    gathered, computed, reduced = [], [], []
    for _ in range(degree):
        inter += a
        intra = max(inter, intra) + g
        inter = intra if shared else inter
        gathered.append(intra)
    inter += phase.grad_ms
    intra = inter if shared else intra
    for ready in gathered:
        compute = max(compute, ready) + e
        computed.append(compute)
    for ready in computed:
        intra = max(intra, ready) + s
        if shared:
            inter = intra = intra + a
        reduced.append(intra)
    if not shared:
        for ready in reduced:
            inter = max(inter, ready) + a
    return inter


def random_phase(rng: random.Random, equal_links: bool = False) -> Phase:
    """A layer with g != s unless asked otherwise."""

    def load() -> Load:
        return Load(LinearCost(rng.choice([0.0, 0.3 * rng.random()]), rng.random()), 20 * rng.random())

    gather = load()
    return Phase(load(), gather, load(), gather if equal_links else load(), rng.choice([0.0, 30 * rng.random()]))


def loads(largest: float = 1e3) -> st.SearchStrategy[Load]:
    """Work of any size: nothing, tiny, gigantic; start-up and slope may be 0."""
    numbers = st.one_of(st.just(0.0), st.floats(1e-6, largest), st.integers(1, 40).map(float))
    return st.builds(Load, st.builds(LinearCost, numbers, numbers), numbers, st.integers(1, 3))


def phases(largest: float = 1e3) -> st.SearchStrategy[Phase]:
    """Any layer in any of the two orders that have a closed form."""
    load = loads(largest)
    grads = st.one_of(st.just(0.0), st.floats(1e-6, largest**2))
    return st.builds(Phase, load, load, load, load, grads, st.sampled_from(["paper", "shared"]))

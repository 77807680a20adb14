# SPDX-License-Identifier: Apache-2.0
"""Layers as if they had been measured, for tests of what is made of measurements."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ds_fsmoe.planning.call_shape import CallShape, layer_of_call, moe_work
from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cluster_schema import COLLECTIVES, LINKS
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.plan import Planner, Settings
from ds_fsmoe.planning.decide.plan_requests import Degree, SearchSpace
from ds_fsmoe.planning.decide.search import Choice
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.measured import (
    ALL_GATHER,
    ALL_TO_ALL,
    BACKWARD,
    BACKWARD_ANEW,
    FORWARD,
    REDUCE_SCATTER,
    LayerProfile,
    Timing,
)
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import AllToAll, Layer

FREE = LinearCost(0.0, 0.0)
GROUPS = Groups(world=4, gpus_per_node=2, ep=2, esp=2)
# Every degree up to 8 divides the capacity, so equal shares are whole slots.
SIZES = CallShape(num_experts=4, capacity=840, width=13, dtype_bytes=4, num_products=1, num_weights=754)


def cluster(inter: float, intra: float, start_ms: float = 0.1, gemm: LinearCost = FREE) -> Cluster:
    """Two nodes of two ranks, of which two need ``inter`` or ``intra`` ms for a byte; processors take no time."""
    times = {"all_to_all": 1, "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    costs = {
        f"{link}.{name}": Operation(LinearCost(start_ms, slope * times[name]), 2)
        for link, slope in zip(LINKS, (inter, intra), strict=True)
        for name in COLLECTIVES
    }
    free = dict.fromkeys(("attention", "softmax", "routing", "order"), Operation(FREE))
    return Cluster("mine", 2, 2, costs | free | {"gemm": Operation(gemm)})


def line(alpha_ms: float, whole_ms: float, size: float) -> Timing:
    """Measured on a line: alpha, and what the whole capacity takes beyond it."""
    shares = (0.25, 0.5, 1.0)
    return Timing("byte", tuple(size * each for each in shares), tuple(alpha_ms + whole_ms * each for each in shares))


def made_up(seed: int = 0, is_written: bool = True, uses_rng: bool = False, task_ms: float = 0.0, **wholes: float):
    """Costs of a layer; each is (alpha, all of it) in ms."""
    chance = random.Random(seed)
    work = {backward: moe_work(GROUPS, backward, SIZES) for backward in (False, True)}
    sent, gathered = (each.size for each in work[False].ahead)
    flops = work[False].expert.size
    sizes = {ALL_TO_ALL: sent, ALL_GATHER: gathered, REDUCE_SCATTER: gathered, FORWARD: flops, BACKWARD: 2 * flops}
    sizes |= {} if is_written else {BACKWARD_ANEW: 2 * flops}
    drawn = {name: (chance.uniform(0.01, 0.3), chance.uniform(0.5, 8)) for name in sizes}
    operations = {
        name: line(drawn[name][0], wholes.get(name.replace(" ", "_"), drawn[name][1]), size)
        for name, size in sizes.items()
    }
    return LayerProfile(operations, task_ms, uses_rng)


@dataclass(frozen=True)
class Machine:
    """How lanes run tasks."""

    is_serial: bool = False
    issues_ahead: bool = False
    contention: Contention = IDEAL

    def planner(self) -> Planner:
        """A planner for it."""
        return Planner({}, Settings(self.contention, is_serial=self.is_serial))


def layer_of(profile: LayerProfile, machine: Machine = Machine(), alltoall: AllToAll = "flat", **more) -> Layer:
    """The layer as the planner sees it."""
    return layer_of_call(GROUPS, SIZES, profile.costs(machine.issues_ahead), alltoall, **more)


def choose_degrees(
    profile: LayerProfile,
    machine: Machine,
    space: SearchSpace,
    asked: tuple[Degree, Degree] = (None, None),
    links: str = "paper",
    shape: CallShape = SIZES,
) -> tuple[Choice, Choice]:
    """How it is run, forward and backward."""
    space = space if asked == (None, None) else space.with_degrees(*asked, links)
    layer = layer_of_call(GROUPS, shape, profile.costs(machine.issues_ahead))
    return machine.planner().choose(layer, space)

# SPDX-License-Identifier: Apache-2.0
"""Cut in any number of chunks, forward and backward differently, over any groups: the numbers stay those of the loop.

Float64 against the loop over tokens, to 1e-12; every case trains nothing and looks at every value and gradient.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe import LinearGate, SimpleOrder
from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.shards import shard_expert
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, Observer, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.layer.runtime import block_of
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from tests.covering import covering, every_case
from tests.layer_runs import token_path
from tests.ranks import run_on_ranks
from tests.reference import LayerSettings, moe_layer
from tests.samples import sampled
from tests.test_layer_against_loop import AUX_FACTOR, EXPERTS, Problem, make_problem
from tests.test_layer_against_loop import Case as LoopCase
from tests.waiting import pause

FORWARD, BACKWARD = (1, 2, 3, 4, 7), (1, 2, 3, 5)
DROP = LayerSettings(k=2, capacity_factor=1.1, min_capacity=2)
NO_DROP = LayerSettings(k=3, drop_tokens=False)
ORDERS = ("shared", "paper", "reduce_first")
LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1)]
"""(ranks, ep, esp); the fourth is the layout of the paper's figure 2."""
MORE_LAYOUTS = [(2, 1, 1), (4, 1, 4), (4, 2, 1), (8, 4, 2)]


@dataclass(frozen=True)
class Case:
    """How the layer is run."""

    forward: int
    backward: int
    expert: str = "gpt"
    settings: LayerSettings = DROP
    links: str = "paper"
    recompute: bool = False
    """Of the chunks of the forward, if they are not equal."""
    tokens: tuple[int, ...] = (23, 23, 23, 23, 23, 23, 23, 23)
    crowded: bool = False
    hidden: int = 29
    in_rows: bool = False


# Divisible by the 4 shards there are at the most, and by little else.
OF_SHARDS = 28


AXES = (FORWARD, BACKWARD, tuple(EXPERTS), (DROP, NO_DROP), ORDERS)


def can_be_sharded(expert: str) -> bool:
    return expert != "module"


def rows_of(cases: list[Case]) -> list[Case]:
    """The same cases on rows instead of slots."""
    return [replace(case, in_rows=True) for case in cases]


def in_layout(cases: list[Case], esp_size: int) -> list[Case]:
    return [replace(case, hidden=OF_SHARDS) for case in cases] if esp_size > 1 else cases


def every_degree(esp_size: int) -> list[Case]:
    """All pairs of degrees, the other axes taken in turn."""
    experts = itertools.cycle(each for each in EXPERTS if esp_size == 1 or can_be_sharded(each))
    others = itertools.cycle(itertools.product((DROP, NO_DROP), ORDERS))
    cases = [Case(*pair, next(experts), *next(others)) for pair in itertools.product(FORWARD, BACKWARD)]
    return in_layout(cases, esp_size)


def covering_cases(layout: tuple[int, int, int]) -> list[Case]:
    """Those of one layout, where the layouts together have every pair of values of two axes, theirs being one."""
    found = covering(LAYOUTS, *AXES, allowed=lambda at, f, b, expert, *_: at[2] == 1 or can_be_sharded(expert))
    return in_layout([Case(*values) for at, *values in found if at == layout], layout[2])


SPECIAL = [
    Case(4, 3, recompute=True),
    # Fewer slots than chunks; nobody, or everybody, at one expert; a rank with less than the others.
    Case(7, 5, settings=LayerSettings(k=1, drop_tokens=False), tokens=(1,) * 8),
    Case(3, 2, settings=NO_DROP, crowded=True),
    Case(2, 3, settings=NO_DROP, tokens=(23, 5, 11, 1, 23, 5, 11, 1)),
]


def problem_of(case: Case, world_size: int) -> Problem:
    return make_problem(
        LoopCase(case.settings, case.expert, 4, case.tokens, case.crowded, hidden=case.hidden), world_size
    )


@lru_cache(maxsize=32)
def by_loop(case: Case, world_size: int) -> tuple[Problem, list, list[torch.Tensor]]:
    """The problem, what the loop over tokens gives for each rank, and the loss of each rank."""
    problem = problem_of(case, world_size)
    for each in (*problem.x_per_rank, problem.weight_EM):
        each.requires_grad_()
    loops = moe_layer(problem.x_per_rank, problem.weight_EM, problem.experts, case.settings)
    losses = [
        (loop.output_SM * dy_SM).sum() + AUX_FACTOR * loop.aux_loss
        for loop, dy_SM in zip(loops, problem.dy_per_rank, strict=True)
    ]
    return problem, loops, losses


def as_if_one_chunk(case: Case) -> Case:
    """The part of a case on which the numbers may depend."""
    return Case(1, 1, case.expert, case.settings, tokens=case.tokens, crowded=case.crowded, hidden=case.hidden)


def local_experts(experts: list[nn.Module], groups: FSMoEGroups, ep: int, esp: int) -> list[nn.Module]:
    """Copies of those of this rank, or of its part of each."""
    block = groups.layout.group_of("blocks", groups.rank)
    ep_rank, shard = divmod(block.index(groups.rank), esp)
    each = len(experts) // ep
    mine = copy.deepcopy(experts[ep_rank * each : (ep_rank + 1) * each])
    return mine if esp == 1 else [shard_expert(expert, shard, esp)[0] for expert in mine]


def run_layer(case: Case, ep: int, esp: int, lanes: Lanes, observer: Observer | None = None) -> dict[str, Any]:
    """One forward and backward of this rank."""
    groups = make_groups(ep, esp)
    problem = problem_of(case, groups.layout.world_size)
    gate = LinearGate(**asdict(case.settings), top2_2nd_expert_sampling=False)
    gate.build_once(problem.weight_EM.shape[1], len(problem.experts))
    gate.double().load_state_dict({"wg.weight": problem.weight_EM})
    experts = local_experts(problem.experts, groups, ep, esp)
    plans = (
        PhasePlan(BlockPlan(case.forward, case.links), groups.planned, backward=False),
        PhasePlan(BlockPlan(case.backward, case.links), groups.planned, backward=True),
    )
    alltoall = FlatAllToAll()
    collectives = Collectives(
        alltoall.exchange,
        groups.ep_group,
        groups.esp_group,
        exchange_rows=alltoall.exchange_rows,
        block=block_of(groups),
    )
    pipeline = LayerPipeline(lanes, collectives, *plans, recompute=case.recompute, observer=observer)
    x_SM = problem.x_per_rank[groups.rank].requires_grad_()
    result = token_path(
        x_SM,
        None,
        gate=gate,
        order=SimpleOrder(),
        pipeline=pipeline,
        experts=ExpertSet(experts, keep_expert_dim=True),
        group=groups.block_group,
        in_rows=case.in_rows,
    )
    dy_SM = problem.dy_per_rank[groups.rank]
    ((result.output * dy_SM).sum() + AUX_FACTOR * result.aux_loss).backward()
    return {
        "output": result.output.detach(),
        "dx": x_SM.grad,
        "dgate": gate.wg.weight.grad,
        "dexperts": [parameter.grad for expert in experts for parameter in expert.parameters()],
    }


def expected(case: Case, ep: int, esp: int) -> dict[str, Any]:
    """The same by the loop."""
    groups = make_groups(ep, esp)
    problem, loops, losses = by_loop(as_if_one_chunk(case), groups.layout.world_size)
    rank = groups.rank
    parameters = [parameter for expert in problem.experts for parameter in expert.parameters()]
    loss = torch.stack([losses[each] for each in groups.layout.group_of("blocks", rank)]).sum()
    gradients = iter(torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True))
    # Shards of the gradients are the gradients of the shards.
    of_experts = copy.deepcopy(problem.experts)
    for expert in of_experts:
        for parameter in expert.parameters():
            parameter.data.copy_(next(gradients))
    dx, dgate = torch.autograd.grad(losses[rank], (problem.x_per_rank[rank], problem.weight_EM), retain_graph=True)
    mine = local_experts(of_experts, groups, ep, esp)
    return {
        "output": loops[rank].output_SM.detach(),
        "dx": dx,
        "dgate": dgate,
        "dexperts": [parameter.detach() for expert in mine for parameter in expert.parameters()],
    }


def worst_difference(ours: Any, theirs: Any) -> float:
    if isinstance(ours, list):
        assert len(ours) == len(theirs)
        return max(worst_difference(*pair) for pair in zip(ours, theirs, strict=True))
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item() if ours.numel() else 0.0


def compare(rank: int, world_size: int, cases: list[Case], ep: int, esp: int) -> list[str]:
    lanes, found = make_lanes(torch.device("cpu")), []
    for case in cases:
        ours, theirs = run_layer(case, ep, esp, lanes), expected(case, ep, esp)
        assert theirs["dx"].abs().max() > 1e-2
        found += [
            f"{case}: {name} differs by {worst_difference(ours[name], theirs[name]):.2g}"
            for name in ours
            if not worst_difference(ours[name], theirs[name]) < 1e-12
        ]
    lanes.close()
    return found


def assert_equal_to_the_loop(world_size: int, ep: int, esp: int, cases: list[Case], folder: Path) -> None:
    for rank, found in enumerate(run_on_ranks(compare, world_size, folder, cases, ep, esp)):
        assert not found, f"rank {rank}: {len(found)} of {len(cases)} cases: {found[:5]}"


@sampled(("world_size", "ep", "esp"), LAYOUTS, kept=[0, 3])
def test_backward_degree_may_differ_from_forward(world_size: int, ep: int, esp: int, tmp_path: Path) -> None:
    """Every pair of degrees in one process, and every pair of values of two axes over the layouts."""
    cases = covering_cases((world_size, ep, esp)) + in_layout(SPECIAL, esp)
    cases += every_degree(esp) if world_size == 1 else []
    assert_equal_to_the_loop(world_size, ep, esp, cases, tmp_path)


@sampled(("world_size", "ep", "esp"), LAYOUTS, kept=[3])
def test_rows_have_the_numbers_of_the_loop_whatever_the_degrees(
    world_size: int, ep: int, esp: int, tmp_path: Path
) -> None:
    cases = rows_of(covering_cases((world_size, ep, esp)) + in_layout(SPECIAL, esp))
    cases += rows_of(every_degree(esp)) if world_size == 1 else []
    assert_equal_to_the_loop(world_size, ep, esp, cases, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ep", "esp"), [*LAYOUTS, *MORE_LAYOUTS])
def test_every_pair_of_degrees_is_right_in_every_layout(world_size: int, ep: int, esp: int, tmp_path: Path) -> None:
    assert_equal_to_the_loop(world_size, ep, esp, every_degree(esp) + in_layout(SPECIAL, esp), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ep", "esp"), [*LAYOUTS, *MORE_LAYOUTS])
def test_every_pair_of_degrees_in_every_order_equals_the_loop(
    world_size: int, ep: int, esp: int, tmp_path: Path
) -> None:
    found = every_case(*AXES, allowed=lambda f, b, expert, *_: esp == 1 or can_be_sharded(expert))
    assert_equal_to_the_loop(world_size, ep, esp, in_layout([Case(*values) for values in found], esp), tmp_path)


class Delays(Observer):
    """Sleeps a random while at the start of a task, another one on every rank."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def begin(self, index: int, task: Any) -> None:
        pause(self.random, 0, 0, 0.001, 0.004)


def delayed(rank: int, world_size: int) -> int:
    lanes, serial = make_lanes(torch.device("cpu")), make_lanes(torch.device("cpu"), overlap=False)
    delays, different = Delays(rank), 0
    for number in range(200):
        sizes = (1, world_size) if number % 2 else (world_size, 1)
        case = Case(1 + number % 5, 1 + number % 4, links=ORDERS[number % 3], hidden=OF_SHARDS)
        ours, theirs = run_layer(case, *sizes, lanes, delays), run_layer(case, *sizes, serial)
        different += any(worst_difference(ours[name], theirs[name]) > 0 for name in ours)
    lanes.close()
    return different


@pytest.mark.slow
def test_whoever_is_late_the_numbers_are_those_of_one_task_after_another(tmp_path: Path) -> None:
    assert run_on_ranks(delayed, 2, tmp_path) == [0, 0]

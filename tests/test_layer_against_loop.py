# SPDX-License-Identifier: Apache-2.0
"""Cut in any number of chunks, forward and backward differently, over any ranks, a layer equals the loop over tokens.

Float64 against the loop, to 1e-12; every case trains nothing and looks at every value and gradient.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import GPTFeedForward, LinearGate, MixtralFeedForward, MOELayer, SimpleOrder
from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.shards import shard_expert
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.layer.runtime import block_of
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from tests.covering import covering
from tests.layer_runs import token_path
from tests.ranks import run_on_ranks
from tests.reference import LayerSettings, moe_layer
from tests.samples import sampled

M, H, S = 13, 29, 13
AUX_FACTOR = 0.37
FORWARD, BACKWARD = (1, 2, 3, 4, 7), (1, 2, 3, 5)
DROP = LayerSettings(k=2, capacity_factor=1.1, min_capacity=2)
NO_DROP = LayerSettings(k=3, drop_tokens=False)

EXPERTS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": lambda hidden: GPTFeedForward(M, hidden),
    "mixtral": lambda hidden: MixtralFeedForward(M, hidden),
    "module": lambda hidden: nn.Sequential(nn.Linear(M, hidden), nn.Tanh(), nn.Linear(hidden, M)),
}


@dataclass(frozen=True)
class LoopCase:
    """One layer, on any number of ranks."""

    settings: LayerSettings
    expert: str = "gpt"
    num_experts: int = 4
    tokens: tuple[int, int, int, int] = (S, S, S, S)
    """Of each rank; as many are used as there are ranks."""
    crowded: bool = False
    """Every token wants expert 1 first."""
    masked: bool = False
    """Some tokens take no part."""
    hidden: int = H
    degrees: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Problem:
    """Everything that goes into a case; all ranks make the same."""

    weight_EM: torch.Tensor
    experts: list[nn.Module]
    x_per_rank: list[torch.Tensor]
    dy_per_rank: list[torch.Tensor]
    used_per_rank: list[torch.Tensor | None]
    seeds: list[int]
    """What each rank's random stream starts from, just before its layer runs."""


def make_problem(case: LoopCase, world_size: int) -> Problem:
    torch.manual_seed(17)
    weight_EM = 0.4 * torch.randn(case.num_experts, M, dtype=torch.float64)
    experts = [EXPERTS[case.expert](case.hidden).double() for _ in range(case.num_experts)]
    tokens = case.tokens[:world_size]
    x_per_rank = [torch.randn(num_tokens, M, dtype=torch.float64) for num_tokens in tokens]
    if case.crowded:
        weight_EM[1, 0] = 4.5
        for x_SM in x_per_rank:
            x_SM[:, 0] = 2.0
    dy_per_rank = [torch.randn(num_tokens, M, dtype=torch.float64) for num_tokens in tokens]
    used_per_rank = [torch.rand(num_tokens) > 0.3 if case.masked else None for num_tokens in tokens]
    return Problem(
        weight_EM, experts, x_per_rank, dy_per_rank, used_per_rank, [900 + rank for rank in range(world_size)]
    )


def run_case(rank: int, world_size: int, case: LoopCase) -> dict[str, Any]:
    """What our layer computes on one rank: values, and gradients of a loss that has the auxiliary loss in it."""
    problem = make_problem(case, world_size)
    gate = LinearGate(**asdict(case.settings), top2_2nd_expert_sampling=False)
    group = dist.group.WORLD if world_size > 1 else None
    options = {"expert_impl": EXPERTS[case.expert](case.hidden), "group": group, "return_stats": True}
    options["pipeline_degree"] = case.degrees
    layer = MOELayer(gate, SimpleOrder(), model_dim=M, num_experts=case.num_experts, **options).double()
    state = {"gate.wg.weight": problem.weight_EM}
    for local in range(case.num_experts // world_size):
        expert = problem.experts[rank * (case.num_experts // world_size) + local]
        state |= {f"experts.experts.{local}.{name}": tensor for name, tensor in expert.state_dict().items()}
    layer.load_state_dict(state)

    x_SM = problem.x_per_rank[rank].requires_grad_()
    torch.manual_seed(problem.seeds[rank])
    result = layer(x_SM, problem.used_per_rank[rank])
    ((result.output * problem.dy_per_rank[rank]).sum() + AUX_FACTOR * result.aux_loss).backward()
    return {
        "output": result.output.detach(),
        "aux_loss": result.aux_loss.detach(),
        "counts": result.counts_E.tolist(),
        "dx": x_SM.grad,
        "dgate": layer.gate.wg.weight.grad,
        "dexperts": [parameter.grad for parameter in layer.experts.parameters()],
    }


def assert_equal_to_the_loop(case: LoopCase, of_ranks: list[dict[str, Any]]) -> None:
    problem = make_problem(case, len(of_ranks))
    priorities = []
    for seed, x_SM in zip(problem.seeds, problem.x_per_rank, strict=True):
        # Random token selection: one uniform number per token and expert, the largest stay.
        torch.manual_seed(seed)
        priorities.append(torch.rand(x_SM.shape[0], case.num_experts))
    inputs = [x_SM.requires_grad_() for x_SM in problem.x_per_rank]
    weight_EM = problem.weight_EM.requires_grad_()
    used = [None if used_S is None else used_S.tolist() for used_S in problem.used_per_rank]
    loops = moe_layer(inputs, weight_EM, problem.experts, case.settings, used, priorities)
    losses = [
        (loop.output_SM * dy_SM).sum() + AUX_FACTOR * loop.aux_loss
        for loop, dy_SM in zip(loops, problem.dy_per_rank, strict=True)
    ]
    parameters = [parameter for expert in problem.experts for parameter in expert.parameters()]
    gradients = torch.autograd.grad(
        torch.stack(losses).sum(), [*inputs, *parameters], retain_graph=True, materialize_grads=True
    )

    def check(ours: torch.Tensor, loops: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(ours, loops, rtol=0, atol=1e-12, msg=lambda text: f"{case}: {what}: {text}")

    for rank, (seen, loop) in enumerate(zip(of_ranks, loops, strict=True)):
        assert seen["counts"] == loop.counts_E
        check(seen["output"], loop.output_SM.detach(), f"output of rank {rank}")
        check(seen["aux_loss"], loop.aux_loss.detach(), f"auxiliary loss of rank {rank}")
        check(seen["dx"], gradients[rank], f"input gradient of rank {rank}")
        # The gate is not shared: a rank's own tokens are all that its gradient comes from.
        (dgate_EM,) = torch.autograd.grad(losses[rank], weight_EM, retain_graph=True)
        check(seen["dgate"], dgate_EM, f"gate gradient of rank {rank}")
    ours = [gradient for seen in of_ranks for gradient in seen["dexperts"]]
    assert len(ours) == len(parameters)
    for i, (ours_of_one, loops_of_one) in enumerate(zip(ours, gradients[len(inputs) :], strict=True)):
        check(ours_of_one, loops_of_one, f"gradient of expert parameter {i}")
    assert any(seen["output"].abs().max() > 1e-2 for seen in of_ranks)


def loop_cases() -> list[LoopCase]:
    found = covering((1, 2, 3), (True, False), tuple(EXPERTS), ("plain", "crowded", "masked"), ((1, 1), (3, 2)))
    return [
        LoopCase(
            LayerSettings(k, 0.6, 2) if drop else LayerSettings(k, drop_tokens=False),
            expert,
            8 if kind == "masked" else 4,
            crowded=kind == "crowded",
            masked=kind == "masked",
            degrees=degrees,
        )
        for k, drop, expert, kind, degrees in found
    ]


EVERYWHERE = [
    *loop_cases(),
    LoopCase(LayerSettings(3, 0.6, 2, drop_policy="position"), "module", 8),
    LoopCase(LayerSettings(4), "gpt"),
    LoopCase(LayerSettings(1, min_capacity=31), "gpt", 8),
]
ALONE = [
    LoopCase(LayerSettings(2), "gpt", 1 + 2, (1, 0, 0, 0)),
    LoopCase(LayerSettings(1), "gpt", 1),
    LoopCase(LayerSettings(3, 0.5), "mixtral", 7),
    # Every pair of degrees, the other axes in turn.
    *(
        LoopCase(settings, expert, degrees=degrees)
        for degrees, settings, expert in zip(
            itertools.product(FORWARD, BACKWARD), itertools.cycle((DROP, NO_DROP)), itertools.cycle(EXPERTS)
        )
    ),
]
# Dropless ranks may have different numbers of tokens: the capacity is agreed on.
SPREAD = [
    LoopCase(LayerSettings(k, drop_tokens=False), "gpt", num_experts, tokens)
    for k, num_experts, tokens in (
        (1, 4, (1, S, 7, 11)),
        (2, 8, (S, 1, S, 3)),
        (3, 4, (1, 1, 1, 1)),
        (2, 4, (S, 1, 1, 2)),
    )
]


def run_cases(rank: int, world_size: int, cases: list[LoopCase]) -> list[dict[str, Any]]:
    return [run_case(rank, world_size, case) for case in cases]


@pytest.mark.parametrize("case", EVERYWHERE + ALONE, ids=str)
def test_one_process_equals_the_loop_over_tokens(case: LoopCase) -> None:
    of_rank = run_case(0, 1, case)
    assert_equal_to_the_loop(case, [of_rank])
    if case.crowded:
        assert of_rank["counts"][1] == S
        assert case.settings.k > 1 or sum(of_rank["counts"]) == S


def test_experts_spread_over_ranks_equal_the_loop_over_tokens(tmp_path: Path) -> None:
    cases = EVERYWHERE + SPREAD
    found = run_on_ranks(run_cases, 4, tmp_path, cases)
    for case, *of_ranks in zip(cases, *found, strict=True):
        assert_equal_to_the_loop(case, of_ranks)


def capacity_without_dropping(rank: int, world_size: int, tokens: list[int]) -> tuple[int, list[int]]:
    """(capacity, counts) of a rank that has so many tokens."""
    torch.manual_seed(5)
    gate = LinearGate(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    gate.build(M, 4)
    x_SM = torch.randn(tokens[rank], M, generator=torch.Generator().manual_seed(rank))
    routing = gate(x_SM, None, dist.group.WORLD)
    return routing.capacity, routing.counts_E.tolist()


def test_without_dropping_all_ranks_agree_on_the_largest_count_of_any(tmp_path: Path) -> None:
    seen = run_on_ranks(capacity_without_dropping, 4, tmp_path, [3, S, 1, 11])
    largest = max(count for _, counts in seen for count in counts)
    assert [capacity for capacity, _ in seen] == [largest] * 4
    assert largest > max(seen[0][1])


# ---- in chunks

ORDERS = ("shared", "paper", "reduce_first")
LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1)]
"""(ranks, ep, esp); the fourth is the layout of the paper's figure 2."""
EVERY_LAYOUT = [*LAYOUTS, (2, 1, 1), (4, 1, 4), (4, 2, 1), (8, 4, 2)]


@dataclass(frozen=True)
class Case:
    """How the layer is run."""

    forward: int
    backward: int
    expert: str = "gpt"
    settings: LayerSettings = DROP
    links: str = "paper"
    in_rows: bool = False
    recompute: bool = False
    """Of the chunks of the forward, if they are not equal."""
    tokens: tuple[int, ...] = (S,) * 8
    crowded: bool = False
    hidden: int = H


# Divisible by the 4 shards there are at the most, and by little else.
OF_SHARDS = 28


AXES = (FORWARD, BACKWARD, tuple(EXPERTS), (DROP, NO_DROP), ORDERS, (False, True), (False, True))


def can_be_sharded(expert: str) -> bool:
    return expert != "module"


def in_layout(cases: list[Case], esp_size: int) -> list[Case]:
    return [replace(case, hidden=OF_SHARDS) for case in cases] if esp_size > 1 else cases


def covering_cases(layout: tuple[int, int, int]) -> list[Case]:
    """Those of one layout, where the layouts together have every pair of values of two axes, theirs being one."""
    found = covering(EVERY_LAYOUT, *AXES, allowed=lambda at, f, b, expert, *_: at[2] == 1 or can_be_sharded(expert))
    return in_layout([Case(*values) for at, *values in found if at == layout], layout[2])


SPECIAL = [
    Case(4, 3, recompute=True),
    # Fewer slots than chunks; nobody, or everybody, at one expert; a rank with less than the others.
    Case(7, 5, settings=LayerSettings(k=1, drop_tokens=False), tokens=(1,) * 8),
    Case(3, 2, settings=NO_DROP, crowded=True),
    Case(2, 3, settings=NO_DROP, tokens=(S, 5, 11, 1) * 2),
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


def run_layer(case: Case, ep: int, esp: int, lanes: Lanes) -> dict[str, Any]:
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
    pipeline = LayerPipeline(lanes, collectives, *plans, recompute=case.recompute)
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


@sampled(("world_size", "ep", "esp"), EVERY_LAYOUT)
def test_chunks_change_no_number(world_size: int, ep: int, esp: int, tmp_path: Path) -> None:
    """Every pair of values of two axes over the layouts; rows and slots of the special cases."""
    cases = covering_cases((world_size, ep, esp))
    cases += [replace(case, in_rows=in_rows) for case in in_layout(SPECIAL, esp) for in_rows in (False, True)]
    for rank, found in enumerate(run_on_ranks(compare, world_size, tmp_path, cases, ep, esp)):
        assert not found, f"rank {rank}: {len(found)} of {len(cases)} cases: {found[:5]}"

# SPDX-License-Identifier: Apache-2.0
"""Expert choice and SoftMoE over any groups, cut in any number of chunks: values and gradients are the plain loops'."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.gates.expert_choice import ExpertChoiceGate
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.execution.tensor_parallel import TensorParallelTokens
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from tests.layer_runs import token_path
from tests.ranks import run_on_ranks
from tests.reference import LayerSettings, capacity_of
from tests.samples import sampled
from tests.slot_gate_loops import expert_choice_layer, softmoe_layer
from tests.test_layer_against_loop import LAYOUTS, LoopCase, M, Problem, local_experts, make_problem, worst_difference

NUM_EXPERTS = 4


@dataclass(frozen=True)
class Case:
    """How a layer is run."""

    gate: str
    options: dict[str, Any] = field(default_factory=dict)
    forward: int = 1
    backward: int = 1
    order: str = "auto"
    links: str = "reduce_first"
    recompute: bool = False
    tokens: tuple[int, ...] = (23, 23, 23, 23)
    masked: bool = False
    expert: str = "gpt"

    def of_slots(self) -> int:
        """The router's rows."""
        return NUM_EXPERTS * self.options.get("slots_per_expert", 1)


AT_2 = {"k": 2, "capacity_factor": 1.1}
CASES = [
    Case("expert_choice", AT_2),
    Case("expert_choice", AT_2, 3, 2, masked=True),
    Case("expert_choice", AT_2, 2, 5, "einsum", "paper"),
    Case("expert_choice", {}, 7, 3, links="shared", recompute=True, masked=True, expert="mixtral"),
    Case("expert_choice", {**AT_2, "agree_capacity": True}, 3, 2, tokens=(23, 5, 11, 1), masked=True),
    Case("softmoe", {"slots_per_expert": 5}),
    Case("softmoe", {"slots_per_expert": 5}, 2, 3, masked=True),
    Case("softmoe", {"slots_per_expert": 5}, 7, 2, links="paper", tokens=(23, 5, 11, 1)),
    Case("softmoe", {}, 3, 2, recompute=True, expert="mixtral"),
    Case("softmoe", {"slots_per_expert": 3}, 3, 5, links="shared", masked=True),
]


def problem_of(case: Case, world_size: int) -> Problem:
    settings = LayerSettings()
    problem = make_problem(
        LoopCase(settings, case.expert, NUM_EXPERTS, case.tokens, masked=case.masked, hidden=28), world_size
    )
    generator = torch.Generator().manual_seed(3)
    return replace(problem, weight_EM=torch.randn(case.of_slots(), M, generator=generator, dtype=torch.float64))


def by_loop(case: Case, x_SM: torch.Tensor, used_S: torch.Tensor | None, problem: Problem) -> torch.Tensor:
    """The output for the tokens of one rank."""
    if case.gate == "softmoe":
        slots_per_expert = case.options.get("slots_per_expert", 1)
        return softmoe_layer(x_SM, problem.weight_EM, problem.experts, slots_per_expert, used_S)
    settings = LayerSettings(case.options.get("k", 1), case.options.get("capacity_factor", 1.0), 0)
    num_taken = min(len(x_SM), capacity_of(len(x_SM), NUM_EXPERTS, settings))
    return expert_choice_layer(x_SM, problem.weight_EM, problem.experts, num_taken, used_S)[0]


def make_gate(case: Case, problem: Problem) -> GateBase:
    gate = registry.lookup("gate", case.gate)(**case.options)
    gate.build_once(M, NUM_EXPERTS)
    gate.double().load_state_dict({"wg.weight": problem.weight_EM.detach()})
    return gate


def run_layer(
    case: Case,
    problem: Problem,
    groups: FSMoEGroups,
    experts: list[nn.Module],
    lanes: Lanes,
    number: int,
    duplicates: TensorParallelTokens | None = None,
) -> dict[str, Any]:
    """One forward and backward with the tokens of one rank of the problem."""
    gate = make_gate(case, problem)
    plans = (
        PhasePlan(BlockPlan(case.forward, case.links), groups.planned, backward=False),
        PhasePlan(BlockPlan(case.backward, case.links), groups.planned, backward=True),
    )
    collectives = Collectives(FlatAllToAll().exchange, groups.ep_group, groups.esp_group)
    x_SM = problem.x_per_rank[number].clone().requires_grad_()
    result = token_path(
        x_SM,
        problem.used_per_rank[number],
        gate=gate,
        order=registry.lookup("order", gate.gives.order if case.order == "auto" else case.order)(),
        pipeline=LayerPipeline(lanes, collectives, *plans, recompute=case.recompute),
        experts=ExpertSet(experts, keep_expert_dim=True),
        group=groups.block_group,
        duplicates=duplicates,
    )
    (result.output * problem.dy_per_rank[number]).sum().backward()
    return {
        "output": result.output.detach(),
        "dx": x_SM.grad,
        "dgate": gate.wg.weight.grad,
        "dexperts": [parameter.grad for expert in experts for parameter in expert.parameters()],
    }


def expected(case: Case, problem: Problem, numbers: list[int], number: int) -> tuple[dict[str, Any], list[nn.Module]]:
    """The same by the loops; the experts' gradients, which come from all ``numbers``, as copies of the experts."""
    inputs = [x_SM.clone().requires_grad_() for x_SM in problem.x_per_rank]
    weight_EM = problem.weight_EM.requires_grad_()
    outputs = {
        each: by_loop(case, inputs[each], problem.used_per_rank[each], problem) for each in sorted({*numbers, number})
    }
    losses = {each: (output * problem.dy_per_rank[each]).sum() for each, output in outputs.items()}
    parameters = [parameter for expert in problem.experts for parameter in expert.parameters()]
    of_parameters = iter(
        torch.autograd.grad(
            sum(losses[each] for each in numbers),
            parameters,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
    )
    of_experts = copy.deepcopy(problem.experts)
    for expert in of_experts:
        for parameter in expert.parameters():
            parameter.data.copy_(next(of_parameters))
    dx, dgate = torch.autograd.grad(losses[number], (inputs[number], weight_EM))
    return {"output": outputs[number].detach(), "dx": dx, "dgate": dgate}, of_experts


def parameters_of(experts: list[nn.Module]) -> list[torch.Tensor]:
    return [parameter.detach() for expert in experts for parameter in expert.parameters()]


def differing(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    assert theirs["dx"].abs().max() > 1e-2
    assert theirs["dgate"].abs().max() > 1e-2
    return [
        f"{case}: {name} differs by {worst_difference(ours[name], theirs[name]):.2g}"
        for name in ours
        if not worst_difference(ours[name], theirs[name]) < 1e-12
    ]


def compare(rank: int, world_size: int, ep: int, esp: int) -> list[str]:
    lanes, found = make_lanes(torch.device("cpu")), []
    groups = make_groups(ep, esp)
    for case in CASES:
        problem = problem_of(case, world_size)
        ours = run_layer(case, problem, groups, local_experts(problem.experts, groups, ep, esp), lanes, rank)
        theirs, of_experts = expected(case, problem, list(groups.layout.group_of("blocks", rank)), rank)
        # Shards of the gradients are the gradients of the shards.
        theirs["dexperts"] = parameters_of(local_experts(of_experts, groups, ep, esp))
        found += differing(case, ours, theirs)
    lanes.close()
    return found


@sampled(("world_size", "ep", "esp"), LAYOUTS, kept=[3])
def test_in_every_layout_the_layer_equals_the_plain_loop(world_size: int, ep: int, esp: int, tmp_path: Path) -> None:
    for rank, found in enumerate(run_on_ranks(compare, world_size, tmp_path, ep, esp)):
        assert not found, f"rank {rank}: {found}"


def compare_duplicates(rank: int, world_size: int) -> list[str]:
    """Ranks that have the same tokens, as tensor-parallel ones do: each sends its part of the slots."""
    lanes, found = make_lanes(torch.device("cpu")), []
    groups = make_groups(world_size, 1)
    for case in CASES:
        problem = problem_of(case, 1)
        experts = local_experts(problem.experts, groups, world_size, 1)
        ours = run_layer(case, problem, groups, experts, lanes, 0, TensorParallelTokens(dist.group.WORLD))
        theirs, of_experts = expected(case, problem, [0], 0)
        theirs["dexperts"] = parameters_of(local_experts(of_experts, groups, world_size, 1))
        found += differing(case, ours, theirs)
    lanes.close()
    return found


@sampled("world_size", [2, 4], kept=[0])
def test_ranks_with_the_same_tokens_share_the_slots_out(world_size: int, tmp_path: Path) -> None:
    # 13 or 5 slots over 2 and 4 ranks: some rows are no slot's.
    for rank, found in enumerate(run_on_ranks(compare_duplicates, world_size, tmp_path)):
        assert not found, f"rank {rank}: {found}"


def agreed_capacity(rank: int, world_size: int, tokens: list[int]) -> tuple[int, list[int], int]:
    """(capacity, counts, empty slots) of a rank that has so many tokens."""
    gate = ExpertChoiceGate(k=2, agree_capacity=True)
    gate.build(M, NUM_EXPERTS)
    routing = gate(torch.randn(tokens[rank], M), None, dist.group.WORLD)
    return routing.capacity, routing.counts_E.tolist(), int((routing.tokens_R == tokens[rank]).sum())


def test_ranks_with_different_numbers_of_tokens_agree_on_the_largest_capacity(tmp_path: Path) -> None:
    seen = run_on_ranks(agreed_capacity, 4, tmp_path, [3, 23, 1, 11])
    assert [capacity for capacity, _, _ in seen] == [12] * 4
    # What an expert takes of a rank's tokens does not depend on those of others.
    assert [counts for _, counts, _ in seen] == [[each] * 4 for each in (2, 12, 1, 6)]
    assert [empty for _, _, empty in seen] == [4 * (12 - each) for each in (2, 12, 1, 6)]

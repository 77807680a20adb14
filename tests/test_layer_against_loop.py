# SPDX-License-Identifier: Apache-2.0
"""The layer in float64 equals the loop over tokens to 1e-12: values and every gradient, on 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import GPTFeedForward, LinearGate, MixtralFeedForward, MOELayer, SimpleOrder
from tests.ranks import run_on_ranks
from tests.reference import LayerSettings, moe_layer

M, H, S = 13, 29, 23
AUX_FACTOR = 0.37

EXPERTS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": lambda hidden: GPTFeedForward(M, hidden),
    "mixtral": lambda hidden: MixtralFeedForward(M, hidden),
    "module": lambda hidden: nn.Sequential(nn.Linear(M, hidden), nn.Tanh(), nn.Linear(hidden, M)),
}


@dataclass(frozen=True)
class Case:
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


def make_problem(case: Case, world_size: int) -> Problem:
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


def run_case(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """What our layer computes on one rank: values, and gradients of a loss that has the auxiliary loss in it."""
    problem = make_problem(case, world_size)
    gate = LinearGate(**asdict(case.settings), top2_2nd_expert_sampling=False)
    group = dist.group.WORLD if world_size > 1 else None
    options = {"expert_impl": EXPERTS[case.expert](case.hidden), "group": group, "return_stats": True}
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


def assert_equal_to_the_loop(case: Case, of_ranks: list[dict[str, Any]]) -> None:
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
        torch.testing.assert_close(ours, loops, rtol=0, atol=1e-12, msg=lambda text: f"{what}: {text}")

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


def drop_or_not(k: int) -> list[LayerSettings]:
    return [LayerSettings(k, 0.6, 2), LayerSettings(k, drop_tokens=False)]


EVERYWHERE = [Case(settings, expert) for k in (1, 2, 3) for settings in drop_or_not(k) for expert in EXPERTS]
EVERYWHERE += [Case(settings, crowded=True) for k in (1, 2, 3) for settings in drop_or_not(k)]
EVERYWHERE += [Case(settings, "mixtral", 8, masked=True) for k in (1, 2, 3) for settings in drop_or_not(k)]
EVERYWHERE += [Case(LayerSettings(3, 0.6, 2, drop_policy="position"), "module", 8)]
EVERYWHERE += [Case(LayerSettings(4), "gpt"), Case(LayerSettings(1, min_capacity=31), "gpt", 8)]
ALONE = [
    Case(LayerSettings(2), "gpt", 1 + 2, (1, 0, 0, 0)),
    Case(LayerSettings(1), "gpt", 1),
    Case(LayerSettings(3, 0.5), "mixtral", 7),
]
# Dropless ranks may have different numbers of tokens: the capacity is agreed on.
SPREAD = [
    Case(LayerSettings(k, drop_tokens=False), "gpt", num_experts, tokens)
    for k, num_experts, tokens in (
        (1, 4, (1, S, 7, 11)),
        (2, 8, (S, 1, S, 3)),
        (3, 4, (1, 1, 1, 1)),
        (2, 4, (S, 1, 1, 2)),
    )
]


@pytest.mark.parametrize("case", EVERYWHERE + ALONE, ids=str)
def test_one_process_equals_the_loop_over_tokens(case: Case) -> None:
    assert_equal_to_the_loop(case, [run_case(0, 1, case)])


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [run_case(rank, world_size, case) for case in cases]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 4], ids="{} ranks".format)
def of_ranks_by_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list]:
    cases = EVERYWHERE + SPREAD
    of_ranks = run_on_ranks(run_cases, request.param, tmp_path_factory.mktemp("ranks"), cases)
    return dict(zip(cases, zip(*of_ranks, strict=True), strict=True))


@pytest.mark.parametrize("case", EVERYWHERE + SPREAD, ids=str)
def test_experts_spread_over_ranks_equal_the_loop_over_tokens(case: Case, of_ranks_by_case: dict[Case, list]) -> None:
    assert_equal_to_the_loop(case, list(of_ranks_by_case[case]))


def test_the_crowded_cases_are_crowded() -> None:
    for case in EVERYWHERE:
        if case.crowded:
            counts = run_case(0, 1, case)["counts"]
            assert counts[1] == S
            assert case.settings.k > 1 or sum(counts) == S


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

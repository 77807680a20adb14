# SPDX-License-Identifier: Apache-2.0
"""The layer equals a plain loop over tokens: by hand and in fp64 to 1e-12, and trained by DeepSpeed in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe import GPTFeedForward, LinearGate, MixtralFeedForward, MOELayer, SimpleOrder
from tests.ranks import run_on_ranks
from tests.reference import Formula, moe_layer
from tests.small_model import NUM_EXPERTS, WIDTH, Case, SmallModel, batch

# Tokens of each rank, all different: a rank may have few.
M, H, E = 13, 29, 4
TOKENS_OF_RANK = (23, 23, 23, 23)

FORMULAS = [
    Formula(k=1, drop_tokens=False),
    Formula(k=1, capacity_factor=1.1, min_capacity=4),
    Formula(k=2, drop_tokens=False),
    Formula(k=2, capacity_factor=0.7, min_capacity=1),
    Formula(k=3, drop_tokens=False),
    Formula(k=3, capacity_factor=0.7, min_capacity=1),
    Formula(k=3, capacity_factor=0.7, min_capacity=1, drop_policy="position"),
    Formula(k=4, capacity_factor=1.0, min_capacity=4),
]
EXPERTS = {
    "gpt": lambda: GPTFeedForward(M, H, activation="silu"),
    "mixtral": lambda: MixtralFeedForward(M, H),
    "module": lambda: nn.Sequential(nn.Linear(M, H), nn.Tanh(), nn.Linear(H, M)),
}


def settings_of(formula: Formula) -> dict[str, Any]:
    """The gate's settings for a formula, without chance."""
    return {
        "k": formula.k,
        "capacity_factor": formula.capacity_factor,
        "min_capacity": formula.min_capacity,
        "drop_tokens": formula.drop_tokens,
        "drop_policy": formula.drop_policy,
        "use_rts": False,
        "top2_2nd_expert_sampling": False,
    }


def whole_problem(expert: str, crowded: bool) -> tuple[torch.Tensor, list[nn.Module], list[torch.Tensor], list]:
    """Router [E, M], all experts, and tokens and output gradients of every rank, in fp64."""
    torch.manual_seed(7)
    weight_EM = torch.randn(E, M, dtype=torch.double)
    if crowded:  # every token prefers expert 2 by far, so the others get none (k = 1) or few
        weight_EM[2] = 1.3
    experts = [EXPERTS[expert]().double() for _ in range(E)]
    tokens = [torch.randn(count, M, dtype=torch.double) for count in TOKENS_OF_RANK]
    if crowded:
        tokens = [each.abs() for each in tokens]
    return weight_EM, experts, tokens, [torch.randn_like(each) for each in tokens]


def run_layer(rank: int, world_size: int, formula: Formula, expert: str, crowded: bool) -> dict[str, Any]:
    """What the layer computes on one rank, as numbers."""
    weight_EM, experts, tokens, gradients = whole_problem(expert, crowded)
    group = dist.group.WORLD if world_size > 1 else None
    layer = MOELayer(
        LinearGate(**settings_of(formula)),
        SimpleOrder(),
        model_dim=M,
        num_experts=E,
        expert_impl=experts[0],
        group=group,
        return_stats=True,
    ).double()
    with torch.no_grad():
        layer.gate.wg.weight.copy_(weight_EM)
        for local, mine in enumerate(layer.experts.experts):
            mine.load_state_dict(experts[rank * layer.num_local_experts + local].state_dict())
    x_SM = tokens[rank].clone().requires_grad_()
    routing = layer.gate(x_SM, None, group)
    result = layer(x_SM)
    (result.output * gradients[rank]).sum().add(result.aux_loss).backward()
    return {
        "output": result.output.detach(),
        "aux": result.aux_loss.detach(),
        "counts": result.counts_E.tolist(),
        "kept tokens": sorted(
            s for s in range(len(x_SM)) for choice in routing.slots_KS[:, s].tolist() if choice < routing.num_slots
        ),
        "dx": x_SM.grad,
        "dgate": layer.gate.wg.weight.grad,
        "dexperts": [[p.grad for p in mine.parameters()] for mine in layer.experts.experts],
    }


def check_against_loop(seen: list[dict[str, Any]], formula: Formula, expert: str, crowded: bool) -> None:
    """Hold what the ranks computed against the loop, run once for all of them."""
    weight_EM, experts, tokens, gradients = whole_problem(expert, crowded)
    weight_EM.requires_grad_()
    loss = torch.zeros((), dtype=torch.double)
    inputs = []
    for rank, of_rank in enumerate(seen):
        x_SM = tokens[rank].clone().requires_grad_()
        kept_by_k1 = of_rank["kept tokens"] if formula.k == 1 and formula.drop_tokens else None
        answer = moe_layer(x_SM, weight_EM, experts, formula, kept_by_k1)
        torch.testing.assert_close(of_rank["output"], answer.output_SM.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(of_rank["aux"], answer.aux_loss.detach(), rtol=0, atol=1e-12)
        assert of_rank["counts"] == answer.counts_E
        assert len(of_rank["kept tokens"]) == len(answer.kept)
        loss = loss + (answer.output_SM * gradients[rank]).sum() + answer.aux_loss
        inputs.append(x_SM)
        # Each rank's own router gradient, from its own tokens.
        own_loss = (answer.output_SM * gradients[rank]).sum() + answer.aux_loss
        (own,) = torch.autograd.grad(own_loss, weight_EM, retain_graph=True)
        torch.testing.assert_close(of_rank["dgate"], own, rtol=0, atol=1e-11)
    parameters = [p for each in experts for p in each.parameters()]
    expected = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True)
    for of_rank, dx in zip(seen, expected, strict=False):
        torch.testing.assert_close(of_rank["dx"], dx, rtol=0, atol=1e-11)
    got = [gradient for of_rank in seen for mine in of_rank["dexperts"] for gradient in mine]
    for gradient, wanted, parameter in zip(got, expected[len(inputs) :], parameters, strict=True):
        wanted = torch.zeros_like(parameter) if wanted is None else wanted
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.parametrize("formula", FORMULAS, ids=str)
def test_one_process_equals_the_loop(formula: Formula, expert: str, crowded: bool) -> None:
    check_against_loop([run_layer(0, 1, formula, expert, crowded)], formula, expert, crowded)


def run_layers(rank: int, world_size: int, cases: list) -> list:
    return [run_layer(rank, world_size, *case) for case in cases]


@pytest.mark.parametrize("world_size", [2, 4])
def test_experts_spread_over_ranks_equal_the_loop(world_size: int, tmp_path: Path) -> None:
    cases = [(formula, name, crowded) for formula in FORMULAS for name in EXPERTS for crowded in (False, True)]
    for case, *seen in zip(cases, *run_on_ranks(run_layers, world_size, tmp_path, cases), strict=True):
        check_against_loop(seen, *case)


LEARNING_RATE, STEPS = 0.5, 5


def train_with_deepspeed(rank: int, world_size: int, cases: list[Case]) -> list[tuple[list[float], dict]]:
    """Losses and final parameters (by global name) of our layer under DeepSpeed, fp32."""
    import ds_fsmoe

    results = []
    for case in cases:
        model = SmallModel(case, rank)
        config = case.ds_config(fsmoe={"enabled": True}, gradient_clipping=0.0)
        engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        losses = []
        for step in range(STEPS * case.accumulation):
            loss, _ = engine(*batch(step, rank, torch.float32))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        first_expert = rank % case.ep_size * (NUM_EXPERTS // case.ep_size)
        parameters = {global_name(n, first_expert): p.detach().clone() for n, p in model.named_parameters()}
        results.append((losses, parameters))
        engine.destroy()
    return results


def global_name(name: str, first_expert: int) -> str:
    parts = name.split(".")
    if "deepspeed_experts" in parts:
        at = parts.index("deepspeed_experts") + 1
        parts[at] = str(first_expert + int(parts[at]))
    return ".".join(parts)


class LoopModel(nn.Module):
    """The small model with every expert in one process, in fp64, its MoE layers as loops over tokens."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.whole = SmallModel(replace(case, ep_size=1), rank=0).double()
        self.formula = Formula(case.k, 1.25, 4, case.drop_tokens)
        self.case = case

    def layer(self, number: int, x_BLM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moe = self.whole.moes[number]
        inner = moe.deepspeed_moe
        x_SM = x_BLM.reshape(-1, WIDTH)
        answer = moe_layer(x_SM, inner.gate.wg.weight, list(inner.experts.deepspeed_experts), self.formula)
        y_SM = answer.output_SM
        if self.case.use_residual:
            share = torch.softmax(moe.coefficient(x_SM), dim=-1)
            y_SM = y_SM * share[:, :1] + moe.mlp(x_SM) * share[:, 1:]
        return y_SM.reshape(x_BLM.shape), answer.aux_loss

    def forward(self, x_BLM: torch.Tensor, target_BLM: torch.Tensor) -> torch.Tensor:
        y_BLM, aux_first = self.layer(0, self.whole.first(x_BLM))
        y_BLM, aux_second = self.layer(1, x_BLM + torch.tanh(self.whole.middle(y_BLM)))
        return ((y_BLM - target_BLM) ** 2).mean() + 0.01 * (aux_first + aux_second)


def train_loop(case: Case, world_size: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses of every rank and final parameters, all ranks' batches averaged in one process, by hand-written SGD."""
    model = LoopModel(case)
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        model.zero_grad()
        for micro in range(case.accumulation):
            for rank in range(world_size):
                x_BLM, target_BLM = batch(step * case.accumulation + micro, rank, torch.float64)
                loss = model(x_BLM, target_BLM)
                (loss / (world_size * case.accumulation)).backward()
                losses[rank].append(loss.item())
        with torch.no_grad():
            for parameter in model.whole.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    return losses, {name: p.detach() for name, p in model.whole.named_parameters()}


# k = 1 is run dropless: who stays in a full expert is no formula. The others drop.
TRAINED = [
    Case(stage=0, k=1, drop_tokens=False),
    Case(stage=1, k=2, accumulation=3, use_residual=True),
    Case(stage=2, k=3, drop_tokens=True),
    Case(stage=1, k=1, drop_tokens=False, use_residual=True),
    Case(stage=2, k=2, drop_tokens=False),
]


@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_training_with_deepspeed_equals_training_by_loop(world_size: int, ep_size: int, tmp_path: Path) -> None:
    options = (("top2_2nd_expert_sampling", False), ("use_rts", False))
    cases = [replace(case, ep_size=ep_size, moe_options=options) for case in TRAINED]
    ranks = run_on_ranks(train_with_deepspeed, world_size, tmp_path, cases)
    for number, case in enumerate(cases):
        losses, parameters = train_loop(case, world_size)
        for rank in range(world_size):
            seen_losses, seen_parameters = ranks[rank][number]
            torch.testing.assert_close(torch.tensor(seen_losses), torch.tensor(losses[rank]), rtol=2e-5, atol=1e-6)
            for name, value in seen_parameters.items():
                torch.testing.assert_close(value.double(), parameters[name], rtol=2e-5, atol=2e-6, msg=f"{case} {name}")


def test_the_loop_notices_a_gradient_scaled_wrongly() -> None:
    case = Case(k=2, drop_tokens=False, moe_options=(("top2_2nd_expert_sampling", False),))
    _, right = train_loop(case, 2)
    _, wrong = train_loop(replace(case, accumulation=2), 1)
    name = "moes.0.deepspeed_moe.experts.deepspeed_experts.0.fc1.weight"
    assert not torch.allclose(right[name], wrong[name], rtol=2e-5, atol=2e-6)

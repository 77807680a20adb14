# SPDX-License-Identifier: Apache-2.0
"""Short trainings with every gate on one process: the loss falls and the load comes nearer to balance. And the bias of
the deepseek gate: what it counts, how it moves, and what becomes of it in casts and state dicts."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fsmoe import DeepSeekGate, GPTFeedForward, MOELayer, SimpleOrder, registry, update_gates
from ds_fsmoe.components.routing import kind_of
from tests.samples import sampled

M, E, S = 13, 5, 211
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek": {"k": 2, "bias_update_speed": 0.01},
    "topk": {"k": 2},
    "sigmoid": {"k": 2},
    "expert_choice": {"k": 2},
    "softmoe": {"slots_per_expert": 7},
}


def imbalance(counts_E: torch.Tensor) -> float:
    """The fullest expert over the mean; 1 is balance."""
    return (counts_E.max() / counts_E.double().mean()).item()


def train(name: str, steps: int = 150) -> tuple[list[float], list[float]]:
    """(losses, imbalances), one of each per step. The tokens are much alike, so they all want the same experts.

    What evens the load of deepseek is its bias alone.
    """
    torch.manual_seed(2)
    gate = registry.lookup("gate", name)(**OPTIONS.get(name, {}))
    order = registry.lookup("order", kind_of(gate).order)()
    layer = MOELayer(gate, order, model_dim=M, num_experts=E, expert_impl=GPTFeedForward(M, 29), return_stats=True)
    common_M, teacher = 1.5 * torch.randn(M), nn.Sequential(nn.Linear(M, 19), nn.Tanh(), nn.Linear(19, M))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    losses, imbalances = [], []
    for step in range(steps):
        x_SM = torch.randn(S, M, generator=torch.Generator().manual_seed(step)) + common_M
        result = layer(x_SM)
        assert name != "deepseek" or result.aux_loss == 0
        loss = (result.output - teacher(x_SM).detach()).square().mean()
        optimizer.zero_grad()
        (loss + 0.05 * result.aux_loss).backward()
        optimizer.step()
        update_gates([gate])
        losses.append(loss.item())
        imbalances.append(imbalance(result.counts_E))
    return losses, imbalances


GATES = registry.known("gate")


@sampled("name", GATES, kept=[GATES.index("deepseek")], drawn=2)
def test_the_loss_falls_and_the_load_comes_nearer_to_balance(name: str) -> None:
    losses, imbalances = train(name)
    assert fmean(losses[-10:]) < 0.7 * fmean(losses[:10])
    first, last = fmean(imbalances[:5]), fmean(imbalances[-10:])
    if kind_of(registry.lookup("gate", name)).order == "sparse" and name != "expert_choice":
        assert first > 1.3
        assert last < 1 + 0.75 * (first - 1)
    else:
        # Where slots choose, no expert ever has more than another.
        assert first == last == 1.0


# ---- the bias of deepseek


def make(num_experts: int = 6, **options: Any) -> DeepSeekGate:
    torch.manual_seed(0)
    gate = DeepSeekGate(**options)
    gate.build_once(M, num_experts)
    return gate


def crowd() -> torch.Tensor:
    """[97, M] tokens that are much alike, so that a router sends most of them to the same experts."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(97, M, generator=generator) + 2.0 * torch.randn(M, generator=generator)


def test_forwards_in_training_are_counted_once_and_no_others() -> None:
    gate, x_SM = make(k=2, capacity_factor=0.3, min_capacity=0), crowd()
    used_S = torch.arange(97) % 3 > 0
    first, second = gate(x_SM), gate(x_SM[:41], used_S[:41])
    assert torch.equal(gate.counts_to_sum(), first.counts_E + second.counts_E)
    gate.eval()(x_SM)
    assert torch.equal(gate.counts_to_sum(), first.counts_E + second.counts_E)
    update_gates([gate])
    assert gate.counts_to_sum().sum() == 0
    assert make(bias_update_speed=0.0).counts_to_sum() is None
    # Nor what is computed again for the backward.
    for use_reentrant in (False, True):
        gate, calls = DeepSeekGate(k=2), []
        layer = MOELayer(gate, SimpleOrder(), model_dim=M, num_experts=6, expert_impl=GPTFeedForward(M, 17))
        gate.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        checkpoint(layer, crowd().requires_grad_(), use_reentrant=use_reentrant).sum().backward()
        assert len(calls) == 2
        assert gate.counts_to_sum().sum() == 2 * 97


def test_a_cast_to_16_bits_leaves_the_bias_in_float32_and_it_is_saved_without_the_counts() -> None:
    gate, bias_E = make(k=2), 1.0 + 0.001 * torch.arange(6)
    gate(crowd())
    gate.balance_bias.copy_(bias_E)
    other = make(k=2)
    other.load_state_dict(gate.state_dict())
    assert list(gate.state_dict()) == ["balance_bias", "wg.weight"]
    assert torch.equal(other.balance_bias, bias_E)
    for dtype in (torch.bfloat16, torch.float16):
        cast = gate.to(dtype)
        assert (cast.wg.weight.dtype, cast.counted_E.dtype) == (dtype, torch.int64)
        assert cast.balance_bias.dtype == torch.float32
        assert torch.equal(cast.balance_bias, bias_E)
    assert gate.double().balance_bias.dtype == torch.float64

# SPDX-License-Identifier: Apache-2.0
"""The bias of the deepseek gate: what it counts, how it moves, and what becomes of it in casts and state dicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_fsmoe import DeepSeekGate, GPTFeedForward, MOELayer, SimpleOrder, update_gates


def make(num_experts: int = 6, **options: Any) -> DeepSeekGate:
    torch.manual_seed(0)
    gate = DeepSeekGate(**options)
    gate.build_once(13, num_experts)
    return gate


def crowd(num_tokens: int = 97) -> torch.Tensor:
    """[S, 13] tokens that are much alike, so that a router sends most of them to the same experts."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, 13, generator=generator) + 2.0 * torch.randn(13, generator=generator)


def imbalance(counts_E: torch.Tensor) -> float:
    """The fullest expert over the mean; 1 is balance."""
    return (counts_E.max() / counts_E.double().mean()).item()


def test_a_bias_goes_up_where_there_were_too_few_tokens_and_down_where_there_were_too_many() -> None:
    gate = make(bias_update_speed=0.25)
    gate.after_optimizer_step(torch.tensor([4, 2, 6, 4, 5, 3]))
    assert gate.balance_bias.tolist() == [0.0, 0.25, -0.25, 0.0, -0.25, 0.25]
    gate.after_optimizer_step(torch.tensor([0, 0, 0, 0, 0, 5]))
    assert gate.balance_bias.tolist() == [0.25, 0.5, 0.0, 0.25, 0.0, 0.0]


def test_the_bias_moves_the_load_towards_balance_without_any_loss() -> None:
    gate = make(k=2, bias_update_speed=0.005, drop_tokens=False)
    x_SM = crowd()
    before = imbalance(gate(x_SM).counts_E)
    assert gate(x_SM).aux_loss == 0
    weight = gate.wg.weight.clone()
    for _ in range(300):
        gate(x_SM)
        update_gates([gate])
    assert before > 1.8
    assert imbalance(gate(x_SM).counts_E) < 1.25
    assert torch.equal(gate.wg.weight, weight)


def test_forwards_in_training_are_counted_and_no_others() -> None:
    gate = make(k=2, capacity_factor=0.3, min_capacity=0)
    x_SM = crowd()
    used_S = torch.arange(97) % 3 > 0
    first, second = gate(x_SM), gate(x_SM[:41], used_S[:41])
    assert torch.equal(gate.counts_to_sum(), first.counts_E + second.counts_E)
    gate.eval()(x_SM)
    assert torch.equal(gate.counts_to_sum(), first.counts_E + second.counts_E)
    update_gates([gate])
    assert gate.counts_to_sum().sum() == 0
    assert make(bias_update_speed=0.0).counts_to_sum() is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_computed_again_for_the_backward_is_not_counted_twice(use_reentrant: bool) -> None:
    gate = DeepSeekGate(k=2)
    layer = MOELayer(gate, SimpleOrder(), model_dim=13, num_experts=6, expert_impl=GPTFeedForward(13, 17))
    calls = []
    gate.register_forward_hook(lambda *_: calls.append(1))
    x_SM = crowd().requires_grad_()
    checkpoint(layer, x_SM, use_reentrant=use_reentrant).sum().backward()
    assert len(calls) == 2
    assert gate.counts_to_sum().sum() == 2 * 97
    assert x_SM.grad.norm() > 0


def test_gates_are_updated_each_with_its_own_counts() -> None:
    wide, narrow, fixed = make(6, k=2), make(3, k=1, norm_topk_prob=False), make(4, bias_update_speed=0.0)
    for gate in (wide, narrow, fixed):
        gate(crowd())
    alone = [make(6, k=2), make(3, k=1, norm_topk_prob=False)]
    for gate in alone:
        gate(crowd())
        gate.after_optimizer_step(gate.counts_to_sum().clone())
    update_gates([wide, narrow, fixed])
    assert torch.equal(wide.balance_bias, alone[0].balance_bias)
    assert torch.equal(narrow.balance_bias, alone[1].balance_bias)
    assert wide.balance_bias.abs().max() > 0
    assert fixed.balance_bias.abs().max() == 0


def test_a_cast_to_16_bits_leaves_the_bias_in_float32() -> None:
    gate = make(k=2)
    gate.balance_bias.copy_(1.0 + 0.001 * torch.arange(6))
    for dtype in (torch.bfloat16, torch.float16):
        cast = gate.to(dtype)
        assert cast.wg.weight.dtype == dtype
        assert cast.balance_bias.dtype == torch.float32
        assert torch.equal(cast.balance_bias, 1.0 + 0.001 * torch.arange(6))
        assert cast.counted_E.dtype == torch.int64
    assert gate.double().balance_bias.dtype == torch.float64


def test_the_bias_is_saved_and_the_counts_are_not() -> None:
    gate = make(k=2)
    gate(crowd())
    update_gates([gate])
    assert list(gate.state_dict()) == ["balance_bias", "wg.weight"]
    other = make(k=2)
    other.load_state_dict(gate.state_dict())
    assert torch.equal(other.balance_bias, gate.balance_bias)

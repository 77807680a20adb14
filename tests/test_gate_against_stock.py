# SPDX-License-Identifier: Apache-2.0
"""The top-k gate gives the numbers of stock DeepSpeed's, bit for bit, and draws what stock draws."""

from __future__ import annotations

import itertools

import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate, topkgating

from ds_fsmoe.components.gates.topk import LinearGate, route_top_k
from ds_fsmoe.components.routing import Routing
from tests.covering import covering, every_case
from tests.samples import sampled


def stock_as_routing(outcome: tuple) -> Routing:
    aux_loss, capacity, num_experts, expert_KS, position_KS, weights_KS, counts_E = outcome
    capacity = int(capacity)
    slots_KS = torch.where(expert_KS >= 0, expert_KS.long() * capacity + position_KS.long(), num_experts * capacity)
    return Routing(slots_KS, weights_KS, aux_loss, counts_E, capacity, num_experts)


def assert_same_routing(ours: Routing, stocks: Routing) -> None:
    assert (ours.capacity, ours.num_experts) == (stocks.capacity, stocks.num_experts)
    for name in ("slots_KS", "weights_KS", "aux_loss", "counts_E"):
        assert getattr(ours, name).dtype == getattr(stocks, name).dtype, name
        assert torch.equal(getattr(ours, name), getattr(stocks, name)), name


AXES = (
    (1, 2, 3, 5),
    (None, "Jitter", "RSample"),
    (True, False),
    (True, False),
    (torch.bfloat16, torch.float32),
    (True, False),
)
CASES = covering(*AXES)
# Every pair of any two of these always; the others are drawn.
OTHERS = [each for each in every_case(*AXES) if each not in CASES]


@sampled(
    ("k", "noise", "random_choice", "drop_tokens", "dtype", "training"),
    [*CASES, *OTHERS],
    kept=range(len(CASES)),
    drawn=4,
    ids=str,
)
def test_top_k_equals_stock_number_for_number(
    k: int, noise: str | None, random_choice: bool, drop_tokens: bool, dtype: torch.dtype, training: bool
) -> None:
    for (num_tokens, num_experts, width), factor in itertools.product(
        [(23, 5, 13), (7, 11, 3), (97, 7, 29)], (0.6, 1.3)
    ):
        options = {
            "k": k,
            "capacity_factor": factor,
            "eval_capacity_factor": factor * 1.5,
            "min_capacity": 2,
            "noisy_gate_policy": noise,
            "drop_tokens": drop_tokens,
            "use_rts": random_choice,
            "top2_2nd_expert_sampling": random_choice,
        }
        torch.manual_seed(3)
        stock = TopKGate(width, num_experts, **options).to(dtype).train(training)
        gate = LinearGate(**options)
        gate.build(width, num_experts)
        gate.to(dtype).train(training).load_state_dict(stock.state_dict())
        x_SM = torch.randn(num_tokens, width).to(dtype).requires_grad_()

        torch.manual_seed(5)
        stocks = stock_as_routing(stock(x_SM, None, True))
        stocks_random_state = torch.get_rng_state()
        torch.manual_seed(5)
        ours = gate(x_SM)
        assert_same_routing(ours, stocks)
        assert torch.equal(torch.get_rng_state(), stocks_random_state)
        factor_KS = torch.linspace(-1.7, 2.3, ours.weights_KS.numel()).reshape(ours.weights_KS.shape)
        gradients = [
            torch.autograd.grad((routing.weights_KS * factor_KS).sum() + 0.01 * routing.aux_loss, (x_SM, weight))
            for routing, weight in ((ours, gate.wg.weight), (stocks, stock.wg.weight))
        ]
        for our_gradient, stocks_gradient in zip(*gradients, strict=True):
            assert stocks_gradient.abs().max() > 0
            assert torch.equal(our_gradient, stocks_gradient)


@pytest.mark.parametrize("k", [3, 5])
def test_dropping_by_position_equals_stocks_function(k: int) -> None:
    # Stock has this policy in its function only; its gate module never asks for it.
    logits_SE = torch.randn(53, 11, generator=torch.Generator().manual_seed(k))
    stocks = stock_as_routing(topkgating(logits_SE, k, 0.7, 2, drop_policy="position", sparse_routes=True))
    settings = LinearGate(k=k, capacity_factor=0.7, min_capacity=2, drop_policy="position").settings
    ours = route_top_k(logits_SE, torch.eye(11), settings, training=True)
    assert (stocks.slots_KS == stocks.num_slots).any()
    assert_same_routing(ours, stocks)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_under_autocast_and_with_a_mask_for_top_1_the_gate_is_still_stocks(k: int) -> None:
    x_SM, used_S = torch.randn(47, 13, generator=torch.Generator().manual_seed(0)), torch.arange(47) % 4 > 0
    for is_cast, mask_S, factor in ((True, None, 3.0), (False, used_S, 0.6))[: 1 + (k == 1)]:
        options = {"k": k, "capacity_factor": factor, "min_capacity": 2}
        stock, gate = TopKGate(13, 6, **options), LinearGate(**options)
        gate.build(13, 6)
        gate.load_state_dict(stock.state_dict())
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            torch.manual_seed(1)
            stocks = stock_as_routing(stock(x_SM, None if mask_S is None else mask_S.long(), True))
            torch.manual_seed(1)
            ours = gate(x_SM, mask_S)
        # Rounded scores may be equal, and which of two equal ones is first is left to each.
        for name in ("weights_KS", "aux_loss", "counts_E") if is_cast else ("weights_KS", "slots_KS", "counts_E"):
            assert torch.equal(getattr(ours, name), getattr(stocks, name)), name

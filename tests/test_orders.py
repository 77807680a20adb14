# SPDX-License-Identifier: Apache-2.0
"""The laws of every order on the shelf."""

from __future__ import annotations

import pytest
import torch

from ds_fsmoe import LinearGate, OrderBase, Routing, registry

M = 13
ORDERS = registry.known("order")


def make_order(name: str) -> OrderBase:
    return registry.lookup("order", name)()


def routing_of(slots_KS: torch.Tensor, weights_KS: torch.Tensor, num_experts: int, capacity: int) -> Routing:
    zero = torch.zeros(())
    return Routing(slots_KS, weights_KS, zero, torch.zeros(num_experts, dtype=torch.int64), capacity, num_experts)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_slot_per_token_and_weight_one_is_the_identity(name: str, dtype: torch.dtype) -> None:
    num_tokens, num_experts, capacity = 23, 5, 7
    slots_KS = torch.randperm(num_experts * capacity, generator=torch.Generator().manual_seed(1))[:num_tokens][None]
    routing = routing_of(slots_KS, torch.ones(1, num_tokens), num_experts, capacity)
    x_SM = torch.randn(num_tokens, M).to(dtype)
    order = make_order(name)
    x_ECM = order.arrange(x_SM, routing)
    assert x_ECM.shape == (num_experts, capacity, M)
    assert torch.equal(order.restore(x_ECM, routing), x_SM)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_arrange_and_restore_equal_a_loop(name: str, k: int) -> None:
    torch.manual_seed(0)
    gate = LinearGate(k=k, capacity_factor=0.6).double()
    gate.build(M, 5)
    gate.double()
    x_SM = torch.randn(29, M, dtype=torch.double)
    routing = gate(x_SM)
    order = make_order(name)
    x_ECM = order.arrange(x_SM, routing)
    y_ECM = torch.randn_like(x_ECM)
    y_SM = order.restore(y_ECM, routing)

    want_x_ECM, want_y_SM = torch.zeros_like(x_ECM), torch.zeros_like(x_SM)
    for choice in range(k):
        for token in range(29):
            slot = routing.slots_KS[choice, token].item()
            if slot < routing.num_slots:
                want_x_ECM[slot // routing.capacity, slot % routing.capacity] = x_SM[token]
                want_y_SM[token] += (
                    routing.weights_KS[choice, token] * y_ECM[slot // routing.capacity, slot % routing.capacity]
                )
    assert (routing.slots_KS == routing.num_slots).any()
    assert torch.equal(x_ECM, want_x_ECM)
    torch.testing.assert_close(y_SM, want_y_SM, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ORDERS)
def test_gradients_are_those_of_the_map(name: str) -> None:
    slots_KS = torch.tensor([[0, 5, 3, 6], [4, 6, 1, 2]])  # 6 is dropped
    order = make_order(name)

    def there_and_back(x_SM: torch.Tensor, weights_KS: torch.Tensor) -> torch.Tensor:
        routing = routing_of(slots_KS, weights_KS, 2, 3)
        return order.restore(torch.sin(order.arrange(x_SM, routing)), routing)

    x_SM = torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    weights_KS = torch.rand(2, 4, dtype=torch.double).requires_grad_()
    assert torch.autograd.gradcheck(there_and_back, (x_SM, weights_KS))


@pytest.mark.parametrize("name", ORDERS)
def test_a_token_dropped_everywhere_comes_back_as_zero(name: str) -> None:
    routing = routing_of(torch.tensor([[6, 0]]), torch.tensor([[0.0, 0.5]]), 2, 3)
    y_SM = make_order(name).restore(torch.full((2, 3, M), 4.0), routing)
    assert torch.equal(y_SM, torch.tensor([[0.0], [2.0]]).expand(2, M))


@pytest.mark.parametrize("name", ORDERS)
def test_an_infinity_of_one_token_stays_with_it(name: str) -> None:
    """Multiplying with a mask would turn the infinity of one row into NaN in every other."""
    routing = routing_of(torch.tensor([[0, 1, 6]]), torch.tensor([[1.0, 1.0, 0.0]]), 2, 3)
    x_SM = torch.ones(3, M)
    x_SM[1] = float("inf")
    order = make_order(name)
    y_SM = order.restore(order.arrange(x_SM, routing), routing)
    assert torch.equal(y_SM[0], torch.ones(M))
    assert torch.equal(y_SM[2], torch.zeros(M))


@pytest.mark.parametrize("name", ORDERS)
def test_the_sum_over_choices_is_taken_in_float32(name: str) -> None:
    routing = routing_of(torch.tensor([[0], [1], [2]]), torch.full((3, 1), 1 / 3), 1, 3)
    y_ECM = torch.tensor([1.0, 1.0078125, 1.0]).to(torch.bfloat16).view(1, 3, 1)
    expected = (y_ECM.float().sum() / 3).to(torch.bfloat16)
    assert make_order(name).restore(y_ECM, routing).item() == expected.item()

# SPDX-License-Identifier: Apache-2.0
"""Whole layers with one order and with the other, and that nothing is dropped where nothing is to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_fsmoe import LinearGate, MOELayer, SimpleOrder
from ds_fsmoe.components.gate import GateBase
from ds_fsmoe.components.gates.expert_choice import ExpertChoiceGate
from ds_fsmoe.components.order import OrderBase
from ds_fsmoe.components.orders.einsum import EinsumOrder
from ds_fsmoe.components.routing import Routing

S, M, H, E = 23, 13, 19, 5
DROPPING = [{"k": k, "capacity_factor": 0.6, "min_capacity": 2} for k in (1, 2, 3)]
DROPLESS = [{"k": k, "capacity_factor": 0.1, "drop_tokens": False} for k in (1, 2, 3)]


def make_layer(gate: GateBase, order: OrderBase, expert: nn.Module | str = "gpt") -> MOELayer:
    options = {"model_dim": M, "num_experts": E, "expert_dim": H, "return_stats": True, "pipeline_degree": (3, 2)}
    return MOELayer(gate, order, expert_impl=expert, **options).double()


@pytest.mark.parametrize("masked", [False, True], ids=["all used", "some masked"])
@pytest.mark.parametrize("options", [*DROPPING, *DROPLESS, None], ids=str)
def test_a_layer_is_the_same_with_einsum_and_with_sparse(options: dict | None, masked: bool) -> None:
    x_SM = torch.randn(S, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    used_S = torch.arange(S) % 4 > 0 if masked else None
    found = []
    for order in (SimpleOrder(), EinsumOrder()):
        torch.manual_seed(2)
        gate = ExpertChoiceGate(k=2) if options is None else LinearGate(**options)
        layer = make_layer(gate, order)
        torch.manual_seed(3)
        output = layer(x_SM, used_S).output
        dy_SM = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        gradients = torch.autograd.grad(output, [x_SM, *layer.parameters()], dy_SM, materialize_grads=True)
        found.append([output, *gradients])
    assert found[0][0].abs().max() > 1e-2
    for of_sparse, of_einsum in zip(*found, strict=True):
        torch.testing.assert_close(of_einsum, of_sparse, rtol=0, atol=1e-13)


class Products(OrderBase):
    """As a user may write one: products of every slot with masks, of which most numbers are zero."""

    def arrange(self, x_SM: torch.Tensor, routing: Routing) -> torch.Tensor:
        x_RM = self.masks(routing, torch.ones_like(routing.weights_KS)).t().to(x_SM) @ x_SM
        return x_RM.view(routing.num_experts, routing.capacity, -1)

    def restore(self, y_ECM: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.masks(routing, routing.weights_KS).to(y_ECM) @ y_ECM.flatten(0, 1)

    def masks(self, routing: Routing, weights_KS: torch.Tensor) -> torch.Tensor:
        masks_SR = weights_KS.new_zeros(weights_KS.shape[1], routing.num_slots + 1)
        return masks_SR.scatter_add(1, routing.slots_KS.t(), weights_KS.t())[:, :-1]


@pytest.mark.parametrize("dispatch", ["unpadded", "padded"])
@pytest.mark.parametrize("degrees", [1, (3, 2)])
def test_memory_that_no_token_took_has_numbers_for_an_order_that_reads_it(
    degrees: int | tuple[int, int], dispatch: str
) -> None:
    """Whatever lay there before: new memory is nan here."""
    used_S, found = torch.arange(S) % 4 > 0, []
    torch.use_deterministic_algorithms(True)
    try:
        for order in (SimpleOrder(), Products()):
            torch.manual_seed(2)
            gate = LinearGate(k=2, drop_tokens=False)
            sizes = {"model_dim": M, "num_experts": E, "expert_dim": H, "pipeline_degree": degrees}
            layer = MOELayer(gate, order, dispatch=dispatch, **sizes).double()
            torch.manual_seed(3)
            x_SM = torch.randn(S, M, dtype=torch.float64, requires_grad=True)
            output = layer(x_SM, used_S)
            found.append([output, *torch.autograd.grad(output.square().sum(), [x_SM, *layer.parameters()])])
    finally:
        torch.use_deterministic_algorithms(False)
    for of_sparse, of_products in zip(*found, strict=True):
        torch.testing.assert_close(of_products, of_sparse, rtol=0, atol=1e-12)


class Unchanged(nn.Module):
    """An expert whose results are its tokens, so that a token comes back as often as it was sent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.0 * x


def crowded_tokens() -> torch.Tensor:
    """All of them want expert 1 first."""
    x_SM = torch.randn(S, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x_SM[:, 0] = 2.0
    return x_SM


@pytest.mark.parametrize("order_class", [SimpleOrder, EinsumOrder])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("crowded", [False, True])
def test_without_dropping_every_token_comes_back_whole(order_class: type, k: int, crowded: bool) -> None:
    x_SM = crowded_tokens()
    used_S = torch.arange(S) % 4 > 0
    for drop_tokens in (False, True):
        torch.manual_seed(2)
        # With dropping there are 10 slots for 17 tokens, and those that are in none come back as zeros.
        gate = LinearGate(k=k, drop_tokens=drop_tokens, capacity_factor=0.3 / k, min_capacity=0)
        layer = make_layer(gate, order_class(), Unchanged())
        if crowded:
            layer.gate.wg.weight.data[1, 0] = 9.0
        result = layer(x_SM, used_S)
        # For k = 1 the weight is the probability of the expert, for others weights sum to 1.
        scale_S1 = torch.softmax(x_SM @ layer.gate.wg.weight.t(), dim=1).max(dim=1, keepdim=True).values
        whole_SM = used_S[:, None] * x_SM * (scale_S1 if k == 1 else 1.0)
        came_back_S = (result.output - whole_SM).abs().amax(dim=1) < 1e-12
        assert came_back_S.all() == (not drop_tokens)
        assert result.counts_E.sum() == k * used_S.sum()
        assert not crowded or result.counts_E[1] == used_S.sum()

# SPDX-License-Identifier: Apache-2.0
"""What surrounds a call of the experts: autocast, dropout, eval mode, a caller's grad mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from tests import expert_cases as of
from tests.covering import covering
from tests.expert_cases import C, H, M, assert_gradients, backward, forward, make_experts, rows

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


@pytest.fixture
def floats() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and gradients of results, in float32."""
    return rows(2, 3, C, M, dtype=torch.float32), rows(2, 3, C, M, seed=2, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "keep_in_region", "recompute"),
    covering(("gpt gelu", "mixtral", "bottleneck"), (False, True), (False, True)),
)
def test_under_autocast_results_and_gradients_are_autograd_s(
    name: str, keep_in_region: bool, recompute: bool, floats: tuple[torch.Tensor, torch.Tensor]
) -> None:
    experts, (x_NeCM, dy_NeCM) = make_experts(name, dtype=torch.float32), floats
    with torch.autocast(**BF16):
        leaf = x_NeCM.clone().requires_grad_()
        results = [expert(leaf[:, i]) for i, expert in enumerate(experts)]
        y_NeCM = torch.stack([each[0] if isinstance(each, tuple) else each for each in results], dim=1)
    parameters = [each for expert in experts for each in expert.parameters()]
    dy_NeCM = dy_NeCM.to(y_NeCM.dtype)
    expected = torch.autograd.grad(y_NeCM, [leaf, *parameters], dy_NeCM, allow_unused=True)
    assert name == "bottleneck" or y_NeCM.dtype is torch.bfloat16

    with torch.autocast(**BF16):
        call = ExpertSet(experts).call(True, recompute=recompute)
        assert of.calls_modules(call)
        assert torch.equal(call.forward(0, C, x_NeCM), y_NeCM)
        if keep_in_region:
            dx_NeCM = call.backward(0, C, dy_NeCM)
    if not keep_in_region:
        dx_NeCM = call.backward(0, C, dy_NeCM)
    for found, other in zip([dx_NeCM, *call.gradients()], expected, strict=True):
        assert found is other is None or torch.equal(found, other)


@pytest.mark.parametrize("name", ["gpt gelu", "bottleneck"])
def test_a_backward_inside_autocast_of_a_forward_outside_is_not_cast_and_nothing_is_recorded(
    name: str, floats: tuple[torch.Tensor, torch.Tensor]
) -> None:
    experts, (x_NeCM, dy_NeCM) = make_experts(name, dtype=torch.float32), floats
    y_NeCM, dx_NeCM, gradients = of.by_autograd(experts, x_NeCM, dy_NeCM)
    call = ExpertSet(experts).call(True, recompute=True)
    assert torch.equal(call.forward(0, C, x_NeCM), y_NeCM)
    with torch.autocast(**BF16):
        assert torch.equal(call.backward(0, C, dy_NeCM), dx_NeCM)
    assert_gradients(call.gradients(), gradients, atol=0)
    # Nor for a caller with grad enabled.
    call = ExpertSet(experts).call(True)
    y_NeCM = forward(call, x_NeCM.requires_grad_(), [6, 7])
    dx_NeCM = backward(call, y_NeCM, [6, 7])
    assert not any(each is not None and each.requires_grad for each in (y_NeCM, dx_NeCM, *call.gradients()))


def test_a_call_without_backward_under_autocast_leaves_later_gradients_alone(
    floats: tuple[torch.Tensor, torch.Tensor],
) -> None:
    experts, (x_NeCM, _) = make_experts("bottleneck", dtype=torch.float32), floats
    layer = ExpertSet(experts)
    with torch.autocast(**BF16):
        forward(layer.call(False), x_NeCM, [C])
        call = layer.call(True)
        forward(call, x_NeCM, [C])
    backward(call, x_NeCM, [C])
    by_parameter = dict(zip(layer.parameters, call.gradients(), strict=True))
    assert all(by_parameter[expert.inner.weight] is not None for expert in experts)


def dropout_experts() -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Sequential(nn.Linear(M, H), nn.Dropout(0.5), nn.Linear(H, M)).double() for _ in range(3)]


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_with_equal_cuts_is_that_of_autograd_with_the_same_seed(recompute: bool) -> None:
    experts = dropout_experts()
    layer = ExpertSet(experts)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    torch.manual_seed(9)
    leaf = x_NeCM.clone().requires_grad_()
    chunks = [
        torch.stack([expert(leaf[:, i, start:stop]) for i, expert in enumerate(experts)], dim=1)
        for start, stop in of.bounds([5, 5, 3])
    ]
    expected = torch.autograd.grad(torch.cat(chunks, dim=2), [leaf, *layer.parameters], dy_NeCM)
    after = torch.rand(3)

    torch.manual_seed(9)
    call = layer.call(True, recompute=recompute)
    assert torch.equal(forward(call, x_NeCM, [5, 5, 3]), torch.cat(chunks, dim=2))
    assert torch.equal(torch.rand(3), after)
    before = torch.get_rng_state()
    torch.testing.assert_close(backward(call, dy_NeCM, [5, 5, 3]), expected[0], rtol=0, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), before)
    assert_gradients(call.gradients(), expected[1:], atol=1e-12)


def test_an_expert_in_eval_mode_draws_nothing_and_a_graph_is_right_there_too() -> None:
    experts = [expert.eval() for expert in dropout_experts()]
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = of.by_autograd(experts, x_NeCM, dy_NeCM)
    call = ExpertSet(experts).call(True, same_chunks=False)
    torch.testing.assert_close(forward(call, x_NeCM, [6, 7]), y_NeCM, rtol=0, atol=1e-12)
    torch.testing.assert_close(backward(call, dy_NeCM, [3, 10]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


def test_a_result_that_depends_on_nothing_has_zero_gradients_of_rows_and_none_of_weights() -> None:
    class Constant(nn.Module):
        def __init__(self, of_weight: bool) -> None:
            super().__init__()
            self.weight, self.of_weight = nn.Parameter(torch.ones(M).double()), of_weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight if self.of_weight else self.weight.detach()).expand(x.shape)

    call = ExpertSet([Constant(False), Constant(True)]).call(True)
    dy_NeCM = rows(2, 2, C, M)
    assert (forward(call, rows(2, 2, C, M), [6, 7]) == 1).all()
    assert (backward(call, dy_NeCM, [6, 7]) == 0).all()
    none, gradient = call.gradients()
    assert none is None
    torch.testing.assert_close(gradient, dy_NeCM[:, 1].sum(dim=(0, 1)), rtol=0, atol=1e-12)

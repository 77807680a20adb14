# SPDX-License-Identifier: Apache-2.0
"""Experts with adapters of low rank compute what PEFT's changed weights would, without making those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from ds_fsmoe.components.expert_compute.adapters import Adapter
from ds_fsmoe.components.expert_compute.contract import Contract, contract_of
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from tests.test_stacked_experts import FLAGS, NUM_EXPERTS, Experts, off_by

WIDTH, HIDDEN, SLOTS = 8, 12, 4


def adapter_of(module: Experts, contract: Contract, name: str, rank: int, scaling: float = 0.5) -> Adapter:
    sizes = getattr(module, name).shape[1:]
    size_in, size_out = sizes if contract.is_transposed else sizes[::-1]
    like = next(module.parameters())
    a = nn.Parameter(torch.randn(rank * NUM_EXPERTS, size_in).to(like) * 0.3)
    b = nn.Parameter(torch.randn(size_out, rank * NUM_EXPERTS).to(like) * 0.3)
    return Adapter(name, a, b, scaling, NUM_EXPERTS)


def changed(module: Experts, contract: Contract, adapters: list[Adapter]) -> dict[str, torch.Tensor]:
    """The weights as PEFT's ``ParamWrapper.get_delta_weight`` changes them."""
    found = dict(module.named_parameters())
    for each in adapters:
        a = each.a.reshape(NUM_EXPERTS, -1, each.a.shape[-1])
        b = each.b.reshape(each.b.shape[0], -1, NUM_EXPERTS)
        product = torch.einsum("o r e, e r i -> e i o" if contract.is_transposed else "o r e, e r i -> e o i", b, a)
        found[each.weight] = found[each.weight] + product * each.scaling
    return found


def by_loop(module: Experts, contract: Contract, adapters: list[Adapter], x_NecM: torch.Tensor) -> list[torch.Tensor]:
    """What :func:`run` returns for a gradient of ones, expert by expert in bfloat16, by autograd."""
    tensors = x_NecM, *module.parameters(), *(each for adapter in adapters for each in adapter.parameters)
    leaves = [each.detach().bfloat16().requires_grad_() for each in tensors]
    x, *weights = leaves
    of_weights = dict(zip((name for name, _ in module.named_parameters()), weights, strict=False))
    a_and_b = dict(zip(map(id, tensors[1:]), weights, strict=True))

    def linear(name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        weight = of_weights[name][expert]
        y = F.linear(rows, weight.t() if contract.is_transposed else weight)
        for each in (adapter for adapter in adapters if adapter.weight == name):
            a = a_and_b[id(each.a)].unflatten(0, (NUM_EXPERTS, -1))[expert]
            b = a_and_b[id(each.b)].unflatten(1, (-1, NUM_EXPERTS))[..., expert]
            y = y + F.linear(F.linear(rows, a) * each.scaling, b)
        return y

    ups = [module._apply_gate(linear(contract.up, expert, x[:, expert])) for expert in range(NUM_EXPERTS)]
    y_NecM = torch.stack([linear(contract.down, expert, up) for expert, up in enumerate(ups)], dim=1)
    return [y_NecM.detach(), *torch.autograd.grad(y_NecM, leaves, torch.ones_like(y_NecM))]


def made(
    width: int, hidden: int, *asked: tuple[str, int], dtype: Any = torch.float32, **flags: bool
) -> tuple[Experts, Contract, list[Adapter]]:
    """Experts, what they take, and an adapter of a rank for each (of ``"up"`` or ``"down"``, rank)."""
    torch.manual_seed(0)
    module = Experts(Contract(**{"has_bias": False, "is_transposed": False} | flags), width, hidden).to(dtype)
    contract = contract_of(module)
    return module, contract, [adapter_of(module, contract, getattr(contract, of), rank) for of, rank in asked]


def run(call: Any, x_NecM: torch.Tensor, dy_NecM: torch.Tensor) -> list[torch.Tensor]:
    y_NecM = call.forward(0, SLOTS, x_NecM)
    return [y_NecM, call.backward(0, SLOTS, dy_NecM), *call.gradients()]


@pytest.mark.parametrize("way", ["written", "recomputed", "called"])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "".join(str(int(each)) for each in vars(flags).values()))
def test_adapters_give_the_numbers_of_the_changed_weights(flags: Contract, way: str) -> None:
    """Base weights train as well; the first weight has two adapters of other ranks, as if two were active."""
    torch.manual_seed(0)
    module = Experts(flags, WIDTH, HIDDEN).double()
    contract = contract_of(module)
    asked = ((contract.up, 3, 0.5), (contract.up, 8, -2.0), (contract.down, 1, 1.5))
    adapters = [adapter_of(module, contract, *each) for each in asked]
    parameters = [*module.parameters(), *(each for adapter in adapters for each in adapter.parameters)]
    x_NecM = torch.randn(2, NUM_EXPERTS, SLOTS, WIDTH, dtype=torch.float64, requires_grad=True)
    dy_NecM = torch.randn_like(x_NecM)
    weights = changed(module, contract, adapters)
    rows = x_NecM.transpose(0, 1).reshape(-1, WIDTH)
    index = torch.arange(NUM_EXPERTS).repeat_interleave(2 * SLOTS).unsqueeze(1)
    y = functional_call(module, weights, (rows, index, torch.ones(index.shape, dtype=torch.float64)))
    y_NecM = y.view(NUM_EXPERTS, 2, SLOTS, WIDTH).transpose(0, 1)
    wanted = [y_NecM, *torch.autograd.grad(y_NecM, [x_NecM, *parameters], dy_NecM)]
    experts = StackedExperts(module, contract, module.forward if way == "called" else None, adapters=adapters)
    assert list(experts.parameters) == parameters
    call = experts.call(True, recompute=way == "recomputed")
    for ours, theirs in zip(run(call, x_NecM.detach(), dy_NecM), wanted, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("way", ["written", "called"])
def test_frozen_weights_get_no_gradient_while_their_adapters_do(way: str) -> None:
    module, contract, adapters = made(WIDTH, HIDDEN, ("up", 4), ("down", 4), has_bias=True)
    module.requires_grad_(False)
    adapters[1].a.requires_grad_(False)
    experts = StackedExperts(module, contract, module.forward if way == "called" else None, adapters=adapters)
    x_NecM = torch.randn(2, NUM_EXPERTS, SLOTS, WIDTH)
    found = run(experts.call(True), x_NecM, torch.ones_like(x_NecM))
    assert [each is not None for each in found[2:]] == [False] * 4 + [True, True, False, True]
    assert experts.kept_of_a_row(recompute=False)[0] == WIDTH
    assert StackedExperts(module, contract).kept_of_a_row(recompute=False)[0] == 0


@pytest.mark.parametrize("rank", [1, 8])
def test_grouped_products_take_adapters_of_any_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, contract, adapters = made(16, 24, ("up", rank), ("down", rank), dtype=torch.bfloat16)
    x_NecM = torch.randn(2, NUM_EXPERTS, SLOTS, 16).bfloat16()
    wanted = by_loop(module, contract, adapters, x_NecM)
    monkeypatch.setattr(torch, "mm", None)
    found = run(StackedExperts(module, contract, adapters=adapters).call(True), x_NecM, torch.ones_like(x_NecM))
    for ours, theirs in zip(found, wanted, strict=True):
        assert off_by(ours, theirs) < 5e-3


def test_under_autocast_adapters_compute_in_its_type_and_keep_theirs_as_beside_half_precision() -> None:
    """PEFT keeps adapters of half-precision models in float32 unless it is told not to."""
    module, contract, adapters = made(16, 24, ("up", 4), ("down", 4))
    x_NecM = torch.randn(1, NUM_EXPERTS, SLOTS, 16)
    with torch.autocast("cpu", torch.bfloat16):
        call = StackedExperts(module, contract, adapters=adapters).call(True)
        found = run(call, x_NecM, torch.ones_like(x_NecM))
    assert found[0].dtype == torch.bfloat16
    assert {each.dtype for each in found[2:]} == {torch.float32}
    for ours, theirs in zip(found, by_loop(module, contract, adapters, x_NecM), strict=True):
        assert off_by(ours, theirs) < 5e-3

    module, contract, adapters = made(16, 24, ("up", 4), is_transposed=True)
    module.bfloat16().requires_grad_(False)
    x_NecM = x_NecM.bfloat16()
    found = run(StackedExperts(module, contract, adapters=adapters).call(True), x_NecM, x_NecM)
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    assert [each.dtype for each in found[-2:]] == [torch.float32] * 2


def test_a_rank_without_rows_has_gradients_of_zeros_for_its_adapters() -> None:
    module, contract, adapters = made(WIDTH, HIDDEN, ("up", 2), ("down", 2))
    call = StackedExperts(module.requires_grad_(False), contract, adapters=adapters).call(True)
    call.backward(0, 0, call.forward(0, 0, torch.empty(2, NUM_EXPERTS, 0, WIDTH)))
    found = call.gradients()[2:]
    assert [each.shape for each in found] == [each.shape for adapter in adapters for each in adapter.parameters]
    assert not any(each.any() for each in found)


def test_an_adapter_that_changes_before_its_backward_is_refused() -> None:
    module, contract, (adapter,) = made(WIDTH, HIDDEN, ("down", 2))
    call = StackedExperts(module, contract, adapters=[adapter]).call(True)
    y_NecM = call.forward(0, SLOTS, torch.randn(1, NUM_EXPERTS, SLOTS, WIDTH))
    with torch.no_grad():
        adapter.b.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between the forward and its backward"):
        call.backward(0, SLOTS, torch.ones_like(y_NecM))

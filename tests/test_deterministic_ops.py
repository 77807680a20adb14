# SPDX-License-Identifier: Apache-2.0
"""With ``deterministic`` no sum of a layer depends on the order in which its terms come, and no number is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_fsmoe import MOELayer, registry
from ds_fsmoe.ops import Ops, load_ops
from ds_fsmoe.ops.loading import REFERENCE
from tests.test_orders_in_layers import PAIRS, options_of

S, M, H, E = 33, 8, 6, 4
# What adds on CUDA by atomics, by torch.use_deterministic_algorithms' list; those that index dimension 0 or another.
ADDS = {"index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_reduce"}
# What has no fixed order there whatever its arguments are, if it is not of whole numbers.
NEVER = {"cumsum", "cumsum_", "put_", "histc", "bincount", "embedding_dense_backward", "_index_put_impl_"}


class Chance(TorchDispatchMode):
    """Notes operations whose result on CUDA depends on which of two terms comes first.

    Terms that go to places of their own, or that are whole numbers and so add up exactly, do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ADDS:
            _, dim, index, terms, *_ = args
            if not adds_exactly(terms_that_meet(index, terms, dim)):
                self.found.append(name)
        elif name in NEVER and args[0].is_floating_point():
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def terms_that_meet(index: torch.Tensor, terms: torch.Tensor, dim: int) -> torch.Tensor:
    """Those that go to one place with another."""
    if index.dim() < terms.dim():
        index = index.view(*[-1 if each == dim else 1 for each in range(terms.dim())]).expand(terms.shape)
    deterministic, order = index.sort(dim=dim)
    same = deterministic.diff(dim=dim) == 0
    none = torch.zeros_like(same.narrow(dim, 0, 1))
    meets = torch.cat([same, none], dim=dim) | torch.cat([none, same], dim=dim)
    return terms.gather(dim, order)[meets]


def adds_exactly(terms: torch.Tensor) -> bool:
    return not terms.is_floating_point() or bool((terms == terms.round()).all() and terms.abs().sum() < 2**20)


def gradients_of(gate: str, order: str, ops: Ops, dtype: torch.dtype) -> tuple[list[torch.Tensor | None], list[str]]:
    """Result and gradients, and what was left to chance on the way."""
    torch.manual_seed(0)
    layer = MOELayer(
        registry.lookup("gate", gate)(**options_of(gate, drop_tokens=True)),
        registry.lookup("order", order)(),
        model_dim=M,
        num_experts=E,
        expert_dim=H,
        return_stats=True,
        pipeline_degree=(2, 3),
        ops=ops,
    ).to(dtype)
    x_SM = torch.randn(S, M, dtype=dtype).requires_grad_()
    torch.manual_seed(1)
    with Chance() as chance:
        result = layer(x_SM, torch.arange(S) % 5 > 0)
        loss = (result.output * torch.linspace(-1, 1, S * M, dtype=dtype).view(S, M)).sum() + result.aux_loss
        found = torch.autograd.grad(loss, [x_SM, *layer.parameters()], allow_unused=True)
    return [result.output, *found], chance.found


@pytest.mark.parametrize(("gate", "order"), PAIRS, ids=[f"{gate}-{order}" for gate, order in PAIRS])
def test_a_deterministic_layer_leaves_nothing_to_chance_and_has_the_same_numbers(gate: str, order: str) -> None:
    for dtype in (torch.float32, torch.float64):
        plain, _ = gradients_of(gate, order, REFERENCE, dtype)
        # As for CUDA: on a CPU sums have their order.
        fixed, by_chance = gradients_of(gate, order, load_ops("reference", "cuda", deterministic=True), dtype)
        assert by_chance == []
        assert plain[1].abs().max() > 0
        for one, other in zip(fixed, plain, strict=True):
            assert one is other is None or torch.equal(one, other)


def test_what_is_left_to_chance_otherwise_is_noticed() -> None:
    assert set(gradients_of("expert_choice", "sparse", REFERENCE, torch.float32)[1]) >= {"index_add"}
    assert gradients_of("topk", "sparse", REFERENCE, torch.float32)[1] != []


def test_on_cuda_the_compiled_ops_gather_and_add_in_order_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_fsmoe.ops import deterministic, loading

    monkeypatch.setattr(loading, "_load_on_every_rank", lambda device_type: None)
    plain, fixed = load_ops("required", "cuda"), load_ops("required", "cuda", deterministic=True)
    assert plain is loading.COMPILED["cuda"]
    assert (fixed.gather_rows, fixed.add_rows, fixed.name) == (
        deterministic.gather_rows,
        deterministic.add_rows,
        "compiled",
    )
    # Their float64 goes by the reference, and that in order.
    x_SM, slots_KS = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.arange(15).view(3, 5)
    with Chance() as chance:
        y_NM = fixed.arrange(x_SM, slots_KS, 15, None)
        fixed.restore(y_NM, slots_KS, torch.rand(3, 5, dtype=torch.float64), None).sum().backward()
    assert chance.found == []
    assert load_ops("required", "cpu", deterministic=True) is loading.COMPILED["cpu"]


def test_gathering_and_adding_in_order_are_each_others_gradients() -> None:
    ops = load_ops("reference", "cuda", deterministic=True)
    index_N = torch.tensor([3, 0, 5, -1, 3, 3, 1])
    x_RM = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    y_NM = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.gather_rows(x, index_N), x_RM)
    assert torch.autograd.gradgradcheck(lambda x: ops.gather_rows(x, index_N).square(), x_RM)
    assert torch.autograd.gradcheck(lambda y: ops.add_rows(y, index_N, 5), y_NM)
    assert torch.autograd.gradgradcheck(lambda y: ops.add_rows(y, index_N, 5).square(), y_NM)
    for num_rows in (0, 3):
        assert ops.add_rows(torch.ones(0, 2), index_N[:0], num_rows).shape == (num_rows, 2)


def test_halves_are_added_up_in_float32_and_rounded_once() -> None:
    ops = load_ops("reference", "cuda", deterministic=True)
    y_NM = torch.randn(400, 3).bfloat16()
    index_N = torch.randint(-1, 8, (400,))
    exact = REFERENCE.add_rows(y_NM.float(), index_N, 7)
    assert torch.equal(ops.add_rows(y_NM, index_N, 7), exact.bfloat16())

# SPDX-License-Identifier: Apache-2.0
"""Experts: the row-wise law for every registered one, and the built-in ones against plain formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.components.expert import ExpertArgs, ExpertBase, LocalExperts
from ds_fsmoe.components.experts.gpt import ACTIVATIONS, GPTFeedForward
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward
from ds_fsmoe.layer.expert_checks import check_row_wise
from tests.expert_cases import GRAPH, WRITTEN, H, M, make_experts

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
WIDTH, EXPERT_WIDTH, ROWS = 13, 29, 23
# Matrix products of other heights may add in another order, so equal rows can differ in the last bits.
CLOSE = {"rtol": 0, "atol": 1e-14}

FORMULAS: dict[str, Callable[[float], float]] = {
    "relu": lambda a: max(a, 0.0),
    "gelu": lambda a: 0.5 * a * (1 + math.erf(a / math.sqrt(2))),
    "silu": lambda a: a / (1 + math.exp(-a)),
}


def make_expert(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return registry.lookup("expert", name)(WIDTH, EXPERT_WIDTH).double()


def make_rows(num_rows: int = ROWS, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EVERY_EXPERT = pytest.mark.parametrize("name", registry.known("expert"))


# ---- laws of every expert


@EVERY_EXPERT
def test_rows_may_be_permuted_and_cut_anywhere_and_each_depends_on_itself_alone(name: str) -> None:
    expert, x_NM, dy_NM = make_expert(name), make_rows(), make_rows(seed=3)
    permutation_N = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    whole_NM = expert(x_NM)
    wanted = torch.autograd.grad(whole_NM, tuple(expert.parameters()), dy_NM)
    torch.testing.assert_close(expert(x_NM[permutation_N]), whole_NM[permutation_N], **CLOSE)
    for sizes in ([ROWS], [1] * ROWS, [7, 0, 13, 3], [0, ROWS], [11, 12]):
        expert.zero_grad(set_to_none=True)
        results = [expert(x_cM) for x_cM in x_NM.split(sizes)]
        torch.testing.assert_close(torch.cat(results), whole_NM, **CLOSE)
        torch.autograd.backward(results, dy_NM.split(sizes))
        for parameter, gradient in zip(expert.parameters(), wanted, strict=True):
            assert gradient.norm() > 1e-3
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-13)
    y_NM = expert(x_NM.requires_grad_())
    for row in range(0, ROWS, 5):
        (dx_NM,) = torch.autograd.grad(y_NM[row].sum(), x_NM, retain_graph=True)
        assert dx_NM.any(dim=1).nonzero().flatten().tolist() == [row]


@EVERY_EXPERT
def test_leading_dimensions_do_not_matter_rows_may_be_missing_and_their_type_is_kept(name: str) -> None:
    expert, x_NM = make_expert(name), make_rows(30)
    torch.testing.assert_close(expert(x_NM.view(2, 3, 5, WIDTH)), expert(x_NM).view(2, 3, 5, WIDTH), **CLOSE)
    assert expert(x_NM[:0]).shape == (0, WIDTH)
    assert expert(x_NM[:0].view(2, 0, WIDTH)).shape == (2, 0, WIDTH)
    for dtype in DTYPES:
        assert expert.to(dtype)(x_NM.to(dtype)).dtype == dtype


# ---- the built-in ones by formula


def matrix_times_row(weight: list[list[float]], row: list[float], bias: list[float] | None = None) -> list[float]:
    products = [sum(w * x for w, x in zip(weights, row, strict=True)) for weights in weight]
    return products if bias is None else [p + b for p, b in zip(products, bias, strict=True)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gpt_is_two_linear_layers_with_an_activation_between(activation: str, bias: bool) -> None:
    torch.manual_seed(5)
    expert = GPTFeedForward(WIDTH, EXPERT_WIDTH, activation=activation, bias=bias).double()
    assert set(expert.state_dict()) == {f"fc{i}.{kind}" for i in (1, 2) for kind in ("weight", *["bias"] * bias)}
    weights = {name: tensor.tolist() for name, tensor in expert.state_dict().items()}
    x_NM = make_rows(5) * 3
    for row, result in zip(x_NM.tolist(), expert(x_NM).tolist(), strict=True):
        hidden = matrix_times_row(weights["fc1.weight"], row, weights.get("fc1.bias"))
        hidden = [FORMULAS[activation](a) for a in hidden]
        wanted = matrix_times_row(weights["fc2.weight"], hidden, weights.get("fc2.bias"))
        assert result == pytest.approx(wanted, abs=1e-13)
    with pytest.raises(ValueError, match="activation = 'tanh': the choices are relu, gelu, silu"):
        GPTFeedForward(WIDTH, EXPERT_WIDTH, activation="tanh")


def test_mixtral_is_swiglu_without_bias() -> None:
    torch.manual_seed(5)
    expert = MixtralFeedForward(WIDTH, EXPERT_WIDTH).double()
    weights = {name: tensor.tolist() for name, tensor in expert.state_dict().items()}
    assert set(weights) == {"w1.weight", "w2.weight", "w3.weight"}
    x_NM = make_rows(5) * 3
    for row, result in zip(x_NM.tolist(), expert(x_NM).tolist(), strict=True):
        gate = [FORMULAS["silu"](a) for a in matrix_times_row(weights["w1.weight"], row)]
        up = matrix_times_row(weights["w3.weight"], row)
        hidden = [g * u for g, u in zip(gate, up, strict=True)]
        assert result == pytest.approx(matrix_times_row(weights["w2.weight"], hidden), abs=1e-13)


# ---- what experts are, and how a rank's experts are called


class Scale(ExpertBase):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        return args.tokens * self.factor


def test_a_rank_calls_each_expert_with_its_own_rows_and_an_expert_says_what_it_does() -> None:
    experts = LocalExperts(Scale(), 3)
    for i, expert in enumerate(experts.experts):
        expert.factor.data.fill_(10.0**i)
    x_GeCM = torch.arange(2 * 3 * 5 * 7, dtype=torch.float32).view(2, 3, 5, 7)
    factors_e11 = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    assert torch.equal(experts(x_GeCM), x_GeCM * factors_e11)
    experts.experts[1].register_forward_hook(lambda module, args, output: output * 0)
    assert torch.equal(experts(x_GeCM), x_GeCM * factors_e11 * torch.tensor([1.0, 0.0, 1.0]).view(3, 1, 1))
    with pytest.raises(TypeError, match=r"Silent must define do_experts\(args\)"):
        type("Silent", (ExpertBase,), {})()(make_rows())


def test_experts_of_a_rank_share_no_parameter_with_each_other_or_with_their_model() -> None:
    model = GPTFeedForward(WIDTH, EXPERT_WIDTH)
    experts = LocalExperts(model, 3)
    tensors = [parameter.data_ptr() for module in (model, experts) for parameter in module.parameters()]
    assert len(set(tensors)) == len(tensors) == 4 * 4


# ---- the check that an expert treats each row by itself


def module(name: str, function: Callable[[torch.Tensor], Any]) -> nn.Module:
    """An expert of this name without parameters."""
    return type(name, (nn.Module,), {"forward": lambda self, x: function(x)})()


class NormalisesOverRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(M)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.reshape(-1, M)).view(x.shape)


NOT_ROW_WISE = [
    module("CentersRows", lambda x: x - x.mean(dim=-2, keepdim=True)),
    module("LooksBack", lambda x: x + torch.roll(x, 1, dims=-2)),
    module("MixesRanks", lambda x: x + x.flip(0)),
    module("AddsPlace", lambda x: x + torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(-1)),
    NormalisesOverRows(),
]


@pytest.mark.parametrize("expert", NOT_ROW_WISE, ids=lambda each: type(each).__name__)
def test_an_expert_that_is_not_row_wise_is_named(expert: nn.Module) -> None:
    for dtype, keep_expert_dim in itertools.product(DTYPES, (False, True)):
        with pytest.raises(ValueError, match=f"expert {type(expert).__name__} is not row-wise"):
            check_row_wise(expert.to(dtype), M, dtype=dtype, keep_expert_dim=keep_expert_dim)


def test_an_expert_of_another_shape_is_named_by_the_check() -> None:
    wider, shorter = module("Own", lambda x: torch.cat([x, x], dim=-1)), module("Own", lambda x: (x[:, :-1], None))
    for expert in (wider, shorter):
        with pytest.raises(ValueError, match=r"expert Own returned \(2, \d, \d+\) for \(2, 5, 7\)"):
            check_row_wise(expert, M)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_wise_experts_pass_the_check(dtype: torch.dtype) -> None:
    for name, keep_expert_dim in itertools.product((*WRITTEN, *GRAPH), (False, True)):
        check_row_wise(make_experts(name, 1, dtype=dtype)[0], M, keep_expert_dim=keep_expert_dim)


def test_dropout_passes_the_check_and_nothing_is_disturbed_by_it() -> None:
    expert = nn.Sequential(nn.Linear(M, H), nn.Dropout(0.5), nn.Linear(H, M))
    normalises = nn.Sequential(NormalisesOverRows(), nn.Dropout(0.5))
    for parameter in [*expert.parameters(), *normalises.parameters()]:
        parameter.grad = torch.full_like(parameter, 3.0)
    buffers = {name: (buffer, buffer.clone()) for name, buffer in normalises.named_buffers()}
    assert len(buffers) == 3
    state = torch.get_rng_state()
    check_row_wise(expert, M)
    with pytest.raises(ValueError, match="expert Sequential is not row-wise"):
        check_row_wise(normalises, M)
    check_row_wise(normalises.eval(), M)
    assert torch.equal(torch.get_rng_state(), state)
    assert all((each.grad == 3).all() for each in [*expert.parameters(), *normalises.parameters()])
    for name, buffer in normalises.named_buffers():
        was, values = buffers[name]
        assert buffer is was
        assert torch.equal(buffer, values)

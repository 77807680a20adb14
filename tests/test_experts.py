# SPDX-License-Identifier: Apache-2.0
"""Experts: the row-wise law for every registered one, and the built-in ones against plain formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.components.expert import ExpertArgs, ExpertBase, LocalExperts
from ds_fsmoe.components.experts.gpt import ACTIVATIONS, GPTFeedForward
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward

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
def test_permuted_rows_give_permuted_results(name: str) -> None:
    expert, x_NM = make_expert(name), make_rows()
    permutation_N = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(expert(x_NM[permutation_N]), expert(x_NM)[permutation_N], **CLOSE)


@EVERY_EXPERT
def test_rows_may_be_cut_anywhere(name: str) -> None:
    expert, x_NM = make_expert(name), make_rows()
    whole_NM = expert(x_NM)
    for sizes in ([ROWS], [1] * ROWS, [7, 0, 13, 3], [0, ROWS], [11, 12]):
        in_chunks_NM = torch.cat([expert(chunk) for chunk in x_NM.split(sizes)])
        torch.testing.assert_close(in_chunks_NM, whole_NM, **CLOSE)


@EVERY_EXPERT
def test_a_row_depends_on_itself_alone(name: str) -> None:
    expert, x_NM = make_expert(name), make_rows().requires_grad_()
    y_NM = expert(x_NM)
    for row in range(0, ROWS, 5):
        (dx_NM,) = torch.autograd.grad(y_NM[row].sum(), x_NM, retain_graph=True)
        others = [other for other in range(ROWS) if other != row]
        assert (dx_NM[others] == 0).all()
        assert (dx_NM[row] != 0).any()


@EVERY_EXPERT
def test_gradients_of_chunks_add_up_to_those_of_the_whole(name: str) -> None:
    expert, x_NM = make_expert(name), make_rows()
    dy_NM = make_rows(seed=3)
    whole = torch.autograd.grad(expert(x_NM), tuple(expert.parameters()), dy_NM)
    expert.zero_grad(set_to_none=True)
    for x_cM, dy_cM in zip(x_NM.split([7, 0, 13, 3]), dy_NM.split([7, 0, 13, 3]), strict=True):
        expert(x_cM).backward(dy_cM)
    for parameter, gradient in zip(expert.parameters(), whole, strict=True):
        assert gradient.norm() > 1e-3
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-13)


@EVERY_EXPERT
def test_leading_dimensions_do_not_matter_and_rows_may_be_missing(name: str) -> None:
    expert, x_NM = make_expert(name), make_rows(30)
    torch.testing.assert_close(expert(x_NM.view(2, 3, 5, WIDTH)), expert(x_NM).view(2, 3, 5, WIDTH), **CLOSE)
    assert expert(x_NM[:0]).shape == (0, WIDTH)
    assert expert(x_NM[:0].view(2, 0, WIDTH)).shape == (2, 0, WIDTH)


@EVERY_EXPERT
def test_the_type_of_the_rows_is_kept(name: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert make_expert(name).to(dtype)(make_rows().to(dtype)).dtype == dtype


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
        assert result == pytest.approx(
            matrix_times_row(weights["fc2.weight"], hidden, weights.get("fc2.bias")), abs=1e-13
        )


def test_gpt_has_gelu_and_bias_unless_told_otherwise() -> None:
    ours = registry.lookup("expert", "gpt")(WIDTH, EXPERT_WIDTH).double()
    asked = GPTFeedForward(WIDTH, EXPERT_WIDTH, activation="gelu", bias=True).double()
    asked.load_state_dict(ours.state_dict())
    assert torch.equal(ours(make_rows()), asked(make_rows()))


def test_an_unknown_activation_is_refused_with_the_choices() -> None:
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


def test_an_expert_must_say_what_it_does() -> None:
    class Silent(ExpertBase):
        pass

    with pytest.raises(TypeError, match=r"Silent must define do_experts\(args\)"):
        Silent()(make_rows())


def test_a_rank_calls_each_expert_with_its_own_rows() -> None:
    class Scale(ExpertBase):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def do_experts(self, args: ExpertArgs) -> torch.Tensor:
            return args.tokens * self.factor

    experts = LocalExperts(Scale(), 3)
    for i, expert in enumerate(experts.experts):
        expert.factor.data.fill_(10.0**i)
    x_GeCM = torch.arange(2 * 3 * 5 * 7, dtype=torch.float32).view(2, 3, 5, 7)
    factors_e11 = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    assert torch.equal(experts(x_GeCM), x_GeCM * factors_e11)


def test_experts_of_a_rank_share_no_parameter_with_each_other_or_with_their_model() -> None:
    model = GPTFeedForward(WIDTH, EXPERT_WIDTH)
    experts = LocalExperts(model, 3)
    tensors = [parameter.data_ptr() for module in (model, experts) for parameter in module.parameters()]
    assert len(set(tensors)) == len(tensors) == 4 * 4


def test_hooks_on_an_expert_run() -> None:
    experts = LocalExperts(GPTFeedForward(WIDTH, EXPERT_WIDTH), 2)
    called = []
    experts.experts[1].register_forward_pre_hook(lambda module, args: called.append("before"))
    experts.experts[1].register_forward_hook(lambda module, args, output: output * 0)
    y_GeCM = experts(torch.ones(1, 2, 3, WIDTH))
    assert called == ["before"]
    assert (y_GeCM[:, 1] == 0).all()
    assert (y_GeCM[:, 0] != 0).all()

# SPDX-License-Identifier: Apache-2.0
"""The paper's listings: parts of one's own, and a layer put together by hand that is a normal nn.Module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ds_fsmoe
from ds_fsmoe import (
    CallbackBase,
    ExpertBase,
    GPTFeedForward,
    LinearGate,
    MOELayer,
    MoEOutput,
    SimpleOrder,
    registry,
)

M, H, E = 13, 29, 5


def make_layer(**arguments: Any) -> MOELayer:
    arguments = {"model_dim": M, "num_experts": E, "expert_dim": H} | arguments
    return MOELayer(arguments.pop("gate_impl", LinearGate(k=2)), SimpleOrder(), **arguments)


def test_it_is_a_normal_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(M, M), make_layer(), nn.LayerNorm(M))
    x_BLM = torch.randn(3, 7, M, requires_grad=True)
    y_BLM = model(x_BLM)
    assert y_BLM.shape == x_BLM.shape
    y_BLM.square().sum().backward()
    assert x_BLM.grad.abs().sum() > 0
    other = nn.Sequential(nn.Linear(M, M), make_layer(), nn.LayerNorm(M))
    other.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    expected = model(x_BLM)
    torch.manual_seed(1)
    assert torch.equal(other(x_BLM), expected)
    assert model.double()(x_BLM.double()).dtype == torch.float64


def test_statistics_come_when_asked_for() -> None:
    result = make_layer(return_stats=True)(torch.randn(3, 7, M))
    assert isinstance(result, MoEOutput)
    assert result.output.shape == (3, 7, M)
    assert result.aux_loss.shape == ()
    assert result.counts_E.sum() == 2 * 21


def test_an_expert_of_ones_own_as_in_listing_1() -> None:
    class CustomizedExpert(ExpertBase):
        def do_experts(self, args):
            return 3 * args.tokens

    layer = make_layer(expert_impl=CustomizedExpert(), gate_impl=LinearGate(k=2, drop_tokens=False))
    x_SM = torch.randn(17, M)
    torch.testing.assert_close(layer(x_SM), 3 * x_SM)


def test_the_six_hooks_are_called_once_each_in_the_order_of_the_way() -> None:
    class Diary(CallbackBase):
        def __init__(self) -> None:
            self.seen: list[tuple[str, tuple[int, ...], bool]] = []

        def __getattribute__(self, name: str) -> Any:
            if not name.endswith("_hook"):
                return object.__getattribute__(self, name)
            return lambda args: self.seen.append((name, tuple(args.tensor.shape), args.routing is not None))

    diary = Diary()
    make_layer(callbacks=[diary], gate_impl=LinearGate(k=1, min_capacity=4))(torch.randn(2, 10, M))
    slots = (E, 4, M)
    assert diary.seen == [
        ("before_moe_start_hook", (2, 10, M), False),
        ("before_dispatch_hook", slots, True),
        ("after_dispatch_hook", slots, True),
        ("before_combine_hook", slots, True),
        ("after_combine_hook", slots, True),
        ("before_moe_end_hook", (2, 10, M), True),
    ]
    assert {name for name in vars(CallbackBase) if name.endswith("_hook")} == {name for name, _, _ in diary.seen}


def test_a_hook_may_replace_what_travels_and_has_its_gradient() -> None:
    class HalfOnTheWire(CallbackBase):
        def before_dispatch_hook(self, args):
            return args.tensor.to(torch.bfloat16)

        def after_dispatch_hook(self, args):
            return args.tensor.float()

    torch.manual_seed(0)
    plain = make_layer(gate_impl=LinearGate(k=1, use_rts=False))
    hooked = make_layer(gate_impl=LinearGate(k=1, use_rts=False), callbacks=[HalfOnTheWire(), CallbackBase()])
    hooked.load_state_dict(plain.state_dict())
    x_SM = torch.randn(17, M, requires_grad=True)
    assert not torch.equal(hooked(x_SM), plain(x_SM))
    torch.testing.assert_close(hooked(x_SM), plain(x_SM), rtol=2e-2, atol=2e-2)
    hooked(x_SM).sum().backward()
    assert x_SM.grad.abs().sum() > 0


def test_a_hook_may_reshape_the_input_and_shape_it_back() -> None:
    class Patches(CallbackBase):
        def before_moe_start_hook(self, args):
            return args.tensor.reshape(2, -1, M)

        def before_moe_end_hook(self, args):
            assert args.tensor.shape == (2, 12, M)
            return args.tensor.reshape(4, 6, M)

    assert make_layer(callbacks=[Patches()])(torch.randn(4, 6, M)).shape == (4, 6, M)


def test_parts_of_ones_own_are_found_by_name() -> None:
    @ds_fsmoe.register_expert("triple_for_a_test")
    class Triple(ExpertBase):
        def __init__(self, model_dim: int, expert_dim: int) -> None:
            super().__init__()

        def do_experts(self, args):
            return 3 * args.tokens

    assert "triple_for_a_test" in registry.known("expert")
    assert isinstance(make_layer(expert_impl="triple_for_a_test").experts.experts[0], Triple)
    with pytest.raises(ValueError, match="expert 'triple_for_a_test' is taken by"):
        ds_fsmoe.register_expert("triple_for_a_test")(GPTFeedForward)
    del registry._PARTS["expert"]["triple_for_a_test"]


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"expert_impl": "lstm"}, ValueError, "no expert is called 'lstm': the choices are 'gpt', 'mixtral'"),
        ({"expert_dim": None}, ValueError, "expert_impl = 'gpt' needs expert_dim"),
        ({"num_experts": 0}, ValueError, "num_experts = 0: must be a multiple of the 1 rank"),
        ({"gate_impl": LinearGate(k=9)}, ValueError, r"k = 9: must be between 1 and num_experts \(5\)"),
        ({"gate_impl": nn.Linear(3, 3)}, TypeError, "gate_impl = .*: must be an instance of GateBase"),
    ],
)
def test_parts_that_do_not_fit_are_named(arguments: dict, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make_layer(**arguments)


def test_an_unknown_kind_of_part_is_named() -> None:
    with pytest.raises(ValueError, match="the kinds of part are gate, order, alltoall, expert"):
        registry.register("router", "x")

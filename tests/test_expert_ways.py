# SPDX-License-Identifier: Apache-2.0
"""Which way an expert is computed: written out, or through autograd, with its hooks and whatever a user made of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ds_fsmoe import registry
from ds_fsmoe.components.expert import ExpertArgs, ExpertBase
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from tests.expert_cases import (
    GRAPH,
    C,
    H,
    M,
    assert_gradients,
    backward,
    by_autograd,
    calls_modules,
    forward,
    is_written,
    make_experts,
    rows,
    sequential,
)


@pytest.mark.parametrize("name", GRAPH)
def test_other_experts_are_called(name: str) -> None:
    layer = ExpertSet([*make_experts("gpt gelu", 2), *make_experts(name, 1)])
    assert not is_written(layer)
    assert calls_modules(layer.call(True))


HOOKS: dict[str, Callable[[nn.Module, list[str]], object]] = {
    "forward": lambda module, seen: module.register_forward_hook(lambda m, args, out: seen.append("hook")),
    "forward pre": lambda module, seen: module.register_forward_pre_hook(lambda m, args: seen.append("hook")),
    "backward": lambda module, seen: module.register_full_backward_hook(lambda m, dx, dy: seen.append("hook")),
    "backward pre": lambda module, seen: module.register_full_backward_pre_hook(lambda m, dy: seen.append("hook")),
}


@pytest.mark.parametrize("on_submodule", [False, True], ids=["expert", "layer of an expert"])
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", ["gpt relu", "mixtral", "sequential gelu"])
def test_hooks_run_once_for_each_chunk(name: str, kind: str, on_submodule: bool) -> None:
    experts = make_experts(name)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    _, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    layer = ExpertSet(experts)
    assert is_written(layer)
    seen: list[str] = []
    handle = HOOKS[kind](next(iter(experts[1].children())) if on_submodule else experts[1], seen)
    assert not is_written(layer)
    call = layer.call(True)
    forward(call, x_NeCM, [5, 5, 3])
    torch.testing.assert_close(backward(call, dy_NeCM, [5, 5, 3]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)
    assert seen == ["hook"] * 3
    handle.remove()
    assert is_written(layer)


def test_hooks_for_all_modules_run() -> None:
    layer = ExpertSet(make_experts("gpt relu"))
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    try:
        call = layer.call(True)
        forward(call, rows(2, 3, C, M), [13])
    finally:
        handle.remove()
    assert seen == ["Linear", "Linear", "GPTFeedForward"] * 3
    assert is_written(layer)


def test_a_hook_may_replace_what_an_expert_returns() -> None:
    experts = make_experts("gpt relu")
    experts[2].register_forward_hook(lambda module, args, output: output * 3)
    x_NeCM, dy_NeCM = rows(2, 3, C, M), rows(2, 3, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    call = ExpertSet(experts).call(True, same_chunks=False)
    torch.testing.assert_close(forward(call, x_NeCM, [6, 7]), y_NeCM, rtol=0, atol=1e-12)
    torch.testing.assert_close(backward(call, dy_NeCM, [3, 10]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


def triple_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 3 * self.fc2(torch.relu(self.fc1(x)))


class OtherComputation(GPTFeedForward):
    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        return 3 * super().do_experts(args)


class OtherForward(GPTFeedForward):
    forward = triple_forward


class MyLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def with_own_linear() -> nn.Module:
    expert = GPTFeedForward(M, H)
    expert.fc2 = MyLinear(H, M)
    return expert


def with_patched_forward() -> nn.Module:
    expert = GPTFeedForward(M, H, "relu")
    expert.forward = triple_forward.__get__(expert)
    return expert


def with_new_activation() -> nn.Module:
    from ds_fsmoe.components.experts import gpt

    expert = GPTFeedForward(M, H)
    expert.activation = "cube"
    gpt.ACTIVATIONS.setdefault("cube", lambda x: x**3)
    return expert


def parametrised() -> nn.Module:
    expert = GPTFeedForward(M, H)
    nn.utils.parametrizations.weight_norm(expert.fc1)
    return expert


def pruned() -> nn.Module:
    expert = GPTFeedForward(M, H)
    prune.l1_unstructured(expert.fc1, "weight", 0.5)
    return expert


NOT_WHAT_THEY_SEEM: dict[str, Callable[[], nn.Module]] = {
    "subclass with its own do_experts": lambda: OtherComputation(M, H),
    "subclass with its own forward": lambda: OtherForward(M, H),
    "subclass of a linear layer": with_own_linear,
    "forward set on the object": with_patched_forward,
    "activation of the user's": with_new_activation,
    "parametrised": parametrised,
    "pruned": pruned,
    "subclass of nn.Sequential": lambda: type("Mine", (nn.Sequential,), {})(*sequential(nn.ReLU())),
    "four layers": lambda: nn.Sequential(*sequential(nn.ReLU()), nn.Dropout(0.0)),
    "activation not known": lambda: sequential(nn.Softplus()),
    "subclass of an activation": lambda: sequential(type("MyReLU", (nn.ReLU,), {"forward": lambda s, x: x * 2})()),
    "one weight twice": lambda: tied(),
}


def tied() -> nn.Module:
    expert = GPTFeedForward(M, M)
    expert.fc2.weight = expert.fc1.weight
    return expert


@pytest.mark.parametrize("kind", NOT_WHAT_THEY_SEEM)
def test_what_is_not_exactly_a_known_expert_goes_through_autograd(kind: str) -> None:
    torch.manual_seed(4)
    experts = [NOT_WHAT_THEY_SEEM[kind]().double() for _ in range(2)]
    x_NeCM, dy_NeCM = rows(2, 2, C, M), rows(2, 2, C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    layer = ExpertSet(experts)
    assert not is_written(layer)
    call = layer.call(True, same_chunks=False)
    torch.testing.assert_close(forward(call, x_NeCM, [6, 7]), y_NeCM, rtol=0, atol=1e-12)
    torch.testing.assert_close(backward(call, dy_NeCM, [3, 10]), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


def test_a_subclass_that_computes_the_same_is_still_written_out() -> None:
    assert is_written(ExpertSet([type("Named", (GPTFeedForward,), {"note": "mine"})(M, H)]))


def test_every_registered_expert_is_written_out() -> None:
    assert "gpt" in registry.known("expert")
    for name in ("gpt", "mixtral"):
        assert is_written(ExpertSet([registry.lookup("expert", name)(M, H)]))


def test_a_plain_expert_need_not_be_written_out() -> None:
    class Scale(ExpertBase):
        def do_experts(self, args: ExpertArgs) -> torch.Tensor:
            return args.tokens * 2

    assert Scale().written() is None
    assert not is_written(ExpertSet([Scale()]))

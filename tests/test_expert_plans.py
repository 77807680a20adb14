# SPDX-License-Identifier: Apache-2.0
"""Which way experts are computed, written out or through autograd: known ones alone, and anew when anything changes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from ds_fsmoe import registry
from ds_fsmoe.components.expert import ExpertArgs, ExpertBase
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.gradient_sums import make_contiguous
from ds_fsmoe.components.expert_compute.manual_ffn import MANUAL_ACTIVATIONS, ManualFeedForward
from ds_fsmoe.components.experts import gpt
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from tests.covering import covering
from tests.expert_cases import (
    GRAPH,
    C,
    H,
    M,
    assert_as_autograd,
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


def made(name: str = "gpt gelu", count: int = 3, together: str = "always") -> tuple[list[nn.Module], ExpertSet]:
    experts = make_experts(name, count)
    assert make_contiguous(experts)
    return experts, ExpertSet(experts, together=together)


def check(experts: list[nn.Module], layer: ExpertSet) -> None:
    """A call gives what autograd gives now, in the forward and in the backward."""
    for sizes in ((6, 7), (3, 10)):
        assert_as_autograd(layer.call(True, same_chunks=False), experts, (6, 7), sizes)


# ---- which way


class Tripled(GPTFeedForward):
    """Known but for its computation."""

    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        return 3 * super().do_experts(args)


class TripledLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def changed(change: Callable[[nn.Module], object], hidden: int = H) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        expert = GPTFeedForward(M, hidden, "relu")
        change(expert)
        return expert

    return make


def without_activation(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.fc2(self.fc1(x))


NOT_WHAT_THEY_SEEM: dict[str, Callable[[], nn.Module]] = {
    "subclass with its own do_experts": lambda: Tripled(M, H),
    "subclass with its own forward": lambda: type("Mine", (GPTFeedForward,), {"forward": without_activation})(M, H),
    "subclass of a linear layer": changed(lambda expert: setattr(expert, "fc2", TripledLinear(H, M))),
    "forward set on the object": changed(lambda expert: setattr(expert, "forward", without_activation.__get__(expert))),
    "activation of the user's": changed(lambda expert: setattr(expert, "activation", "cube")),
    "parametrised": changed(lambda expert: nn.utils.parametrizations.weight_norm(expert.fc1)),
    "pruned": changed(lambda expert: prune.l1_unstructured(expert.fc1, "weight", 0.5)),
    "one weight twice": changed(lambda expert: setattr(expert.fc2, "weight", expert.fc1.weight), hidden=M),
    "subclass of nn.Sequential": lambda: type("Mine", (nn.Sequential,), {})(*sequential(nn.ReLU())),
    "four layers": lambda: nn.Sequential(*sequential(nn.ReLU()), nn.Dropout(0.0)),
    "activation not known": lambda: sequential(nn.Softplus()),
    "subclass of an activation": lambda: sequential(type("MyReLU", (nn.ReLU,), {"forward": lambda s, x: x * 2})()),
    **{name: lambda make=make: make(M, H) for name, make in GRAPH.items()},
}


@pytest.mark.parametrize("kind", NOT_WHAT_THEY_SEEM)
def test_what_is_not_exactly_a_known_expert_goes_through_autograd(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpt.ACTIVATIONS, "cube", lambda x: x**3)
    torch.manual_seed(4)
    experts = [NOT_WHAT_THEY_SEEM[kind]().double() for _ in range(2)]
    layer = ExpertSet([*make_experts("gpt gelu", 2), *experts])
    assert not is_written(layer)
    assert calls_modules(layer.call(True))
    check([*layer.experts], layer)


def test_a_subclass_that_computes_the_same_is_still_written_out_but_not_under_autocast() -> None:
    layer = ExpertSet([type("Named", (GPTFeedForward,), {"note": "mine"})(M, H)])
    assert is_written(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.written_now() == (None,)
    assert is_written(layer)


@pytest.mark.parametrize("name", registry.known("expert"))
def test_registered_experts_are_written_out_but_for_those_that_have_no_written_form(name: str) -> None:
    expert = registry.lookup("expert", name)(M, H)
    assert is_written(ExpertSet([expert])) or name not in ("gpt", "mixtral")
    assert is_written(ExpertSet([expert])) is (expert.written() is not None)
    assert ExpertBase().written() is None, "it need not have one"


# ---- hooks

HOOKS: dict[str, Callable[[nn.Module, Callable[[], None]], object]] = {
    "forward": lambda module, ran: module.register_forward_hook(lambda m, args, y: ran() or y * 2),
    "forward pre": lambda module, ran: module.register_forward_pre_hook(lambda m, args: ran() or (args[0] * 2,)),
    "backward": lambda module, ran: module.register_full_backward_hook(lambda m, dx, dy: ran() or (dx[0] * 2,)),
    "backward pre": lambda module, ran: module.register_full_backward_pre_hook(lambda m, dy: ran() or (dy[0] * 2,)),
}
HOOKED = covering(
    ("gpt relu", "mixtral", "sequential gelu"), tuple(HOOKS), ("expert", "layer of an expert"), ("always", "never")
)


@pytest.mark.parametrize(("name", "kind", "place", "together"), HOOKED)
def test_hooks_that_come_and_go_later_run_once_for_each_chunk_from_then_until_then(
    name: str, kind: str, place: str, together: str
) -> None:
    """Each doubles what it is given, in the call and in what it is compared with."""
    experts, layer = made(name, together=together)
    check(experts, layer)
    assert is_written(layer)
    seen: list[str] = []
    hooked = experts[1] if place == "expert" else next(iter(experts[1].children()))
    handle = HOOKS[kind](hooked, lambda: seen.append("hook"))
    assert not is_written(layer)
    for _ in range(2):
        seen.clear()
        assert_as_autograd(layer.call(True), experts, (5, 5, 3), (5, 5, 3))
        assert seen == ["hook"] * (3 + 1)  # three chunks, and once in what they are compared with
    handle.remove()
    assert is_written(layer)
    check(experts, layer)


def test_hooks_for_all_modules_run() -> None:
    layer = ExpertSet(make_experts("gpt relu"))
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    try:
        forward(layer.call(True), rows(2, 3, C, M), [13])
    finally:
        handle.remove()
    assert seen == ["Linear", "Linear", "GPTFeedForward"] * 3
    assert is_written(layer)


# ---- what changes later


def parametrized(experts: list[nn.Module]) -> None:
    parametrize.register_parametrization(experts[1].fc1, "weight", nn.Identity())
    parametrize.remove_parametrizations(experts[1].fc1, "weight")


def other_strides(experts: list[nn.Module]) -> None:
    """At the same address."""
    weight = experts[1].fc1.weight
    weight.data = weight.data.flatten().as_strided(weight.shape, (1, weight.shape[0]))


def other_hooks_dictionary(experts: list[nn.Module]) -> None:
    """As copying and pickling of modules do it."""
    experts[1]._forward_hooks = type(experts[1]._forward_hooks)({0: lambda module, args, y: y * 2})


CHANGES: dict[str, Callable[[list[nn.Module]], object]] = {
    "frozen": lambda experts: experts[1].fc1.weight.requires_grad_(False),
    "another activation": lambda experts: setattr(experts[0], "activation", "relu"),
    "another forward": lambda experts: setattr(experts[0], "forward", without_activation.__get__(experts[0])),
    "another class": lambda experts: setattr(experts[2], "__class__", Tripled),
    # As ZeRO gives parameters another place.
    "other memory": lambda experts: setattr(experts[1].fc1.weight, "data", experts[1].fc1.weight.data.clone() * 3),
    "other strides": other_strides,
    "other hooks": other_hooks_dictionary,
    "compiled": lambda experts: experts[1].compile(backend="eager"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_later_counts_in_the_next_call(name: str) -> None:
    # Where one of them is called, nothing depends on who is together.
    for together in ("always", "never") if name != "compiled" else ("always",):
        experts, layer = made(together=together)
        check(experts, layer)
        CHANGES[name](experts)
        check(experts, layer)


@pytest.mark.parametrize(
    "change",
    [
        lambda experts: setattr(experts[1].fc1, "weight", nn.Parameter(experts[1].fc1.weight.detach() * 2)),
        lambda experts: setattr(experts[1], "fc1", copy.deepcopy(experts[1].fc1)),
        parametrized,
        lambda experts: experts[1].fc1.register_parameter("lora", nn.Parameter(torch.zeros(2))),
    ],
    ids=["parameter", "module", "parametrization", "one more"],
)
def test_parameters_that_are_others_are_refused(change: Callable[[list[nn.Module]], None]) -> None:
    experts, layer = made()
    layer.call(True)
    change(experts)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="were replaced after ExpertSet"):
            layer.call(True)


def test_another_type_is_another_plan() -> None:
    experts, layer = made()
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float64, 1e-12)):
        for expert in experts:
            expert.to(dtype)
        x_NeCM = rows(2, 3, C, M, dtype=dtype)
        expected = torch.stack([expert(x_NeCM[:, i]) for i, expert in enumerate(experts)], dim=1)
        torch.testing.assert_close(forward(layer.call(False), x_NeCM, [6, 7]), expected, rtol=0, atol=tolerance)


def test_a_copy_of_a_layer_that_was_used_has_experts_of_its_own() -> None:
    experts, layer = made()
    check(experts, layer)
    copied_experts, copied = copy.deepcopy((experts, layer))
    assert all(one is other for one, other in zip(copied.experts, copied_experts, strict=True))
    with torch.no_grad():
        copied_experts[1].fc1.weight.mul_(2)
    for each in copied_experts:
        each.fc2.bias.requires_grad_(False)
    check(copied_experts, copied)
    check(experts, layer)


def test_what_an_unknown_expert_remembers_is_not_held_for_it() -> None:
    class Remembers(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    expert = Remembers(M, M).double()
    layer = ExpertSet([expert])
    for _ in range(2):
        forward(layer.call(True), rows(2, 1, C, M), [13])
    last = weakref.ref(expert.last)
    expert.last = None
    assert last() is None


class Mine(ExpertBase):
    """Writes its form by an activation that no look at the module shows."""

    activation = "relu"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(M, M), nn.Linear(M, M)

    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        return self.down(getattr(nn.functional, Mine.activation)(self.up(args.tokens)))

    def written(self) -> ManualFeedForward:
        return ManualFeedForward(self.up, MANUAL_ACTIVATIONS[Mine.activation], self.down)


def test_a_form_that_somebody_else_writes_is_asked_for_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = [Mine().double() for _ in range(3)]
    layer = ExpertSet(experts)
    for activation in ("relu", "silu"):
        monkeypatch.setattr(Mine, "activation", activation)
        assert is_written(layer)
        check(experts, layer)


@pytest.mark.parametrize("first", [20, 50])
def test_the_first_cut_says_whether_all_go_at_once_and_any_others_are_read(first: int) -> None:
    experts = make_experts("gpt gelu", 3, 32, 64, torch.float64)
    assert make_contiguous(experts)
    # At once up to 32 rows.
    x_NeCM, dy_NeCM = rows(1, 3, 100, 32), rows(1, 3, 100, 32, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    for recompute, sizes in covering((False, True), ([20, 50, 30], [100], [5, 5, 10, 45, 15, 20])):
        call = ExpertSet(experts).call(True, same_chunks=False, recompute=recompute)
        torch.testing.assert_close(forward(call, x_NeCM, [first, 70 - first, 30]), y_NeCM, rtol=0, atol=1e-12)
        assert len(call._runs) == (1 if first == 20 else 3)
        call.restore(call.release())
        torch.testing.assert_close(backward(call, dy_NeCM, sizes), dx_NeCM, rtol=0, atol=1e-12)
        assert_gradients(call.gradients(), gradients, atol=1e-12)

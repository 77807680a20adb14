# SPDX-License-Identifier: Apache-2.0
"""Gated products in one operator: those of torch's operators are the reference's bit for bit, as the compiled ones are
(test_gpu_one_rank.py), and a form is used only where a module's own function has the same bits."""

from __future__ import annotations

import copy
import gc
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from ds_fsmoe.components.expert_compute.gated_forms import Gate  # noqa: E402
from ds_fsmoe.ops import Ops, reference  # noqa: E402
from tests.ops_cases import assert_same_bits, compiled_ops, ops_named  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LIMIT, ALPHA = 7.0, 1.702


@pytest.fixture(params=["compiled", "plain"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_named(request.param)


@pytest.fixture
def compiled() -> Ops:
    return compiled_ops()


def rows(dtype: torch.dtype, width: int = 37) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_RF = torch.randn(19, 2 * width, generator=generator, dtype=torch.float64) * 5
    return x_RF.to(dtype), torch.randn(19, width, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("form", reference.FORMS)
def test_products_have_the_bits_of_the_reference(ops: Ops, form: str) -> None:
    for interleaved, dtype in itertools.product((False, True), DTYPES):
        arguments = form, interleaved, LIMIT, ALPHA
        x_RF, dh_RH = rows(dtype)
        assert_same_bits(ops.gated(x_RF, *arguments), reference.gated(x_RF, *arguments))
        found, expected = (each.gated_backward(x_RF, dh_RH, *arguments) for each in (ops, reference))
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("form", reference.FORMS)
def test_gradients_are_those_of_the_product(form: str) -> None:
    x_RF, dh_RH = rows(torch.float64, width=3)
    x_RF = (x_RF / 5).requires_grad_()  # away from where a clamp has no derivative
    function = lambda x: reference.gated(x, form, False, LIMIT, ALPHA)  # noqa: E731
    assert torch.autograd.gradcheck(function, x_RF)
    dx_RF, h_RH = reference.gated_backward(x_RF, dh_RH, form, False, LIMIT, ALPHA)
    torch.testing.assert_close(dx_RF, torch.autograd.grad(function(x_RF), x_RF, dh_RH)[0])
    torch.testing.assert_close(h_RH, function(x_RF).detach())


class Experts(nn.Module):
    """Computes what transformers' modules do: by its class a function of theirs, as far as is known."""

    def __init__(self, act: Any, **settings: float) -> None:
        super().__init__()
        self.act_fn = act
        vars(self).update(settings)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Clamped(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


class ClampedBehind(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(min=-self.limit, max=self.limit)


class Swish(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class InFloat32(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (self.act_fn(gate.float()) * up.float()).to(gate.dtype)


for kind in (Experts, Clamped, ClampedBehind, Swish, InFloat32):
    kind._apply_gate.__module__ = "transformers.models.made_up"


class Own(Experts):
    """A script's own function, which reads what it likes."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up * self.scale


class Scaled(nn.SiLU):
    """A script's own activation, with a factor that changes nothing until it is another."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


MODULES = [
    (Experts(nn.SiLU()), ("silu", False)),
    (Experts(F.silu), ("silu", False)),
    (Experts(nn.GELU()), ("gelu", False)),
    (Experts(nn.GELU(approximate="tanh")), ("gelu_tanh", False)),
    (Clamped(nn.SiLU(), limit=LIMIT), ("silu_of_clamped", False)),
    (ClampedBehind(nn.SiLU(), limit=LIMIT), ("clamped_silu", False)),
    (Swish(None, limit=LIMIT, alpha=ALPHA), ("swish_of_clamped", True)),
    (InFloat32(nn.SiLU()), None),
    (Own(nn.SiLU(), scale=3.0), None),
    # Only activations whose settings say what they do have a form.
    *((Experts(act), None) for act in (nn.ReLU(), Scaled(), nn.Sequential(nn.SiLU()), lambda x: F.silu(x))),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("module", "expected"), MODULES, ids=lambda each: type(each).__name__)
def test_the_form_with_a_modules_bits_is_found_or_torchs_way_stays(ops: Ops, module, expected, dtype) -> None:
    if isinstance(module, InFloat32) and dtype == torch.float32:
        expected = "silu", False  # there it is the same
    gate, (x_RF, dh_RH) = Gate(module, True, ops), rows(dtype)
    form = gate.form(x_RF)
    assert (None if form is None else form[:2]) == expected
    leaf_RF = x_RF.clone().requires_grad_()
    own_RH = module._apply_gate(leaf_RF)
    (own_dx,) = torch.autograd.grad(own_RH, leaf_RF, dh_RH)
    assert_same_bits(gate.forward(x_RF).detach(), own_RH.detach())
    dx_RF, h_RH = gate.backward(x_RF, dh_RH)
    assert_same_bits(dx_RF, own_dx)
    assert_same_bits(h_RH, own_RH.detach())


def anew(name: str, value: Any, of: str = "act_fn") -> Callable[[nn.Module], None]:
    return lambda module: setattr(getattr(module, of) if of else module, name, value)


CHANGES: dict[str, tuple[nn.Module, Callable[[nn.Module], None], tuple | None]] = {
    "its limit": (Clamped(nn.SiLU(), limit=LIMIT), anew("limit", 2.0, ""), ("silu_of_clamped", False, 2.0, 0.0)),
    "its activation": (Experts(nn.SiLU()), anew("act_fn", nn.ReLU(), ""), None),
    "its function": (Experts(nn.SiLU()), anew("_apply_gate", lambda x: x.chunk(2, dim=-1)[0], ""), None),
    "a forward of the activation": (Experts(nn.SiLU()), anew("forward", lambda x: 2 * F.silu(x)), None),
    "a setting of the activation": (Experts(nn.GELU()), anew("approximate", "tanh"), ("gelu_tanh", False, 0.0, 0.0)),
    "its mode": (Experts(nn.GELU()), lambda module: module.eval(), ("gelu", False, 0.0, 0.0)),
}


@pytest.mark.parametrize(("module", "change", "expected"), CHANGES.values(), ids=CHANGES)
def test_what_changes_in_a_module_is_looked_at(compiled: Ops, module, change, expected) -> None:
    module = copy.deepcopy(module)
    gate, (x_RF, _) = Gate(module, True, compiled), rows(torch.float32)
    assert gate.form(x_RF) is not None
    change(module)
    assert gate.form(x_RF) == expected
    assert_same_bits(gate.forward(x_RF), module._apply_gate(x_RF))


def test_hooks_on_the_activation_and_on_all_modules_are_called(compiled: Ops) -> None:
    module, calls = Experts(nn.SiLU()), []
    gate, (x_RF, _) = Gate(module, True, compiled), rows(torch.float32)
    gate.forward(x_RF)
    for put in (module.act_fn.register_forward_hook, nn.modules.module.register_module_forward_hook):
        handle = put(lambda called, *_: calls.append(type(called)))
        gate.forward(x_RF)
        handle.remove()
    assert calls == [nn.SiLU, nn.SiLU]
    assert gate.form(x_RF) is not None


def test_what_is_remembered_keeps_no_module_and_a_default_device_changes_nothing(compiled: Ops) -> None:
    """Nor what somebody has hung on it, such as an engine's hooks."""

    class Kept:
        pass

    module, kept, (x_RF, _) = Experts(nn.SiLU()), Kept(), rows(torch.float32)
    module.act_fn.hung_on = kept
    module._apply_gate = types.MethodType(lambda self, x: Experts._apply_gate(self, x), module)
    Gate(module, True, compiled).form(x_RF)
    known = weakref.ref(kept)
    del module, kept
    gc.collect()
    assert known() is None
    with torch.device("meta"):
        form = Gate(Clamped(nn.SiLU(), limit=3.25), True, compiled).form(x_RF)
    assert form == ("silu_of_clamped", False, 3.25, 0.0)


def test_experts_without_a_gate_or_ops_stay_torchs(compiled: Ops) -> None:
    (x_RF, _), module = rows(torch.float32), Experts(nn.SiLU())
    assert Gate(module, False, compiled).form(x_RF) is None
    assert_same_bits(Gate(module, False, compiled).forward(x_RF), F.silu(x_RF))
    assert Gate(module, True, None).form(x_RF) is None

# SPDX-License-Identifier: Apache-2.0
"""Finds the gated product that a module of experts computes, by comparing results, and computes it in one operator.

``stacked_forms`` calls :class:`Gate` between the two products of an expert. ``module._apply_gate`` is called with
special and random rows, and each form of :data:`ds_fsmoe.ops.reference.FORMS` is computed on the same rows. A form
whose results and gradients have the same bits is used from then on. Otherwise, and for experts without a gate, autograd
differentiates the module's own function.

Letters: R rows, H width of an expert, F = 2 * H where experts are gated, else H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ds_fsmoe.components.expert_compute.autograd_call import as_it_is
from ds_fsmoe.ops import Ops
from ds_fsmoe.ops.reference import FORMS

_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
_WIDTH = 64
_NUM_ROWS = 96
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str, type(None))
_OWN_STATE = ("_parameters", "_buffers", "_modules")

_found: dict[Hashable, tuple[Any, ...] | None] = {}
"""A function of transformers, the settings that it reads, dtype and device -> the arguments of the operator;
``None`` where no form fits. It keeps no modules."""


class Gate:
    """Computes the activation between the two products of the experts of one module.

    Args:
        module: the module of the experts.
        has_gate: whether the first product gives gate and up, ``_apply_gate``, or the value alone, ``act_fn``.
        ops: the operators to use; ``None``: the module's own functions.
    """

    def __init__(self, module: nn.Module, has_gate: bool, ops: Ops | None) -> None:
        self._module, self._has_gate, self._ops = module, has_gate, ops
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        """The settings of the module and of its activation when the form was looked up."""
        self._observed: tuple[Any, ...] | None = None
        """All that the function may read, at the time of that lookup."""
        self._form: tuple[Any, ...] | None = None

    def forward(self, up_RF: torch.Tensor) -> torch.Tensor:
        """Compute [R, F] to [R, H]."""
        form = self.form(up_RF)
        if form is not None:
            return self._ops.gated(up_RF, *form)
        return self._module._apply_gate(up_RF) if self._has_gate else self._module.act_fn(up_RF)

    def backward(self, up_RF: torch.Tensor, dh_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient of the argument of :meth:`forward`, [R, F], and its result once more, [R, H].

        Args:
            up_RF: the argument of :meth:`forward`.
            dh_RH: the gradient of its result.
        """
        form = self.form(up_RF)
        if form is not None:
            return self._ops.gated_backward(up_RF, dh_RH, *form)
        dup_RF, h_RH = _differentiated(self.forward, up_RF, dh_RH)
        return dup_RF, h_RH.to(up_RF.dtype)

    def form(self, up_RF: torch.Tensor) -> tuple[Any, ...] | None:
        """Return the arguments of the operator that computes the module's activation; ``None`` if no form fits.

        Args:
            up_RF: rows in the dtype and on the device of the call.
        """
        if self._ops is None or not self._has_gate or up_RF.is_meta:
            return None
        own = self._module.__dict__
        function = own.get("_apply_gate") or type(self._module)._apply_gate
        act = self._module._modules.get("act_fn") or own.get("act_fn")
        of_act = getattr(act, "__dict__", _NOTHING)
        if self._observed != self._as_now(function, act, own, of_act, up_RF.dtype):
            self._names = _settings(own), _settings(of_act)
            # Set last: after a failed lookup the next call tries again.
            self._form = self._resolve(function, act, own, of_act, up_RF)
            self._observed = self._as_now(function, act, own, of_act, up_RF.dtype)
        if self._form is None or any(_GLOBAL_HOOKS) or any(map(of_act.get, _HOOKS)):
            return None
        return self._form

    def _as_now(self, function: Any, act: Any, own: dict[str, Any], of_act: dict[str, Any], dtype: Any) -> Any:
        names, act_names = self._names
        return function, act, dtype, len(own), len(of_act), *map(own.get, names), *map(of_act.get, act_names)

    def _resolve(
        self, function: Any, act: Any, own: dict[str, Any], of_act: dict[str, Any], up_RF: torch.Tensor
    ) -> tuple[Any, ...] | None:
        if not (_is_known(function, "transformers") and _is_simple(act) and _has_one_child(self._module)):
            return None
        names, act_names = self._names
        key = function, names, tuple(map(own.get, names)), type(act), act_names, tuple(map(of_act.get, act_names))
        key = (
            *key,
            None if isinstance(act, nn.Module) else act,
            up_RF.dtype,
            up_RF.device.type,
            self._ops.gated_backward,
        )
        if key not in _found:
            # In calls without gradients too, since a backward may come later.
            with torch.inference_mode(False), torch.device("cpu"):
                _found[key] = _search(self._module, up_RF, self._ops)
        return _found[key]


_NOTHING: dict[str, Any] = {}
_GLOBAL_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)


def _settings(attributes: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of plain attributes, without those that an engine has set."""
    return tuple(sorted(name for name, each in attributes.items() if isinstance(each, _PLAIN) and name[:3] != "ds_"))


def _is_known(function: Any, package: str) -> bool:
    """Return True if a function is a package's own, so that it reads known things: settings of its module and
    ``act_fn``."""
    return getattr(function, "__module__", "").partition(".")[0] == package and hasattr(function, "__code__")


def _is_simple(act: Any) -> bool:
    """Return True if an activation is torch's or transformers' own, without state, so that its settings define it."""
    if act is None or act in (F.silu, F.gelu):
        return True
    if not isinstance(act, nn.Module) or type(act).__module__ not in _ACTIVATIONS or "forward" in vars(act):
        return False
    functions = [each for name, each in vars(act).items() if name[0] != "_" and callable(each)]
    return not any(map(vars(act).get, _OWN_STATE)) and all(each in (F.silu, F.gelu) for each in functions)


_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


def _has_one_child(module: nn.Module) -> bool:
    return not set(module._modules) - {"act_fn"} and not module._buffers


def _search(module: nn.Module, like: torch.Tensor, ops: Ops) -> tuple[Any, ...] | None:
    """Return the arguments of the operator whose result and gradient equal the module's own in every bit."""
    own = module.__dict__
    limit, alpha = (
        next((each for each in map(own.get, some) if isinstance(each, int | float)), None)
        for some in (_LIMITS, _ALPHAS)
    )
    x_RF, dh_RH = _rows(limit, like)
    try:
        own = _differentiated(module._apply_gate, x_RF.clone(), dh_RH)
    except Exception:  # the function may require other rows: then autograd differentiates it
        return None
    for form in FORMS:
        if ("clamped" in form and limit is None) or (form == "swish_of_clamped" and alpha is None):
            continue
        for interleaved in (False, True):
            arguments = form, interleaved, float(limit or 0.0), float(alpha or 0.0)
            with torch.no_grad():
                found = ops.gated(x_RF, *arguments), *ops.gated_backward(x_RF, dh_RH, *arguments)
            if all(map(_is_same, found, (own[1], own[0], own[1]))):
                return arguments
    return None


def _differentiated(
    function: Callable[[torch.Tensor], torch.Tensor], x_RF: torch.Tensor, dh_RH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a function's rows, by autograd, and its result."""
    with torch.enable_grad(), saved_tensors_hooks(as_it_is, as_it_is):
        leaf_RF = x_RF.detach().requires_grad_()
        h_RH = function(leaf_RF)
    (dx_RF,) = torch.autograd.grad(h_RH, leaf_RF, dh_RH.to(h_RH.dtype))
    return dx_RF, h_RH.detach()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # A nan has no sign; a zero has one.
    is_equal = ((one == other) & (one.signbit() == other.signbit())) | (one.isnan() & other.isnan())
    return bool(is_equal.all())


def _rows(limit: float | None, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random and special rows with gradients: of every size, at the limit, and at the ends of the dtype."""
    generator = torch.Generator().manual_seed(0)
    shape = _NUM_ROWS, _WIDTH
    ends = torch.finfo(like.dtype)
    at = 1.0 if limit is None else float(limit)
    sizes = 0.0, at, at * 1.01, ends.max, ends.tiny, math.inf, 20.0, 88.0, 100.0
    special = torch.tensor([*sizes, *(-each for each in sizes), math.nan], dtype=torch.float64)

    def values(columns: int) -> torch.Tensor:
        size = 10.0 ** torch.randint(-4, 3, (shape[0], 1), generator=generator)
        drawn = torch.randn(shape[0], columns, generator=generator, dtype=torch.float64) * size
        chosen = special[torch.randint(len(special), drawn.shape, generator=generator)]
        is_special = torch.rand(drawn.shape, generator=generator) < 0.2
        is_special[: shape[0] // 2] = False
        return torch.where(is_special, chosen, drawn).to(like.dtype).to(like.device)

    return values(2 * shape[1]), values(shape[1])

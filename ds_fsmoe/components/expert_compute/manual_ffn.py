# SPDX-License-Identifier: Apache-2.0
"""Feed-forward networks with hand-written gradients, and the test that an expert is one of them.

``experts`` returns these forms from ``written()``, ``plan`` finds them, and ``written_call`` runs them. Experts without
such a form go through ``autograd_call``.

Letters: N ranks the rows came from, c slots, R = N * c rows, M width, H hidden width.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module

from ds_fsmoe.components.expert import ExpertBase
from ds_fsmoe.components.expert_compute.linears import apply_linear, is_plain_linear


@dataclass(frozen=True)
class Activation:
    """Describes an element-wise function whose result and gradient both follow from one kept tensor."""

    kept: Callable[[torch.Tensor], torch.Tensor]
    """Maps the pre-activation, which it may overwrite, to the kept tensor."""
    result: Callable[[torch.Tensor], torch.Tensor]
    """Maps the kept tensor to the result."""
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Maps the gradient of the result, which it may overwrite, and the kept tensor to the pre-activation's gradient."""


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _in_place(backward: Any, *constants: float, **options: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a backward of aten's that overwrites the gradient it receives.

    New memory for a large tensor costs a CPU as much time as the computation, and a GPU its memory.
    """

    def written(dh: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        if dh.dtype != kept.dtype:  # under autocast
            return backward(dh, kept, *constants, **options)
        return backward.grad_input(dh, kept, *constants, **options, grad_input=dh)

    return written


def _gelu(approximate: str) -> Activation:
    backward = _in_place(torch.ops.aten.gelu_backward, approximate=approximate)
    return Activation(_itself, functools.partial(F.gelu, approximate=approximate), backward)


MANUAL_ACTIVATIONS: dict[str, Activation] = {
    # The result shows where the gradient passes, and the next layer needs it anyway.
    "relu": Activation(torch.relu_, _itself, _in_place(torch.ops.aten.threshold_backward, 0)),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "silu": Activation(_itself, F.silu, _in_place(torch.ops.aten.silu_backward)),
}


class ManualExpert(ABC):
    """Computes ``down(hidden(up_0(x), up_1(x), ...))``, with ``hidden`` element-wise, forward and backward without
    autograd.

    Args:
        up: linear layers from M to H.
        down: the linear layer from H to M.
    """

    def __init__(self, up: tuple[nn.Linear, ...], down: nn.Linear) -> None:
        self.up = up
        self.down = down

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return (*self.up, self.down)

    def with_layers(self, up: Iterable[Any], down: Any) -> ManualExpert:
        """Return the same computation with other layers, which have the same interface."""
        other = copy.copy(self)
        other.up, other.down = tuple(up), down
        return other

    @abstractmethod
    def kept(self, x_NcM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the rest of the forward and the backward need besides the rows, each [N, c, H]."""

    @abstractmethod
    def hidden(self, kept: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Compute the rows of the last layer, [N, c, H], from the kept tensors."""

    @abstractmethod
    def backward_hidden(
        self, dh_NcH: torch.Tensor, kept: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the gradient of the results of each layer of ``up`` for that of :meth:`hidden`, which it may
        overwrite.

        Returns:
            The gradients, and the result of :meth:`hidden` if most of it was computed on the way, else ``None``.
        """


class ManualFeedForward(ManualExpert):
    """Computes ``down(activation(up(x)))``."""

    def __init__(self, up: nn.Linear, activation: Activation, down: nn.Linear) -> None:
        super().__init__((up,), down)
        self.activation = activation

    def kept(self, x_NcM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.activation.kept(apply_linear(self.up[0], x_NcM)),)

    def hidden(self, kept: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.activation.result(kept[0])

    def backward_hidden(
        self, dh_NcH: torch.Tensor, kept: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        return (self.activation.backward(dh_NcH, kept[0]),), None


class ManualGatedFeedForward(ManualExpert):
    """Computes ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, gate: nn.Linear, activation: Activation, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__((gate, up), down)
        self.activation = activation

    def kept(self, x_NcM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = self.up
        return self.activation.kept(apply_linear(gate, x_NcM)), apply_linear(up, x_NcM)

    def hidden(self, kept: tuple[torch.Tensor, ...]) -> torch.Tensor:
        gate_NcH, up_NcH = kept
        return self.activation.result(gate_NcH) * up_NcH

    def backward_hidden(
        self, dh_NcH: torch.Tensor, kept: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        gate_NcH, up_NcH = kept
        d_gate_NcH = self.activation.backward(dh_NcH * up_NcH, gate_NcH)
        result_NcH = self.activation.result(gate_NcH)
        deltas = d_gate_NcH, dh_NcH.mul_(result_NcH) if dh_NcH.dtype == result_NcH.dtype else dh_NcH * result_NcH
        if result_NcH is gate_NcH:  # the kept tensor may be read again
            return deltas, result_NcH * up_NcH
        return deltas, result_NcH.mul_(up_NcH)


def flat_rows(x_NcM: torch.Tensor) -> torch.Tensor:
    """Reshape [N, c, M] to [N * c, M], or [k, N, c, M] to [k, N * c, M]; return rows [R, M] unchanged."""
    if x_NcM.ndim == 2:
        return x_NcM
    return x_NcM.reshape(*x_NcM.shape[:-3], x_NcM.shape[-3] * x_NcM.shape[-2], x_NcM.shape[-1])


# ---- recognising experts


def modules_of(expert: nn.Module) -> list[nn.Module]:
    """Return the expert and all modules inside it: ``expert.modules()`` in another order at a fraction of its cost.

    It runs in every call of a layer, since hooks and layers may change.
    """
    found = [expert]
    for module in found:
        found.extend(each for each in module._modules.values() if each is not None)
    return found


def manual_form(expert: nn.Module) -> ManualExpert | None:
    """Return the expert's hand-written forward and backward; ``None`` where it is not known to compute just that.

    Known are classes that define ``written`` (see :meth:`ExpertBase.written`), unless a subclass overrides the
    computation, and ``nn.Sequential(nn.Linear, activation, nn.Linear)`` with ReLU, GELU or SiLU. Classes must match
    exactly.
    """
    if any("forward" in module.__dict__ for module in modules_of(expert)):
        return None  # this object has its own forward
    form = None
    if type(expert) is nn.Sequential:
        form = _form_of_sequential(expert)
    elif isinstance(expert, ExpertBase) and _written_is_up_to_date(type(expert)):
        form = expert.written()
    if form is None or not all(is_plain_linear(linear) for linear in form.linears):
        return None
    # A weight in two places has one gradient of two terms; leave it to autograd.
    return form if len({id(linear.weight) for linear in form.linears}) == len(form.linears) else None


def runs_unobserved(expert: nn.Module) -> bool:
    """Return True if no hook needs the calls of this module and its submodules: see :func:`is_observed`."""
    return not any(is_observed(module) for module in modules_of(expert))


def is_observed(module: nn.Module) -> bool:
    """Return True if the call of this one module is needed: by hooks, a compiled form, or a forward of its own."""
    return bool(
        torch_module._has_any_global_hook()
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
    )


def _form_of_sequential(expert: nn.Sequential) -> ManualFeedForward | None:
    if len(expert) != 3:
        return None
    up, middle, down = expert
    if type(middle) is nn.GELU:
        activation = MANUAL_ACTIVATIONS.get({"none": "gelu", "tanh": "gelu_tanh"}.get(middle.approximate, ""))
    else:
        activation = MANUAL_ACTIVATIONS.get({nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(middle), ""))
    return None if activation is None else ManualFeedForward(up, activation, down)


@functools.lru_cache(maxsize=256)
def _written_is_up_to_date(expert_class: type) -> bool:
    """Return True if no class derived from the one that defines ``written`` overrides the computation."""

    def definer(name: str) -> type:
        return next(each for each in expert_class.__mro__ if name in vars(each))

    return all(issubclass(definer("written"), definer(name)) for name in ("do_experts", "forward", "__call__"))

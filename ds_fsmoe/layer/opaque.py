# SPDX-License-Identifier: Apache-2.0
"""Represents one of our modules as one operator for torch's compiler, which cannot trace lanes and collectives.

Compiled code calls the operator ``fsmoe::call_module``, which calls the module as without a compiler, with its hooks.
The parameters are no inputs of the operator: its backward runs the backward of that call, in which they get their
gradients, as under reentrant checkpointing. So ZeRO's hooks on parameters keep working, and compiled code does not
depend on the parameters. Converted layers derive from :class:`OpaqueModule`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

_numbers = itertools.count(1)
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


class Handle:
    """Represents a module in compiled code.

    Its number is in a tensor, so that code compiled for one layer runs all others. The tensor requires a gradient, so
    that the operator has a backward even if no other input needs one.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        number = next(_numbers)
        self.path = path
        """The path of the module in its model, for messages."""
        self.is_used = False
        """True if compiled code has called the module."""
        self.backward = -1
        """The number of the last backward that reached the module."""
        _modules[number] = module
        _usual_keys()
        self.tensor = torch.tensor(float(number), dtype=torch.float64, device="cpu", requires_grad=True)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Return ``None`` as the copy: a copied module is another module, perhaps in another process."""
        return type(None), ()


class OpaqueModule(nn.Module):
    """Represents a module that compiled code calls as one operator."""

    @property
    def opaque(self) -> Handle | None:
        """Return the handle that represents the module in compiled code; ``None`` without one."""
        return self.fsmoe.opaque

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its hooks."""
        if torch.compiler.is_dynamo_compiling() and self.opaque is not None and self.fits_operator(*args, **kwargs):
            return self.through_operator(*args)
        return self.call_uncompiled(*args, **kwargs)

    @torch._disable_dynamo
    def call_uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without a compiler; compiled code has a graph break here."""
        return self._call_impl(*args, **kwargs)

    def fits_operator(self, *args: Any, **kwargs: Any) -> bool:
        """Return True if a call can go through the operator."""
        return len(args) == 3 and not kwargs

    def through_operator(self, *args: Any) -> Tensor:
        """Return the result of a call, in compiled code."""
        return self.call_operator(*args)[0]

    def call_operator(
        self, x: Tensor, second: Tensor | None = None, third: Tensor | None = None, num_experts: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the operator.

        Args:
            x: [..., M], the first argument of the module.
            second: the second argument, which has no gradient.
            third: the third argument.
            num_experts: E, if the module sets ``l_aux`` and ``exp_counts``; 0 otherwise.

        Returns:
            The result, in the shape and dtype of ``x``, and the values of ``l_aux`` and ``exp_counts``.
        """
        handle, kind, has_grad = self.opaque.tensor, x.device.type, torch.is_grad_enabled()
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        needs_x = has_grad and x.requires_grad
        needs_third = has_grad and third is not None and third.requires_grad
        inputs = handle, x, second, third
        found = torch.ops.fsmoe.call_module(*inputs, needs_x, needs_third, has_grad, dtype, num_experts)
        return found[0], found[1], found[2]


class _Call(bytearray):
    """Holds the memory of the tensor that represents a call until its backward; its data lives as long as the
    tensor."""

    __slots__ = ("__weakref__", "edges", "gradients", "handle")


_calls: WeakValueDictionary[int, _Call] = WeakValueDictionary()


class _CopiedArgument(torch.autograd.Function):
    """Copies an argument for a module, and stores the gradient of the copy in a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, given: Tensor, gradients: list[Tensor | None], place: int) -> Tensor:
        ctx.gradients, ctx.place = gradients, place
        return given.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.gradients[ctx.place] = gradient
        return None, None, None, None


def _handed(given: Tensor | None, anchor: Tensor | None, gradients: list[Tensor | None], place: int) -> Tensor | None:
    """Return an argument for a module: a copy, since compiled code may write to its memory after the operator."""
    if given is None or anchor is None:
        return None if given is None else given.detach().clone()
    return _CopiedArgument.apply(anchor, given.detach(), gradients, place)


@functools.cache
def _usual_keys() -> tuple[Any, Any]:
    """Return torch's dispatch keys outside of operators."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def _as_outside(has_grad: bool, device: str, autocast: torch.dtype | None) -> Iterator[None]:
    """Run the block as outside of an operator, where autograd is active."""
    with (
        torch._C._ForceDispatchKeyGuard(*_usual_keys()),
        torch.set_grad_enabled(has_grad),
        torch.autocast(device, dtype=autocast, enabled=autocast is not None),
    ):
        yield


_INPUTS = "Tensor handle, Tensor x, Tensor? second, Tensor? third, bool needs_x, bool needs_third, bool has_grad"
_SCHEMA = f"({_INPUTS}, ScalarType? autocast, int num_experts) -> (Tensor, Tensor, Tensor, Tensor)"
_tags = (torch.Tag.cudagraph_unsafe,)
_DENSE = {"memory_format": torch.contiguous_format}


@torch.library.custom_op("fsmoe::call_module", mutates_args=(), schema=_SCHEMA, tags=_tags)
def _call_module(
    handle: Tensor,
    x: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    needs_x: bool,
    needs_third: bool,
    has_grad: bool,
    autocast: torch.dtype | None,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    module, call = _modules[int(handle.item())], _Call(8)
    module.opaque.is_used = True
    call.gradients, call.handle = [None, None, None], module.opaque
    with _as_outside(has_grad, x.device.type, autocast):
        anchor = torch.empty(0, requires_grad=has_grad)
        given = [
            _handed(each, anchor if is_needed else None, call.gradients, i)
            for i, (each, is_needed) in enumerate(((x, needs_x), (second, False), (third, needs_third)))
        ]
        y = module._call_impl(*given[: 2 if num_experts else 3]).to(x.dtype)
        left = (module.l_aux.to(_dtype_of_loss(x)), module.exp_counts) if num_experts else (x.new_empty(0),) * 2
        call.edges = [(i, get_gradient_edge(each)) for i, each in enumerate((y, left[0])) if each.requires_grad]
    number = torch.frombuffer(call, dtype=torch.int64).fill_(id(call) if has_grad else 0)
    _calls[id(call)] = call
    return y.detach().clone(**_DENSE), left[0].detach().clone(), left[1].clone(), number


def _dtype_of_loss(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@_call_module.register_fake
def _(handle, x, second, third, needs_x, needs_third, has_grad, autocast, num_experts):
    left = x.new_empty(0), x.new_empty(0)
    if num_experts:
        left = x.new_empty((), dtype=_dtype_of_loss(x)), x.new_empty(num_experts, dtype=torch.int64)
    y = torch.empty_like(x, **_DENSE)
    return y, *left, torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "fsmoe::call_module_backward",
    mutates_args=(),
    schema="(Tensor number, Tensor dy, Tensor dloss, Tensor? third, bool needs_x, bool needs_third)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_tags,
)
def _call_module_backward(
    number: Tensor, dy: Tensor, dloss: Tensor, third: Tensor | None, needs_x: bool, needs_third: bool
) -> tuple[Tensor, Tensor, Tensor]:
    call = _calls.pop(int(number.item()), None)
    if call is None:
        raise RuntimeError(
            "the backward of compiled code with a ds_fsmoe layer ran a second time, and its activations are freed: "
            "do not use torch.compile where retain_graph is needed"
        )
    number_of_backward = torch._C._current_graph_task_id()
    if call.handle.backward == number_of_backward:
        # Its parameters would get a gradient from each call, and ZeRO would count only the first.
        raise RuntimeError(
            f"{call.handle.path}: one backward reached two compiled calls of this layer: call backward for each "
            "forward, or do not use torch.compile"
        )
    call.handle.backward = number_of_backward
    (edges, gradients), call.edges = (call.edges, call.gradients), []
    with _as_outside(True, dy.device.type, None):
        if edges:
            torch.autograd.backward([edge for _, edge in edges], [(dy, dloss)[i] for i, _ in edges])
    del edges
    wanted = ((gradients[0], dy, needs_x), (gradients[2], third, needs_third))
    dx, dthird = (
        dy.new_empty(0) if not needed else (torch.zeros_like(like) if found is None else found).clone(**_DENSE)
        for found, like, needed in wanted
    )
    return dx, dthird, torch.zeros((), dtype=torch.float64)


@_call_module_backward.register_fake
def _(number, dy, dloss, third, needs_x, needs_third):
    dx, dthird = (
        torch.empty_like(like, **_DENSE) if is_needed else dy.new_empty(0)
        for like, is_needed in ((dy, needs_x), (third, needs_third))
    )
    return dx, dthird, torch.empty((), dtype=torch.float64, device="cpu")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[3], inputs[3])
    ctx.needs = inputs[4:6]


def _gradients(ctx: Any, dy: Tensor, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    number, third = ctx.saved_tensors
    dx, dthird, dhandle = torch.ops.fsmoe.call_module_backward(number, dy, dloss, third, *ctx.needs)
    needs_x, needs_third = ctx.needs
    return dhandle, dx if needs_x else None, None, dthird if needs_third else None, None, None, None, None, None


_call_module.register_autograd(_gradients, setup_context=_save)

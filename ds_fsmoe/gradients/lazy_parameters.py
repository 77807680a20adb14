# SPDX-License-Identifier: Apache-2.0
"""Makes reads of a parameter wait for its new value, which is still being gathered.

``updated_parameters`` marks parameters by it after an optimizer step. A parameter stays the same object. While it
waits, its class is one that torch calls before each operation. Reads of its shape or its gradient return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_GATHER = "_fsmoe_arrives"


class LazyParameter(nn.Parameter):
    """Represents a parameter that is waited for when it is read."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the parameters among the arguments, unless ``func`` reads no values; then run it."""
        if func not in _NOT_VALUES:
            _wait_for_all(args)
            _wait_for_all((kwargs or {}).values())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Wait for the parameter, and copy its new value."""
        wait_for(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: int) -> Any:  # type: ignore[override]
        """Wait for the parameter, and pickle its new value."""
        wait_for(self)
        return self.__reduce_ex__(protocol)


def gather_on_first_read(parameter: nn.Parameter, arrives: Callable[[], None]) -> None:
    """Make the next read of a parameter wait for its gather.

    Args:
        parameter: of torch's own class.
        arrives: waits until the value is complete; callable in any thread, any number of times.
    """
    setattr(parameter, _GATHER, arrives)
    parameter.__class__ = LazyParameter


def can_be_waited_for(parameter: nn.Parameter) -> bool:
    """Return True if a parameter may change its class: it is of torch's own."""
    return type(parameter) in (nn.Parameter, LazyParameter)


def wait_for(parameter: nn.Parameter) -> None:
    """Wait for a parameter if it is still being gathered."""
    if type(parameter) is not LazyParameter:
        return
    # Where two threads wait, the first one that is through takes the mark off.
    arrives = vars(parameter).get(_GATHER)
    if arrives is not None:
        arrives()
    parameter.__class__ = nn.Parameter
    vars(parameter).pop(_GATHER, None)


def _wait_for_all(values: Iterable[Any]) -> None:
    for each in values:
        if isinstance(each, LazyParameter):
            wait_for(each)
        elif isinstance(each, list | tuple):
            _wait_for_all(each)
        elif isinstance(each, dict):
            _wait_for_all(each.values())


# They read a parameter's kind or its gradient, and not its value.
_PROPERTIES = (
    *("grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "is_cuda", "is_cpu"),
    *("is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "_version", "retains_grad"),
    *("output_nr", "grad_dtype"),
)
_METHODS = (
    *("__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"),
    *("ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
    *("size", "storage_offset", "stride"),
)
_SET = ("grad", "requires_grad", "grad_dtype")
# Not every torch has all of them.
_NOT_VALUES = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)),
        *(getattr(torch.Tensor, name).__set__ for name in _SET if hasattr(torch.Tensor, name)),
        *(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)),
        torch.Tensor.grad.__delete__,
    ]
)

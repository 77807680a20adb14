# SPDX-License-Identifier: Apache-2.0
"""Stands for what a block will return, between it and the next block: the value is computed when somebody looks at it.

No tensor, so that code that acts on tensors only leaves it alone; whatever takes a tensor gets the value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Pending:
    """A tensor that is not there yet.

    Args:
        complete: computes it; called once.
    """

    def __init__(self, complete: Callable[[], torch.Tensor]) -> None:
        self._complete: Callable[[], torch.Tensor] | None = complete
        self._value: torch.Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Return whether nobody has looked at it."""
        return self._complete is not None

    @property
    def value(self) -> torch.Tensor:
        """Return the tensor, computed now if need be."""
        if self._complete is not None:
            complete, self._complete = self._complete, None
            self._value = complete()
        return self._value

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with values."""
        return function(*map(looked_at, args), **{name: looked_at(each) for name, each in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        # Not while it is made, or copied.
        if name.startswith("__") or name in ("_complete", "_value"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self.value[at]

    def __len__(self) -> int:
        return len(self.value)


def looked_at(value: Any) -> Any:
    """Return a value, or a list or tuple, with tensors in the place of those that were pending."""
    if isinstance(value, Pending):
        return value.value
    if type(value) in (tuple, list):
        return type(value)(map(looked_at, value))
    return value


def _with_value(of: Callable) -> Callable:
    def method(self: Pending, *others: Any) -> Any:
        return of(self.value, *map(looked_at, others))

    return method


def _with_value_second(of: Callable) -> Callable:
    def method(self: Pending, other: Any) -> Any:
        return of(looked_at(other), self.value)

    return method


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    setattr(Pending, f"__{_name}__", _with_value(getattr(operator, _name)))
    setattr(Pending, f"__r{_name}__", _with_value_second(getattr(operator, _name)))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "setitem"):
    setattr(Pending, f"__{_name}__", _with_value(getattr(operator, _name)))

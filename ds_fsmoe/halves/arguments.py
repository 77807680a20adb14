# SPDX-License-Identifier: Apache-2.0
"""Cuts the arguments of a block into halves of the batch, and puts what it returns together again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

NUM_HALVES = 2
Rest = tuple[tuple, dict[str, Any]]
"""The arguments of a block but the first, by place and by name."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class CannotSplitError(Exception):
    """Says why a block has to be given the whole batch."""


def sizes_of_halves(batch: int) -> tuple[int, int]:
    """Return the samples of each half: the first has one more if there is one too many."""
    return batch - batch // 2, batch // 2


def check_cache(arguments: dict[str, Any]) -> None:
    """Refuse arguments that carry something from call to call.

    Raises:
        CannotSplitError: there is a cache.
    """
    for name in _CACHES:
        if arguments.get(name) is not None:
            raise CannotSplitError(f"it is given a cache ({name}); use_cache = False gives none")


def halves_of(value: Any, batch: int, name: str) -> tuple[Any, Any]:
    """Return what each half gets of an argument: of tensors with a sample in each row its own rows, of all else all.

    Args:
        value: the argument, or a tuple, list or dictionary of such.
        batch: the samples of the whole, B.
        name: for messages.

    Raises:
        CannotSplitError: it is not known how to cut it.
    """
    if isinstance(value, _PLAIN):
        return value, value
    if isinstance(value, torch.Tensor):
        return _halves_of_tensor(value, batch, name)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        pairs = [halves_of(each, batch, f"{name}[{place}]") for place, each in enumerate(value)]
        return type(value)(pair[0] for pair in pairs), type(value)(pair[1] for pair in pairs)
    if type(value) is dict:
        of_keys = {key: halves_of(each, batch, f"{name}[{key!r}]") for key, each in value.items()}
        return {key: pair[0] for key, pair in of_keys.items()}, {key: pair[1] for key, pair in of_keys.items()}
    raise CannotSplitError(f"it is not known how to cut {name}, a {type(value).__name__}, by the batch")


def _halves_of_tensor(value: torch.Tensor, batch: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    # One of a single dimension goes by positions, or is a number.
    if value.dim() < 2 or value.shape[0] == 1:
        return value, value
    if value.shape[0] == batch:
        first, second = value.split(sizes_of_halves(batch))
        return first, second
    raise CannotSplitError(
        f"it is not known how to cut {name} of shape {list(value.shape)} for a batch of {batch}: its first size is "
        "neither that nor 1"
    )


def joined_halves(first: Any, second: Any) -> Any:
    """Return what a block returned for both halves as it would have for the whole batch.

    Args:
        first, second: tensors with a sample in each row, or ``None``, or tuples of such.
    """
    if isinstance(first, tuple):
        return tuple(joined_halves(*each) for each in zip(first, second, strict=True))
    return None if first is None else torch.cat((first, second))


def check_output(value: Any, batch: int) -> None:
    """Refuse what :func:`joined_halves` cannot put together.

    Args:
        value: what a block returned for a whole batch.
        batch: its samples, B.

    Raises:
        CannotSplitError: it is something else.
    """
    for each in value if isinstance(value, tuple) else (value,):
        is_of_samples = isinstance(each, torch.Tensor) and each.dim() > 1 and each.shape[0] == batch
        if each is not None and not is_of_samples:
            shape = f" of shape {list(each.shape)}" if isinstance(each, torch.Tensor) else ""
            raise CannotSplitError(f"it returns a {type(each).__name__}{shape}, which is not one thing for each sample")


# ---- Stands for what a block will return, between it and the next block: the value is computed when somebody looks at
# it
#
# No tensor, so that code that acts on tensors only leaves it alone; whatever takes a tensor gets the value.


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

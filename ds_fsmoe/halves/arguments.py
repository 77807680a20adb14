# SPDX-License-Identifier: Apache-2.0
"""Cuts the arguments of a block into halves of the batch, and puts what it returns together again."""

from __future__ import annotations

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

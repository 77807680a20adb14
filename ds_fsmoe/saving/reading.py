# SPDX-License-Identifier: Apache-2.0
"""Reading files of checkpoints so that nothing in them is run: tensors, plain data, and classes that are named.

A file that :func:`torch.save` has written is a pickle, and a pickle may name any function to be called. Here it may
name those of :data:`PLAIN` and what the user trusts, and nothing else.
"""

from __future__ import annotations

import _codecs
import argparse
import datetime
import pathlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_fsmoe.saving.tags import CheckpointError

_MULTIARRAY = np.core.multiarray if np.__version__.startswith("1.") else np._core.multiarray
_KINDS = ("?", "b", "h", "i", "l", "q", "B", "H", "I", "L", "Q", "e", "f", "d", "g", "F", "D", "U", "S", "M", "m")
# What people keep beside their weights, and what holds only data.
PLAIN: tuple[Any, ...] = (
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    _MULTIARRAY._reconstruct,
    _MULTIARRAY.scalar,
    *{type(np.dtype(each)) for each in _KINDS},
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.Path),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    slice,
    _codecs.encode,  # by which bytes are written
)

# What DeepSpeed's own files name: a class or two with numbers in it.
OF_DEEPSPEED: tuple[str, ...] = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class Unread:
    """Stands for an object that nobody is going to look at, where DeepSpeed need not be installed."""

    def __init__(self, *_: Any) -> None:
        pass


WITHOUT_DEEPSPEED: tuple[Any, ...] = tuple((Unread, name) for name in OF_DEEPSPEED)
"""To be trusted by who wants tensors only."""


def read_file(
    path: Path,
    trusted: Sequence[Any] = (),
    map_location: str | Callable[..., Any] = "cpu",
    in_place: bool = False,
) -> Any:
    """What a file holds.

    Args:
        path: of :func:`torch.save`.
        trusted: classes that it may name beside the plain ones; or pairs of a class and the name it is to stand for.
        map_location: of :func:`torch.load`.
        in_place: leave tensors in the file until they are looked at.

    Raises:
        CheckpointError: it is damaged, or names something else.
    """
    try:
        with torch.serialization.safe_globals([*PLAIN, *trusted]):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=in_place)
    except pickle.UnpicklingError as error:
        named = _strangers(path, trusted)
        if not named:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        raise CheckpointError(
            f"{path} holds objects of {', '.join(named)}, and making them could run code: if you trust whoever wrote "
            'it, name them in your config, "fsmoe": {"checkpoint": {"trusted": [...]}}'
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _strangers(path: Path, trusted: Sequence[Any]) -> list[str]:
    """What a file names that is neither plain nor trusted."""
    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a file that is not one: the first error says so
        return []
    return sorted(named - {_full_name(each) for each in (*PLAIN, *trusted)})


def _full_name(trusted: Any) -> str:
    return trusted[1] if isinstance(trusted, tuple) else f"{trusted.__module__}.{trusted.__qualname__}"

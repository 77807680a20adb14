# SPDX-License-Identifier: Apache-2.0
"""Reads files of checkpoints without running anything in them: tensors, plain data, and classes that are allowed.

A file that :func:`torch.save` has written is a pickle, and a pickle may name any function to be called. Here it may
name those of :data:`PLAIN` and what the user trusts, and nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import _weights_only_unpickler

from ds_fsmoe.checkpoint_files.guards import KEY, PASSED_OVER
from ds_fsmoe.checkpoint_files.numpy_pickles import BYTES, NUMPY, STAND_INS, Anything
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.untrusted import problem_of

# What people keep beside their weights, and what holds only data. numpy's arrays are looked at for themselves.
PLAIN: tuple[Any, ...] = (
    argparse.Namespace,
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.Path),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    slice,
    *BYTES,
    PASSED_OVER,
)

# What DeepSpeed's own files name: a class or two with numbers in it.
OF_DEEPSPEED: tuple[str, ...] = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
WITHOUT_DEEPSPEED: tuple[Any, ...] = tuple((Anything, name) for name in OF_DEEPSPEED)
"""The classes to be trusted by programs that want tensors only, where DeepSpeed need not be installed."""


def read_file(
    path: Path,
    trusted: Sequence[Any] = (),
    map_location: str | Callable[..., Any] = "cpu",
    in_place: bool = False,
) -> Any:
    """Return what a file holds.

    Args:
        path: a file that :func:`torch.save` has written.
        trusted: classes that it may name beside the plain ones; or pairs of a class and the name that it replaces.
        map_location: the argument of that name of :func:`torch.load`.
        in_place: whether tensors stay in the file until they are used.

    Raises:
        CheckpointError: it is damaged, or names something else.
    """
    if (problem := problem_of(path, path.parent)) is not None:
        raise CheckpointError(problem)
    trusted = [*trusted, *_trusted_by_script()]
    try:
        with _allowed(*PLAIN, *trusted):
            try:
                found = torch.load(path, map_location=map_location, weights_only=True, mmap=in_place)
            except pickle.UnpicklingError:
                if not _names_numpy(path):
                    raise
                found = None
        if found is None:
            _go_through(path, trusted)
            with _allowed(*PLAIN, *trusted, *NUMPY):
                found = torch.load(path, map_location=map_location, weights_only=True, mmap=in_place)
    except pickle.UnpicklingError as error:
        named = _strangers(path, trusted)
        if not named:
            raise CheckpointError(f"{path} cannot be read: {_without_advice(error)}") from error
        raise CheckpointError(
            f"{path} holds objects of {', '.join(named)}, and making them could run code: if you trust whoever wrote "
            'it, name them in your config, "fsmoe": {"checkpoint": {"trusted": [...]}}'
        ) from error
    except Exception as error:  # a damaged file brings up anything
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(found, dict):
        found.pop(KEY, None)
    return found


def _trusted_by_script() -> list[Any]:
    """Return what the script has told torch to trust, except numpy's classes, which are dangerous without checks."""
    kept = ("numpy", "_codecs")
    return [each for each in torch.serialization.get_safe_globals() if _full_name(each).partition(".")[0] not in kept]


@contextmanager
def _allowed(*classes: Any) -> Iterator[None]:
    """Allow files to name these classes, and nothing else, within the block."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(classes))
    # torch allows every codec by itself, and what it allows goes before what it is told.
    by_itself = _weights_only_unpickler._get_allowed_globals()
    bytes_by = {name: by_itself[name] for _, name in BYTES if name in by_itself}
    by_itself |= {name: function for function, name in BYTES if name in by_itself}
    try:
        yield
    finally:
        by_itself |= bytes_by
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _names_numpy(path: Path) -> bool:
    """Return whether a file may hold numpy's objects."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no file, or one in the older format, of which that is not known
        return True
    return any(each.partition(".")[0] == "numpy" for each in named)


def _go_through(path: Path, trusted: Sequence[Any]) -> None:
    """Unpickle a file with stand-ins for numpy's classes and for trusted ones; tensors are not read.

    Raises:
        UnpicklingError: its arrays are not what numpy would have written.
    """
    with _allowed(*PLAIN, *STAND_INS, *((Anything, _full_name(each)) for each in trusted)):
        try:
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # in the older format, tensors cannot be left in the file
            torch.load(path, map_location="cpu", weights_only=True)


def _without_advice(error: BaseException) -> BaseException:
    """Return the original error, which torch has wrapped into advice to trust the file."""
    return error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error


def _strangers(path: Path, trusted: Sequence[Any]) -> list[str]:
    """Return what a file names that is neither plain nor trusted."""
    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a file that is not one: the first error says so
        return []
    return sorted(named - {_full_name(each) for each in (*PLAIN, *STAND_INS, *trusted)})


def _full_name(trusted: Any) -> str:
    return trusted[1] if isinstance(trusted, tuple) else f"{trusted.__module__}.{trusted.__qualname__}"

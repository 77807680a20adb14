# SPDX-License-Identifier: Apache-2.0
"""Reads files of checkpoints without running anything in them: tensors, plain data, and classes that are allowed.

A file that :func:`torch.save` has written is a pickle, and a pickle may name any function to be called. torch's reader
of weights alone calls those of :data:`PLAIN` and what the user trusts, and nothing else.

numpy's own classes take whatever a pickle gives them, such as fields beyond the end of an element. So its arrays are
made here, by functions of numpy that check what they are given.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import _weights_only_unpickler

from ds_fsmoe.checkpoint_files.guards import KEY, PASSED_OVER
from ds_fsmoe.checkpoint_files.plain_files import problem_of
from ds_fsmoe.checkpoint_files.tags import CheckpointError

_NUMBER = re.compile(r"[biufc]\d{1,2}")
_KIND_STATE = re.compile(r"\(3, '([<>|=])', None, None, None, -1, -1, 0\)")


class _Kind:
    """Stands in for ``numpy.dtype``."""

    dtype: np.dtype[Any]
    num_made = 0
    """Every array and scalar is made with one."""

    # Not in __init__, which a file can go round.
    def __new__(cls, name: Any = None, *_: Any) -> _Kind:
        if type(name) is not str or not _NUMBER.fullmatch(name):
            raise pickle.UnpicklingError(
                f"numpy.dtype({name!r:.200}): of numpy's arrays those of numbers and booleans are read, and not those "
                "of text, bytes, dates, objects or records; lists hold these as well"
            )
        kind = super().__new__(cls)
        kind.dtype = np.dtype(name)
        _Kind.num_made += 1
        return kind

    def __setstate__(self, state: Any) -> None:
        found = _KIND_STATE.fullmatch(repr(state))
        if found is None:
            raise pickle.UnpicklingError(f"a numpy.dtype with the state {state!r:.200}")
        self.dtype = self.dtype.newbyteorder(found[1])


class _Array(np.ndarray):
    """An array that is filled once."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, raw = state
        if self.size:
            raise pickle.UnpicklingError("an array that is filled twice")  # others may look into it
        checked = _numbers(kind, raw).reshape(shape, order="F" if is_fortran else "C")
        super().__setstate__(checked.__reduce__()[2])


def _new_array(*_: Any) -> _Array:
    return _Array((0,), "b")


def _scalar(kind: Any, raw: Any) -> Any:
    return _numbers(kind, raw).reshape(())[()]


def _numbers(kind: Any, raw: Any) -> np.ndarray:
    if type(kind) is not _Kind or type(raw) is not bytes:
        raise pickle.UnpicklingError("numbers of numpy that are not written as numpy does it")
    return np.frombuffer(raw, kind.dtype)


def _with_numpys_own(found: Any, seen: set[int]) -> Any:
    """Return what was read, with numpy's own classes in place of those that stand in for them.

    Args:
        found: what was read; what it holds is replaced in place.
        seen: the addresses of what was looked at already.
    """
    if isinstance(found, _Array):
        return found.view(np.ndarray)
    if isinstance(found, _Kind):
        return found.dtype
    if type(found) is tuple:
        return tuple(_with_numpys_own(each, seen) for each in found)
    if id(found) in seen:
        return found
    seen.add(id(found))
    if isinstance(found, list):
        found[:] = [_with_numpys_own(each, seen) for each in found]
    values = found if isinstance(found, dict) else getattr(found, "__dict__", None)
    if isinstance(values, dict):
        for name, each in values.items():
            values[name] = _with_numpys_own(each, seen)
    return found


def _encode_latin1(text: Any, codec: Any = None) -> bytes:
    """Replace ``_codecs.encode``, by which files hold bytes; other codecs take minutes over a short text."""
    if type(text) is not str or codec != "latin1":
        raise pickle.UnpicklingError(f"_codecs.encode by {codec!r}: only latin1 is read")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Replace ``bytes``, by which files hold bytes of length 0."""
    return b""


class _Anything:
    """Stands in for an object of a class that nobody will use."""

    def __new__(cls, *_: Any, **__: Any) -> _Anything:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


_ENCODE = "_codecs.encode"
# What people keep beside their weights, and what holds only data.
PLAIN: tuple[Any, ...] = (
    argparse.Namespace,
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.Path),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    slice,
    (_no_bytes, "builtins.bytes"),
    PASSED_OVER,
    (_Kind, "numpy.dtype"),
    ("an array's class, which may only be named", "numpy.ndarray"),
    # numpy 1 and numpy 2 have two names for the same module in files.
    *((_new_array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    # What is made of it may be filled. No file can name it so: a name in a file ends with its line.
    (_Array, "an array\n"),
)

# What DeepSpeed's own files name: a class or two with numbers in it.
OF_DEEPSPEED: tuple[str, ...] = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
WITHOUT_DEEPSPEED: tuple[Any, ...] = tuple((_Anything, name) for name in OF_DEEPSPEED)
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
    allowed = [*PLAIN, *trusted, *_trusted_by_script()]
    try:
        with _allowed(allowed):
            num_made = _Kind.num_made
            found = torch.load(path, map_location=map_location, weights_only=True, mmap=in_place)
            found = found if _Kind.num_made == num_made else _with_numpys_own(found, set())
    except pickle.UnpicklingError as error:
        named = _strangers(path, allowed)
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
def _allowed(classes: list[Any]) -> Iterator[None]:
    """Allow files to name these classes, and nothing else, within the block."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    # torch allows every codec by itself, and what it allows goes before what it is told.
    by_itself = _weights_only_unpickler._get_allowed_globals()
    encode = by_itself[_ENCODE]
    by_itself[_ENCODE] = _encode_latin1
    try:
        with torch.serialization.safe_globals(classes):
            yield
    finally:
        by_itself[_ENCODE] = encode
        torch.serialization.add_safe_globals(before)


def _without_advice(error: BaseException) -> BaseException:
    """Return the original error, which torch has wrapped into advice to trust the file."""
    return error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error


def _strangers(path: Path, allowed: Sequence[Any]) -> list[str]:
    """Return what a file names that is not allowed."""
    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a file that is not one: the first error says so
        return []
    return sorted(named - set(map(_full_name, allowed)))


def _full_name(trusted: Any) -> str:
    return trusted[1] if isinstance(trusted, tuple) else f"{trusted.__module__}.{trusted.__qualname__}"

# SPDX-License-Identifier: Apache-2.0
"""Reads files of checkpoints without running code in them: tensors, plain data, and allowed classes.

``whole`` and loading call it. A file that :func:`torch.save` has written is a pickle, and a pickle may name any
function to be called. Here it may name those of :data:`PLAIN` and those that the user trusts; all others are refused.
"""

from __future__ import annotations

import argparse
import datetime
import math
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

from ds_fsmoe.checkpoint_files.guards import KEY, SKIPPED_GUARD
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.untrusted import problem_of

# ---- Checks that the numpy arrays in a file are what numpy itself would have written
#
# numpy's own classes take whatever a pickle gives them: an itemsize below zero, fields beyond the end of an element, a
# buffer that is freed while another array uses it. So a file that names numpy is first read once with stand-ins
# that check each number against the others and allocate nothing. What they accept, numpy may then read.
#
# Arrays and scalars of numbers and booleans pass; those of text, bytes, dates, objects and records do not.


_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
"""The names that numpy 1 and numpy 2 use for the same module in files."""
_NUMBER = re.compile(r"[biufc]\d{1,2}")


def _refuse(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"{what}: of numpy's arrays those of numbers and booleans are read, and not those of text, bytes, dates, "
        "objects or records; lists hold these as well"
    )


def encode_latin1(text: Any, codec: Any = None) -> bytes:
    """Replace ``_codecs.encode``, by which files hold bytes; other codecs take minutes for a short text."""
    if type(text) is not str or codec != "latin1":
        raise pickle.UnpicklingError(f"_codecs.encode by {codec!r}: only latin1 is read")
    return text.encode("latin1")


def no_bytes() -> bytes:
    """Replace ``bytes``, by which files hold bytes of length 0."""
    return b""


class _Kind:
    """Replaces ``numpy.dtype``."""

    size_bytes: int

    # Not in __init__, which a file can go round.
    def __new__(cls, name: Any = None, align: Any = False, copy: Any = False) -> _Kind:
        if type(name) is not str or not _NUMBER.fullmatch(name) or align is not False or type(copy) is not bool:
            raise _refuse(f"numpy.dtype({name!r}, {align!r}, {copy!r})")
        kind = super().__new__(cls)
        try:
            kind.size_bytes = np.dtype(name).itemsize
        except TypeError as error:
            raise _refuse(str(error)) from error
        return kind

    def __setstate__(self, state: Any) -> None:
        version, order, *others = state if type(state) is tuple and len(state) == 8 else (None, None)
        is_plain = others == [None, None, None, -1, -1, 0] and all(type(each) in (int, type(None)) for each in others)
        if type(version) is not int or version != 3 or order not in ("<", ">", "|", "=") or not is_plain:
            raise _refuse(f"a numpy.dtype with the state {state!r:.200}")


class _ArrayType:
    """Replaces ``numpy.ndarray``, which may only be named."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        raise _refuse("numpy.ndarray is called")


class _Array:
    """Represents an array."""

    def __init__(self) -> None:
        self.is_filled = False

    def __setstate__(self, state: Any) -> None:
        # Filled again, it would free what others may look into.
        if self.is_filled or type(state) is not tuple or len(state) != 5:
            raise _refuse("an array that is filled twice, or not as numpy does it")
        version, shape, kind, is_fortran, raw = state
        is_plain = type(version) is int and version == 1 and type(is_fortran) is bool and type(raw) is bytes
        is_plain = is_plain and type(shape) is tuple and all(type(each) is int and each >= 0 for each in shape)
        if not is_plain or type(kind) is not _Kind or math.prod(shape) * kind.size_bytes != len(raw):
            raise _refuse(f"an array of shape {shape!r:.200} with another number of bytes")
        self.is_filled = True


def _reconstruct(array_type: Any, shape: Any, letter: Any) -> _Array:
    if array_type is not _ArrayType or shape != (0,) or type(shape[0]) is not int or letter != b"b":
        raise _refuse("an array that is not made as numpy does it")
    return _Array()


def _scalar(kind: Any, raw: Any = None) -> object:
    if type(kind) is not _Kind or type(raw) is not bytes or len(raw) != kind.size_bytes:
        raise _refuse("a numpy scalar with another number of bytes")
    return object()


def _of_cores(reconstruct: Any, scalar: Any) -> list[tuple[Any, str]]:
    return [
        (function, f"{core}.{name}")
        for core in _CORES
        for name, function in (("_reconstruct", reconstruct), ("scalar", scalar))
    ]


BYTES: tuple[Any, ...] = ((encode_latin1, "_codecs.encode"), (no_bytes, "builtins.bytes"))
"""The functions that stand in for the names by which files hold bytes."""

STAND_INS: tuple[Any, ...] = (
    (_ArrayType, "numpy.ndarray"),
    (_Kind, "numpy.dtype"),
    *_of_cores(_reconstruct, _scalar),
    # What is made by these may be filled. No file can name them so: a name in a file ends with its line.
    (_Array, "an array\n"),
)
"""The stand-ins for numpy's names while a file is checked."""

_MULTIARRAY = np.core.multiarray if np.__version__.startswith("1.") else np._core.multiarray
NUMPY: tuple[Any, ...] = (
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    *_of_cores(_MULTIARRAY._reconstruct, _MULTIARRAY.scalar),
    *((type(np.dtype(each)), f"kind {each}\n") for each in "?bhilqBHILQefdgFDG"),
)
"""Maps numpy's names in a file to the functions that are called when it is read."""


class Anything:
    """Represents an object of a class that is trusted, or of one that is not used."""

    def __new__(cls, *_: Any, **__: Any) -> Anything:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


# ---- Reads files without running anything in them


# What people keep with their weights, and what has only data. numpy's arrays are checked separately.
PLAIN: tuple[Any, ...] = (
    argparse.Namespace,
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.Path),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    slice,
    *BYTES,
    SKIPPED_GUARD,
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
    """Return the content of a file.

    Args:
        path: a file that :func:`torch.save` has written.
        trusted: classes that it may name besides the plain ones; or pairs of a class and the name that it replaces.
        map_location: the argument of that name of :func:`torch.load`.
        in_place: whether tensors stay in the file until they are used.

    Raises:
        CheckpointError: the file is damaged, or names another class.
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
        named = _untrusted_names(path, trusted)
        if not named:
            raise CheckpointError(f"{path} cannot be read: {_without_advice(error)}") from error
        raise CheckpointError(
            f"{path} holds objects of {', '.join(named)}, and making them could run code: if you trust the file, "
            'name them in your config, "fsmoe": {"checkpoint": {"trusted": [...]}}'
        ) from error
    except Exception as error:  # a damaged file brings up anything
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(found, dict):
        found.pop(KEY, None)
    return found


def _trusted_by_script() -> list[Any]:
    """Return the classes that the script told torch to trust, except numpy's, which are dangerous without checks."""
    kept = ("numpy", "_codecs")
    return [each for each in torch.serialization.get_safe_globals() if _full_name(each).partition(".")[0] not in kept]


@contextmanager
def _allowed(*classes: Any) -> Iterator[None]:
    """Allow files to name only these classes within the block."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(classes))
    # torch itself allows every codec, and its own list precedes the one passed to it.
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
    """Return True if a file may hold numpy's objects."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no file, or one in the older format, of which that is not known
        return True
    return any(each.partition(".")[0] == "numpy" for each in named)


def _go_through(path: Path, trusted: Sequence[Any]) -> None:
    """Unpickle a file with stand-ins for numpy's classes and for trusted ones; tensors are not read.

    Raises:
        UnpicklingError: its arrays differ from those that numpy writes.
    """
    with _allowed(*PLAIN, *STAND_INS, *((Anything, _full_name(each)) for each in trusted)):
        try:
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # in the older format, tensors cannot be left in the file
            torch.load(path, map_location="cpu", weights_only=True)


def _without_advice(error: BaseException) -> BaseException:
    """Return the original error, which torch has wrapped into advice to trust the file."""
    return error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error


def _untrusted_names(path: Path, trusted: Sequence[Any]) -> list[str]:
    """Return the names in a file that are neither plain nor trusted."""
    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a file that is not one: the first error says so
        return []
    return sorted(named - {_full_name(each) for each in (*PLAIN, *STAND_INS, *trusted)})


def _full_name(trusted: Any) -> str:
    return trusted[1] if isinstance(trusted, tuple) else f"{trusted.__module__}.{trusted.__qualname__}"

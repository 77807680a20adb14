# SPDX-License-Identifier: Apache-2.0
"""Checks that the numpy arrays in a file are what numpy itself would have written.

numpy's own classes take whatever a pickle gives them: an itemsize below zero, fields beyond the end of an element, a
buffer that is freed while another array uses it. So a file that names numpy is first read once with stand-ins
that check each number against the others and allocate nothing. What they accept, numpy may then read.

Arrays and scalars of numbers and booleans pass; those of text, bytes, dates, objects and records do not.
"""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import numpy as np

_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
"""The names that numpy 1 and numpy 2 use for the same module in files."""
_NUMBER = re.compile(r"[biufc]\d{1,2}")


def _refuse(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"{what}: of numpy's arrays those of numbers and booleans are read, and not those of text, bytes, dates, "
        "objects or records; lists hold these as well"
    )


def encode_latin1(text: Any, codec: Any = None) -> bytes:
    """Replace ``_codecs.encode``, by which files hold bytes; other codecs take minutes over a short text."""
    if type(text) is not str or codec != "latin1":
        raise pickle.UnpicklingError(f"_codecs.encode by {codec!r}: only latin1 is read")
    return text.encode("latin1")


def no_bytes() -> bytes:
    """Replace ``bytes``, by which files hold bytes of length 0."""
    return b""


class _Kind:
    """Stands in for ``numpy.dtype``."""

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
    """Stands in for ``numpy.ndarray``, which may only be named."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        raise _refuse("numpy.ndarray is called")


class _Array:
    """Stands in for an array."""

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
            raise _refuse(f"an array of shape {shape!r:.200} with other bytes than that takes")
        self.is_filled = True


def _reconstruct(array_type: Any, shape: Any, letter: Any) -> _Array:
    if array_type is not _ArrayType or shape != (0,) or type(shape[0]) is not int or letter != b"b":
        raise _refuse("an array that is not made as numpy does it")
    return _Array()


def _scalar(kind: Any, raw: Any = None) -> object:
    if type(kind) is not _Kind or type(raw) is not bytes or len(raw) != kind.size_bytes:
        raise _refuse("a numpy scalar with other bytes than it takes")
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
"""What numpy's names stand for when the file is actually read."""


class Anything:
    """Stands in for an object of a class that is trusted, or of one that nobody will use."""

    def __new__(cls, *_: Any, **__: Any) -> Anything:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

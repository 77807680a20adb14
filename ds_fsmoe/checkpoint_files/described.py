# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON files that describe a checkpoint: any content is either understood or refused with a clear message."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ds_fsmoe.checkpoint_files.plain_files import problem_of
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.untrusted import read_regular
from ds_fsmoe.versions import VERSION

_T = TypeVar("_T")


def read_described(path: Path, version: int, make: Callable[[Any], _T]) -> _T | None:
    """Return what a file says, or ``None`` if there is no file.

    Args:
        path: the file.
        version: the version of its format.
        make: builds the result from the JSON data; may raise any error on a wrong value.

    Raises:
        CheckpointError: it cannot be read, has another format, or does not suit ``make``.
    """
    if not os.path.lexists(path):
        return None
    if (problem := problem_of(path, path.parent)) is not None:
        raise CheckpointError(problem)
    try:
        found = json.loads(read_regular(path), object_pairs_hook=_without_doubles)
    except FileNotFoundError:  # removed since
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        if found["format"] != version:
            raise CheckpointError(
                f"{path} is of format {found['format']!r}, and this version of ds_fsmoe ({VERSION}) reads {version}"
            )
        return make(found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or not of a checkpoint: {error!r}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found

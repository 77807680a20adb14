# SPDX-License-Identifier: Apache-2.0
"""Reading the JSON files that describe a checkpoint: whatever is in them, it is understood or refused in words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ds_fsmoe.checkpoint_files.plain_files import problem_of
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.versions import VERSION

_T = TypeVar("_T")


def read_described(path: Path, version: int, make: Callable[[Any], _T]) -> _T | None:
    """What a file says; ``None`` if there is none.

    Args:
        path: of the file.
        version: of its format.
        make: of what the JSON holds; may raise whatever a wrong value brings up.

    Raises:
        CheckpointError: it cannot be read, is of another format, or not what ``make`` takes.
    """
    if not os.path.lexists(path):
        return None
    if (problem := problem_of(path, path.parent)) is not None:
        raise CheckpointError(problem)
    try:
        found = json.loads(path.read_text(), object_pairs_hook=_without_doubles)
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

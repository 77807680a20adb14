# SPDX-License-Identifier: Apache-2.0
"""Reads the ``"fsmoe"`` block from a command line, for scripts whose DeepSpeed config is a dict inside them.

``ds_fsmoe.run`` and the commands that start a training run call it before the script begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OPTION = "--fsmoe"
HELP = "the block, as a file or as JSON; it replaces the block in the script's own config"
_EXAMPLE = "a file, or a JSON object such as '{\"enabled\": true}'"


def take_option(arguments: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Split our option from the arguments in front of a script.

    Only arguments in front of the script are ours; after it, an argument of the same name belongs to the script.

    Returns:
        The value of the option or ``None``, the other options in front, and the script with its own arguments.

    Raises:
        ValueError: the option is given twice, or without a value.
    """
    value: str | None = None
    others: list[str] = []
    left = list(arguments)
    while left and left[0].startswith("-"):
        name, equals, written = left.pop(0).partition("=")
        if name != OPTION:
            others.append(name + equals + written)
            continue
        if value is not None:
            raise ValueError(f"{OPTION} is given twice; remove one")
        if not equals and not left:
            raise ValueError(f"{OPTION} needs a value: {_EXAMPLE}")
        value = written if equals else left.pop(0)
    return value, others, left


def read_given(text: str) -> dict[str, Any]:
    """Read the block of a command line.

    Args:
        text: the block as JSON, if it begins with a brace; else the path of a JSON file, which may have comments as
            DeepSpeed's configs may. Either is the block, or a DeepSpeed config with the block in it. The rest of such a
            config is ignored.

    Raises:
        ValueError: the file is missing, or has another content. The message begins with the text.
    """
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{OPTION} {text}: is not JSON: {error}") from error
    else:
        found = _read_file(text)
    block = found.get("fsmoe", found) if isinstance(found, Mapping) else found
    if not isinstance(block, Mapping):
        raise ValueError(f"{OPTION} {text}: holds {json.dumps(block)}; the block is an object: {_EXAMPLE}")
    return dict(block)


def _read_file(path: str) -> Any:
    if not Path(path).is_file():
        raise ValueError(f"{OPTION} {path}: no such file; the value is {_EXAMPLE}")
    from ds_fsmoe.engine.compat import load_ds_config

    try:
        return load_ds_config(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{OPTION} {path}: cannot be read as JSON: {error}") from error

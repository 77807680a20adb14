# SPDX-License-Identifier: Apache-2.0
"""Checks where files go."""

from __future__ import annotations

from pathlib import Path


def check_folders(*paths: Path | None) -> None:
    """Check, before the work is done, that the results can be written.

    Raises:
        ValueError: the folder of a path does not exist.
    """
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.resolve().parent}")

# SPDX-License-Identifier: Apache-2.0
"""Prints results as tables and checks where files go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "") -> None:
    """Print columns as wide as their widest cell; numbers, and cells that begin like one, are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(heads), *cells]) for column in range(len(heads))]
    right = [bool(cells) and all(_is_number(row[column]) for row in cells) for column in range(len(heads))]
    for row in [list(heads), ["-" * width for width in widths], *cells]:
        aligned = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        print(indent + "  ".join(aligned).rstrip())


def _is_number(cell: str) -> bool:
    return cell == "" or cell[0].isdigit() or cell[0] in "+-"


def check_folders(*paths: Path | None) -> None:
    """Check, before the work is done, that the results can be written.

    Raises:
        ValueError: the folder of a path does not exist.
    """
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.resolve().parent}")

# SPDX-License-Identifier: Apache-2.0
"""Prints tables: drawn by rich on a terminal, as columns of plain text in files, pipes and logs. The commands and the
log's handler use it; :mod:`~ds_fsmoe.terminal.screen` prints single lines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from ds_fsmoe.terminal.screen import MARKS, console_of, is_terminal

if TYPE_CHECKING:
    from rich.padding import Padding


class Table:
    """Holds rows of cells below their heads. ``str()`` returns the plain text, one line per row.

    Each column is as wide as its widest cell. Columns of numbers are right-aligned.

    Args:
        heads: the head of each column; empty for a list of names and values.
        rows: the rows, each with a cell for each head.
        indent: text ahead of each line of plain text.
        has_rule: whether plain text has a line of dashes below the heads.
    """

    def __init__(
        self, heads: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "", has_rule: bool = True
    ) -> None:
        self._heads = tuple(heads)
        self._rows = [tuple(map(str, row)) for row in rows]
        self._indent = indent
        self._has_rule = has_rule
        columns = list(zip(*self._rows, strict=True)) or [()] * len(self._heads)
        self._are_numbers = [bool(column) and all(map(_is_number, column)) for column in columns]

    def lines(self) -> list[str]:
        """Return the plain text, line by line. It is the same in every locale, and ASCII if the cells are."""
        every = [self._heads, *self._rows] if self._heads else list(self._rows)
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        if self._heads and self._has_rule:
            every.insert(1, tuple("-" * width for width in widths))
        return [self._indent + "  ".join(map(_aligned, row, widths, self._are_numbers)).rstrip() for row in every]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __rich__(self) -> Padding:
        from rich.box import SIMPLE_HEAD
        from rich.padding import Padding
        from rich.table import Table as RichTable
        from rich.text import Text

        has_heads = bool(self._heads)
        drawn = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", show_header=has_heads)
        for head, is_number in zip(self._heads or ("",) * len(self._are_numbers), self._are_numbers, strict=True):
            drawn.add_column(Text(head), justify="right" if is_number else "left", overflow="fold")
        for row in self._rows:
            drawn.add_row(*(Text(cell, style=MARKS.get(cell, "")) for cell in row))
        return Padding(drawn, (0, 0, 0, len(self._indent)), expand=False)


class Message(str):
    """Holds text with tables, for a log. It is plain text like any string; the log's handler draws the tables of
    :attr:`parts` on a terminal.

    Args:
        parts: lines of text and tables, from the first to the last.
    """

    parts: tuple[str | Table, ...]

    def __new__(cls, parts: Sequence[str | Table]) -> Message:
        found = super().__new__(cls, "\n".join(map(str, parts)))
        found.parts = tuple(parts)
        return found

    def __getnewargs__(self) -> tuple[Sequence[str | Table]]:
        return (self.parts,)  # ranks send it to each other


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "") -> None:
    """Print a table to standard output: drawn on a terminal, as plain text elsewhere."""
    print_parts([Table(heads, rows, indent)], sys.stdout)


def print_parts(parts: Sequence[str | Table], stream: TextIO, style: str = "") -> None:
    """Print lines of text and tables.

    Args:
        parts: lines of text and tables, in order.
        stream: where to print.
        style: the style of the lines of text on a terminal.
    """
    if not is_terminal(stream):
        print(*parts, sep="\n", file=stream, flush=True)
        return
    console = console_of(stream)
    for part in parts:
        if isinstance(part, Table):
            console.print(part)
        else:
            # The terminal breaks long lines by itself, and joins them again when they are copied.
            console.print(part, style=style, soft_wrap=True)


def _is_number(cell: str) -> bool:
    return cell == "" or cell[0].isdigit() or cell[0] in "+-"


def _aligned(cell: str, width: int, is_number: bool) -> str:
    return cell.rjust(width) if is_number else cell.ljust(width)

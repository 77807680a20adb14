# SPDX-License-Identifier: Apache-2.0
"""Tells terminals from files and pipes, and prints in colour on terminals. The tables and bars of this folder, the log
and the commands use it. ``NO_COLOR`` turns colour off (no-color.org).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

YELLOW, RED = "yellow", "bold red"
"""Styles of warnings and of errors."""
MARKS = {"[OKAY]": "bright_green", "[YES]": "bright_green", "[NO]": "bright_yellow", "[FAIL]": "bright_red"}
"""Words and their styles, as in DeepSpeed's ``ds_report``."""
_bars: list[Progress] = []
"""The bars that are drawn now, by whose console all else has to be printed."""


def is_terminal(stream: TextIO) -> bool:
    """Return True if the stream is a terminal that can redraw lines; False for files, pipes and ``TERM=dumb``."""
    # A stream of a process whose output is closed may have no such method.
    asks = getattr(stream, "isatty", None)
    return asks is not None and asks() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def console_of(stream: TextIO) -> Console:
    """Return a console that draws on a terminal.

    Args:
        stream: one for which :func:`is_terminal` holds.
    """
    if _bars:
        return _bars[-1].console
    from rich.console import Console

    colours = None if os.environ.get("NO_COLOR") else "auto"
    plain = {"highlight": False, "markup": False, "emoji": False}
    return Console(file=stream, force_terminal=True, color_system=colours, **plain)


def print_coloured(text: str, style: str, stream: TextIO | None = None) -> None:
    """Print a warning or an error, in colour on a terminal.

    Args:
        text: the text to print.
        style: :data:`YELLOW`, :data:`RED`, or another style of rich.
        stream: where to print; ``None``: the current standard error.
    """
    stream = sys.stderr if stream is None else stream
    if is_terminal(stream):
        console_of(stream).print(text, style=style, soft_wrap=True)
    else:
        print(text, file=stream, flush=True)


def print_marked(text: str) -> None:
    """Print to standard output, with the words of :data:`MARKS` in colour on a terminal."""
    if not is_terminal(sys.stdout):
        print(text, flush=True)
        return
    from rich.text import Text

    marked = Text(text)
    for word, style in MARKS.items():
        marked.highlight_words([word], style)
    console_of(sys.stdout).print(marked, soft_wrap=True)


def bar_now() -> Progress | None:
    """Return the progress bar that is drawn now, or None."""
    return _bars[-1] if _bars else None


@contextmanager
def drawn(bar: Progress) -> Iterator[None]:
    """Draw a bar in the last line while the block runs. Text printed meanwhile appears above it."""
    _bars.append(bar)
    try:
        with bar:
            yield
    finally:
        _bars.remove(bar)

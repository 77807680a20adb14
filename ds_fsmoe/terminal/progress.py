# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of long work: a bar on a terminal, a line from time to time in a file. Commands and measurements
use it; :mod:`~ds_fsmoe.terminal.tables` prints results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from ds_fsmoe.terminal import screen

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_T = TypeVar("_T")
EVERY_S = 10.0
"""The seconds between two lines, and before the first."""
PATIENCE_S = 2.0
"""The seconds before a bar appears; shorter work shows none."""
_WIDEST_NOTE = 60


class NowAndThen:
    """Decides when the next line is due.

    Args:
        now_s: the clock, in seconds.
        every_s: the seconds between two lines, and before the first.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic, every_s: float = EVERY_S) -> None:
        self._now_s = now_s
        self._every_s = every_s
        self._begun_s = self._last_s = now_s()

    @property
    def took_s(self) -> float:
        """Return the seconds since construction."""
        return self._now_s() - self._begun_s

    def is_due(self) -> bool:
        """Return True if a line is due, and start the wait for the next one."""
        now_s = self._now_s()
        if now_s - self._last_s < self._every_s:
            return False
        self._last_s = now_s
        return True


class Progress:
    """Shows the progress of one piece of work. Use it in a ``with`` statement.

    Args:
        what: the work, such as "measuring".
        total: the number of units; ``None``: unknown.
        unit: the name of the units, as a plural.
        is_shown: whether this process shows progress; in a job, only the first rank should.
        say: where lines go; ``None``: to standard error. A bar is drawn only where that is a terminal.
        now_s: the clock, in seconds.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "steps",
        *,
        is_shown: bool = True,
        say: Callable[[str], None] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.done = 0
        """The number of units that are done."""
        self._what, self._total, self._unit, self._is_shown = what, total, unit, is_shown
        self._write = say or _to_standard_error
        self._has_bar = is_shown and screen.is_terminal(sys.stderr)
        self._lines = NowAndThen(now_s)
        self._note = ""
        self._bar: RichProgress | None = None
        self._shown = ExitStack()

    def __call__(self, note: str = "") -> None:
        """Count one more unit.

        Args:
            note: the unit or its result, shown in brackets.
        """
        self.reached(self.done + 1, note)

    def reached(self, done: int, note: str = "") -> None:
        """Set the number of units that are done."""
        self.done, self._note = done, note[:_WIDEST_NOTE]
        if self._has_bar:
            if self._bar is None and self._lines.took_s >= PATIENCE_S:
                self._begin_bar()
            if self._bar is not None:
                self._bar.update(self._task, completed=done, total=self._total, note=self._note)
        elif self._is_shown and self._lines.is_due():
            of_total = "" if self._total is None else f" of {self._total}"
            note = self._note and f" ({self._note})"
            self._write(f"{self._what}: {done}{of_total} {self._unit} after {self._lines.took_s:.0f} s{note}")

    def update(self, done: int, total: int) -> None:
        """Set the number of units that are done, and the total."""
        self._total = total
        self.reached(done)

    def _begin_bar(self) -> None:
        bar = screen.bar_now()
        if bar is None:
            bar = _new_bar()
            self._shown.enter_context(screen.drawn(bar))
        # Work inside of other work has a line of its own below that one's.
        self._task = bar.add_task(self._what, total=self._total, unit=self._unit, note=self._note)
        self._shown.callback(bar.remove_task, self._task)
        self._bar = bar

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar = None
        self._shown.close()


def followed(items: Iterable[_T], progress: Progress) -> Iterator[_T]:
    """Yield each item, and count it when the next one is asked for."""
    with progress:
        for item in items:
            yield item
            progress()


def _new_bar() -> RichProgress:
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[unit]}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[note]}", markup=False),
    )
    # Lines printed meanwhile go above the bar, but into the file where standard output is one.
    return progress.Progress(
        *columns,
        console=screen.console_of(sys.stderr),
        transient=True,
        redirect_stdout=screen.is_terminal(sys.stdout),
    )


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

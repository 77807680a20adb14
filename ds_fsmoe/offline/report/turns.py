# SPDX-License-Identifier: Apache-2.0
"""Compares stock and ours over short runs that took turns: a ratio for each turn, an interval over turns, a verdict.

A turn is one run of each. What slows the machine for minutes slows both runs of a turn, so it is in no ratio; who goes
first changes from turn to turn, so that neither always has the warmer machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.special import stdtrit

from ds_fsmoe.files.runs import Run, read_run
from ds_fsmoe.offline.report.comparison import settled_after, times_of
from ds_fsmoe.offline.report.verdict import CONFIDENCE, FEWEST_BLOCKS, Interval

FEWEST_STEPS = 5
"""The fewest steps of a run that make a turn count: a median of fewer says little."""


@dataclass(frozen=True)
class Turn:
    """What one run of each took, over the same steps."""

    number: int
    num_steps: int
    """The steps of each that count."""
    stock_ms: float
    ours_ms: float

    @property
    def ratio(self) -> float:
        """How many times as fast ours was."""
        return self.stock_ms / self.ours_ms


def order_of(turn: int) -> tuple[bool, bool]:
    """Return which runs of a turn are ours, in the order in which they run: stock first, then ours first, and so on."""
    return (False, True) if turn % 2 == 0 else (True, False)


def turn_of(number: int, stock: Run, ours: Run) -> Turn | None:
    """Return what a turn found; ``None`` if its runs ended before plans were settled, or too soon after that."""
    after = max(settled_after(stock), settled_after(ours))
    times = times_of(stock, after), times_of(ours, after)
    if times[0] is None or times[1] is None or min(each.step_ms for each in times if each) <= 0:
        return None
    num_steps = min(each.num_steps for each in times if each)
    return Turn(number, num_steps, times[0].step_ms, times[1].step_ms) if num_steps >= FEWEST_STEPS else None


def read_turns(folder: Path, stock: str, ours: str) -> tuple[list[Turn], int] | None:
    """Return the turns that count, and how many were run; ``None`` if there are none.

    Args:
        folder: the folder with a folder for each turn.
        stock, ours: the names of the folders of the runs of a turn.

    Raises:
        NoRunError: a run of a turn has recorded nothing.
    """
    folders = sorted(folder.iterdir()) if folder.is_dir() else []
    if not folders:
        return None
    found = [turn_of(i, read_run(each / stock), read_run(each / ours)) for i, each in enumerate(folders)]
    return [each for each in found if each is not None], len(folders)


def middle(turns: Sequence[Turn]) -> float:
    """Return the geometric mean of the turns' ratios."""
    return math.exp(statistics.fmean(math.log(each.ratio) for each in turns))


def interval_of(turns: Sequence[Turn]) -> Interval | None:
    """Return the 95% interval of the ratio: Student's, of the logarithms of the turns' ratios.

    Returns:
        ``None`` for fewer than ten turns.
    """
    if len(turns) < FEWEST_BLOCKS:
        return None
    logs = [math.log(each.ratio) for each in turns]
    reach = float(stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(logs) / math.sqrt(len(logs))
    center = statistics.fmean(logs)
    return Interval(math.exp(center - reach), math.exp(center + reach))

# SPDX-License-Identifier: Apache-2.0
"""Defines the states of the autotuner, each with its data, and which may come after which.

:class:`~ds_fsmoe.tuning.autotune.Autotune` is in one of them, the same on every rank, as it changes only at forwards
and steps. Once plans are settled, :mod:`ds_fsmoe.tuning.drift` compares steps with their predictions, and asks for
forwards to be watched again where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_fsmoe.tuning.trial_rounds import TrialRounds


@dataclass(frozen=True)
class Waiting:
    """Marks a job in its first steps whose config does not ask for tuning."""

    steps_left: int
    """The optimizer steps until it asks for itself to be run."""


@dataclass(frozen=True)
class Watching:
    """Marks forwards in training that show the sizes of layers and the time of the rest of the model."""

    forwards_left: int | None = None
    """The forwards to watch before the measuring; ``None``: as many as at the start of a job, which has run none."""
    why_again: str | None = None
    """The reason why plans are made again; ``None``: it is the first time."""


@dataclass(frozen=True)
class Profiling:
    """Marks the time between two forwards in which costs are measured and plans are searched."""

    why_again: str | None = None


@dataclass(frozen=True)
class Trying:
    """Marks steps that are trained by the best plans alternately."""

    rounds: TrialRounds


@dataclass(frozen=True)
class Settled:
    """Marks that plans are chosen, or that there will be none."""

    why_without: str = ""
    """The reason why nothing was measured; empty: plans were chosen."""


State = Waiting | Watching | Profiling | Trying | Settled

NEXT: dict[type[State], tuple[type[State], ...]] = {
    Waiting: (Waiting, Watching, Settled),
    Watching: (Watching, Profiling, Settled),
    Profiling: (Trying, Settled, Watching),
    Trying: (Settled, Watching),
    Settled: (Watching, Settled),
}
"""State -> the states that may come after it. Plans of a checkpoint settle any; a drift has any watched again."""

# SPDX-License-Identifier: Apache-2.0
"""Compares two recorded runs of one training: how much faster one is, whether losses agree, where the time went."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ds_fsmoe.files.runs import Run

PARTS = (("forward", "forward_ms"), ("backward", "backward_ms"), ("optimizer", "optimizer_ms"))
ROUNDING = 1e-6
"""The relative difference of losses up to which steps count as equal."""
WARM_UP = 3
"""The number of steps that do not count, as the first ones are slow."""


@dataclass(frozen=True)
class StepTimes:
    """The medians in milliseconds, over the steps that count."""

    num_steps: int
    step_ms: float
    parts_ms: dict[str, float]
    """The times by part; "rest" is the time between the parts, such as data loading."""


def settled_after(run: Run) -> int:
    """Return the last step in which something was measured or tried; from there on the run does not change."""
    first = run.steps[0]["step"] if run.steps else 0
    return max(first + WARM_UP - 1, int(run.plans.get("settled_at", 0)))


def step_times_ms(run: Run, after: int) -> list[float]:
    """Return the times of the steps after a given one, in their order."""
    return [row["step_ms"] for row in run.steps if row["step"] > after and "step_ms" in row]


def times_of(run: Run, after: int | None = None) -> StepTimes | None:
    """Return the times of the steps after a given one; ``None`` if there are none.

    Args:
        run: a run that has been read.
        after: the last step that does not count; by default what :func:`settled_after` returns.
    """
    after = settled_after(run) if after is None else after
    rows = [row for row in run.steps if row["step"] > after and "step_ms" in row]
    if not rows:
        return None
    parts = {name: statistics.median(row.get(key, 0.0) for row in rows) for name, key in PARTS if key in rows[0]}
    step_ms = statistics.median(row["step_ms"] for row in rows)
    if parts:
        parts["rest"] = statistics.median(row["step_ms"] - sum(row.get(key, 0.0) for _, key in PARTS) for row in rows)
    return StepTimes(len(rows), step_ms, parts)


@dataclass(frozen=True)
class Losses:
    """Compares the losses in the steps that both runs have."""

    num_steps: int
    largest_difference: float
    """The relative difference; infinite where one of the two is not finite, and 0 where neither is."""
    at_step: int
    last: tuple[float, float]
    not_finite_from: tuple[int | None, int | None]
    """The first step of each run with a loss that is not finite."""
    apart_from: int | None = None
    """The first step whose losses are apart by more than rounding leaves of equal steps; ``None``: none is."""


def losses_of(one: Run, other: Run) -> Losses | None:
    """Return how far two runs' losses are apart; ``None`` if no step has both."""
    of_one, of_other = (
        {row["step"]: float(row["loss"]) for row in run.steps if isinstance(row.get("loss"), (int, float))}
        for run in (one, other)
    )
    steps = sorted(set(of_one) & set(of_other))
    if not steps:
        return None
    apart = {step: _apart(of_one[step], of_other[step]) for step in steps}
    worst = max(apart, key=apart.__getitem__)
    bad = tuple(next((step for step in steps if not math.isfinite(each[step])), None) for each in (of_one, of_other))
    last, first = (of_one[steps[-1]], of_other[steps[-1]]), next((n for n in steps if apart[n] > ROUNDING), None)
    return Losses(len(steps), apart[worst], worst, last, (bad[0], bad[1]), first)


def _apart(one: float, other: float) -> float:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(abs(one), 1e-12)
    return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf


def pair(runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """Return (stock, ours), if there is one of each."""
    stock, ours = ([run for run in runs if run.is_stock is kind] for kind in (True, False))
    return (stock[0], ours[0]) if stock and ours else None

# SPDX-License-Identifier: Apache-2.0
"""Compares two recorded runs of one training: the speedup, the losses, and where the time went. ``ds_fsmoe compare``
and the report's page call it.

It also computes how certain the ratio is, and possible causes where ours is not clearly faster. Short alternating runs
give a ratio for each turn, and an interval over turns. A turn is one run of each. A slowdown of the machine for minutes
affects both runs of a turn, so it cancels out. The first run alternates from turn to turn, so that neither always has
the warmer machine.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.special import stdtrit

from ds_fsmoe.config.words import words_of
from ds_fsmoe.files.runs import Run, read_run, trace_folder
from ds_fsmoe.files.traces import read_trace
from ds_fsmoe.offline.report.critical_path import tasks_of
from ds_fsmoe.planning.schedule import Lane

PARTS = (("forward", "forward_ms"), ("backward", "backward_ms"), ("optimizer", "optimizer_ms"))
ROUNDING = 1e-6
"""The relative difference of losses up to which steps count as equal."""
WARM_UP = 3
"""The number of steps that do not count, as the first ones are slow."""


@dataclass(frozen=True)
class RunTimes:
    """Holds the medians over the counted steps, in ms."""

    num_steps: int
    step_ms: float
    parts_ms: dict[str, float]
    """The times by part; "rest" is the time between the parts, such as data loading."""


def settled_after(run: Run) -> int:
    """Return the last step with a measurement or trial; from there on the run does not change."""
    first = run.steps[0]["step"] if run.steps else 0
    tuning = (row["step"] for row in run.steps if row.get("is_tuning"))
    return max(first + WARM_UP - 1, int(run.plans.get("settled_at", 0)), *tuning)


def step_times_ms(run: Run, after: int) -> list[float]:
    """Return the ms of the steps after a given one, in order."""
    return [row["step_ms"] for row in run.steps if row["step"] > after and "step_ms" in row]


def times_of(run: Run, after: int | None = None) -> RunTimes | None:
    """Return the times of the steps after a given one, or None if there are none.

    Args:
        run: the run.
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
    return RunTimes(len(rows), step_ms, parts)


@dataclass(frozen=True)
class Losses:
    """Holds the comparison of losses in the steps that both runs have."""

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
    """Return the difference of two runs' losses, or None if no step has both."""
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
    """Return (stock, ours) if there is one of each, otherwise None."""
    stock, ours = ([run for run in runs if run.is_stock is kind] for kind in (True, False))
    return (stock[0], ours[0]) if stock and ours else None


BLOCK = 5
"""The number of neighbouring steps that are drawn together, as what disturbs one of them disturbs the next."""
FEWEST_BLOCKS = 10
"""The fewest blocks, or turns, from which there is an interval: of fewer it would hold the truth too seldom."""
_DRAWS = 1000
CONFIDENCE = 0.95
SHORT_MS = 1.0
"""The mean duration below which tasks gain little from being cut."""
LITTLE = 0.1
"""The share of the step below which there is little traffic to hide."""

SAME_PART, APART = 0.05, 1.5
"""The share of a step from which the optimizer counts, and the ratio from which it is said to differ."""


@dataclass(frozen=True)
class Interval:
    """Holds the ends of a 95% interval of a ratio."""

    low: float
    high: float


def winner(interval: Interval | None, of_what: str) -> str:
    """Return which system is faster, in words; neither if the interval contains 1 or is missing.

    Args:
        interval: the interval of stock's time over ours.
        of_what: the units that are too few if there is no interval.
    """
    if interval is None:
        return f"no winner: an interval needs {FEWEST_BLOCKS} {of_what}, and there are fewer"
    if interval.low > 1:
        return "ds_fsmoe is faster: the whole interval is above 1"
    if interval.high < 1:
        return "stock DeepSpeed is faster: the whole interval is below 1"
    return "no winner: the interval contains 1, so the difference is within the noise"


def ratio_interval(baseline_ms: Sequence[float], variant_ms: Sequence[float]) -> Interval | None:
    """Return the interval of the variant's speedup, by a bootstrap over blocks of neighbouring steps of each run.

    It covers variation from step to step. It does not cover changes of the machine between the runs.

    Returns:
        The interval; ``None`` if a run has fewer than ten blocks.
    """
    runs = [_blocks(times_ms) for times_ms in (baseline_ms, variant_ms)]
    if any(len(blocks) < FEWEST_BLOCKS for blocks in runs):
        return None
    draw = random.Random(0)
    ratios = sorted(_drawn_median(runs[0], draw) / max(_drawn_median(runs[1], draw), 1e-9) for _ in range(_DRAWS))
    left_out = round(_DRAWS * (1 - CONFIDENCE) / 2)
    return Interval(ratios[left_out], ratios[-1 - left_out])


def _blocks(times_ms: Sequence[float]) -> list[Sequence[float]]:
    return [times_ms[i : i + BLOCK] for i in range(0, len(times_ms) - BLOCK + 1, BLOCK)]


def _drawn_median(blocks: list[Sequence[float]], draw: random.Random) -> float:
    return statistics.median(each for block in draw.choices(blocks, k=len(blocks)) for each in block)


def disturbance(stock: RunTimes, ours: RunTimes) -> str | None:
    """Return a sentence if the part that both runs share took different times, as when another job was running."""
    parts = [each.parts_ms.get("optimizer", 0.0) for each in (stock, ours)]
    if min(parts) < SAME_PART * min(stock.step_ms, ours.step_ms) or max(parts) < APART * min(parts):
        return None
    return (
        f"the optimizer, which is the same in both runs, took {parts[0]:.3g} and {parts[1]:.3g} ms: the machine was "
        "not equally busy, so do not rely on this comparison"
    )


def reasons(stock: Run, ours: Run, times: RunTimes) -> list[str]:
    """Return possible reasons why ours is not faster, one sentence each, with a remedy.

    Args:
        stock, ours: the two runs.
        times: the times of stock's steps.
    """
    block = words_of(ours.facts.get("block", {})).normalized
    found = []
    if not ours.plans.get("choices"):  # nothing was measured
        asked = block.get("num_chunks", {})
        cut = {phase: asked[phase] for phase in ("forward", "backward") if _is_chunked(asked.get(phase))}
        if cut:
            chunks = " and ".join(f"{count} {phase}" for phase, count in cut.items())
            found.append(
                f"num_chunks was set by hand ({chunks}) and not by measurements: leave fsmoe.num_chunks out, "
                "and the autotuner chooses it"
            )
        elif block.get("schedule") != "lina":  # which cuts by the bytes of layers
            why = ours.facts.get("why_untuned")
            if not isinstance(why, str):
                is_off = block.get("autotune", {}).get("enabled") is False
                why = '"autotune" is false' if is_off else "it ended too soon for that"
            found.append(
                f"the layers run in one chunk, so nothing of them overlaps: the job was not measured, because {why}"
            )
    found += _by_trace(stock, times)
    return found


def _is_chunked(degree: object) -> bool:
    return isinstance(degree, int) and degree > 1


def _by_trace(stock: Run, times: RunTimes) -> list[str]:
    """Return findings from the tasks of stock's layers, if they were traced."""
    try:
        files = sorted(trace_folder(stock.folder).glob("rank*.json"))
        traces = {rank: read_trace(file) for rank, file in enumerate(files)}
        tasks = [task for of_rank in tasks_of(traces).values() for phase in of_rank for task in phase.values()]
        steps = sum(len(trace["otherData"].get("steps", [])) for trace in traces.values())
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not tasks or not steps:
        return []
    found = []
    mean_ms = statistics.fmean(task.end_us - task.begin_us for task in tasks) / 1e3
    if mean_ms < SHORT_MS:
        found.append(
            f"a task of stock's MoE layers takes {mean_ms:.2f} ms on average; below {SHORT_MS:g} ms, starting more and "
            "smaller ones costs about what overlap gains: try larger layers or batches"
        )
    traffic_ms = sum(task.end_us - task.begin_us for task in tasks if task.lane != Lane.COMPUTE) / 1e3 / steps
    share = traffic_ms / times.step_ms if times.step_ms else 0.0
    if share < LITTLE:
        found.append(
            f"traffic of the MoE layers is {share:.0%} of a step of stock, so hiding all of it would make a step "
            f"{1 / (1 - share):.2f} times as fast at most"
        )
    return found


FEWEST_STEPS = 5
"""The fewest steps of a run that make a turn count: a median of fewer says little."""


@dataclass(frozen=True)
class Turn:
    """Holds the times of one run of each, over the same steps."""

    number: int
    num_steps: int
    """The steps of each that count."""
    stock_ms: float
    fsmoe_ms: float

    @property
    def ratio(self) -> float:
        """Return the speedup of ours."""
        return self.stock_ms / self.fsmoe_ms


def order_of(turn: int) -> tuple[bool, bool]:
    """Return which runs of a turn are ours, in their order: stock first, then ours first, alternating."""
    return (False, True) if turn % 2 == 0 else (True, False)


def turn_of(number: int, stock: Run, ours: Run) -> Turn | None:
    """Return the result of a turn, or None if a run ended before plans were settled, or too soon afterwards."""
    after = max(settled_after(stock), settled_after(ours))
    times = times_of(stock, after), times_of(ours, after)
    if times[0] is None or times[1] is None or min(each.step_ms for each in times if each) <= 0:
        return None
    num_steps = min(each.num_steps for each in times if each)
    return Turn(number, num_steps, times[0].step_ms, times[1].step_ms) if num_steps >= FEWEST_STEPS else None


def read_turns(folder: Path, stock: str, ours: str) -> tuple[list[Turn], int] | None:
    """Return the turns that count, and the number that ran; None if there are none.

    Args:
        folder: the folder with a folder for each turn.
        stock, ours: the names of the folders of the runs of a turn.

    Raises:
        NoRunError: a run of a turn has no record.
    """
    folders = sorted(folder.iterdir()) if folder.is_dir() else []
    if not folders:
        return None
    found = [turn_of(i, read_run(each / stock), read_run(each / ours)) for i, each in enumerate(folders)]
    return [each for each in found if each is not None], len(folders)


def middle(turns: Sequence[Turn]) -> float:
    """Return the geometric mean of the turns' ratios."""
    return math.exp(statistics.fmean(math.log(each.ratio) for each in turns))


def reach_of_mean(values: Sequence[float]) -> float:
    """Return half the length of the 95% interval of a mean: Student's, of at least two values."""
    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def interval_of(turns: Sequence[Turn]) -> Interval | None:
    """Return the 95% interval of the ratio: Student's, of the logarithms of the turns' ratios.

    Returns:
        The interval; ``None`` for fewer than ten turns.
    """
    if len(turns) < FEWEST_BLOCKS:
        return None
    logs = [math.log(each.ratio) for each in turns]
    reach, center = reach_of_mean(logs), statistics.fmean(logs)
    return Interval(math.exp(center - reach), math.exp(center + reach))

# SPDX-License-Identifier: Apache-2.0
"""Tells how certain the ratio of two runs is, and what may be the cause where ours is not clearly faster."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ds_fsmoe.files.runs import Run, trace_folder
from ds_fsmoe.files.traces import read_trace
from ds_fsmoe.offline.report.comparison import StepTimes
from ds_fsmoe.offline.report.critical_path import tasks_of
from ds_fsmoe.planning.schedule import Lane

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
    """The ends of a 95% interval; no unit."""

    low: float
    high: float


def winner(interval: Interval | None, of_what: str) -> str:
    """Return in words who is faster, if that can be said: nobody is where the interval holds 1, or where there is none.

    Args:
        interval: of the ratio, stock's time over ours.
        of_what: what there were too few of where there is no interval.
    """
    if interval is None:
        return f"no winner: an interval takes {FEWEST_BLOCKS} {of_what}, and there are fewer"
    if interval.low > 1:
        return "ours is faster: the whole interval is above 1"
    if interval.high < 1:
        return "stock DeepSpeed is faster: the whole interval is below 1"
    return "no winner: the interval holds 1, so the difference is inside the noise"


def ratio_interval(baseline_ms: Sequence[float], variant_ms: Sequence[float]) -> Interval | None:
    """Return how many times as fast the variant is, by a bootstrap over blocks of neighbouring steps of each run.

    It covers what varied from step to step. It does not cover what the machine did during one run and not during
    the other.

    Returns:
        ``None`` where either run has fewer than ten blocks.
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


def disturbance(stock: StepTimes, ours: StepTimes) -> str | None:
    """Return a sentence if the part of a step that both runs share took different times: something else was running."""
    parts = [each.parts_ms.get("optimizer", 0.0) for each in (stock, ours)]
    if min(parts) < SAME_PART * min(stock.step_ms, ours.step_ms) or max(parts) < APART * min(parts):
        return None
    return (
        f"the optimizer, which does the same in both, took {parts[0]:.3g} and {parts[1]:.3g} ms: the machine was not "
        "equally busy in the two runs, and this comparison is worth little"
    )


def reasons(stock: Run, ours: Run, times: StepTimes) -> list[str]:
    """Return what may keep ours from being faster, one sentence each, with what to try.

    Args:
        stock, ours: the two runs.
        times: the times of stock's steps.
    """
    block = ours.facts.get("block", {})
    found = []
    if not ours.plans.get("choices"):  # nothing was measured
        asked = block.get("pipeline_degree", {})
        cut = {phase: asked[phase] for phase in ("forward", "backward") if _is_cut(asked.get(phase))}
        if cut:
            chunks = " and ".join(f"{count} {phase}" for phase, count in cut.items())
            found.append(
                f"num_chunks was given by hand ({chunks}), whether or not that pays here: leave fsmoe.num_chunks out, "
                "so that it is chosen from measurements"
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


def _is_cut(degree: object) -> bool:
    return isinstance(degree, int) and degree > 1


def _by_trace(stock: Run, times: StepTimes) -> list[str]:
    """Return what the tasks of stock's layers show, if they were traced."""
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

# SPDX-License-Identifier: Apache-2.0
"""Writes the sections about steps: loss, time, tokens per second and memory of each, and one step of each run task
by task. The report's page calls it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_fsmoe.files.runs import Run, has_trace, trace_folder
from ds_fsmoe.offline.report.charts import Points, TracedStep, draw_lines, draw_timeline, is_drawable
from ds_fsmoe.offline.report.comparison import settled_after, times_of
from ds_fsmoe.offline.report.critical_path import BETWEEN, TracedPhase, added, measured_tasks, merge_ranks
from ds_fsmoe.offline.report.page import Page
from ds_fsmoe.offline.report.palette import LANE_NAMES, LANES, task_name

_PARTS = ("forward", "backward", "optimizer", "rest")
_AXIS_SHARE, _AXIS_MARGIN = 0.98, 1.25
"""The share of the steps that count which the axis of times has room for, and by how much it is longer than these."""
_GIB = float(1 << 30)
_GROWN = 0.03
"""The share of memory from which a rise is worth a word."""


def counted_after(runs: Sequence[Run]) -> int:
    """Return the last step that is not counted, the same for all runs."""
    return max((settled_after(run) for run in runs if run.steps), default=0)


def lines_of(runs: Sequence[Run], value: Callable[[Mapping[str, Any]], Any], skip: int = 0) -> Points:
    """Return a line of points for each run that has such values.

    Args:
        runs: the runs.
        value: a function that returns the value of a step; values that cannot be drawn are skipped.
        skip: the number of steps to leave out at the beginning.
    """
    found = {
        run.name: [(row["step"], each) for row in run.steps[skip:] if is_drawable(each := value(row))] for run in runs
    }
    return {name: points for name, points in found.items() if points}


def losses(page: Page, runs: Sequence[Run]) -> None:
    """Write the section about losses."""
    lines = lines_of(runs, lambda row: row.get("loss"))
    if lines:
        page.heading("Losses")
        page.paragraph("Of rank 0's batches.")
        page.chart(draw_lines("loss over steps", lines, "loss", from_zero=False))


def step_times(page: Page, runs: Sequence[Run]) -> None:
    """Write the section about the times of steps, without the first step, which is slow."""
    lines = lines_of(runs, lambda row: row.get("step_ms"), skip=1)
    if not lines:
        return
    page.heading("Step times")
    after = counted_after(runs)
    axis_end = _axis_end(lines, after)
    shaded = [each for run in runs for each in tuning_of(run)]
    about = "time of each step"
    page.chart(draw_lines(about, lines, "ms per step", from_zero=True, axis_end=axis_end, shaded=shaded))
    above = [ms for points in lines.values() for _, ms in points if axis_end is not None and ms > axis_end]
    words = [f"Counted after step {after}: until then things are made, measured and tried."]
    if shaded:
        spans = (str(first) if first == last else f"{first} to {last}" for first, last, _ in shaded)
        stretches = ", ".join(dict.fromkeys(spans))
        words.append(f"Shaded: steps {stretches}, in which the autotuner measured or tried plans.")
    if above:
        which = "step is" if len(above) == 1 else "steps are"
        words.append(f"The axis is cut: {len(above)} {which} above it (triangles), of up to {max(above):,.0f} ms.")
    page.paragraph(" ".join(words))
    rows = []
    for run in runs:
        times = times_of(run, after)
        if times is not None:
            parts = (f"{times.parts_ms[part]:.4g}" if part in times.parts_ms else "" for part in _PARTS)
            rows.append((run.name, times.num_steps, f"{times.step_ms:.4g}", *parts))
    if rows:
        page.table(("medians in ms", "steps", "step", *_PARTS), rows)


def _axis_end(lines: Points, after: int) -> float | None:
    """Return the end of the axis of times, so that a few slow steps do not dominate; None for no limit."""
    counted = sorted(ms for points in lines.values() for step, ms in points if step > after)
    if not counted:
        return None
    axis_end = _AXIS_MARGIN * counted[int(_AXIS_SHARE * (len(counted) - 1))]
    return axis_end if axis_end > 0 and any(ms > axis_end for points in lines.values() for _, ms in points) else None


def tuning_of(run: Run) -> list[tuple[int, int, str]]:
    """Return the ranges of steps with measurements or trials: (first, last, words).

    Runs of earlier versions do not record these steps, only when plans were settled.
    """
    marked = [row["step"] for row in run.steps if row.get("is_tuning")]
    settled = int(run.plans.get("settled_at", 0))
    if not marked and run.plans.get("trials") and run.steps and settled > run.steps[0]["step"]:
        marked = list(range(run.steps[0]["step"], settled + 1))
    stretches: list[list[int]] = []
    for step in marked:
        if stretches and step == stretches[-1][1] + 1:
            stretches[-1][1] = step
        else:
            stretches.append([step, step])
    return [(first, last, f"{run.name}: the autotuner measured or tried plans") for first, last in stretches]


def throughput(page: Page, runs: Sequence[Run]) -> None:
    """Write the section about tokens per second, or samples where tokens were not counted."""
    lines, unit = _tokens_per_s(runs), "tokens"
    if len(lines) < sum(bool(run.steps) for run in runs):
        samples = {run.name: points for run in runs if (points := _samples_per_s(run))}
        if len(samples) > len(lines):
            lines, unit = samples, "samples"
    if not lines:
        return
    page.heading(f"{unit.capitalize()} per second")
    after = counted_after(runs)
    tiles = []
    for name, points in lines.items():
        counted = [value for step, value in points if step > after]
        if counted:
            tiles.append((f"{statistics.median(counted):,.0f}", f"{unit} per second, {name} (median)"))
    page.tiles(tiles)
    page.chart(draw_lines(f"{unit} per second over steps", lines, f"{unit} per second", from_zero=True))
    if unit == "tokens":
        page.paragraph(
            "Tokens that come to the first MoE layer of rank 0, times the ranks that have tokens of their own."
        )


def _tokens_per_s(runs: Sequence[Run]) -> Points:
    found = {}
    for run in runs:
        ranks = run.facts.get("token_ranks", run.facts.get("world_size", 1))

        def value(row: Mapping[str, Any], ranks: Any = ranks) -> float | None:
            tokens, ms = row.get("tokens_of_rank"), row.get("step_ms")
            return 1e3 * tokens * ranks / ms if tokens and is_drawable(ms) and ms > 0 else None

        found |= lines_of([run], value, skip=1)
    return found


def _samples_per_s(run: Run) -> list[tuple[float, float]]:
    return [
        (row["step"], 1e3 * (row["samples"] - before["samples"]) / row["step_ms"])
        for before, row in pairwise(run.steps)
        if "samples" in row and "samples" in before and is_drawable(row.get("step_ms")) and row["step_ms"] > 0
    ]


def memory(page: Page, runs: Sequence[Run]) -> None:
    """Write the section about the memory of rank 0."""
    lines = lines_of(runs, lambda row: row["memory_bytes"] / _GIB if "memory_bytes" in row else None)
    if not lines:
        return
    page.heading("Memory")
    peaks = [(run, max(row.get("memory_peak_bytes", 0) for row in run.steps)) for run in runs if run.steps]
    page.tiles((f"{peak / _GIB:.3g} GiB", f"at most, {run.name}") for run, peak in peaks if peak)
    page.chart(draw_lines("memory at the end of each step", lines, "GiB", from_zero=True))
    what = "; ".join(dict.fromkeys(run.facts["memory"] for run in runs if "memory" in run.facts))
    page.paragraph(f"Of rank 0, at the end of each step{f': what is {what}' if what else ''}.")
    page.points(each for run in runs if (each := _grown_while_tuning(run)))


def _grown_while_tuning(run: Run) -> str:
    """Return a sentence about the growth of memory in steps with measurements or trials, or an empty text."""
    held = {row["step"]: row["memory_bytes"] for row in run.steps if "memory_bytes" in row}
    grown, stretches = 0, tuning_of(run)
    for first, last, _ in stretches:
        grown += max(0, held.get(last, 0) - held.get(first - 1, held.get(last, 0)))
    if grown < _GROWN * max(held.values(), default=0):
        return ""
    spans = ", ".join(f"{first} to {last}" for first, last, _ in stretches)
    return (
        f"{run.name}: {grown / _GIB:.3g} GiB of it came in steps {spans}, while the autotuner measured or tried plans."
    )


_UNUSUAL = 1.25
"""The ratio to the median step from which a step is said to be unlike the others."""


@dataclass(frozen=True)
class ShownStep:
    """Holds one step of a run as traced by its first rank, with the phases of its layers over all ranks."""

    run: Run
    step: int
    traced: TracedStep
    phases: Sequence[TracedPhase]
    file: Path
    """The merged trace."""
    of_median: float | None = None
    """The time of the step over the median step of the run; ``None``: not known."""

    @property
    def path_ms(self) -> float:
        """Return the ms of the critical paths of all phases."""
        return sum(each.ms for each in self.phases)

    def shares_ms(self) -> dict[str, float]:
        """Return the parts of the critical path by kinds of tasks in ms, the largest first."""
        return added(each.shares_ms() for each in self.phases)


def trace(page: Page, run: Run) -> ShownStep | None:
    """Return the traced step whose time is nearest to the median step, or None; without times, the last traced one.
    Write warnings about missing parts.
    """
    if not has_trace(run.folder):
        return None
    try:
        file, traces, phases, lacks = merge_ranks(trace_folder(run.folder))
    except (OSError, ValueError) as error:
        page.warn(f"{run.name}: the trace cannot be shown: {error}")
        return None
    for problem in [*lacks, *_incomplete(traces)]:
        page.warn(f"{run.name}: the trace is incomplete: {problem}")
    rank = min(traces)
    of_median = _over_median(run)
    # A run may have ended in the last one.
    in_order = sorted(measured_tasks(traces[rank], rank), key=lambda each: each.begin_us)
    steps = traces[rank]["otherData"].get("steps", [])
    tasks = {step: [each for each in in_order if each.step == step] for step in steps}
    found = [step for step, of_step in tasks.items() if of_step]
    if not found:
        return None
    step = min(reversed(found), key=lambda each: abs(of_median.get(each, float("inf")) - 1))
    traced = TracedStep(f"{run.name}, step {step}, rank {rank}", tasks[step])
    own = [each for each in phases if each.key.step == step]
    return ShownStep(run, step, traced, own, file, of_median.get(step))


def _over_median(run: Run) -> dict[int, float]:
    """Return step, as traces count them, -> its time over that of the median step."""
    times = times_of(run)
    if times is None or times.step_ms <= 0:
        return {}
    # Traces count from 0 on, and records from 1.
    return {row["step"] - 1: row["step_ms"] / times.step_ms for row in run.steps if "step_ms" in row}


def _incomplete(traces: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each way in which ranks' traces ended early."""
    ranks_of: dict[str, list[int]] = {}
    for rank, trace in traces.items():
        about = trace["otherData"]
        if not about.get("complete", False):
            seen = ", ".join(map(str, about.get("steps", []))) or "none"
            ranks_of.setdefault(f"{about.get('ended', 'no end')}; steps there are: {seen}", []).append(rank)
    return [f"{how} (rank {', '.join(map(str, ranks))})" for how, ranks in ranks_of.items()]


def timelines(page: Page, steps: Sequence[ShownStep]) -> None:
    """Write the section with one step of each run, one above the other."""
    if not steps:
        return
    page.heading("One step, task by task")
    page.paragraph(
        "Each bar is a task of a MoE layer on the lane that it occupies; point at one for what it waited for, which is "
        "outlined. All runs are on one axis, each from its first task on."
    )
    page.chart(draw_timeline([each.traced for each in steps]))
    for each in steps:
        if each.of_median is not None and not 1 / _UNUSUAL < each.of_median < _UNUSUAL:
            page.paragraph(
                f"{each.run.name}: this step took {each.of_median:.1f} medians; none nearer was traced.", True
            )
    _explain(page, steps)
    for each in steps:
        page.paragraph(
            f"{each.run.name}: all ranks, critical path and idle times for Perfetto (ui.perfetto.dev): {each.file.name}"
        )


def _explain(page: Page, steps: Sequence[ShownStep]) -> None:
    """Write tables of the critical paths and of the lanes, with a column for each run."""
    found = [each for each in steps if each.path_ms]
    if not found:
        return
    names = [each.run.name for each in found]
    shares = [each.shares_ms() for each in found]
    rows = []
    for what in added(shares):
        own = ((each.get(what, 0.0), step.path_ms) for each, step in zip(shares, found, strict=True))
        words = what if what == BETWEEN else task_name(what)
        rows.append((words, *(f"{ms:.3f} ({ms / path_ms:.0%})" for ms, path_ms in own)))
    rows.append(("all", *(f"{each.path_ms:.3f}" for each in found)))
    page.table(("critical path, ms", *names), rows)
    lanes = [_of_lanes(each.phases) for each in found]
    words = list(dict.fromkeys(what for each in lanes for what in each))
    ordered = sorted(words, key=lambda what: (list(map(str, LANES)).index(what[0]), what[1] != BUSY))
    page.table(
        ("lanes, ms, mean of ranks", *names),
        (
            (f"{LANE_NAMES[lane]}: {what}", *(f"{each.get((lane, what), 0.0):.3f}" for each in lanes))
            for lane, what in ordered
        ),
    )


def _of_lanes(phases: Sequence[TracedPhase]) -> dict[tuple[str, str], float]:
    """Return (lane, state) -> the ms in which a lane was busy, or idle for a reason."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for phase in phases:
        for lane, ms in phase.busy_ms.items():
            found[lane, BUSY] += ms
            for what, idle_ms in phase.idle_ms.get(lane, {}).items():
                found[lane, f"idle, {_waiting(what)}"] += idle_ms
    return found


BUSY = "busy"


def _waiting(what: str) -> str:
    kind = what.removeprefix("for ")
    return what if kind == what else f"waiting for {task_name(kind)}"

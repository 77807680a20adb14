# SPDX-License-Identifier: Apache-2.0
"""Shows what each step of runs was: its loss, its time, its tokens per second, its memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.report.charts import Points, draw_lines, is_drawable
from ds_fsmoe.offline.report.comparison import settled_after, times_of

if TYPE_CHECKING:
    from ds_fsmoe.offline.report.page import Page

_PARTS = ("forward", "backward", "optimizer", "rest")
_CUT_SHARE, _ROOM = 0.98, 1.25
"""The share of the steps that count which the axis of times has room for, and by how much it is longer than these."""
_GIB = float(1 << 30)
_GROWN = 0.03
"""The share of memory from which a rise is worth a word."""


def counted_after(runs: Sequence[Run]) -> int:
    """Return the last step that does not count, the same for all runs."""
    return max((settled_after(run) for run in runs if run.steps), default=0)


def lines_of(runs: Sequence[Run], value: Callable[[Mapping[str, Any]], Any], skip: int = 0) -> Points:
    """Return a line of points for each run that has such values.

    Args:
        runs: the runs.
        value: a function that returns what is drawn of a step, or something that cannot be drawn.
        skip: the steps at the beginning that are left out.
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
    """Write the section about what steps took, without the first, in which everything is slow."""
    lines = lines_of(runs, lambda row: row.get("step_ms"), skip=1)
    if not lines:
        return
    page.heading("Step times")
    after = counted_after(runs)
    cut_at = _cut(lines, after)
    shaded = [each for run in runs for each in tuning_of(run)]
    about = "time of each step"
    page.chart(draw_lines(about, lines, "ms per step", from_zero=True, cut_at=cut_at, shaded=shaded))
    above = [ms for points in lines.values() for _, ms in points if cut_at is not None and ms > cut_at]
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


def _cut(lines: Points, after: int) -> float | None:
    """Return where the axis of times ends, so that few slow steps do not squash the others; ``None``: nowhere."""
    counted = sorted(ms for points in lines.values() for step, ms in points if step > after)
    if not counted:
        return None
    cut_at = _ROOM * counted[int(_CUT_SHARE * (len(counted) - 1))]
    return cut_at if cut_at > 0 and any(ms > cut_at for points in lines.values() for _, ms in points) else None


def tuning_of(run: Run) -> list[tuple[int, int, str]]:
    """Return the stretches of steps in which something was measured or tried: (first, last, words).

    Runs of earlier versions do not say which steps these are, only when plans were settled.
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
    """Write the section about memory of rank 0."""
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
    """Return by how much memory has grown in the steps in which the autotuner measured or tried plans, if it has."""
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

# SPDX-License-Identifier: Apache-2.0
"""Finds the step of each run that is shown task by task, and says what its critical path is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fsmoe.files.runs import Run, has_trace, trace_folder
from ds_fsmoe.offline.report.charts import TracedStep, draw_timeline, tasks_of_step
from ds_fsmoe.offline.report.comparison import times_of
from ds_fsmoe.offline.report.critical_path import BETWEEN, TracedPhase, merge_ranks
from ds_fsmoe.offline.report.palette import LANE_NAMES, LANES, task_name

if TYPE_CHECKING:
    from ds_fsmoe.offline.report.page import Page


_UNUSUAL = 1.25
"""The ratio to the median step from which a step is said to be unlike the others."""


@dataclass(frozen=True)
class ShownStep:
    """One step of a run, as its first rank has traced it, and the phases of its layers over all ranks."""

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
        """The time of the critical paths of all phases."""
        return sum(each.ms for each in self.phases)

    def shares_ms(self) -> dict[str, float]:
        """Return what the critical path consists of, by kinds of tasks, the largest first."""
        return added(each.shares_ms() for each in self.phases)


def shown_step(page: Page, run: Run) -> ShownStep | None:
    """Return, of the traced steps of a run that have tasks, the one whose time is nearest to the median step, or the
    last if times are not known; ``None``: there is none. Say on the page what is missing."""
    if not has_trace(run.folder):
        return None
    try:
        file, traces, phases, lacks = merge_ranks(trace_folder(run.folder))
    except (OSError, ValueError) as error:
        page.warn(f"{run.name}: its trace cannot be shown: {error}")
        return None
    for problem in [*lacks, *_incomplete(traces)]:
        page.warn(f"{run.name}: the trace is incomplete: {problem}")
    rank = min(traces)
    of_median = _over_median(run)
    # A run may have ended in the last one.
    tasks = {step: tasks_of_step(traces[rank], step) for step in traces[rank]["otherData"].get("steps", [])}
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
    """Return a sentence for each way in which ranks' traces have ended early."""
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
    """Write what the critical paths are made of, and what lanes did, a column for each run."""
    found = [each for each in steps if each.path_ms]
    if not found:
        return
    names = [each.run.name for each in found]
    shares = [each.shares_ms() for each in found]
    rows = []
    for what in added(shares):
        own = [each.get(what, 0.0) for each in shares]
        rows.append(
            (piece_words(what), *(f"{ms:.3f} ({ms / each.path_ms:.0%})" for ms, each in zip(own, found, strict=True)))
        )
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
    """Return (lane, what) -> the milliseconds in which a lane was busy, or idle and why."""
    found: dict[tuple[str, str], float] = {}
    for phase in phases:
        for lane, ms in phase.busy_ms.items():
            found[lane, BUSY] = found.get((lane, BUSY), 0.0) + ms
            for what, idle_ms in phase.idle_ms.get(lane, {}).items():
                key = lane, f"idle, {_waiting(what)}"
                found[key] = found.get(key, 0.0) + idle_ms
    return found


BUSY = "busy"


def piece_words(what: str) -> str:
    """Return the words for a piece of the critical path."""
    return what if what == BETWEEN else task_name(what)


def _waiting(what: str) -> str:
    kind = what.removeprefix("for ")
    return what if kind == what else f"waiting for {task_name(kind)}"


def added(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up numbers by name, and return them with the largest first."""
    found: dict[str, float] = {}
    for values in each:
        for name, value in values.items():
            found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: -item[1]))

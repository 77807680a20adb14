# SPDX-License-Identifier: Apache-2.0
"""Puts together the page of recorded runs, the conclusion first."""

from __future__ import annotations

from collections.abc import Sequence

from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.report import conclusion, decisions, steps_told, traced_steps, what_ran
from ds_fsmoe.offline.report.comparison import Turn
from ds_fsmoe.offline.report.loads import loads, placement
from ds_fsmoe.offline.report.page import CONCLUSION, Page


def make_page(runs: Sequence[Run], turns: Sequence[Turn] = ()) -> Page:
    """Return a page with everything that runs have recorded.

    Args:
        runs: one run, or stock's and ours.
        turns: what short runs of both that took turns have found.
    """
    page = Page(" and ".join(run.name for run in runs))
    page.heading(CONCLUSION)
    for run in runs:
        for problem in run.problems:
            page.warn(f"{run.name}: {problem}")
    shown: list[traced_steps.ShownStep] = []

    def trace(page: Page, run: Run) -> None:
        found = traced_steps.shown_step(page, run)
        if found is not None:
            shown.append(found)

    for run in runs:
        page.section(trace, run)
    page.section(conclusion.conclusion, runs, turns, shown)
    page.section(conclusion.gains, turns)
    page.section(traced_steps.timelines, shown)
    for of_steps in (steps_told.step_times, steps_told.losses, steps_told.throughput, steps_told.memory):
        page.section(of_steps, runs)
    for run in runs:
        for of_run in (
            decisions.decided,
            decisions.trials,
            decisions.compared,
            loads,
            placement,
            decisions.measured_operations,
        ):
            page.section(of_run, run)
    page.section(what_ran.config_difference, runs)
    page.section(what_ran.what_ran, runs)
    return page

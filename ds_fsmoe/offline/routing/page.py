# SPDX-License-Identifier: Apache-2.0
"""Shows recorded routing: load, skew and drift of each layer, as a table and as charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ds_fsmoe.offline.report.charts import Chart, draw_heat, draw_lines
from ds_fsmoe.offline.report.loads import MOST_CELLS
from ds_fsmoe.offline.report.page import Page
from ds_fsmoe.offline.routing.load import LayerLoad, loads_of, mean_of
from ds_fsmoe.routes.recorded import Recording, read_routing
from ds_fsmoe.routes.written import parts_of
from ds_fsmoe.terminal.progress import Progress
from ds_fsmoe.terminal.tables import Table

ROUTING = "routing"
"""The folder in that of a run in which its routing is looked for."""
_HEADS = (
    "layer",
    "experts",
    "k",
    "choices",
    "fullest expert",
    "fullest rank",
    "variation",
    "idle",
    "drift",
    "over all",
)
_MOST_PICTURES = 6


def has_routing(path: Path) -> bool:
    """Return whether a path is a folder of recorded routing, or a packed file."""
    return (path.suffix == ".npz" and path.is_file()) or bool(parts_of(path))


def add_routing(page: Page, path: Path) -> list[str | Table]:
    """Write a section about recorded routing, and return it to be printed.

    Args:
        page: the page.
        path: the folder, or packed file.

    Raises:
        RoutingFileError: it cannot be read.
    """
    recording = read_routing(path)
    loads = _read(recording, path.name)
    about = _about(recording)
    page.heading("Routing")
    page.paragraph(about)
    for problem in recording.problems:
        page.warn(problem)
    rows = [_row(each) for each in loads]
    page.table(_HEADS, rows)
    page.paragraph(_WORDS)
    _draw(page, loads, recording.steps)
    return [about, *recording.problems, Table(_HEADS, rows, has_rule=False), _WORDS]


def _read(recording: Recording, name: str) -> list[LayerLoad]:
    """Return the loads of all layers, and say how far that has come."""
    with Progress(f"reading {name}", len(recording), "choices") as progress:
        return loads_of(recording, progress.tell)


_WORDS = (
    "Fullest expert and rank: over the mean, as a mean over steps; rank: of those that share the experts. Variation: "
    "the standard deviation of loads over their mean. Idle: experts that got nothing at all. Drift: the share of "
    "choices on other experts than in the step recorded before, as a mean; over all: last quarter of steps against the "
    "first."
)


def _about(recording: Recording) -> str:
    steps = recording.steps
    which = f"{len(steps)} step(s), {steps[0]} to {steps[-1]}" if steps else "no step"
    return f"Routing of {len(recording.layers)} MoE layer(s) on {len(recording.ranks)} rank(s): {which}."


def _row(load: LayerLoad) -> tuple[str, ...]:
    numbers = (mean_of(each) for each in (load.skew_N, load.fullest_rank_N, load.variation_N))
    drifts = (mean_of(load.drift_N), load.drift_over_all)
    return (
        *(load.layer.path, str(load.layer.num_experts), str(load.num_choices), f"{int(load.load_NE.sum()):,}"),
        *(_number(each) for each in numbers),
        str(load.num_idle),
        *(_number(each) for each in drifts),
    )


def _number(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "-"


def _draw(page: Page, loads: Sequence[LayerLoad], steps: Sequence[int]) -> None:
    if not steps:
        return
    skews = {each.layer.path: list(zip(steps, each.skew_N, strict=True)) for each in loads}
    drifts = {each.layer.path: list(zip(steps, each.drift_N, strict=True))[1:] for each in loads}
    worst = sorted(loads, key=lambda each: -np.nan_to_num(mean_of(each.skew_N)))[:_MOST_PICTURES]
    names = [each.layer.path for each in worst]
    if len(loads) > len(worst):
        page.paragraph(f"Of the {len(loads)} layers the {len(worst)} most skewed are drawn.")
    about = "fullest expert over the mean, over steps"
    page.chart(draw_lines(about, {name: skews[name] for name in names}, "fullest expert / mean", from_zero=True))
    if len(steps) > 1:
        about = "share of choices on other experts than in the step before"
        page.chart(draw_lines(about, {name: drifts[name] for name in names}, "drift", from_zero=True))
    page.charts([_heat(each, steps) for each in worst])


def _heat(load: LayerLoad, steps: Sequence[int]) -> Chart:
    stride = math.ceil(load.load_NE.size / MOST_CELLS)
    mean_N1 = load.load_NE.mean(axis=1, keepdims=True)
    share_NE = (load.load_NE / mean_N1.clip(min=1e-9))[::stride].tolist()
    about = f"load of the experts of {load.layer.path} over steps"
    return draw_heat(about, load.layer.path, steps[::stride], share_NE, "expert", "load over the mean")

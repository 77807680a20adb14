# SPDX-License-Identifier: Apache-2.0
"""Pictures of models on clusters from few GPUs to thousands. They need matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from ds_fsmoe.planning.draw import drawing
from ds_fsmoe.planning.palette import LIGHT, RUN_COLOURS
from ds_fsmoe.planning.presets import BEST
from ds_fsmoe.planning.scale import LIMITS, Row, job_of

"""One palette for all pictures: that of the timelines."""
_LIMIT_NAMES = {
    "inter": "bytes between nodes",
    "intra": "bytes inside nodes",
    "compute": "computation",
    "start_up": "start-ups",
    "gradients": "gradients",
}
_WIDTH = 9.0
_DPI = 100
"""Pictures are 900 pixels wide."""


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every picture, and return the files: efficiency and the gain of crossing once per node for each cluster,
    limits and systems for each model on the first cluster.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message says how to get it.
    """
    files = [folder / f"scale_{name}.png" for name in ("efficiency", "exchange", "limits", "systems")]
    for draw, file in zip((draw_efficiency, draw_exchange, draw_limits, draw_systems), files, strict=True):
        draw(rows, file)
    return files


def draw_efficiency(rows: Sequence[Row], file: Path) -> None:
    """Draw the tokens of a GPU and second over those at the smallest size; hollow where the model does not fit."""
    chosen = [row for row in rows if row["preset"] == BEST and row["is_choice"]]
    title = "tokens/s of a GPU over those at the smallest size (preset best); hollow: does not fit in memory"
    with _panels(file, title, _values(rows, "cluster"), "efficiency") as axes:
        for cluster, axis in axes.items():
            for place, model in enumerate(_values(rows, "model")):
                line = [row for row in chosen if (row["cluster"], row["model"]) == (cluster, model)]
                _line(axis, line, itemgetter("efficiency"), model, RUN_COLOURS[place])
            axis.set_ylim(0, 1.05)


def draw_exchange(rows: Sequence[Row], file: Path) -> None:
    """Draw how many times as fast the best layout is as the best one with a flat all-to-all."""
    best = [row for row in rows if row["preset"] == BEST]
    flat_ms = {job_of(row): row["step_ms"] for row in best if row["is_flat_choice"]}
    title = "times as fast with all-to-alls once per node as with flat ones, each in its best layout (preset best)"
    with _panels(file, title, _values(rows, "cluster"), "times as fast") as axes:
        for cluster, axis in axes.items():
            for place, model in enumerate(_values(rows, "model")):
                line = [row for row in best if row["is_choice"] and (row["cluster"], row["model"]) == (cluster, model)]
                _line(axis, line, lambda row: flat_ms[job_of(row)] / row["step_ms"], model, RUN_COLOURS[place])
            axis.axhline(1.0, color="black", linewidth=0.8)


def draw_limits(rows: Sequence[Row], file: Path) -> None:
    """Draw what share of a step would be saved if one thing cost nothing, on the first cluster."""
    cluster = _values(rows, "cluster")[0]
    chosen = [row for row in rows if row["preset"] == BEST and row["is_choice"] and row["cluster"] == cluster]
    title = f"{cluster}: share of a step that would be saved if one thing cost nothing (preset best)"
    with _panels(file, title, _values(rows, "model"), "share of the step") as axes:
        for model, axis in axes.items():
            line = [row for row in chosen if row["model"] == model]
            for place, name in enumerate(LIMITS):
                _line(axis, line, itemgetter(f"without_{name}"), _LIMIT_NAMES[name], RUN_COLOURS[place])
            axis.set_ylim(bottom=0)


def draw_systems(rows: Sequence[Row], file: Path) -> None:
    """Draw how many times as fast as stock's order every system is, on the first cluster, with the same layout."""
    cluster = _values(rows, "cluster")[0]
    chosen = [row for row in rows if row["is_choice"] and row["cluster"] == cluster]
    stock_ms = {job_of(row): row["step_ms"] for row in chosen if row["preset"] == "deepspeed"}
    title = f"{cluster}: times as fast as deepspeed, in the layout that is best"
    with _panels(file, title, _values(rows, "model"), "times as fast") as axes:
        for model, axis in axes.items():
            for place, name in enumerate(each for each in _values(rows, "preset") if each != "deepspeed"):
                line = [row for row in chosen if (row["model"], row["preset"]) == (model, name)]
                line = [row for row in line if job_of(row) in stock_ms]
                _line(axis, line, lambda row: stock_ms[job_of(row)] / row["step_ms"], name, RUN_COLOURS[place])
            axis.axhline(1.0, color="black", linewidth=0.8)


def _values(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))


def _line(axis: Any, rows: Sequence[Row], value: Callable[[Row], float], label: str, colour: str) -> None:
    rows = sorted(rows, key=lambda row: row["ranks"])
    ranks = [row["ranks"] for row in rows]
    axis.plot(ranks, [value(row) for row in rows], color=colour, linewidth=1.4, label=label)
    for is_filled in (True, False):
        of_kind = [row for row in rows if (row["fits"] is not False) == is_filled]
        faces = colour if is_filled else "white"
        at = [row["ranks"] for row in of_kind], [value(row) for row in of_kind]
        axis.plot(*at, "o", markersize=3.5, markerfacecolor=faces, markeredgecolor=colour, markeredgewidth=0.9)


@contextmanager
def _panels(file: Path, title: str, names: Sequence[str], what: str) -> Iterator[dict[str, Any]]:
    """One panel for each name, three in a row, and the legend of all where a panel is left, or below."""
    pyplot = drawing()
    columns = min(3, len(names))
    num_rows = -(-len(names) // columns)
    figure, axes = pyplot.subplots(
        num_rows, columns, figsize=(_WIDTH, 0.6 + 2.5 * num_rows), squeeze=False, layout="constrained"
    )
    panels = dict(zip(names, axes.flat, strict=False))
    yield panels
    for place, (name, axis) in enumerate(panels.items()):
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_xscale("log", base=2)
        lines = [line for line in axis.get_lines() if line.get_label()[0] != "_"]
        ticks = sorted({int(each) for line in lines for each in line.get_xdata()})
        axis.set_xticks(ticks[::3], [str(each) for each in ticks[::3]])
        axis.minorticks_off()
        axis.tick_params(labelsize=8)
        axis.grid(color=LIGHT.grid, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        if place % columns == 0:
            axis.set_ylabel(what, fontsize=9)
        axis.set_xlabel("GPUs", fontsize=9)
    for axis in list(axes.flat)[len(names) :]:
        axis.set_axis_off()
    handles = {line.get_label(): line for axis in panels.values() for line in axis.get_lines()}
    handles = {label: line for label, line in handles.items() if label[0] != "_"}
    if len(names) % columns:
        list(axes.flat)[-1].legend(handles.values(), handles, loc="center left", fontsize=9, frameon=False)
    else:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(file, dpi=_DPI)
    pyplot.close(figure)

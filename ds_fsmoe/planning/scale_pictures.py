# SPDX-License-Identifier: Apache-2.0
"""Draws models on clusters from few GPUs to thousands, each picture a panel for each cluster or model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from ds_fsmoe.planning.draw import colours, data_of, drawing, write_picture
from ds_fsmoe.planning.palette import LIGHT, RUN_COLOURS
from ds_fsmoe.planning.presets import BEST
from ds_fsmoe.planning.scale import LIMITS, Row, job_of

_LIMIT_NAMES = {
    "inter": "bytes between nodes",
    "intra": "bytes inside nodes",
    "compute": "computation",
    "start_up": "start-ups",
    "gradients": "gradients",
}
_PANEL_PX = 232, 170
_COLUMNS = 3

Lines = Mapping[str, Sequence[tuple[Row, float]]]
"""The rows of lines by their names, each with what is drawn of it."""


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every picture, and return the files: efficiency and the gain of crossing once per node for each cluster,
    limits and systems for each model on the first cluster.

    Raises:
        ModuleNotFoundError: altair is missing; the message says how to get it.
    """
    files = [folder / f"scale_{name}.png" for name in ("efficiency", "exchange", "limits", "systems")]
    for draw, file in zip((draw_efficiency, draw_exchange, draw_limits, draw_systems), files, strict=True):
        draw(rows, file)
    return files


def draw_efficiency(rows: Sequence[Row], file: Path) -> None:
    """Draw the tokens of a GPU and second over those at the smallest size; hollow where the model does not fit."""
    chosen = [row for row in rows if row["preset"] == BEST and row["is_choice"]]
    panels = _by_cluster(rows, chosen, itemgetter("efficiency"))
    title = "tokens/s of a GPU over those at the smallest size (preset best); hollow: does not fit in memory"
    _draw(panels, file, title, "efficiency", most=1.05)


def draw_exchange(rows: Sequence[Row], file: Path) -> None:
    """Draw how many times as fast the best layout is as the best one with a flat all-to-all."""
    best = [row for row in rows if row["preset"] == BEST]
    flat_ms = {job_of(row): row["step_ms"] for row in best if row["is_flat_choice"]}
    chosen = [row for row in best if row["is_choice"]]
    panels = _by_cluster(rows, chosen, lambda row: flat_ms[job_of(row)] / row["step_ms"])
    title = "times as fast with all-to-alls once per node as with flat ones, each in its best layout (preset best)"
    _draw(panels, file, title, "times as fast", level=1.0)


def draw_limits(rows: Sequence[Row], file: Path) -> None:
    """Draw what share of a step would be saved if one thing cost nothing, on the first cluster."""
    cluster = _values(rows, "cluster")[0]
    chosen = [row for row in rows if row["preset"] == BEST and row["is_choice"] and row["cluster"] == cluster]
    panels = {
        model: {
            _LIMIT_NAMES[name]: [(row, row[f"without_{name}"]) for row in chosen if row["model"] == model]
            for name in LIMITS
        }
        for model in _values(rows, "model")
    }
    title = f"{cluster}: share of a step that would be saved if one thing cost nothing (preset best)"
    _draw(panels, file, title, "share of the step")


def draw_systems(rows: Sequence[Row], file: Path) -> None:
    """Draw how many times as fast as stock's order every system is, on the first cluster, with the same layout."""
    cluster = _values(rows, "cluster")[0]
    chosen = [row for row in rows if row["is_choice"] and row["cluster"] == cluster]
    stock_ms = {job_of(row): row["step_ms"] for row in chosen if row["preset"] == "deepspeed"}
    chosen = [row for row in chosen if job_of(row) in stock_ms]
    panels = {
        model: {
            name: [
                (row, stock_ms[job_of(row)] / row["step_ms"])
                for row in chosen
                if (row["model"], row["preset"]) == (model, name)
            ]
            for name in _values(rows, "preset")
            if name != "deepspeed"
        }
        for model in _values(rows, "model")
    }
    title = f"{cluster}: times as fast as deepspeed, in the layout that is best"
    _draw(panels, file, title, "times as fast", level=1.0)


def _by_cluster(rows: Sequence[Row], chosen: Sequence[Row], value: Callable[[Row], float]) -> dict[str, Lines]:
    """Return a panel for each cluster with a line for each model."""
    return {
        cluster: {
            model: [(row, value(row)) for row in chosen if (row["cluster"], row["model"]) == (cluster, model)]
            for model in _values(rows, "model")
        }
        for cluster in _values(rows, "cluster")
    }


def _values(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))


def _draw(
    panels: Mapping[str, Lines],
    file: Path,
    title: str,
    what: str,
    level: float | None = None,
    most: float | None = None,
) -> None:
    """Draw a panel for each name, three in a row, with one legend.

    Args:
        panels: the lines of each.
        file: the file to write.
        title: what stands above all of them.
        what: what y is.
        level: where a line crosses each panel.
        most: the end of y; ``None``: as the points ask for.
    """
    alt = drawing()
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colour = colours(names, [RUN_COLOURS[place % len(RUN_COLOURS)] for place in range(len(names))], columns=4)
    ranks = sorted({row["ranks"] for lines in panels.values() for line in lines.values() for row, _ in line})

    def of(number: int, panel: str, lines: Lines) -> Any:
        points = [
            {"name": name, "ranks": row["ranks"], "value": value, "fits": row["fits"] is not False}
            for name, line in lines.items()
            for row, value in line
        ]
        x_scale = alt.Scale(type="log", base=2, domain=[ranks[0], ranks[-1]] if ranks else [1, 2], nice=False)
        x = alt.X("ranks:Q", scale=x_scale, title="GPUs", axis=alt.Axis(values=ranks[::3], grid=False))
        y_scale = alt.Scale(zero=level is None, nice=False, **({} if most is None else {"domain": [0.0, most]}))
        y = alt.Y("value:Q", scale=y_scale, title=what if number % _COLUMNS == 0 else None)
        chart = alt.Chart(data_of(points)).encode(x=x, y=y, color=colour)
        layers = [chart.mark_line(strokeWidth=1.6)]
        layers.append(chart.transform_filter("datum.fits").mark_circle(size=26, opacity=1))
        layers.append(chart.transform_filter("!datum.fits").mark_point(size=26, opacity=1, fill=LIGHT.ground))
        if level is not None:
            line = alt.Chart(data_of([{"value": level}])).mark_rule(color=LIGHT.ink)
            layers.append(line.encode(y=alt.Y("value:Q", scale=y_scale)))
        width, height = _PANEL_PX
        head = alt.TitleParams(panel, anchor="start", fontSize=12)
        return alt.layer(*layers).properties(width=width, height=height, title=head)

    charts = [of(number, *panel) for number, panel in enumerate(panels.items())]
    write_picture(alt.concat(*charts, columns=_COLUMNS, spacing=16).resolve_scale(y="independent"), file, title=title)

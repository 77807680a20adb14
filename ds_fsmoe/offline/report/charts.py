# SPDX-License-Identifier: Apache-2.0
"""Describes the charts of a page; the page adds the colours of its light and dark modes.

Names of runs, layers and plans come from files. So they are values of these charts, never fields or expressions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from ds_fsmoe.offline.report.critical_path import MeasuredTask
from ds_fsmoe.offline.report.palette import (
    LANE_NAMES,
    LANES,
    LIGHT,
    OTHER,
    PHASE_COLOURS,
    RUN_COLOURS,
    colour_of,
    task_name,
    text_on,
)

ROWS = "rows"
"""The name of the data of a chart."""
_MOST_POINTS = 1500
"""The points that a line has at most; of longer runs every so manieth is drawn."""
_MOST_CELLS = 6000
"""The cells that the picture of a layer has at most."""
_FEW = 60
"""The points up to which each has a mark of its own."""

QUIET = RUN_COLOURS[0]
"""The colour of what is read second, seen on light and dark."""

Points = Mapping[str, Sequence[tuple[float, float]]]
"""The points of lines by their names."""


@dataclass(frozen=True)
class Chart:
    """Holds a chart of a page."""

    about: str
    """What it shows, for those who do not see it."""
    spec: Mapping[str, Any]
    """The chart as Vega-Lite has it, with its data."""
    is_zoomable: bool = False
    is_broad: bool = False
    """Whether it needs more room than a phone has, and scrolls there."""


@contextmanager
def needs(package: str = "", what: str = "a page") -> Iterator[None]:
    """Run an import of the block; a missing package raises an error with the command to install it.

    Args:
        package: the package; empty: that of the missing module.
        what: the result that needs the package, for the message.

    Raises:
        ModuleNotFoundError: the package is missing; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = package or error.name
        raise ModuleNotFoundError(f"{what} needs {name}: pip install 'ds_fsmoe[plot]'", name=name) from error


def library() -> ModuleType:
    """Return altair, which describes charts."""
    with needs("altair"):
        import altair
    return altair


def chart_of(
    about: str,
    chart: Any,
    data: Mapping[str, Sequence[Mapping[str, Any]]],
    height: int = 240,
    is_broad: bool = False,
) -> Chart:
    """Return a chart with its data, as wide as its container.

    Args:
        about: a description of the chart.
        chart: the chart by altair, whose data have names.
        data: the data by name.
        height: the height in pixels.
        is_broad: whether it scrolls on narrow screens.
    """
    sized = chart.properties(width="container", height=height)
    spec = sized.to_dict(validate=False) | {"datasets": {name: list(rows) for name, rows in data.items()}}
    # What the page says is configured there; an address has no place in it.
    for unwanted in ("$schema", "config"):
        spec.pop(unwanted, None)
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    spec["description"] = about
    params = (param for part in (spec, *spec.get("layer", ())) for param in part.get("params", ()))
    return Chart(about, spec, any(each["name"] == "zoom" for each in params), is_broad)


def zoom(alt: ModuleType) -> Any:
    """Return a parameter for moving and zooming a chart along x; the wheel alone scrolls the page."""
    return alt.selection_interval(name="zoom", bind="scales", encodings=["x"], zoom="wheel![event.ctrlKey]")


def colours_of(names: Sequence[str], first: int = 0) -> dict[str, str]:
    """Return the colour of each name: the colours of runs in their order, from number ``first`` on."""
    return {name: RUN_COLOURS[(first + number) % len(RUN_COLOURS)] for number, name in enumerate(names)}


def phase_spans(tasks: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Return (phase, begin, end) of each stretch in which all tasks that begin are of one phase, in order of time.

    Args:
        tasks: (phase, begin, end) of each task, in any unit.
    """
    spans: list[tuple[str, float, float]] = []
    for phase, begin, end in sorted(tasks, key=lambda each: each[1]):
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1], max(end, spans[-1][2]))
        else:
            spans.append((phase, begin, end))
    return spans


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return every n-th point if there are many, and the last."""
    stride = math.ceil(len(points) / _MOST_POINTS)
    return points if stride < 2 else [*points[::stride], *points[-1:]]


def is_drawable(value: Any) -> bool:
    """Return True if a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def draw_lines(
    about: str,
    lines: Points,
    y_title: str,
    *,
    from_zero: bool,
    axis_end: float | None = None,
    shaded: Iterable[tuple[float, float, str]] = (),
    is_zoomable: bool = True,
) -> Chart:
    """Return one line per name over optimizer steps.

    Args:
        about: a description of the chart.
        lines: the points by name.
        y_title: the values with their unit.
        from_zero: whether the axis begins at zero.
        axis_end: the end of the axis; triangles there stand for larger values. ``None``: above all.
        shaded: ranges of steps to shade, with the reason: (from, to, words).
        is_zoomable: whether the chart can be moved and zoomed.
    """
    alt = library()
    names = list(lines)
    rows = [
        {"x": x, "y": y, "name": name, "is_cut": axis_end is not None and y > axis_end}
        for name, points in lines.items()
        for x, y in thinned(points)
        if is_drawable(x) and is_drawable(y)
    ]
    y_scale = alt.Scale(zero=from_zero) if axis_end is None else alt.Scale(domain=[0.0, axis_end], nice=False)
    x_axis = alt.Axis(grid=False, tickMinStep=1, format="d")
    x = alt.X("x:Q", title="optimizer step", scale=alt.Scale(zero=False, nice=False), axis=x_axis)
    y = alt.Y("y:Q", title=y_title, scale=y_scale)
    scale = alt.Scale(domain=names, range=list(colours_of(names).values()))
    legend = alt.Legend(
        orient="top", title=None, symbolType="stroke", columns=2 if len(names) > 2 else 0, labelLimit=320
    )
    colour = alt.Color("name:N", scale=scale, legend=legend)
    tips = [
        alt.Tooltip("name:N", title="of"),
        alt.Tooltip("x:Q", title="step"),
        alt.Tooltip("y:Q", title=y_title, format=",.5~g"),
    ]
    # Later lines cover earlier ones: where they agree, only a dashed line on a broader one shows both.
    dashes = [[1, 0], *[[6, 3]] * (len(names) - 1)]
    dash = alt.StrokeDash("name:N", scale=alt.Scale(domain=names, range=dashes), legend=legend)
    first = alt.datum.name == (names[0] if names else "")
    width = alt.condition(first, alt.value(2.6), alt.value(1.6))
    base = alt.Chart(alt.NamedData(ROWS))
    is_few = len(rows) <= _FEW * len(lines)
    layers, data = [], {ROWS: rows}
    if stretches := [{"x": begin - 0.5, "x2": end + 0.5, "why": why} for begin, end, why in shaded]:
        data["stretches"] = stretches
        shade = alt.Chart(alt.NamedData("stretches")).mark_rect(color=QUIET, opacity=0.22, clip=True)
        layers.append(shade.encode(x="x:Q", x2="x2:Q", tooltip=alt.Tooltip("why:N", title="steps")))
    line = base.mark_line(clip=True).encode(x=x, y=y, color=colour, strokeDash=dash, strokeWidth=width)
    dots = base.transform_filter("!datum.is_cut").mark_point(filled=True, clip=True, size=26 if is_few else 60)
    # Where dots would cover the line, they are there to be pointed at.
    layers += [line, dots.encode(x=x, y=y, color=colour, opacity=alt.value(1 if is_few else 0), tooltip=tips)]
    if any(row["is_cut"] for row in rows):
        above = base.transform_filter("datum.is_cut").mark_point(shape="triangle-up", filled=True, size=45, yOffset=5)
        layers.append(above.encode(x=x, y=alt.value(0), color=colour, tooltip=tips))
    if is_zoomable:
        layers[0] = layers[0].add_params(zoom(alt))
    return chart_of(about, alt.layer(*layers), data)


def draw_dots(
    about: str, rows: Sequence[Mapping[str, Any]], x_title: str, title: str, ticks: Sequence[Mapping[str, Any]] = ()
) -> Chart:
    """Return a point for each value, in a row for each name.

    Args:
        about: a description of the chart.
        rows: "name", "x", "is_kept" and "note" of each point, in the order of names from the top.
        x_title: the values with their unit.
        title: the title.
        ticks: "name" and "x" of values marked by a stroke, such as medians.
    """
    alt = library()
    names = list(dict.fromkeys(row["name"] for row in [*ticks, *rows]))
    y = alt.Y("name:N", sort=names, title=None, axis=alt.Axis(labelLimit=280, grid=True, ticks=False, domain=False))
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(zero=False), axis=alt.Axis(grid=False, tickCount=8))
    colour = alt.condition("datum.is_kept", alt.value(RUN_COLOURS[1]), alt.value(RUN_COLOURS[0]))
    tips = [
        alt.Tooltip("name:N", title="plan"),
        alt.Tooltip("x:Q", title=x_title, format=",.5~g"),
        alt.Tooltip("note:N", title=" "),
    ]
    layers, data = [], {}
    if rows:
        dots = alt.Chart(alt.NamedData(ROWS)).mark_point(filled=True, size=55, opacity=0.75)
        layers.append(dots.encode(x=x, y=y, color=colour, tooltip=tips))
        data[ROWS] = rows
    if ticks:
        stroke = alt.Chart(alt.NamedData("ticks")).mark_tick(thickness=2, size=16)
        layers.append(stroke.encode(x=x, y=y, color=colour, tooltip=tips))
        data["ticks"] = ticks
    return chart_of(about, alt.layer(*layers).properties(title=title), data, 24 * len(names), is_broad=True)


def draw_heat(
    about: str, title: str, steps: Sequence[int], counts_NE: Sequence[Sequence[float]] | np.ndarray, v_title: str
) -> Chart:
    """Return a cell for each step and expert, coloured by its count relative to the mean of the step.

    Args:
        about: a description of the chart.
        title: the title.
        steps: the N steps; of many, every n-th is drawn.
        counts_NE: [N, E], such as tokens.
        v_title: the name of a count over the mean.
    """
    alt = library()
    num_experts = max((len(each) for each in counts_NE), default=1)
    stride = max(1, math.ceil(len(steps) * num_experts / _MOST_CELLS))
    steps, counts_NE = steps[::stride], np.asarray(counts_NE[::stride]).tolist()
    means_N = [sum(counts) / len(counts) or 1.0 for counts in counts_NE]
    rows = [
        {"x": str(step), "y": expert, "v": round(count / mean, 3)}
        for step, counts, mean in zip(steps, counts_NE, means_N, strict=True)
        for expert, count in enumerate(counts)
        if is_drawable(count / mean)
    ]
    every = max(1, math.ceil(len(steps) / 6))
    shown = [str(each) for each in steps[::every]]
    axis = alt.Axis(values=shown, labelAngle=0, ticks=False, domain=False)
    cells = alt.Chart(alt.NamedData(ROWS)).mark_rect()
    chart = cells.encode(
        x=alt.X("x:O", sort=[str(each) for each in steps], title="optimizer step", axis=axis),
        y=alt.Y("y:O", title="expert", axis=alt.Axis(labelOverlap=True, ticks=False, domain=False)),
        color=alt.Color(
            "v:Q",
            scale=alt.Scale(scheme="blueorange", domainMid=1, domainMin=0, domainMax=2, clamp=True),
            legend=None,
        ),
        tooltip=[
            alt.Tooltip("x:O", title="step"),
            alt.Tooltip("y:O", title="expert"),
            alt.Tooltip("v:Q", title=v_title, format=".3~g"),
        ],
    )
    return chart_of(about, chart.properties(title=title), {ROWS: rows}, min(220, max(90, 14 * num_experts)))


def draw_against(about: str, rows: Sequence[Mapping[str, Any]], x_title: str, y_title: str, title: str) -> Chart:
    """Return points of two values each, with the line of equal values.

    Args:
        about: a description of the chart.
        rows: "x", "y", "kind" and "name" of each point.
        x_title, y_title: the values with their unit.
        title: the title.
    """
    alt = library()
    most = max((each[axis] for each in rows for axis in "xy" if is_drawable(each[axis])), default=1.0)
    kinds = list(dict.fromkeys(each["kind"] for each in rows))
    points = alt.Chart(alt.NamedData(ROWS)).mark_point(filled=True, size=40, opacity=0.65)
    scale = alt.Scale(domain=kinds, range=list(colours_of(kinds, 1).values()))
    points = points.encode(
        x=alt.X("x:Q", title=x_title, scale=alt.Scale(domain=[0, most * 1.05], nice=False)),
        y=alt.Y("y:Q", title=y_title, scale=alt.Scale(domain=[0, most * 1.05], nice=False)),
        color=alt.Color("kind:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
        tooltip=[
            alt.Tooltip("name:N", title="phase"),
            alt.Tooltip("x:Q", title=x_title, format=".4~g"),
            alt.Tooltip("y:Q", title=y_title, format=".4~g"),
        ],
    )
    same = alt.Chart(alt.NamedData("same")).mark_line(color=QUIET, strokeWidth=1, strokeDash=[4, 3])
    same = same.encode(x="x:Q", y="y:Q")
    ends = [{"x": each, "y": each} for each in (0, most * 1.05)]
    return chart_of(about, alt.layer(same, points).properties(title=title), {ROWS: list(rows), "same": ends})


def draw_fit(about: str, points: Iterable[tuple[float, float, float]], unit: str, title: str) -> Chart:
    """Return measured values with their fitted line.

    Args:
        about: a description of the chart.
        points: (size, measured ms, fitted ms), by size.
        unit: the unit of sizes.
        title: the title.
    """
    alt = library()
    base = alt.Chart(alt.NamedData(ROWS))
    x = alt.X("x:Q", title=unit, axis=alt.Axis(format="~s", tickCount=4))
    y = alt.Y("y:Q", title="ms", axis=alt.Axis(tickCount=4))
    tips = [
        alt.Tooltip("x:Q", title=unit, format=",.5~g"),
        alt.Tooltip("y:Q", title="measured, ms", format=".4~g"),
        alt.Tooltip("fit:Q", title="fitted, ms", format=".4~g"),
    ]
    line = base.mark_line(color=RUN_COLOURS[1], strokeWidth=1.5).encode(x=x, y=alt.Y("fit:Q", title="ms"))
    dots = base.mark_point(filled=True, color=RUN_COLOURS[0], size=35).encode(x=x, y=y, tooltip=tips)
    rows = [{"x": size, "y": ms, "fit": fit} for size, ms, fit in points]
    return chart_of(about, alt.layer(line, dots).properties(title=title), {ROWS: rows}, 130)


_MOST_COLOURED = 6


def draw_ranks(panels: Sequence[tuple[str, Sequence[Sequence[tuple[int, float]]]]]) -> list[Chart]:
    """Return a chart for each panel, all on one scale: bars of ranks, divided into their experts.

    The experts with most rows have colours, the same in all panels.

    Args:
        panels: the title of each chart, and for each rank (expert, rows).
    """
    alt = library()
    total: dict[int, float] = {}
    for expert, rows in (each for ranks in panels[0][1] for each in ranks) if panels else ():
        total[expert] = total.get(expert, 0.0) + rows
    hottest = [str(each) for each in sorted(total, key=lambda each: (-total[each], each))[:_MOST_COLOURED]]
    colours = colours_of(hottest, 1)
    highest = max((sum(rows for _, rows in ranks) for _, of_ranks in panels for ranks in of_ranks), default=1.0)
    found = []
    for title, of_ranks in panels:
        loads = [sum(rows for _, rows in ranks) for ranks in of_ranks]
        mean = sum(loads) / len(loads)
        over = f": fullest rank {max(loads) / mean:.2f} times the mean" if mean else ""
        data = [
            {
                "x": rank,
                "y": rows,
                "order": -rows,
                "expert": str(expert),
                "kind": str(expert) if str(expert) in colours else "others",
            }
            for rank, ranks in enumerate(of_ranks)
            for expert, rows in ranks
        ]
        scale = alt.Scale(domain=[*colours, "others"], range=[*colours.values(), OTHER])
        bars = alt.Chart(alt.NamedData(ROWS)).mark_bar()
        bars = bars.encode(
            x=alt.X("x:O", title="rank", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("y:Q", title="rows of a call", scale=alt.Scale(domain=[0, highest], nice=False)),
            color=alt.Color("kind:N", scale=scale, legend=alt.Legend(title="expert", orient="bottom")),
            order="order:Q",
            tooltip=[
                alt.Tooltip("x:O", title="rank"),
                alt.Tooltip("expert:N", title="expert"),
                alt.Tooltip("y:Q", title="rows of a call", format=",.4~g"),
            ],
        )
        even = alt.Chart(alt.NamedData("mean")).mark_rule(color=QUIET, strokeDash=[2, 3]).encode(y="y:Q")
        about = f"rows of each rank by expert, {title}"
        chart = alt.layer(bars, even).properties(title=f"{title}{over}")
        found.append(chart_of(about, chart, {ROWS: data, "mean": [{"y": mean}]}, 180))
    return found


_PHASES = {"fwd": "forward", "bwd": "backward"}
_ROW_PX = 30
_MOST_NAMED = 4
"""So many of the tasks that one waited for are named."""
_WORDS_SHARE, _NUMBER_SHARE = 0.07, 0.011
"""The share of what is in sight from which on a task says its name, or at least its chunk."""


@dataclass(frozen=True)
class TracedStep:
    """Holds the tasks of one step of one rank."""

    title: str
    tasks: Sequence[MeasuredTask]
    """The tasks, in order of time."""

    @property
    def length_ms(self) -> float:
        """Return the ms from the begin of the first task to the end of the last."""
        ends = [each.end_us for each in self.tasks]
        return (max(ends) - min(each.begin_us for each in self.tasks)) / 1e3 if ends else 0.0


def task_rows(number: int, step: TracedStep) -> list[dict[str, Any]]:
    """Return a row of data for each task, with ms from the begin of the first.

    Args:
        number: the position of the run, from 0 on.
        step: the step with its tasks.
    """
    begin_us = min((each.begin_us for each in step.tasks), default=0.0)
    at_place = {(each.run, each.index): each for each in step.tasks}
    rows = []
    for each in step.tasks:
        needed = [at_place[each.run, index] for index in each.waits_for if (each.run, index) in at_place]
        rows.append(
            {
                "id": _id(number, each),
                "needs": "|".join(["", *(_id(number, other) for other in needed), ""]),
                "row": _row(number, each.lane),
                "x": round((each.begin_us - begin_us) / 1e3, 4),
                "x2": round((each.end_us - begin_us) / 1e3, 4),
                "ms": round((each.end_us - each.begin_us) / 1e3, 4),
                "kind": task_name(each.kind),
                "task": _words(each),
                "chunk": str(each.chunk + 1),
                "ink": text_on(colour_of(each.kind)),
                "where": f"{each.layer} {_PHASES.get(each.phase, each.phase)}",
                "phase": _PHASES.get(each.phase, each.phase),
                "run_number": number,
                "lane": LANE_NAMES[each.lane],
                "run": step.title,
                "waited": _waited(each, needed),
            }
        )
    return rows


def _id(number: int, task: MeasuredTask) -> str:
    return f"{number}.{task.run}.{-1 if task.index is None else task.index}"


def _words(task: MeasuredTask) -> str:
    return f"{task_name(task.kind)}, chunk {task.chunk + 1}"


def _row(number: int, what: str) -> str:
    return f"{number} {what}"


def _waited(task: MeasuredTask, needed: Sequence[MeasuredTask]) -> str:
    """Return the tasks that a task waited for, the last to end first, and the time from their end to its start."""
    if not needed:
        return "nothing of its layer"
    found = []
    for each in sorted(needed, key=lambda each: -each.end_us)[:_MOST_NAMED]:
        before_ms = max(0.0, (task.begin_us - each.end_us) / 1e3)
        found.append(f"{_words(each)} (ended {before_ms:.3g} ms before)")
    more = len(needed) - len(found)
    return "; ".join(found) + (f"; and {more} more" if more > 0 else "")


def draw_timeline(steps: Sequence[TracedStep]) -> Chart:
    """Return the chart of one step of each run, on one axis from 0 on.

    Args:
        steps: the steps from the top down, each with at least one task.
    """
    alt = library()
    rows = [row for number, step in enumerate(steps) for row in task_rows(number, step)]
    longest_ms = max((step.length_ms for step in steps), default=0.0) or 1.0
    heads = [
        {"row": _row(number, "head"), "words": f"{step.title}: {step.length_ms:.4g} ms"}
        for number, step in enumerate(steps)
    ]
    order = [_row(number, what) for number in range(len(steps)) for what in ("head", "phase", *map(str, LANES))]
    phases = [
        {
            "row": _row(number, "phase"),
            "phase": phase,
            "shade": PHASE_COLOURS.get(phase, OTHER),
            "at": (begin + end) / 2,
        }
        | {"x": begin, "x2": end}
        for number in range(len(steps))
        for phase, begin, end in phase_spans(
            (each["phase"], each["x"], each["x2"]) for each in rows if each["run_number"] == number
        )
    ]
    kinds: dict[str, str] = {}
    for kind in (each.kind for step in steps for each in step.tasks):
        kinds.setdefault(task_name(kind), colour_of(kind))
    # Rows have internal numbers that the chart does not show.
    lane_words = " : ".join(
        f"datum.value == '{_row(n, what)}' ? '{words}'"
        for n in range(len(steps))
        for what, words in (("phase", "phase"), *((str(lane), LANE_NAMES[lane]) for lane in LANES))
    )
    axis = alt.Axis(labelExpr=f"{lane_words} : ''", title=None, ticks=False, domain=False, grid=False, minExtent=76)
    y = alt.Y("row:N", scale=alt.Scale(domain=order, paddingInner=0.12), axis=axis)
    x_scale = alt.Scale(domain=[0.0, longest_ms], nice=False)
    x = alt.X("x:Q", title="ms from the first task", scale=x_scale)
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=list(kinds), range=list(kinds.values())),
        legend=alt.Legend(title=None, orient="bottom", columns=6, labelLimit=200),
    )
    hovered = alt.selection_point(
        name="hovered", on="pointerover", clear="pointerout", fields=["id", "needs"], empty=False
    )
    is_own, is_needed = (
        "length(data('hovered_store')) && data('hovered_store')[0].values[0] == datum.id",
        "length(data('hovered_store')) && indexof(data('hovered_store')[0].values[1], '|' + datum.id + '|') >= 0",
    )
    task = alt.Chart(alt.NamedData(ROWS))
    bars = task.mark_rect(clip=True, cornerRadius=1).encode(
        x=x,
        x2="x2:Q",
        y=y,
        color=colour,
        stroke=alt.condition(f"({is_own}) || ({is_needed})", alt.value("currentColor"), alt.value("transparent")),
        strokeWidth=alt.condition(is_own, alt.value(2.5), alt.value(1.5)),
        tooltip=[
            alt.Tooltip(f"{name}:{'Q' if name in ('x', 'ms') else 'N'}", title=title)
            for name, title in (
                *(("task", "task"), ("where", "layer"), ("lane", "lane"), ("x", "begins at, ms")),
                *(("ms", "takes, ms"), ("waited", "waited for"), ("run", "run")),
            )
        ],
    )
    sight = f"(isArray(zoom.x) ? zoom.x[1] - zoom.x[0] : {longest_ms})"
    middle = "isArray(zoom.x) ? (max(datum.x, zoom.x[0]) + min(datum.x2, zoom.x[1])) / 2 : (datum.x + datum.x2) / 2"
    named = (
        f"datum.ms > {_WORDS_SHARE} * {sight} ? datum.kind : datum.ms > {_NUMBER_SHARE} * {sight} ? datum.chunk : ''"
    )
    labels = task.transform_calculate(at=middle).transform_calculate(label=named)
    labels = labels.mark_text(fontSize=11, clip=True, tooltip=None).encode(
        x=alt.X("at:Q", scale=x_scale), y=y, text="label:N", color=alt.Color("ink:N", scale=None)
    )
    titles = alt.Chart(alt.NamedData("heads")).mark_text(align="left", baseline="middle", fontWeight=600)
    titles = titles.encode(x=alt.value(0), y=y, text="words:N")
    of_phases = alt.Chart(alt.NamedData("phases"))
    stretches = of_phases.mark_rect(clip=True).encode(
        x=x, x2="x2:Q", y=y, color=alt.Color("shade:N", scale=None), tooltip=alt.Tooltip("phase:N")
    )
    within = f"datum.x2 - datum.x > {_WORDS_SHARE} * {sight} ? datum.phase : ''"
    phase_words = of_phases.transform_calculate(label=within).mark_text(fontSize=11, clip=True, color=LIGHT.ink)
    phase_words = phase_words.encode(x=alt.X("at:Q", scale=x_scale), y=y, text="label:N")
    layers = [bars.add_params(zoom(alt), hovered), labels, titles, stretches, phase_words]
    about = "tasks of one step on their lanes: " + " and ".join(step.title for step in steps)
    data = {ROWS: rows, "heads": heads, "phases": phases}
    return chart_of(about, alt.layer(*layers), data, _ROW_PX * len(order), is_broad=True)

# SPDX-License-Identifier: Apache-2.0
"""Draws timelines of plans, and writes charts of other modules as PNG. It needs altair; planning does not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from ds_fsmoe.offline.report.charts import needs, phase_spans
from ds_fsmoe.offline.report.palette import LANE_NAMES, LANES, LIGHT, PHASE_COLOURS, colour_of, task_name, text_on
from ds_fsmoe.planning.schedule import HOLD
from ds_fsmoe.planning.timeline import Timeline

WIDTH_PX = 760
"""The pixels of what a picture of 900 pixels draws, beside names of lanes."""
_SCALE = 2
"""The pixels of a file for each of these, for screens that show as many."""
_LABEL_SHARE = 0.018
"""The share of the width from which on a task has its chunk's number in it."""
_LANE_PX = 27


def drawing() -> ModuleType:
    """Return altair, which describes charts, if it is installed.

    Raises:
        ModuleNotFoundError: altair or vl-convert is missing; the message says how to install it.
    """
    with needs(what="a picture"):
        import altair
        import vl_convert  # noqa: F401
    return altair


def data_of(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return rows as the data of a chart."""
    return drawing().Data(values=list(rows))


def colours(domain: Sequence[str], of_each: Sequence[str], columns: int = 5) -> Any:
    """Return the colours of a chart's ``name``, with their legend below.

    Args:
        domain: the names in their order.
        of_each: the colour of each.
        columns: the number of columns of the legend.
    """
    alt = drawing()
    legend = alt.Legend(title=None, orient="bottom", columns=columns, labelLimit=260)
    return alt.Color("name:N", scale=alt.Scale(domain=list(domain), range=list(of_each)), legend=legend)


def write_picture(chart: Any, path: str | Path | IO[bytes], *, below: str = "") -> None:
    """Write a chart as a PNG.

    Args:
        chart: the chart by altair.
        path: the file to write.
        below: small text below the chart, such as the settings of its rows.
    """
    if below:
        of_lines = {
            "text": textwrap.wrap(below, 150),
            "anchor": "start",
            "orient": "bottom",
            "fontSize": 8,
            "offset": 12,
        }
        chart = chart.properties(title=of_lines | {"color": LIGHT.quiet, "fontWeight": "normal"})
    chart = chart.configure(background=LIGHT.ground, padding=10).configure_view(stroke=None)
    chart = chart.configure_axis(gridColor=LIGHT.grid, labelColor=LIGHT.ink, titleColor=LIGHT.quiet, domain=False)
    chart.save(path, format="png", scale_factor=_SCALE)


def draw_lanes(
    steps: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], length_ms: float, x_title: str = "ms", columns: int = 5
) -> Any:
    """Return a chart of tasks on their lanes, with steps one above the other on one axis.

    Args:
        steps: the title and the tasks of each: ``kind``, ``lane``, ``phase``, ``start``, ``end`` in ms, and ``label``,
            which is written into tasks that are wide enough.
        length_ms: the end of the axis.
        x_title: the title of the axis.
        columns: the number of columns of the legend.
    """
    alt = drawing()
    scale = alt.Scale(domain=[0.0, length_ms or 1.0], nice=False)
    lanes = ["phase", *(LANE_NAMES[lane] for lane in LANES)]
    y = alt.Y("lane:N", scale=alt.Scale(domain=lanes, paddingInner=0.15), axis=alt.Axis(title=None, ticks=False))
    kinds = dict.fromkeys(task["kind"] for _, tasks in steps for task in tasks)
    colour = colours([task_name(kind) for kind in kinds], [colour_of(kind) for kind in kinds], columns)

    def of(number: int, title: str, tasks: Sequence[Mapping[str, Any]]) -> Any:
        rows = [
            {
                "lane": LANE_NAMES[task["lane"]],
                "name": task_name(task["kind"]),
                "start": task["start"],
                "end": task["end"],
                "at": (task["start"] + task["end"]) / 2,
                "label": task["label"] if task["end"] - task["start"] > _LABEL_SHARE * length_ms else "",
                "ink": text_on(colour_of(task["kind"])),
            }
            for task in tasks
        ]
        is_last = number == len(steps) - 1
        axis = alt.Axis(title=x_title if is_last else None, labels=is_last, ticks=is_last)
        of_step = alt.Chart(data_of(rows))
        bars = of_step.mark_rect(stroke=LIGHT.ground, strokeWidth=0.5, cornerRadius=1)
        bars = bars.encode(x=alt.X("start:Q", scale=scale, axis=axis), x2="end:Q", y=y, color=colour)
        words = of_step.mark_text(fontSize=9).encode(
            x=alt.X("at:Q", scale=scale), y=y, text="label:N", color=alt.Color("ink:N", scale=None)
        )
        spans = phase_spans((task["phase"], task["start"], task["end"]) for task in tasks)
        of_phases = alt.Chart(
            data_of(
                {"lane": "phase", "phase": phase, "shade": PHASE_COLOURS[phase], "at": (begin + end) / 2}
                | {"start": begin, "end": end}
                for phase, begin, end in spans
            )
        )
        stretches = of_phases.mark_rect(stroke=LIGHT.ground, strokeWidth=0.5).encode(
            x=alt.X("start:Q", scale=scale), x2="end:Q", y=y, color=alt.Color("shade:N", scale=None)
        )
        named = of_phases.mark_text(fontSize=10, color=LIGHT.ink)
        named = named.encode(x=alt.X("at:Q", scale=scale), y=y, text="phase:N")
        head = alt.TitleParams(title, anchor="start", fontSize=13)
        return alt.layer(bars, words, stretches, named).properties(
            width=WIDTH_PX, height=_LANE_PX * len(lanes), title=head
        )

    return alt.vconcat(*(of(number, *step) for number, step in enumerate(steps)), spacing=12)


def save_png(timelines: Sequence[tuple[str, Timeline, float]], path: str | Path | IO[bytes]) -> None:
    """Draw timelines one above the other on one scale, and write them to a file.

    Args:
        timelines: the title and the timeline of each row, and the ms at which its backward begins.
        path: the file to write.

    Raises:
        ModuleNotFoundError: altair is missing; the message says how to install it.
    """
    steps = [
        (
            f"{title}: one step, {timeline.makespan_ms:.2f} ms",
            [
                {
                    "kind": span.task.kind,
                    "lane": span.task.lane,
                    "phase": "forward" if span.start_ms < backward_ms else "backward",
                    "start": span.start_ms,
                    "end": span.end_ms,
                    "label": str(span.task.chunk + 1),
                }
                for span in timeline.spans
                if span.task.kind != HOLD
            ],
        )
        for title, timeline, backward_ms in timelines
    ]
    longest_ms = max((timeline.makespan_ms for _, timeline, _ in timelines), default=0.0)
    write_picture(draw_lanes(steps, longest_ms, "time in ms; the number in a task is its chunk"), path)

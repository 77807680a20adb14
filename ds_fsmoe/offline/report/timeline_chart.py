# SPDX-License-Identifier: Apache-2.0
"""Describes a chart of traced tasks on their lanes: runs one above the other on one axis, with what each waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_fsmoe.files.traces import MEASURED
from ds_fsmoe.offline.report.charts import ROWS, Chart, chart_of, library, zoom
from ds_fsmoe.offline.report.palette import LANE_NAMES, LANES, colour_of, name_of, text_on
from ds_fsmoe.planning.schedule import Lane

_PHASES = {"fwd": "forward", "bwd": "backward"}
_ROW_PX = 30
_MOST_NAMED = 4
"""So many of the tasks that one waited for are named."""
_WORDS_SHARE, _NUMBER_SHARE = 0.07, 0.011
"""The share of what is in sight from which on a task says its name, or at least its chunk."""


@dataclass(frozen=True)
class TracedStep:
    """The tasks of one step of one rank."""

    title: str
    tasks: Sequence[Mapping[str, Any]]
    """The events of a trace, in order of time; times in microseconds."""

    @property
    def length_ms(self) -> float:
        """The time from the begin of the first task to the end of the last."""
        ends = [each["ts"] + each["dur"] for each in self.tasks]
        return (max(ends) - min(each["ts"] for each in self.tasks)) / 1e3 if ends else 0.0


def tasks_of_step(trace: Mapping[str, Any], step: int) -> list[Mapping[str, Any]]:
    """Return the tasks of a step that a rank has traced, in order of time."""
    found = (each for each in trace["traceEvents"] if each.get("ph") == "X" and each.get("cat") == MEASURED)
    return sorted((each for each in found if each["args"]["step"] == step), key=lambda each: each["ts"])


def rows_of(number: int, step: TracedStep) -> list[dict[str, Any]]:
    """Return a row of data for each task, with milliseconds from the first one's begin.

    Args:
        number: the position of the run, from 0 on.
        step: its tasks.
    """
    begin_us = min((each["ts"] for each in step.tasks), default=0.0)
    of_run: dict[int, dict[int, Mapping[str, Any]]] = {}
    for each in step.tasks:
        if "index" in each["args"]:
            of_run.setdefault(each["args"]["run"], {})[each["args"]["index"]] = each
    rows = []
    for each in step.tasks:
        args = each["args"]
        own = of_run.get(args["run"], {})
        needed = [own[at] for at in args.get("waits_for", ()) if at in own]
        rows.append(
            {
                "id": _id(number, args),
                "needs": "|".join(["", *(_id(number, at["args"]) for at in needed), ""]),
                "row": _row(number, str(args["lane"])),
                "x": round((each["ts"] - begin_us) / 1e3, 4),
                "x2": round((each["ts"] + each["dur"] - begin_us) / 1e3, 4),
                "ms": round(each["dur"] / 1e3, 4),
                "kind": name_of(args["kind"]),
                "task": f"{name_of(args['kind'])}, chunk {args['chunk'] + 1}",
                "chunk": str(args["chunk"] + 1),
                "ink": text_on(colour_of(args["kind"])),
                "where": f"{args['layer']} {_PHASES.get(args['phase'], args['phase'])}",
                "lane": LANE_NAMES[Lane(args["lane"])],
                "run": step.title,
                "waited": _waited(each, needed),
            }
        )
    return rows


def _id(number: int, args: Mapping[str, Any]) -> str:
    return f"{number}.{args['run']}.{args.get('index', -1)}"


def _row(number: int, what: str) -> str:
    return f"{number} {what}"


def _waited(task: Mapping[str, Any], needed: Sequence[Mapping[str, Any]]) -> str:
    """Say what a task had to wait for, the last to end first, and how long before its begin that ended."""
    if not needed:
        return "nothing of its layer"
    found = []
    for each in sorted(needed, key=lambda each: -(each["ts"] + each["dur"]))[:_MOST_NAMED]:
        before_ms = max(0.0, (task["ts"] - each["ts"] - each["dur"]) / 1e3)
        args = each["args"]
        found.append(f"{name_of(args['kind'])}, chunk {args['chunk'] + 1} (ended {before_ms:.3g} ms before)")
    more = len(needed) - len(found)
    return "; ".join(found) + (f"; and {more} more" if more > 0 else "")


def draw_timeline(steps: Sequence[TracedStep]) -> Chart:
    """Return the chart of one step of each run, on one axis from 0 on.

    Args:
        steps: from the top down, each with at least one task.
    """
    alt = library()
    rows = [row for number, step in enumerate(steps) for row in rows_of(number, step)]
    longest_ms = max((step.length_ms for step in steps), default=0.0) or 1.0
    heads = [
        {"row": _row(number, "head"), "words": f"{step.title}: {step.length_ms:.4g} ms"}
        for number, step in enumerate(steps)
    ]
    order = [_row(number, what) for number in range(len(steps)) for what in ("head", *map(str, LANES))]
    kinds: dict[str, str] = {}
    for step in steps:
        for each in step.tasks:
            kind = each["args"]["kind"]
            kinds.setdefault(name_of(kind), colour_of(kind))
    # Rows are told apart by numbers, of which nobody need know.
    lane_words = " : ".join(
        f"datum.value == '{_row(n, str(lane))}' ? '{LANE_NAMES[lane]}'" for n in range(len(steps)) for lane in LANES
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
    start, end = ("zoom.x[0]", "zoom.x[1]")
    middle = f"isArray(zoom.x) ? (max(datum.x, {start}) + min(datum.x2, {end})) / 2 : (datum.x + datum.x2) / 2"
    named = (
        f"datum.ms > {_WORDS_SHARE} * {sight} ? datum.kind : datum.ms > {_NUMBER_SHARE} * {sight} ? datum.chunk : ''"
    )
    labels = task.transform_calculate(at=middle).transform_calculate(label=named)
    labels = labels.mark_text(fontSize=11, clip=True, tooltip=None).encode(
        x=alt.X("at:Q", scale=x_scale), y=y, text="label:N", color=alt.Color("ink:N", scale=None)
    )
    titles = alt.Chart(alt.NamedData("heads")).mark_text(align="left", baseline="middle", fontWeight=600)
    titles = titles.encode(x=alt.value(0), y=y, text="words:N")
    layers = [bars.add_params(zoom(alt), hovered), labels, titles]
    about = "tasks of one step on their lanes: " + " and ".join(step.title for step in steps)
    data = {ROWS: rows, "heads": heads}
    return chart_of(about, alt.layer(*layers), data, _ROW_PX * len(order), is_broad=True)

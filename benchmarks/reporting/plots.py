# SPDX-License-Identifier: Apache-2.0
"""Results as pictures (PNG), described with altair as the pages of runs are, 900 pixels wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.outcome import AA
from benchmarks.reporting.rows import Comparison, Row, made_with_words
from ds_fsmoe.offline.plan.draw import colours, data_of, draw_lanes, drawing, write_picture
from ds_fsmoe.offline.report.palette import LIGHT, RUN_COLOURS, run_colours
from ds_fsmoe.planning.schedule import Lane

_WIDTH_PX = 640
"""The pixels of what is drawn, beside which the names of cases have room."""
_NAMES_PX = 230
_FEW_CASES = 8
_SHAPES = ("circle", "diamond", "square")
"""Of a colour's first variant, of its next one, and so on."""
_TITLES = {
    "whole": "Whole models",
    "layer_best": "Two layers of the paper's grid, in stock's fastest layout",
    "layer": "Two layers of the paper's grid, in the paper's layout",
    "models": "Models of two layers",
    "parts": "What each part adds",
    "stages": "By ZeRO stage",
}
"""Benchmark -> what is measured in it."""
_NAMES = {
    "stock": "stock DeepSpeed",
    "ours": "ds_fsmoe, one word (best)",
    "ours, rows": "ds_fsmoe, unpadded",
    "ours, over all ranks": "ds_fsmoe, ep_size 4",
    "stock, no more memory": "stock in as little memory",
}
"""Variant -> its name in a picture, where rows have another."""
_PRESETS = {"ours": "best"}
"""Variant -> the preset whose colour it has."""


def draw_ratios(found: Comparison, file: Path) -> None:
    """Draw speedups: a bar for each variant's geometric mean above, and below a row of dots for each case, with
    intervals as lines where there are such."""
    alt = drawing()
    variants = [each for each in found.variants if each not in (AA, found.baseline)]
    of_variant = run_colours(variants, _PRESETS)
    shown = {each: _NAMES.get(each, each) for each in variants}
    colour = colours(list(shown.values()), list(of_variant.values()), columns=4)
    of_all = [each for each in variants if found.num_measured(each) == len(found.cases)]
    means = [{"name": shown[each], "ratio": found.mean(each), "words": f"{found.mean(each):.2f}"} for each in of_all]
    points = []
    for case in found.cases:
        for variant in variants:
            ratio, interval = found.ratio(case, variant), found.interval(case, variant)
            if ratio is not None:
                low, high = interval or (ratio, ratio)
                points.append({"case": case, "name": shown[variant], "ratio": ratio, "low": low, "high": high})
    ends = [1.0, *(each["ratio"] for each in means), *(each[at] for each in points for at in ("low", "high"))]
    scale = alt.Scale(domain=[min(0.0, *ends), 1.04 * max(ends)], nice=False)
    one = alt.Chart(data_of([{"ratio": 1.0}])).mark_rule(color=LIGHT.ink).encode(x="ratio:Q")
    names = {
        "title": None,
        "labelLimit": _NAMES_PX,
        "minExtent": _NAMES_PX,
        "maxExtent": _NAMES_PX,
        "ticks": False,
        "labelFontSize": 10,
    }
    y = alt.Y("name:N", sort=None, axis=alt.Axis(**names))
    bars = (
        alt.Chart(data_of(means))
        .mark_bar()
        .encode(
            x=alt.X("ratio:Q", scale=scale, title=None, axis=alt.Axis(labels=False, ticks=False)), y=y, color=colour
        )
    )
    words = bars.mark_text(align="left", dx=4, fontSize=12).encode(text="words:N", color=alt.value(LIGHT.ink))
    baseline = _NAMES.get(found.baseline, found.baseline)
    head = alt.TitleParams(
        f"{_TITLES.get(found.name, found.name)}: speed relative to {baseline}, 1.0 = same",
        subtitle="Bars: geometric mean of all cases. Dots: each case, with 95% intervals where ten blocks were run.",
        anchor="start",
        fontSize=13,
        subtitleFontSize=10,
        subtitleColor=LIGHT.quiet,
    )
    above = (bars + words + one).properties(width=_WIDTH_PX, height=26 * max(1, len(means)), title=head)
    x = alt.X("ratio:Q", scale=scale, title=f"speed relative to {baseline} (1.0 = same)")
    y = alt.Y("case:N", sort=None, axis=alt.Axis(**names, grid=True, labelExpr=_wrapped(found.cases)))
    of_cases = alt.Chart(data_of(points)).encode(y=y, color=colour)
    # Of many cases each has one line, so that they fit on a screen; of few each variant has its own.
    apart = {
        "yOffset": alt.YOffset("name:N", sort=None, scale=alt.Scale(domain=list(shown.values()), paddingOuter=0.3))
    }
    apart, row_px = ({}, 24) if len(found.cases) > _FEW_CASES else (apart, max(34, 9 * len(variants)))
    shape = alt.Shape(
        "name:N",
        scale=alt.Scale(domain=list(shown.values()), range=_shapes(list(of_variant.values()))),
        legend=colour["legend"],
    )
    dots = of_cases.mark_point(size=38, opacity=1, filled=True).encode(x=x, shape=shape, **apart)
    lines = of_cases.mark_rule(strokeWidth=1.6).encode(x=alt.X("low:Q", scale=scale), x2="high:Q", **apart)
    height = row_px * len(found.cases)
    below = (lines + dots + one).properties(width=_WIDTH_PX, height=height)
    write_picture(alt.vconcat(above, below, spacing=14), file, below=made_with_words(list(found.rows.values())))


def _shapes(of_colours: Sequence[str]) -> list[str]:
    """Return the shape of each variant: those of one colour have different ones."""
    return [_SHAPES[of_colours[:i].count(each) % len(_SHAPES)] for i, each in enumerate(of_colours)]


def _wrapped(cases: Sequence[str]) -> str:
    """Return the expression of labels that are cut into lines, which axes do not do by themselves."""
    found = "datum.label"
    for case in cases:
        lines = textwrap.wrap(case, 46)
        if len(lines) > 1:
            found = f"datum.label == {_quoted(case)} ? [{', '.join(map(_quoted, lines))}] : {found}"
    return found


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def draw_predictions(rows: Sequence[Row], pairs: Sequence[tuple[str, str, str]], file: Path) -> None:
    """Draw predicted over measured times.

    Args:
        rows: a point each.
        pairs: (column predicted, column measured, what it is).
        file: to be written.
    """
    alt = drawing()
    points = [
        {"measured": float(row[measured]), "predicted": float(row[predicted]), "name": what}
        for predicted, measured, what in pairs
        for row in rows
    ]
    largest = 1.05 * max(max(each["measured"], each["predicted"]) for each in points)
    scale = alt.Scale(domain=[0.0, largest], nice=False)
    kinds = list(dict.fromkeys(each["name"] for each in points))
    colour = colours(kinds, list(run_colours(kinds).values()), columns=2)
    dots = alt.Chart(data_of(points)).mark_circle(size=50, opacity=0.9)
    dots = dots.encode(
        x=alt.X("measured:Q", scale=scale, title="measured, ms"),
        y=alt.Y("predicted:Q", scale=scale, title="predicted, ms"),
        color=colour,
    )
    ends = [{"at": 0.0}, {"at": largest}]
    equal = alt.Chart(data_of(ends)).mark_line(color=LIGHT.ink, strokeWidth=1)
    equal = equal.encode(x=alt.X("at:Q", scale=scale), y=alt.Y("at:Q", scale=scale))
    write_picture((equal + dots).properties(width=_WIDTH_PX, height=_WIDTH_PX), file, below=made_with_words(rows))


def draw_timelines(rows: Sequence[Row], file: Path) -> None:
    """Draw the tasks of one step, lane by lane; schedules below one another on one scale."""
    variants: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        times = {"start": float(row["start_ms"]), "end": float(row["end_ms"])}
        variants.setdefault(row["variant"], []).append(
            {"kind": row["kind"], "lane": Lane(row["lane"]), "phase": _PHASES[row["phase"]], "label": "", **times}
        )
    ends_ms = {variant: max(each["end"] for each in tasks) for variant, tasks in variants.items()}
    steps = [
        (f"One training step of two MoE layers, preset {variant}: {ends_ms[variant]:.0f} ms", tasks)
        for variant, tasks in variants.items()
    ]
    made = f"{rows[0]['case']}; {made_with_words(rows)}"
    write_picture(draw_lanes(steps, max(ends_ms.values()), "time in ms"), file, below=made)


_PHASES = {"fwd": "forward", "bwd": "backward"}


def draw_fits(rows: Sequence[Row], file: Path) -> None:
    """Draw what was measured of each operation, and the line through it."""
    alt = drawing()

    def of(operation: str) -> Any:
        own = sorted(
            (
                {name: float(row[name]) for name in ("size", "measured_ms", "line_ms")} | {"row": row}
                for row in rows
                if row["operation"] == operation
            ),
            key=lambda each: each["size"],
        )
        row = own[0].pop("row")
        for each in own[1:]:
            each.pop("row")
        chart = alt.Chart(data_of(own)).encode(x=alt.X("size:Q", title=row["unit"], axis=alt.Axis(tickCount=3)))
        dots = chart.mark_circle(size=30, color=RUN_COLOURS[1]).encode(y=alt.Y("measured_ms:Q", title="time in ms"))
        line = chart.mark_line(color=RUN_COLOURS[2], strokeWidth=1.2).encode(y="line_ms:Q")
        head = alt.TitleParams(f"{operation}, r² {float(row['r2']):.3f}", fontSize=10, anchor="start", limit=240)
        return (line + dots).properties(width=_WIDTH_PX // 3, height=130, title=head)

    operations = list(dict.fromkeys(row["operation"] for row in rows))
    grid = alt.concat(*map(of, operations), columns=3).resolve_scale(x="independent", y="independent")
    write_picture(grid, file, below=made_with_words(rows))

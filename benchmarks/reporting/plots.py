# SPDX-License-Identifier: Apache-2.0
"""Results as pictures (PNG)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.outcome import AA
from benchmarks.reporting.rows import Comparison, Row, made_with_words
from ds_fsmoe.planning.palette import LANE_NAMES, LANES, LIGHT, RUN_COLOURS, colour_of, name_of

_LANES = tuple(str(lane) for lane in LANES)
"""As rows have them."""


@contextmanager
def _picture(file: Path, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """A figure and its axes, written at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, **options)
    yield axes
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def draw_ratios(found: Comparison, file: Path) -> None:
    """Draw speedups: a bar for each variant's geometric mean above, and below a row of dots for each case, with
    intervals as lines where there are such. 900 pixels wide, however many cases there are."""
    variants = [each for each in found.variants if each not in (AA, found.baseline)]
    colours = {each: RUN_COLOURS[(1 + i) % len(RUN_COLOURS)] for i, each in enumerate(variants)}
    whole = [each for each in variants if found.num_measured(each) == len(found.cases)]
    heights = 0.24 * max(1, len(whole)) + 0.5, 0.34 * len(found.cases) + 0.9
    size = 6.0, sum(heights) + 0.8
    with _picture(file, size, nrows=2, height_ratios=heights, sharex=True) as (above, below):
        for i, variant in enumerate(whole):
            mean = found.mean(variant)
            above.barh(i, mean, color=colours[variant])
            above.text(mean, i, f" {mean:.2f}", va="center", fontsize=7)
        above.set_yticks(range(len(whole)), whole, fontsize=7)
        above.invert_yaxis()
        above.set_title(f"{found.name}: geometric mean of all cases", fontsize=8, loc="left")
        spread = min(0.6, 0.12 * len(variants))
        for i, variant in enumerate(variants):
            offset = spread * ((i + 0.5) / len(variants) - 0.5)
            for row, case in enumerate(found.cases):
                ratio, interval = found.ratio(case, variant), found.interval(case, variant)
                if ratio is None:
                    continue
                if interval is not None:
                    below.plot(interval, [row + offset] * 2, color=colours[variant], linewidth=1.2)
                below.plot(ratio, row + offset, "o", color=colours[variant], markersize=3.5)
        below.set_yticks(range(len(found.cases)), [textwrap.fill(each, 34) for each in found.cases], fontsize=6)
        below.set_ylim(len(found.cases) - 0.5, -0.5)
        below.grid(axis="y", color=LIGHT.grid, linewidth=0.5)
        below.set_xlabel(f"times faster than {found.baseline}", fontsize=7)
        for axes in (above, below):
            axes.axvline(1.0, color=LIGHT.ink, linewidth=0.8)
            axes.tick_params(axis="x", labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
        marks = [below.plot([], [], "o", color=colours[each], label=each)[0] for each in variants]
        below.legend(handles=marks, fontsize=6, ncols=3, loc="upper left", bbox_to_anchor=(-0.3, -0.9 / heights[1]))
        made = textwrap.fill(made_with_words(list(found.rows.values())), 110)
        below.figure.supxlabel(made, fontsize=5, x=0.02, ha="left")


def draw_predictions(rows: Sequence[Row], pairs: Sequence[tuple[str, str, str]], file: Path) -> None:
    """Predicted against measured.

    Args:
        rows: a point each.
        pairs: (column predicted, column measured, what it is).
        file: to be written.
    """
    with _picture(file, (5, 5)) as axes:
        largest = 0.0
        for predicted, measured, label in pairs:
            points = [(float(row[measured]), float(row[predicted])) for row in rows]
            largest = max([largest, *map(max, points)])
            axes.scatter(*zip(*points, strict=True), s=18, label=label)
        axes.plot([0, 1.05 * largest], [0, 1.05 * largest], color="black", linewidth=0.8)
        axes.set_xlabel("measured [ms]")
        axes.set_ylabel("predicted [ms]")
        axes.set_title(made_with_words(rows), fontsize=5)
        axes.legend(fontsize=7)


def draw_timelines(rows: Sequence[Row], file: Path) -> None:
    """The tasks of one step, lane by lane; schedules below one another on one scale."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    with _picture(file, (12, 1.8 * len(variants) + 0.8), nrows=len(variants), sharex=True, squeeze=False) as axes:
        for at, variant in zip(axes[:, 0], variants, strict=True):
            for kind in kinds:
                for place, lane in enumerate(_LANES):
                    spans = [
                        (float(row["start_ms"]), float(row["end_ms"]) - float(row["start_ms"]))
                        for row in rows
                        if (row["variant"], row["kind"], row["lane"]) == (variant, kind, lane)
                    ]
                    label = name_of(kind) if place == 0 and at is axes[0, 0] else None
                    at.broken_barh(spans, (place - 0.4, 0.8), color=colour_of(kind), label=label)
            at.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in LANES])
            at.invert_yaxis()
            at.set_ylabel(variant)
        axes[0, 0].legend(fontsize=6, ncols=len(kinds), loc="lower center", bbox_to_anchor=(0.5, 1.15))
        made = f"{rows[0]['case']}; {made_with_words(rows)}"
        axes[0, 0].set_title(textwrap.fill(made, 190), fontsize=6, loc="left")
        axes[-1, 0].set_xlabel("ms")


def draw_fits(rows: Sequence[Row], file: Path) -> None:
    """What was measured of each operation, and the line through it."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    columns = min(4, len(operations))
    lines = -(-len(operations) // columns)
    with _picture(file, (3 * columns, 2.4 * lines), nrows=lines, ncols=columns, squeeze=False) as axes:
        for at in axes.flat[len(operations) :]:
            at.axis("off")
        for at, operation in zip(axes.flat, operations, strict=False):
            own = sorted((float(row["size"]), row) for row in rows if row["operation"] == operation)
            sizes = [size for size, _ in own]
            at.plot(sizes, [float(row["measured_ms"]) for _, row in own], "o", markersize=3)
            at.plot(sizes, [float(row["line_ms"]) for _, row in own], linewidth=1)
            at.set_title(f"{operation}, r^2 {float(own[0][1]['r2']):.3f}", fontsize=7)
            at.set_xlabel(own[0][1]["unit"], fontsize=6)
            at.tick_params(labelsize=6)
        axes[0, 0].set_ylabel("ms", fontsize=7)

# SPDX-License-Identifier: Apache-2.0
"""Results as pictures (PNG)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.outcome import AA
from benchmarks.reporting.rows import Comparison, Row, made_with_words

LANES = ("compute", "intra", "inter")


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


def draw_bars(found: Comparison, file: Path) -> None:
    """Speedups as bars, with their intervals where there are such; one group for each case and one for the mean."""
    groups = [*found.cases, "geometric mean"]
    variants = [each for each in found.variants if each != AA]
    width = 0.8 / len(variants)
    from matplotlib import colormaps

    colours = colormaps["tab20"]
    with _picture(file, (max(7.0, 0.1 * len(groups) * len(variants) + 3), 4.5)) as axes:
        for i, variant in enumerate(variants):
            ratios = [found.ratio(case, variant) or 0.0 for case in found.cases]
            intervals = [found.interval(case, variant) for case in found.cases]
            spans = [
                (0.0, 0.0) if interval is None else (ratio - interval[0], interval[1] - ratio)
                for interval, ratio in zip(intervals, ratios, strict=True)
            ]
            errors = [[max(0.0, each[side]) for each in [*spans, (0.0, 0.0)]] for side in (0, 1)]
            at = [group + (i - (len(variants) - 1) / 2) * width for group in range(len(groups))]
            mean = found.mean(variant) if found.num_measured(variant) == len(found.cases) else 0.0
            bars = {"label": variant, "color": colours(i), "error_kw": {"linewidth": 0.6}}
            axes.bar(at, [*ratios, mean], width, yerr=errors, **bars)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(groups)), groups, rotation=35, ha="right", fontsize=7)
        axes.set_ylabel(f"times faster than {found.baseline}")
        axes.set_title(f"{found.name}: {made_with_words(list(found.rows.values()))}", fontsize=6)
        axes.set_ylim(top=1.2 * axes.get_ylim()[1])  # room for the legend
        axes.legend(fontsize=7, ncols=3, loc="upper left")


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
        import matplotlib

        colours = matplotlib.colormaps["tab20"]
        for at, variant in zip(axes[:, 0], variants, strict=True):
            for kind in kinds:
                for place, lane in enumerate(LANES):
                    spans = [
                        (float(row["start_ms"]), float(row["end_ms"]) - float(row["start_ms"]))
                        for row in rows
                        if (row["variant"], row["kind"], row["lane"]) == (variant, kind, lane)
                    ]
                    label = kind if place == 0 and at is axes[0, 0] else None
                    at.broken_barh(spans, (place - 0.4, 0.8), color=colours(kinds.index(kind) % 20), label=label)
            at.set_yticks(range(len(LANES)), LANES)
            at.set_ylabel(variant)
        axes[0, 0].legend(fontsize=6, ncols=len(kinds), loc="lower center", bbox_to_anchor=(0.5, 1.15))
        axes[0, 0].set_title(f"{rows[0]['case']}; {made_with_words(rows)}", fontsize=6)
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

# SPDX-License-Identifier: Apache-2.0
"""Draws what runs have recorded into PNG files. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_fsmoe.files.runs import Run
from ds_fsmoe.files.traces import MEASURED
from ds_fsmoe.files.whole_files import new_file
from ds_fsmoe.planning.draw import drawing, save_png
from ds_fsmoe.planning.schedule import Lane, Task
from ds_fsmoe.planning.timeline import Span, Timeline

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#79706e")
_LABEL_SHARE, _MOST_LABELLED = 0.08, 32
"""The share of the highest bar from which on a part of a bar says what it is, and the bars of a row where any does."""


@contextmanager
def _picture(file: Path, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Yield axes to draw in, and write the file at the end."""
    pyplot = drawing()
    figure, axes = pyplot.subplots(figsize=size, layout="constrained", **options)
    try:
        yield axes
        with new_file(file, "wb") as out:
            figure.savefig(out, dpi=130, format="png")
    finally:
        pyplot.close(figure)


def draw_lines(lines: Mapping[str, Sequence[tuple[float, float]]], y_label: str, file: Path, from_zero: bool) -> None:
    """Draw one line per run over optimizer steps.

    Args:
        lines: maps a name -> (step, value).
        y_label: what the values are, with their unit.
        file: the file to be written.
        from_zero: whether the axis begins at zero.
    """
    with _picture(file, (7, 3.4)) as axes:
        for (name, points), colour in zip(lines.items(), _COLOURS * len(lines), strict=False):
            if points:
                marker = "." if len(points) < 60 else None
                # The later lie over the earlier: where they agree, only a dashed line shows both.
                style = "-" if name == next(iter(lines)) else "--"
                axes.plot(*zip(*points, strict=True), style, label=name, color=colour, marker=marker, linewidth=1.4)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(y_label)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


def draw_load(load_NE: Any, steps: Sequence[int], title: str, file: Path) -> None:
    """Draw how many choices each expert got in each step, over the mean of the step.

    Args:
        load_NE: [N, E], choices.
        steps: the N steps.
        title: the layer.
        file: the file to be written.
    """
    mean_N1 = load_NE.mean(axis=1, keepdims=True)
    share_EN = (load_NE / mean_N1.clip(min=1e-9)).T
    with _picture(file, (7, 2.6)) as axes:
        extent = (-0.5, len(steps) - 0.5, len(share_EN) - 0.5, -0.5)
        shown = axes.imshow(share_EN, aspect="auto", cmap="magma_r", vmin=0, extent=extent, interpolation="nearest")
        ticks = sorted({round(each * (len(steps) - 1) / 5) for each in range(6)})
        axes.set_xticks(ticks, [str(steps[each]) for each in ticks])
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("optimizer step that was recorded")
        axes.set_ylabel("expert")
        axes.figure.colorbar(shown, label="load over the mean")


def draw_fits(fits: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw what was measured of each operation, and the line fitted to it."""
    columns = min(3, len(fits))
    rows = -(-len(fits) // columns)
    with _picture(file, (2.9 * columns, 2.3 * rows), nrows=rows, ncols=columns, squeeze=False) as axes:
        for at in axes.flat[len(fits) :]:
            at.axis("off")
        for at, fit in zip(axes.flat, fits, strict=False):
            points = sorted(zip(fit["sizes"], fit["times_ms"], fit["line_ms"], strict=True))
            sizes = [each[0] for each in points]
            at.plot(sizes, [each[1] for each in points], "o", markersize=3.5, color=_COLOURS[0])
            at.plot(sizes, [each[2] for each in points], linewidth=1.2, color=_COLOURS[1])
            good = "" if fit["is_good"] else ", bad fit"
            at.set_title(f"{fit['operation']}, off by {fit['typical_share']:.1%}{good}", fontsize=8)
            at.set_xlabel(fit["unit"], fontsize=7)
            at.tick_params(labelsize=7)
            at.spines[["top", "right"]].set_visible(False)
        for at in axes[:, 0]:
            at.set_ylabel("ms", fontsize=7)


def draw_compared(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw predicted and measured steps: over time, and phase by phase against each other."""
    with _picture(file, (8.5, 3.4), ncols=2) as (over_time, against):
        steps = [row["step"] for row in rows]
        for which, style in (("measured_ms", "-"), ("predicted_ms", "--")):
            values = [row["whole"][which] for row in rows]
            over_time.plot(steps, values, style, marker=".", label=which.removesuffix("_ms"), linewidth=1.3)
        over_time.set_ylim(bottom=0)
        over_time.set_xlabel("optimizer step")
        over_time.set_ylabel("step without the optimizer, ms")
        over_time.legend(fontsize=8, frameon=False)
        largest = 0.0
        for direction, colour in zip(("forward", "backward"), _COLOURS, strict=False):
            points = [
                (each["measured_ms"], each["predicted_ms"])
                for row in rows
                for name, each in row["phases"].items()
                if name.endswith(direction)
            ]
            if points:
                largest = max(largest, *(max(each) for each in points))
                against.scatter(*zip(*points, strict=True), s=14, label=direction, color=colour, alpha=0.7)
        against.plot([0, largest * 1.05], [0, largest * 1.05], color="black", linewidth=0.8)
        against.set_xlabel("phase of a layer, measured ms")
        against.set_ylabel("predicted ms")
        against.legend(fontsize=8, frameon=False)
        for each in (over_time, against):
            each.spines[["top", "right"]].set_visible(False)


def draw_loads(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the load of each layer's experts over time, as a multiple of the mean."""
    layers = list(dict.fromkeys(name for row in rows for name in row["layers"]))
    columns = min(3, len(layers))
    lines = -(-len(layers) // columns)
    with _picture(file, (3.1 * columns + 0.7, 2.1 * lines), nrows=lines, ncols=columns, squeeze=False) as axes:
        for at in axes.flat[len(layers) :]:
            at.axis("off")
        image = None
        for at, layer in zip(axes.flat, layers, strict=False):
            own = [(row["step"], row["layers"][layer]["tokens_E"]) for row in rows if layer in row["layers"]]
            shares = [[each / (sum(tokens) / len(tokens) or 1.0) for each in tokens] for _, tokens in own]
            image = at.imshow(
                list(zip(*shares, strict=True)), aspect="auto", cmap="coolwarm", vmin=0, vmax=2, interpolation="none"
            )
            at.set_title(layer, fontsize=8)
            some = sorted({0, len(own) // 2, len(own) - 1})
            at.set_xticks(some, [str(own[each][0]) for each in some])
            at.tick_params(labelsize=7)
        for at in axes[:, 0]:
            at.set_ylabel("expert", fontsize=7)
        for at in axes[-1]:
            at.set_xlabel("optimizer step", fontsize=7)
        if image is not None:
            axes[0, 0].figure.colorbar(image, ax=axes, label="tokens over the mean", shrink=0.8)


def draw_ranks(panels: Sequence[tuple[str, Sequence[Sequence[tuple[int, float]]]]], file: Path) -> None:
    """Draw the rows that each rank computes as a bar of its experts, in rows of bars to one scale.

    The experts with most rows have colours, the same in all rows of bars; large parts say the number of the expert.

    Args:
        panels: the title of each row of bars, and for each rank (expert, rows).
        file: the file to be written.
    """
    total: dict[int, float] = {}
    for expert, rows in (each for ranks in panels[0][1] for each in ranks) if panels else ():
        total[expert] = total.get(expert, 0.0) + rows
    hottest = sorted(total, key=lambda each: (-total[each], each))
    colours = dict(zip(hottest, _COLOURS, strict=False))
    size = 7, 0.5 + 1.9 * len(panels)
    with _picture(file, size, nrows=len(panels), sharex=True, sharey=True, squeeze=False) as axes:
        highest = max(sum(rows for _, rows in ranks) for _, of_ranks in panels for ranks in of_ranks)
        for at, (title, of_ranks) in zip(axes[:, 0], panels, strict=True):
            _stack(at, of_ranks, colours, highest)
            loads = [sum(rows for _, rows in ranks) for ranks in of_ranks]
            mean = sum(loads) / len(loads)
            at.axhline(mean, color="black", linewidth=0.8, linestyle=":")
            over = f": fullest rank {max(loads) / mean:.2f} times the mean" if mean else ""
            at.set_title(f"{title}{over}", loc="left", fontsize=9)
            at.set_ylabel("rows of a call", fontsize=8)
            at.tick_params(labelsize=8)
            at.spines[["top", "right"]].set_visible(False)
        axes[-1, 0].set_xlabel("rank", fontsize=8)
        axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)


def _stack(
    at: Any, of_ranks: Sequence[Sequence[tuple[int, float]]], colours: Mapping[int, str], highest: float
) -> None:
    """Draw the bars of one row, from the expert with most rows up."""
    ordered = [sorted(ranks, key=lambda each: -each[1]) for ranks in of_ranks]
    bottoms = [0.0] * len(ordered)
    for level in range(max(map(len, ordered), default=0)):
        here = [(rank, *parts[level]) for rank, parts in enumerate(ordered) if level < len(parts)]
        at.bar(
            [rank for rank, _, _ in here],
            [rows for _, _, rows in here],
            bottom=[bottoms[rank] for rank, _, _ in here],
            color=[colours.get(expert, "#d5d3cf") for _, expert, _ in here],
            edgecolor="white",
            linewidth=0.4,
        )
        for rank, expert, rows in here:
            if rows > _LABEL_SHARE * highest and len(ordered) <= _MOST_LABELLED:
                at.text(rank, bottoms[rank] + rows / 2, str(expert), ha="center", va="center", fontsize=7)
            bottoms[rank] += rows


def timeline_of(trace: Mapping[str, Any], step: int) -> Timeline:
    """Return the tasks of one step of one rank, beginning with its first task.

    Args:
        trace: the trace of that rank.
        step: a step that is in the trace.
    """
    events = [
        each
        for each in trace["traceEvents"]
        if each.get("ph") == "X" and each.get("cat") == MEASURED and each["args"]["step"] == step
    ]
    first_us = min((each["ts"] for each in events), default=0)
    return Timeline(
        tuple(
            Span(
                Task(each["args"]["kind"], Lane(each["args"]["lane"]), each["args"]["chunk"]),
                (each["ts"] - first_us) / 1e3,
                (each["ts"] + each["dur"] - first_us) / 1e3,
                None,
            )
            for each in sorted(events, key=lambda each: each["ts"])
        )
    )


def draw_timelines(timelines: Sequence[tuple[str, Timeline]], file: Path) -> None:
    """Draw timelines one above the other, on one scale."""
    with new_file(file, "wb") as out:
        save_png(timelines, out)


def loss_lines(runs: Sequence[Run]) -> dict[str, list[tuple[float, float]]]:
    """Return the losses of each run that has them."""
    found = {run.name: [(row["step"], row["loss"]) for row in run.steps if _is_number(row.get("loss"))] for run in runs}
    return {name: points for name, points in found.items() if points}


def step_lines(runs: Sequence[Run]) -> dict[str, list[tuple[float, float]]]:
    """Return the milliseconds of each step except the first, in which everything is slow."""
    found = {
        run.name: [(row["step"], row["step_ms"]) for row in run.steps[1:] if _is_number(row.get("step_ms"))]
        for run in runs
    }
    return {name: points for name, points in found.items() if points}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)

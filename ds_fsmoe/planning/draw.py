# SPDX-License-Identifier: Apache-2.0
"""This module draws timelines as a picture. It needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import IO

from ds_fsmoe.planning.palette import LANE_NAMES, LANES, colour_of, name_of, text_on
from ds_fsmoe.planning.schedule import HOLD
from ds_fsmoe.planning.timeline import Timeline

_LABEL_SHARE = 0.012  # of the width; a narrower task is drawn without its name


def drawing() -> ModuleType:
    """Return matplotlib's ``pyplot``, set to draw into files.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message says how to get it.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        needed = "a picture needs matplotlib: pip install 'ds_fsmoe[plot]'"
        raise ModuleNotFoundError(needed, name="matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_png(timelines: Sequence[tuple[str, Timeline]], path: str | Path | IO[bytes]) -> None:
    """Draw timelines one above the other, to one scale, and write them to a file.

    Args:
        timelines: the title and the timeline of each row.
        path: the file to write.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message says how to get it.
    """
    pyplot = drawing()
    from matplotlib.patches import Patch

    longest_ms = max((timeline.makespan_ms for _, timeline in timelines), default=0.0) or 1.0
    figure, axes = pyplot.subplots(
        len(timelines), figsize=(14, 0.9 + 1.6 * len(timelines)), sharex=True, squeeze=False, layout="constrained"
    )
    seen: dict[str, str] = {}
    for axis, (title, timeline) in zip(axes[:, 0], timelines, strict=True):
        for span in timeline.spans:
            task, length_ms = span.task, span.end_ms - span.start_ms
            if task.kind == HOLD:
                continue
            colour = seen.setdefault(name_of(task.kind), colour_of(task.kind))
            row = LANES.index(task.lane)
            axis.barh(row, length_ms, left=span.start_ms, color=colour, edgecolor="white", linewidth=0.4)
            if length_ms > _LABEL_SHARE * longest_ms:
                at = {"ha": "center", "va": "center", "fontsize": 6, "color": text_on(colour)}
                axis.text(span.start_ms + length_ms / 2, row, str(task.chunk + 1), **at)
        axis.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in LANES])
        axis.invert_yaxis()
        axis.set_title(f"{title}: {timeline.makespan_ms:.2f} ms", loc="left", fontsize=9)
        axis.set_xlim(0, longest_ms * 1.01)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms; the number in a task is its chunk")
    handles = [Patch(color=colour, label=name) for name, colour in seen.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

# SPDX-License-Identifier: Apache-2.0
"""This module draws timelines as a picture. It needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import IO

from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    ATTENTION,
    COLLECT,
    EXPERT,
    EXPERT_DW,
    EXPERT_DX,
    EXPERT_GRAD,
    GATHER,
    GRAD,
    GRAD_GATHER,
    GRAD_SCATTER,
    HOLD,
    MP_GATHER,
    MP_REDUCE,
    REDUCE,
    SOFTMAX,
    SPREAD,
    Lane,
)
from ds_fsmoe.planning.timeline import Timeline

_COLOURS = {
    A2A_IN: "#4c78a8",
    A2A_IN_NODE: "#4c78a8",
    A2A_OUT: "#9ecae9",
    A2A_OUT_NODE: "#9ecae9",
    GATHER: "#54a24b",
    REDUCE: "#88d27a",
    SPREAD: "#54a24b",
    COLLECT: "#88d27a",
    EXPERT: "#f58518",
    EXPERT_DX: "#f58518",
    EXPERT_DW: "#ffbf79",
    GRAD: "#e45756",
    EXPERT_GRAD: "#ff9d98",
    GRAD_SCATTER: "#ff9d98",
    GRAD_GATHER: "#ff9d98",
    ATTENTION: "#b279a2",
    SOFTMAX: "#d6a5c9",
    MP_GATHER: "#79706e",
    MP_REDUCE: "#bab0ac",
}
_OTHER = "#eeca3b"
_LABEL_SHARE = 0.012  # of the width; a narrower task is drawn without its name
_LANE_NAMES = {Lane.COMPUTE: "compute", Lane.INTRA: "intra-node", Lane.INTER: "inter-node"}


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
            colour = seen.setdefault(task.kind, _COLOURS.get(task.kind, _OTHER))
            row = list(Lane).index(task.lane)
            axis.barh(row, length_ms, left=span.start_ms, color=colour, edgecolor="white", linewidth=0.4)
            if length_ms > _LABEL_SHARE * longest_ms:
                axis.text(span.start_ms + length_ms / 2, row, str(task.chunk + 1), ha="center", va="center", fontsize=6)
        axis.set_yticks(range(len(Lane)), [_LANE_NAMES[lane] for lane in Lane])
        axis.invert_yaxis()
        axis.set_title(f"{title}: {timeline.makespan_ms:.2f} ms", loc="left", fontsize=9)
        axis.set_xlim(0, longest_ms * 1.01)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms; the number in a task is its chunk")
    handles = [Patch(color=colour, label=kind) for kind, colour in seen.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

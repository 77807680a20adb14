# SPDX-License-Identifier: Apache-2.0
"""Defines the look of all pictures: the colours and names of tasks, the order of lanes, the colours of runs. Pages,
charts and printed texts use it.

It is data and imports no drawing package. Colours of one lane differ for colour-blind readers as well;
``tests/planning/test_palette.py`` measures how much.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ds_fsmoe.planning import schedule as kinds
from ds_fsmoe.planning.schedule import Lane

LANES: tuple[Lane, ...] = (Lane.COMPUTE, Lane.INTRA, Lane.INTER)
"""From top to bottom."""
LANE_NAMES: dict[Lane, str] = {Lane.COMPUTE: "compute", Lane.INTRA: "intra-node", Lane.INTER: "inter-node"}

TASK_NAMES: dict[str, str] = {
    kinds.A2A_IN: "dispatch",
    kinds.A2A_IN_NODE: "dispatch",
    kinds.A2A_OUT: "combine",
    kinds.A2A_OUT_NODE: "combine",
    kinds.GATHER: "all-gather",
    kinds.REDUCE: "reduce-scatter",
    kinds.SPREAD: "copy in node",
    kinds.COLLECT: "sum in node",
    kinds.EXPERT: "experts",
    kinds.ATTENTION: "attention",
    kinds.SOFTMAX: "softmax",
    kinds.DENSE: "dense layers",
    kinds.ELEMENTWISE: "norms and activations",
    kinds.MP_GATHER: "attention, all-gather",
    kinds.MP_REDUCE: "attention, reduce-scatter",
    kinds.ROUTE: "gate",
    kinds.ORDER: "permute",
    kinds.RESTORE: "un-permute",
    kinds.REST: "rest of the model",
    kinds.GRAD: "gradient slice",
    kinds.EXPERT_GRAD: "gradient slice of experts",
    kinds.GRAD_SCATTER: "gradient slice, reduce-scatter",
    kinds.GRAD_GATHER: "gradient slice, all-gather",
    kinds.PARAMETERS: "parameters, all-gather",
    kinds.EXPERT_PARAMETERS: "parameters of experts, all-gather",
    kinds.GRAD_PARTS: "gradients, reduce-scatter",
    kinds.EXPERT_GRAD_PARTS: "gradients of experts, reduce-scatter",
    kinds.HOLD: "held by another lane",
    **dict.fromkeys(kinds.QUANTISING, "conversion to the communication dtype"),
    **dict.fromkeys(kinds.DEQUANTISING, "conversion from the communication dtype"),
}
"""Kind of task -> the field's words. The part of an all-to-all inside the node has the same: its lane says which."""

PALETTE: dict[str, str] = {
    kinds.A2A_IN: "#2b7ad7",
    kinds.A2A_IN_NODE: "#2b7ad7",
    kinds.A2A_OUT: "#54cefc",
    kinds.A2A_OUT_NODE: "#54cefc",
    kinds.GATHER: "#30743d",
    kinds.REDUCE: "#a2f0d9",
    kinds.SPREAD: "#6ea84d",
    kinds.COLLECT: "#f9e880",
    kinds.EXPERT: "#d9811b",
    kinds.ATTENTION: "#5f408d",
    kinds.SOFTMAX: "#a090e1",
    kinds.DENSE: "#c23b22",
    kinds.ELEMENTWISE: "#c9b8a8",
    kinds.MP_GATHER: "#484849",
    kinds.MP_REDUCE: "#878a93",
    kinds.ROUTE: "#603910",
    kinds.ORDER: "#7fbbc0",
    kinds.RESTORE: "#247792",
    kinds.REST: "#d3d9dd",
    kinds.GRAD: "#7d1356",
    kinds.EXPERT_GRAD: "#f381b4",
    kinds.GRAD_SCATTER: "#9b55a3",
    kinds.GRAD_GATHER: "#f1a4b5",
    # Never in one picture with slices of gradients, or next to computation in these colours.
    kinds.PARAMETERS: "#247792",
    kinds.EXPERT_PARAMETERS: "#7fbbc0",
    kinds.GRAD_PARTS: "#7d1356",
    kinds.EXPERT_GRAD_PARTS: "#f381b4",
    **dict.fromkeys(kinds.QUANTISING, "#4a3fd0"),
    **dict.fromkeys(kinds.DEQUANTISING, "#c8c83c"),
    # The stages of a pipeline are never in one picture with the tasks of a layer.
    kinds.HOLD: "#e8eaed",
}
"""Kind of task -> the colour of its bar."""
PHASE_COLOURS: dict[str, str] = {"forward": "#dfe3e8", "backward": "#b9c0ca"}
"""Phase -> the colour of its bar above the lanes."""
OTHER = "#b5b8a0"
"""The colour of a kind that has none of its own, such as an operation that a user has added."""

RUN_COLOURS: tuple[str, ...] = ("#767b84", "#2a7fd4", "#d1631c", "#1f9a72", "#8f5fc4", "#b8860b", "#c4518f", "#4d6a2f")
"""Of what is compared: stock or whatever is the baseline, ours, and further ones; to be read on either paper."""

PRESET_COLOURS: dict[str, str] = {
    "stock": RUN_COLOURS[0],
    "deepspeed": RUN_COLOURS[7],
    "tutel": RUN_COLOURS[2],
    "tutel_improved": RUN_COLOURS[5],
    "pipemoe_lina": RUN_COLOURS[3],
    "lina": RUN_COLOURS[6],
    "fsmoe_no_iio": "#1b8a94",
    "fsmoe": RUN_COLOURS[4],
    "best": RUN_COLOURS[1],
}
"""Preset -> its colour in every picture; ``best`` is ours."""


def run_colours(names: Sequence[str], presets: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the colour of each name: a preset's own, else the next one that no preset among the names has.

    Args:
        names: the names in their order.
        presets: the preset that a name stands for, where it is not its own.
    """
    found = {each: PRESET_COLOURS.get(presets.get(each, each)) for each in names}
    free = itertools.cycle([each for each in RUN_COLOURS if each not in found.values()] or RUN_COLOURS)
    return {name: colour or next(free) for name, colour in found.items()}


@dataclass(frozen=True)
class Paper:
    """Holds the colours of background and text of a picture."""

    ground: str
    ink: str
    quiet: str
    """Of axes, units and what else is read second."""
    grid: str


LIGHT = Paper("#ffffff", "#1c2026", "#5a616b", "#e3e6ea")
DARK = Paper("#14171c", "#e9ecf0", "#a3abb6", "#31363e")


def colour_of(kind: str) -> str:
    """Return the colour of a kind of task; unknown kinds share one."""
    return PALETTE.get(kind, OTHER)


def task_name(kind: str) -> str:
    """Return the plain words for a kind of task, or its own name in lower case if it is unknown."""
    return TASK_NAMES.get(kind, kind.lower().replace("_", " "))


def text_on(colour: str) -> str:
    """Return the colour of text on ``colour``: the darker or the lighter ink, whichever has more contrast."""
    brightness = luminance(colour)
    on_light = (brightness + 0.05) / (luminance(LIGHT.ink) + 0.05)
    return LIGHT.ink if on_light >= (luminance(LIGHT.ground) + 0.05) / (brightness + 0.05) else LIGHT.ground


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, from 0 (black) to 1 (white)."""
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def linear(colour: str) -> tuple[float, float, float]:
    """Return the linear red, green and blue of ``#rrggbb``, each from 0 to 1."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return _light(red), _light(green), _light(blue)


def _light(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

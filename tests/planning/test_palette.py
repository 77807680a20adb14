# SPDX-License-Identifier: Apache-2.0
"""Every task has words and a colour, and colours that meet in one lane are told apart by the colour-blind as well."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_fsmoe.offline.plan import draw
from ds_fsmoe.offline.report import charts, palette
from ds_fsmoe.offline.report.charts import phase_spans
from ds_fsmoe.planning import schedule as kinds
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.schedule import Lane, Schedule, Task
from ds_fsmoe.planning.timeline import simulate

IN_ONE_LANE = {
    "compute": (
        *(kinds.EXPERT, kinds.ATTENTION, kinds.SOFTMAX, kinds.DENSE, kinds.ELEMENTWISE),
        *(kinds.ROUTE, kinds.ORDER, kinds.RESTORE, kinds.REST, kinds.QUANTISE_IN, kinds.DEQUANTISE_IN),
    ),
    "intra": (
        *(kinds.A2A_IN_NODE, kinds.A2A_OUT_NODE, kinds.GATHER, kinds.REDUCE, kinds.SPREAD, kinds.COLLECT),
        *(kinds.MP_GATHER, kinds.MP_REDUCE, kinds.GRAD, kinds.EXPERT_GRAD, kinds.GRAD_SCATTER, kinds.GRAD_GATHER),
        *(kinds.QUANTISE_SPREAD, kinds.DEQUANTISE_SPREAD),
    ),
    "inter": (
        *(kinds.A2A_IN, kinds.A2A_OUT, kinds.GATHER, kinds.REDUCE, kinds.GRAD, kinds.EXPERT_GRAD),
        *(kinds.QUANTISE_IN, kinds.DEQUANTISE_IN),
    ),
}
# Vienot, Brettel and Mollon, "Digital video colourmaps for checking the legibility of displays by dichromats" (1999):
# linear red, green and blue as they are seen without one kind of cone.
SEEN = {
    "all cones": np.eye(3),
    "no red": np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]),
    "no green": np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, seen: np.ndarray) -> np.ndarray:
    """The colour in CIELAB, in which distances are about as large as they are seen."""
    xyz = TO_XYZ @ np.clip(seen @ np.array(palette.linear(colour)), 0.0, 1.0) / (TO_XYZ @ np.ones(3))
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("lane", IN_ONE_LANE)
def test_colours_that_meet_in_a_lane_differ_however_they_are_seen(lane: str, seen: str) -> None:
    for one, other in combinations(dict.fromkeys(IN_ONE_LANE[lane]), 2):
        apart = float(np.linalg.norm(lab(palette.PALETTE[one], SEEN[seen]) - lab(palette.PALETTE[other], SEEN[seen])))
        assert apart > 7, (palette.task_name(one), palette.task_name(other), apart)


def test_every_kind_of_task_has_words_and_a_colour() -> None:
    every_kind = {value for name, value in vars(kinds).items() if name.isupper() and isinstance(value, str)}
    assert {kinds.EXPERT, kinds.DENSE, kinds.HOLD} <= every_kind
    assert palette.TASK_NAMES.keys() == palette.PALETTE.keys() == every_kind
    assert palette.task_name("MY_OWN") == "my own"
    assert palette.colour_of("MY_OWN") not in palette.PALETTE.values()
    assert set(palette.LANES) == set(palette.LANE_NAMES)


def test_a_preset_has_one_colour_in_every_picture_and_nothing_else_has_it_there() -> None:
    assert palette.PRESET_COLOURS.keys() == {"stock", *NAMES}
    assert len(set(palette.PRESET_COLOURS.values())) == len(palette.PRESET_COLOURS)
    few = palette.run_colours(("ours", "AutoEP", "tutel"), {"ours": "best"})
    many = palette.run_colours(("AutoEP", *NAMES))
    assert few["ours"] == many["best"] == palette.PRESET_COLOURS["best"]
    assert few["tutel"] == many["tutel"] == palette.PRESET_COLOURS["tutel"]
    assert len(set(few.values())) == 3
    assert many["AutoEP"] not in [many[each] for each in NAMES]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((palette.luminance(one), palette.luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_runs_can_be_read_on_light_and_on_dark_paper_and_words_in_a_task_on_its_colour() -> None:
    for colour in {*palette.RUN_COLOURS, *palette.PRESET_COLOURS.values()}:
        assert min(contrast(colour, paper.ground) for paper in (palette.LIGHT, palette.DARK)) > 2.9, colour
    assert len(set(palette.RUN_COLOURS)) == len(palette.RUN_COLOURS)
    for colour in ("#000000", "#ffffff", *palette.PALETTE.values()):
        assert contrast(colour, palette.text_on(colour)) > 4.0, colour


def test_a_phase_is_marked_from_its_first_task_to_its_last_and_again_for_the_next_micro_batch() -> None:
    tasks = [("forward", 0.0, 2.0), ("forward", 1.0, 4.0), ("backward", 4.0, 6.0), ("forward", 6.0, 7.0)]
    assert phase_spans(reversed(tasks)) == [("forward", 0.0, 4.0), ("backward", 4.0, 6.0), ("forward", 6.0, 7.0)]


def test_timelines_are_drawn_one_above_the_other_on_one_axis_that_is_as_long_as_the_longest_with_room_for_each_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("altair")
    drawn: list[Any] = []
    monkeypatch.setattr(draw, "write_picture", lambda chart, path: drawn.append(chart.to_dict()))
    tasks = [Task(kinds.EXPERT, Lane.COMPUTE, size=size) for size in (2.0, 5.0)]
    timelines = [simulate(Schedule((each,)), {kinds.EXPERT: LinearCost(0.0, 1.0)}) for each in tasks]
    draw.save_png([("short", timelines[0], 1.0), ("long", timelines[1], 1.0)], tmp_path / "drawn.png")
    (made,) = drawn
    assert [each["title"]["text"] for each in made["vconcat"]] == [
        "short: one step, 2.00 ms",
        "long: one step, 5.00 ms",
    ]
    for each in made["vconcat"]:
        assert each["layer"][0]["encoding"]["x"]["scale"]["domain"] == [0.0, 5.0]
        assert each["height"] >= 20 * len(each["layer"][0]["encoding"]["y"]["scale"]["domain"])


def test_a_rank_s_bars_have_the_colours_of_the_experts_with_most_rows() -> None:
    pytest.importorskip("altair")
    ranks = [[(expert, 9.0 - expert) for expert in range(4)], [(expert, 9.0 - expert) for expert in range(4, 8)]]
    (chart,) = charts.draw_ranks([("rows", ranks)])
    bars = next(iter(chart.spec["datasets"].values()))
    assert [each["kind"] for each in bars] == [*map(str, range(6)), "others", "others"]

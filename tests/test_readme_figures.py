# SPDX-License-Identifier: Apache-2.0
"""The figures of README's "Is it faster?" and of docs/benchmarks.md follow from the rows in benchmarks/results."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.reporting.rows import Row, comparison, newest, read

ROOT = Path(__file__).resolve().parents[1]
FRONT = " ".join((ROOT / "README.md").read_text().split("## Is it faster?")[1].split("\n## ")[0].split())
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
TEXT = " ".join(PAGE.split())
RESULTS = ROOT / "benchmarks" / "results"
LAYER = comparison("layer", read(RESULTS / "layer.csv"))
# Columns of the page's table: the names under which the rows have them.
COLUMNS = {
    "our layout, stock's schedule": "deepspeed",
    "`tutel`": "tutel",
    "`pipemoe_lina`": "pipemoe_lina",
    "`fsmoe`": "fsmoe",
    "`best`": "best",
    "stock, all ranks": "stock, best layout",
    "`best`, all ranks": "best, best layout",
}


def ratios(variant: str, over: str) -> list[float]:
    """How much faster one variant is than another, layer by layer."""
    return [LAYER.ratio(case, variant) / LAYER.ratio(case, over) for case in LAYER.cases]


def mean(values: list[float]) -> float:
    return math.exp(fmean(map(math.log, values)))


def predicted(variant: str) -> list[dict[str, float]]:
    rows = newest(read(RESULTS / "layer_predicted.csv"), ("case", "variant"))
    return [
        {key: float(value) for key, value in row.items() if key.endswith("_ms")}
        for row in rows
        if row["variant"] == variant and row["case"] in LAYER.cases
    ]


def test_the_table_is_that_of_all_layers() -> None:
    assert len(LAYER.cases) == 24
    head, _, figures = [line for line in PAGE.splitlines() if line.startswith("|")][:3]
    shown = dict(zip((cell.strip() for cell in head.split("|")), figures.split("|"), strict=True))
    for column, variant in COLUMNS.items():
        assert float(shown[column]) == pytest.approx(LAYER.mean(variant), abs=0.0051), column


def test_the_comparison_of_one_word_comes_first() -> None:
    tuned, uncut = (ratios(f"{each}, best layout", "stock, best layout") for each in ("best", "deepspeed"))
    assert FRONT.startswith(f"**With one word in the config, for the same model: {mean(tuned):.2f} times.**")
    assert f"{mean(tuned):.2f} (geometric mean, {min(tuned):.2f} to {max(tuned):.2f} from layer to layer)" in FRONT
    assert mean(uncut) == pytest.approx(1.05, abs=0.0051)
    slower = sum(each < 1 for each in uncut)
    assert f"about 1.05 ({min(uncut):.2f} to {max(uncut):.2f}; slower than stock in {slower} of the 24)" in FRONT


def test_the_share_of_time_in_the_kernel_is_that_of_the_rows() -> None:
    def kernel_share(variant: str) -> float:
        rows = [LAYER.rows[case, variant] for case in LAYER.cases]
        return fmean(float(row["network_cpu_share"]) for row in rows)

    stock, ours = kernel_share("stock, best layout"), kernel_share("deepspeed, best layout")
    assert f"stock spends {stock:.3f} of its CPU time in the kernel, ours {ours:.3f}" in FRONT


def test_the_gain_in_the_layout_of_the_paper_is_a_layout_times_a_schedule() -> None:
    layout, whole = LAYER.mean("deepspeed"), LAYER.mean("best")
    assert f"`best` is {whole:.2f} times as fast as stock's program" in FRONT
    assert f"gains {whole:.2f} there, of which {layout:.2f} is the layout and {whole / layout:.2f} the schedule" in TEXT
    assert f"`fsmoe` is {mean(ratios('fsmoe', 'tutel')):.2f} times as fast" in TEXT
    assert f"`best` is {mean(ratios('best', 'fsmoe')):.3f} times as fast as `fsmoe`" in TEXT
    for same in ("tutel_improved", "pipemoe_lina", "fsmoe_no_iio"):
        assert mean(ratios(same, "tutel")) == pytest.approx(1, abs=0.01)


def test_what_is_said_of_noise_and_predictions_is_said_of_the_worst_too() -> None:
    rows = [LAYER.rows[case, variant] for case in LAYER.cases for variant in COLUMNS.values()]
    assert {row["steps"] for row in rows} == {"3"}
    again = [LAYER.ratio(case, "A/A") for case in LAYER.cases]
    assert f"was between {min(again):.3f} and {max(again):.3f}" in TEXT
    best = predicted("best")
    assert len(best) == 24
    off = [abs(each["predicted_ms"] / each["measured_ms"] - 1) for each in best]
    assert f"off its prediction by {fmean(off):.0%} on average, {max(off):.0%} at worst" in TEXT
    over = [each["measured_ms"] / each["bound_ms"] for each in best]
    assert f"takes {fmean(over):.2f} times as long as its busiest lane alone should" in TEXT
    shorter = sum(each < 1 for each in over)
    assert f"from {min(over):.2f} to {max(over):.2f}: in {shorter} of 24 layers the step is shorter" in TEXT


def test_losses_that_differ_in_the_last_digit_are_counted() -> None:
    rows = newest(read(RESULTS / "models_loss.csv"), ("case", "variant", "step"))
    rows = [row for row in rows if "buckets of a packet" in row["hardware"]]

    def loss(row: Row, variant: str) -> str:
        alike = (row["case"], variant, row["step"])
        return next(each["loss"] for each in rows if (each["case"], each["variant"], each["step"]) == alike)

    ours = [row for row in rows if not row["variant"].startswith(("stock", "A/A"))]
    differ = [(row["loss"], loss(row, "stock, best layout")) for row in ours]
    same = sum(one == other for one, other in differ)
    assert f"{same} of {len(differ)} values to every digit, {len(differ) - same} differ in the last one" in TEXT
    assert all(abs(float(one) - float(other)) < 1.1e-6 for one, other in differ)


def test_what_another_machine_measured_is_said_to_be_of_another_machine() -> None:
    gates = comparison("gates", read(RESULTS / "gates.csv"))
    assert not re.search("Intel.*buckets of a packet", " ".join(row["hardware"] for row in gates.rows.values()))
    assert "**From another machine or an older bed**" in TEXT

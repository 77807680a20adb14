# SPDX-License-Identifier: Apache-2.0
"""What is said around the figures of README and docs/benchmarks.md holds for the rows in benchmarks/results, too; that
each figure is that of a row is seen in test_figures.py."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.reporting.figures import Results, mean
from benchmarks.reporting.rows import Row, comparison, newest, read

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
TEXT = " ".join(PAGE.split())
RESULTS = ROOT / "benchmarks" / "results"
OF = Results(RESULTS)
LAYER = OF.comparison("layer")
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


def test_the_columns_of_the_table_are_those_of_its_figures_and_of_all_layers() -> None:
    assert len(LAYER.cases) == 24
    section = PAGE.split("## In the layout of the paper")[1]
    head, _, figures = [line for line in section.splitlines() if line.startswith("|")][:3]
    shown = dict(zip((cell.strip() for cell in head.split("|")), figures.split("|"), strict=True))
    for column, variant in COLUMNS.items():
        assert float(shown[column]) == pytest.approx(LAYER.mean(variant), abs=0.0051), column


def test_a_mean_over_layers_is_geometric() -> None:
    values = OF.of_cases("layer", "best", "deepspeed")
    each = [LAYER.ratio(case, "best") / LAYER.ratio(case, "deepspeed") for case in LAYER.cases]
    assert values == each
    assert mean(values) == pytest.approx(math.exp(fmean(map(math.log, each))))


def test_presets_that_are_said_to_equal_tutel_do() -> None:
    assert "equal `tutel` to 1%" in TEXT
    for same in ("tutel_improved", "pipemoe_lina", "fsmoe_no_iio"):
        assert mean(OF.of_cases("layer", same, "tutel")) == pytest.approx(1, abs=0.01)


def test_rows_that_are_said_to_be_three_steps_are() -> None:
    assert "Each row is three single steps" in TEXT
    rows = [LAYER.rows[case, variant] for case in LAYER.cases for variant in COLUMNS.values()]
    assert {row["steps"] for row in rows} == {"3"}


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

# SPDX-License-Identifier: Apache-2.0
"""What is said around the figures of README and of the notes on figures holds for the rows of benchmarks/results; that
each figure is that of a row is seen in test_figures.py."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.reporting.figures import Results, mean
from benchmarks.reporting.rows import Row, newest, read

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "benchmarks" / "notes" / "figures.md").read_text()
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


def test_the_columns_of_the_table_are_those_of_its_figures_and_of_its_layers() -> None:
    assert len(LAYER.cases) == 6
    section = PAGE.split("## In the layout of the paper")[1]
    head, _, *layers, means = [line for line in section.split("![")[0].splitlines() if line.startswith("|")]
    assert len(layers) == 6
    shown = dict(zip((cell.strip() for cell in head.split("|")), means.split("|"), strict=True))
    for column, variant in COLUMNS.items():
        assert float(shown[column]) == pytest.approx(LAYER.mean(variant), abs=0.0051), column


def test_every_layer_that_the_page_shows_is_of_ten_blocks_on_one_bed() -> None:
    for name in ("layer", "layer_best"):
        rows = OF.comparison(name).rows.values()
        assert {row["blocks"] for row in rows} == {"10"}
        assert len({(row["hardware"], row["allocator"]) for row in rows}) == 1


@pytest.mark.parametrize("name", ["layer", "layer_best"])
@pytest.mark.parametrize("variant", ["best", "fsmoe"])
def test_a_mean_over_tutel_is_the_geometric_one_of_steps_that_were_neighbours(name: str, variant: str) -> None:
    ratios = {
        row["case"]: float(row["ratio"])
        for row in read(RESULTS / f"{name}.csv")
        if (row["variant"], row["over"]) == (variant, "tutel")
    }
    assert set(ratios) == set(OF.comparison(name).cases)
    expected = math.exp(fmean(map(math.log, ratios.values())))
    assert mean(OF.of_cases(name, variant, "tutel")) == pytest.approx(expected)


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

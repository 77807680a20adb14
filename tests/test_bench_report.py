# SPDX-License-Identifier: Apache-2.0
"""Rows of results as tables and pictures: the newest of each, the bad ones too, and what is not there by name."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import comparison, draw_bars, draw_predictions

ROOT = Path(__file__).resolve().parents[1]


def row(case: str, variant: str, ratio: float, spread: float = 0.1, **others: Any) -> dict[str, str]:
    low, high = (ratio, ratio) if variant == "stock" else (ratio - spread, ratio + spread)
    facts = {"hardware": "a machine", "commit": "abc", "date": "2026-01-02 03:04", "torch": "2", "deepspeed": "0.19.8"}
    numbers = {"ratio": f"{ratio:.4f}", "ratio_low": f"{low:.4f}", "ratio_high": f"{high:.4f}"}
    return facts | {"case": case, "variant": variant, "cpu_bound": "False", "noisy": "False"} | numbers | others


ROWS = [
    row("one", "stock", 1.0),
    row("one", "A/A", 1.01),
    row("one", "ours", 1.1),
    row("two", "stock", 1.0),
    row("two", "A/A", 0.97, noisy="True"),
    row("two", "ours", 0.5, cpu_bound="True"),
    row("one", "ours", 2.0, commit="def"),
    row("one", "another", 1.5),
]


def test_the_newest_row_of_a_case_and_a_variant_counts() -> None:
    found = comparison("layer", ROWS)
    assert found.baseline == "stock"
    assert found.cases == ("one", "two")
    assert found.variants == ("A/A", "ours", "another")
    assert found.ratio("one", "ours") == 2.0
    assert found.ratio("two", "another") is None


def test_the_mean_is_geometric_and_over_what_was_measured() -> None:
    found = comparison("layer", ROWS)
    assert found.mean("ours") == pytest.approx(1.0)
    assert found.mean("another") == pytest.approx(1.5)


def test_the_table_keeps_what_is_slower_and_marks_what_cannot_be_trusted() -> None:
    text = comparison("layer", ROWS).markdown()
    assert "| two | 0.970 (0.87 to 1.07) noisy | 0.500 (0.40 to 0.60) CPU |  |" in text
    assert "commit abc, def" in text
    assert "hardware a machine" in text


def test_rows_without_a_baseline_are_refused() -> None:
    with pytest.raises(ValueError, match="layer: no row of a baseline among ours"):
        comparison("layer", [row("one", "ours", 1.3)])


def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_bars(comparison("layer", ROWS), tmp_path / "bars.png")
    times = {"predicted_ms": "3", "isolated_ms": "2", "measured_ms": "4", "step_predicted_ms": "8"}
    draw_predictions([row("x", "y", 1.0) | times | {"step_measured_ms": "9"}], tmp_path / "points.png")
    for name in ("bars", "points"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.report", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_prints_tables_and_writes_pictures(tmp_path: Path) -> None:
    with (tmp_path / "layer.csv").open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    done = run("--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "| **geometric mean** |" in done.stdout
    assert (tmp_path / "plots" / "layer.png").is_file()


def test_what_was_not_measured_is_named_with_what_was(tmp_path: Path) -> None:
    (tmp_path / "layer.csv").write_text("a\n")
    done = run("models", "--results", str(tmp_path))
    assert done.returncode == 2
    assert f"no results of models in {tmp_path}; there are: layer" in done.stdout

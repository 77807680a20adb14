# SPDX-License-Identifier: Apache-2.0
"""Rows of results as tables and pictures: the newest of each, the bad ones too, and what is not there by name."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.result_files import RESULTS
from benchmarks.reporting.plots import draw_fits, draw_predictions, draw_ratios, draw_timelines
from benchmarks.reporting.rows import comparison, read
from benchmarks.reporting.tables import beside_table_5, gains_in_two, losses, operations, predictions
from tests.benchmarks.result_laws import broken

ROOT = Path(__file__).resolve().parents[2]


def row(case: str, variant: str, ratio: float, spread: float = 0.1, **others: Any) -> dict[str, str]:
    low, high = (ratio, ratio) if variant == "stock" else (ratio - spread, ratio + spread)
    facts = {"hardware": "a machine", "commit": "abc", "date": "2026-01-02 03:04", "torch": "2", "deepspeed": "0.19.8"}
    numbers = {"ratio": f"{ratio:.4f}", "ratio_low": f"{low:.4f}", "ratio_high": f"{high:.4f}"}
    facts |= {"case": case, "variant": variant, "cpu_bound": "False", "noisy": "False", "steps": "12"}
    return facts | numbers | others


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
    assert "In parentheses: 95% intervals over blocks of steps.\n" in text


def test_what_was_measured_in_few_blocks_is_shown_without_an_interval_though_an_old_row_has_one() -> None:
    # The last is as it is written now; the others are of before, when any number of blocks had one.
    few = [row("one", "stock", 1.0, steps="3"), row("one", "A/A", 1.01, steps="3", noisy="True")]
    few += [
        row("one", "ours", 1.83, steps="5"),
        row("one", "new", 1.5, steps="9", ratio_low="", ratio_high="", noisy=""),
    ]
    found = comparison("layer", few)
    assert found.baseline == "stock"
    text = found.markdown()
    assert "| one | 1.010 | 1.830 | 1.500 |" in text
    assert "No interval: 3 to 9 blocks, and it takes 10.\n" in text
    assert "95%" not in text
    # Of a benchmark whose blocks have two steps.
    assert "| one | 1.830 |" in comparison("wire", [few[0], row("one", "ours", 1.83, steps="18")]).markdown()
    both = comparison("wire", [few[0], row("one", "ours", 1.83, steps="20")]).markdown()
    assert "| one | 1.830 (1.73 to 1.93) |" in both
    assert "95% intervals over blocks of steps. Else no interval: 1 blocks, and it takes 10." in both


def test_rows_that_were_published_keep_the_laws_of_rows() -> None:
    found = {file.stem: broken(file.stem, read(file)) for file in RESULTS.glob("*.csv")}
    assert {name: said for name, said in found.items() if said} == {}


@pytest.mark.parametrize(
    ("name", "where", "change"),
    [
        ("layer", {"variant": "A/A"}, {"variant": "other"}),
        ("layer", {"variant": "stock"}, {"ratio": "1.1"}),
        ("layer", {"variant": "best"}, {"p50": "1e6"}),
        ("layer", {"variant": "best"}, {"ratio_low": "9.0"}),
        ("layer", {"variant": "best"}, {"ratio_low": ""}),
        ("layer", {"variant": "best"}, {"steps": "4"}),
        ("layer", {"variant": "best"}, {"network_cpu_share": "0.9"}),
        ("layer_predicted", {"variant": "best"}, {"predicted_ms": "0"}),
        ("operations", {"operation": "experts"}, {"share": "0.5"}),
        ("operations", {"operation": "experts"}, {"operation": "other"}),
        ("timeline", {"kind": "A2A_IN"}, {"end_ms": "1e5"}),
        ("timeline", {"phase": "bwd", "layer": "L00"}, {"phase": "fwd"}),
        ("fits", {}, {"r2": "1.2"}),
        ("interference", {"variant": "alone"}, {"p50": "1.2"}),
        ("models_loss", {"variant": "best"}, {"loss": "nan"}),
        ("models_loss", {"variant": "best", "step": "0"}, {"loss": "3.0"}),
    ],
)
def test_rows_that_break_a_law_of_rows_are_noticed(name: str, where: dict[str, str], change: dict[str, str]) -> None:
    rows = read(RESULTS / f"{name}.csv")
    fitting = [row for row in rows if where.items() <= row.items()]
    # All of a variant of the timeline, so that it lacks something; else the last.
    for row in fitting if name == "timeline" else fitting[-1:]:
        row |= change
    assert broken(name, rows)


def test_no_row_that_was_published_is_said_to_have_an_interval_unless_it_is_of_ten_blocks() -> None:
    with_one = {}
    for name in ("layer", "models", "layer_skew", "metrics", "unchunked", "wire", "alltoall", "bed", "ops"):
        found = comparison(name, read(RESULTS / f"{name}.csv"))
        with_one[name] = any(found.interval(*at) for at in found.rows)
        assert ("95%" in found.markdown()) == with_one[name]
    assert [name for name, has_one in with_one.items() if has_one] == ["layer", "bed", "ops"]


def test_rows_without_a_baseline_are_refused() -> None:
    with pytest.raises(ValueError, match="layer: no row of a baseline among ours"):
        comparison("layer", [row("one", "ours", 1.3)])


def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_ratios(comparison("layer", ROWS), tmp_path / "bars.png")
    times = {"predicted_ms": "3", "measured_ms": "4"}
    pairs = [("predicted_ms", "measured_ms", "steps")]
    draw_predictions([row("x", "y", 1.0) | times], pairs, tmp_path / "points.png")
    task = {"kind": "A2A_IN", "lane": "inter", "phase": "fwd", "start_ms": "0", "end_ms": "2"}
    draw_timelines([row("x", name, 1.0) | task for name in ("stock's", "ours")], tmp_path / "timelines.png")
    point = {"operation": "all-to-all", "unit": "byte", "size": "8", "measured_ms": "1", "line_ms": "2", "r2": "0.9"}
    draw_fits([row("x", "y", 1.0) | point], tmp_path / "fits.png")
    for name in ("bars", "points", "timelines", "fits"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_papers_table_stands_beside_ours_and_gains_over_stock_are_in_two_parts() -> None:
    ratios = {"stock": 1.0, "deepspeed": 1.2, "tutel": 1.5, "fsmoe": 1.8, "best": 2.1}
    found = comparison("layer", [row("one", name, ratio) for name, ratio in ratios.items()])
    text = beside_table_5(found)
    assert "| fsmoe | 1.18 | 1.22 | 1.20 |" in text
    assert "| best |  |  | 1.40 |" in text
    assert "tutel_improved" not in text
    assert "`fsmoe` over stock 1.800: our runtime with stock's schedule 1.200, the schedule 1.500" in gains_in_two(
        found
    )


def test_predictions_are_held_against_measurements_and_bounds() -> None:
    times = {
        "predicted_ms": 90,
        "measured_ms": 100,
        "bound_ms": 80,
        "uncut_measured_ms": 150,
        "uncut_predicted_ms": 180,
    }
    rows = [row("one", "best", 1.0) | {name: str(value) for name, value in times.items()}]
    rows += [row("two", "best", 1.0) | {name: str(2 * value) for name, value in times.items()}]
    assert "| best | 2 | 10.0% | 10.0% | 1.25 | 0.75 |" in predictions(rows)
    # Off by a tenth and by three: that is a mean and a worst, and one that is off the other way counts as much.
    rows[1] |= {"predicted_ms": "260"}
    assert "| best | 2 | 20.0% | 30.0% | 1.25 |" in predictions(rows)


def test_shares_of_a_step_sum_up_communication() -> None:
    parts = {("forward", "all-to-all"): 3, ("backward", "all-to-all"): 3, ("forward", "experts"): 4}
    rows = [
        row("one", "x", 1.0)
        | {"layout": "node", "phase": phase, "operation": name, "ms": str(ms), "share": str(ms / 10)}
        for (phase, name), ms in parts.items()
    ]
    assert "| one, node | 10 | 60% | 40% | **60%** |" in operations(rows)


def test_losses_are_held_against_stocks_in_the_same_layout() -> None:
    of = {"stock": (6.0, 5.0), "ours": (6.0, 5.5), "stock, best layout": (6.0, 4.0), "best, best layout": (6.0, 4.0)}
    rows = [
        row("one", name, 1.0) | {"step": str(step), "loss": str(loss)}
        for name, values in of.items()
        for step, loss in enumerate(values)
    ]
    text = losses(rows)
    assert "| one: ours | 6.0000 | 5.5000 | 10.00% |" in text
    assert "| one: best, best layout | 6.0000 | 4.0000 | 0.00% |" in text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.report", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def test_the_command_prints_tables_and_writes_pictures(tmp_path: Path) -> None:
    with (tmp_path / "layer.csv").open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    done = run("--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "| **geometric mean** |" in done.stdout
    assert (tmp_path / "plots" / "layer.png").is_file()


def test_rows_of_another_kind_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text("configuration,preset,ratio,ratio_low,ratio_high\nx,y,1.2,,\n")
    done = run("--results", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_was_not_measured_is_named_with_what_was(tmp_path: Path) -> None:
    (tmp_path / "layer.csv").write_text("a\n")
    done = run("models", "--results", str(tmp_path))
    assert done.returncode == 2
    assert f"no results of models in {tmp_path}; there are: layer" in done.stdout

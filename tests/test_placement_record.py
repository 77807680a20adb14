# SPDX-License-Identifier: Apache-2.0
"""What a run tells of where its experts are: its record, monitors, the report and the pictures."""

from __future__ import annotations

import csv
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds_fsmoe.files.runs import PLACEMENT, RUN, append_lines, read_run, write_json
from ds_fsmoe.offline.report.decisions import decisions_of, placement, rows_of_ranks
from ds_fsmoe.offline.report.page import Page
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.telemetry.routers import of_placement
from tests.ranks import run_on_ranks
from tests.report_runs import charts_of, without_programs
from tests.small_model import BATCH, NUM_EXPERTS, Case, SmallModel, batch

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[1]


def row(step: int, layer: str, balance: float, expected: float | None = None, **others: Any) -> dict[str, Any]:
    """A line of the record; without an expected balance nothing changes."""
    changes = expected is not None
    found = {"step": step, "layer": layer, "rows_E": [3.0, 1.0, 2.0], "balance": balance}
    found |= {"expected_balance": expected if changes else balance, "num_swaps": int(changes)}
    return found | {"gain_ms": 2.0 if changes else 0.0, "why": f"{layer} at {step}"} | others


# ---- the report


def test_a_decision_is_measured_by_the_next_one_in_the_layer_that_was_fullest() -> None:
    rows = [row(10, "a", 2.5), row(10, "b", 2.0, 1.1), row(30, "b", 1.2), row(30, "a", 2.4, 1.3)]
    first, last = decisions_of(rows)
    assert (first.step, first.fullest["layer"], first.measured) == (10, "b", 1.2)
    assert (last.step, last.fullest["layer"], last.measured) == (30, "a", None)
    assert [each["layer"] for each in first.changed] == ["b"]


def test_of_a_decision_that_changes_nothing_the_fullest_layer_is_told() -> None:
    (only,) = decisions_of([row(5, "a", 1.2), row(5, "b", 1.4)])
    assert only.changed == []
    assert only.fullest["why"] == "b at 5"


def test_a_step_that_was_done_again_counts_as_it_was_done_last() -> None:
    before, again = decisions_of([row(10, "a", 2.0, 1.0), row(20, "a", 1.5), row(20, "a", 1.1), row(20, "b", 1.3)])
    assert before.measured == 1.1
    assert set(again.rows) == {"a", "b"}


def page_of(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    tmp_path.mkdir(exist_ok=True)
    write_json(tmp_path / RUN, {"format": 1, "schedule": "best"})
    append_lines(tmp_path / PLACEMENT, rows)
    page = Page("a run")
    page.section(placement, read_run(tmp_path))
    return without_programs(page.html())


def test_a_run_in_which_nothing_moved_has_its_reason_and_no_table(tmp_path: Path) -> None:
    page = page_of(tmp_path, [row(10, "a", 1.2), row(10, "b", 1.0)])
    assert "was decided once, 0 times with a change" in page
    assert "Last decision: a at 10." in page
    assert "<table>" not in page
    assert not charts_of(page)


def test_of_many_changes_the_last_ones_are_shown(tmp_path: Path) -> None:
    rows = [row(10 * at, "a", 2.0, 1.5, gain_ms=None) for at in range(1, 42)]
    page = page_of(tmp_path, rows)
    assert "The last 30 changes of 41 are shown." in page
    steps = [int(each) for each in re.findall(r"<tr><td>(\d+)</td>", page)]
    assert steps == [10 * at for at in range(12, 42)]
    # Without times there is no gain to tell, and after the last decision nothing was measured.
    assert page.count("<td>1.50</td><td>2.00</td><td>-</td>") == 29
    assert page.count("<td>1.50</td><td>-</td><td>-</td>") == 1


def test_a_damaged_line_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    write_json(tmp_path / RUN, {"format": 1, "schedule": "best"})
    good = row(10, "a", 2.0, 1.0, places={"before": [0, 1, 2], "after": [1, 0, 2], "node_of_rank": [0, 0, 1]})
    bad = [good | {"rows_E": []}, good | {"balance": "x"}, good | {"gain_ms": "2"}, good | {"num_swaps": -1}]
    bad += [good | {"places": good["places"] | {"before": each}} for each in ([], [0.0], [-2], [True], None)]
    bad += [{name: good[name] for name in good if name not in (lost, "places")} for lost in ("layer", "why")]
    append_lines(tmp_path / PLACEMENT, [good, *bad, good | {"step": 20, "gain_ms": None}])
    run = read_run(tmp_path)
    assert [each["step"] for each in run.placement] == [10, 20]
    assert f"{PLACEMENT}: {len(bad)} of {len(bad) + 2} lines cannot be read, and are left out" in run.problems


# ---- pictures


def test_each_rank_has_the_rows_of_its_experts() -> None:
    placed = ExpertPlacement((3, 0, 2, 1), 4, 2)
    assert rows_of_ranks(placed, np.array([5, 6, 7, 8])) == [[(3, 8.0), (0, 5.0)], [(2, 7.0), (1, 6.0)]]


def test_a_run_that_had_replicas_says_so_and_its_experts_are_drawn_without_them(tmp_path: Path) -> None:
    places = {"before": [0, 1, -1, 2, 3, -1], "after": [0, 2, -1, 1, 3, 0], "node_of_rank": [0, 0]}
    of_before = row(10, "a", 2.0, 1.0, rows_E=[4.0, 3.0, 2.0, 1.0], places=places, num_replicas=1)
    page = page_of(tmp_path, [of_before])
    assert "Experts had replicas on other ranks in this run" in page
    assert charts_of(page)
    assert "Experts had replicas" not in page_of(tmp_path / "now", [row(10, "a", 2.0, 1.0)])


def test_the_picture_of_the_docs_is_of_the_policy_that_comes_along() -> None:
    """What the page says of its picture is what the script computes."""
    script = runpy.run_path(str(ROOT / "tools" / "draw_placement.py"), run_name="draw_placement")
    words = (ROOT / "docs" / "placement.md").read_text().split("![")[1].split("## ")[0]
    found, rows_GE, nodes = [], script["rows"](), script["NODE_OF_RANK"]
    for each in script["placements"]().values():
        loads = [sum(part for _, part in parts) for parts in rows_of_ranks(each, rows_GE.sum(axis=0))]
        found.append(f"{max(loads) / (sum(loads) / len(loads)):.2f}")
        assert sum(loads) == len(nodes) * script["NUM_TOKENS"] * script["K"]
    assert re.findall(r"\b\d\.\d\d\b", words) == found
    assert float(found[1]) < float(found[0])


def test_the_script_of_the_picture_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(ROOT / "tools" / "draw_placement.py"), run_name="draw_placement")
    script["main"].__globals__["FILE"] = tmp_path / "drawn.png"
    script["main"]()
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("fullest rank") == 2


# ---- monitors


def test_monitors_get_the_fullest_layer_and_sums() -> None:
    rows = [row(10, "L00", 2.0, 1.1), row(10, "L01", 1.4, 1.2, num_swaps=3, gain_ms=0.5)]
    assert of_placement(rows, False) == {
        "placement/balance": 2.0,
        "placement/expected_balance": 1.2,
        "placement/moved": 4,
        "placement/gain_ms": 2.5,
    }
    detailed = of_placement(rows, True)
    assert detailed["L01/placement/balance"] == 1.4
    assert len(detailed) == 3 * 4


def test_where_nothing_is_known_of_times_no_gain_is_told() -> None:
    assert "placement/gain_ms" not in of_placement([row(1, "L00", 2.0, 1.0, gain_ms=None)], False)
    assert of_placement([], True) == {}


# ---- an engine

STEPS, EVERY = 12, 2


def train(rank: int, world_size: int, folder: str, metrics: str) -> dict[str, Any]:
    """Some steps in which all tokens but every third choose the experts of the first rank."""
    import ds_fsmoe

    case = Case(ep_size=2, stage=1, k=2, drop_tokens=False)
    model = SmallModel(case, rank)
    block = {"enabled": True, "metrics": metrics, "record": {"dir": f"{folder}/{metrics}"}}
    block |= {"placement": {"policy": "balanced", "every": EVERY}, "autotune": False}
    monitor = {"enabled": True, "output_path": folder, "job_name": metrics}
    config = case.ds_config(fsmoe=block, csv_monitor=monitor)
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    tokens = len(batch(0, rank, next(model.parameters()).dtype)[0].flatten(0, -2))
    hot = np.arange(tokens) % 3 > 0
    indices = np.where(hot[:, None, None], [[[0, 1]]], [[[2, 3]]]).repeat(len(engine.fsmoe.layers), axis=1)
    seen = []
    for step in range(STEPS):
        engine.fsmoe.replay(indices)
        loss, _ = engine(*batch(step, rank, next(model.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        seen.append({label: each.expert_of_place for label, each in engine.fsmoe.placement.now.items()})
    engine.destroy()
    return {"places": seen, "tokens": tokens}


def train_twice(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    return {metrics: train(rank, world_size, folder, metrics) for metrics in ("detailed", "off")}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("placed")
    return SimpleNamespace(folder=folder, ranks=run_on_ranks(train_twice, 2, folder / "ranks", str(folder)))


@pytest.mark.parametrize("metrics", ["detailed", "off"])
def test_every_decision_is_recorded_with_what_came_of_it(metrics: str, job: SimpleNamespace) -> None:
    assert NUM_EXPERTS == 4
    run = read_run(job.folder / metrics)
    assert not run.problems
    first, *others = decisions_of(run.placement)
    assert others
    assert first.step < STEPS
    tokens = sum(each[metrics]["tokens"] for each in job.ranks)
    hot = sum(sum(at % 3 > 0 for at in range(each[metrics]["tokens"])) for each in job.ranks)
    for label, each in first.rows.items():
        assert each["rows_E"] == [hot, hot, tokens - hot, tokens - hot]
        assert each["balance"] == pytest.approx(2 * hot / tokens)
        assert each["expected_balance"] == pytest.approx(1.0)
        assert (each["num_swaps"], each["gain_ms"]) == (1, None)
        assert each["places"]["before"] == [0, 1, 2, 3]
        assert sorted(each["places"]["after"]) == [0, 1, 2, 3]
        assert each["places"]["node_of_rank"] == [0, 0]
        before, *_, after = (each[label] for each in job.ranks[0][metrics]["places"])
        # It has come to be as was decided, and so was measured.
        assert [list(before), list(after)] == [each["places"]["before"], each["places"]["after"]]
        assert others[0].rows[label]["balance"] == pytest.approx(1.0)
        assert "places" not in others[0].rows[label]
    assert job.ranks[0][metrics]["places"] == job.ranks[1][metrics]["places"]


def test_monitors_are_told_at_each_decision(job: SimpleNamespace) -> None:
    def written(name: str) -> list[float]:
        with (job.folder / "detailed" / f"fsmoe_{name}.csv").open() as file:
            return [float(value) for _, value in list(csv.reader(file))[1:]]

    decisions = decisions_of(read_run(job.folder / "detailed").placement)
    of_layers = [list(each.rows.values()) for each in decisions]
    assert written("placement_balance") == pytest.approx([max(each["balance"] for each in rows) for rows in of_layers])
    assert written("placement_moved") == [sum(each["num_swaps"] for each in rows) for rows in of_layers]
    assert written("L00_placement_expected_balance")[0] == pytest.approx(1.0)
    with (job.folder / "detailed" / "fsmoe_placement_moved.csv").open() as file:
        samples = [int(each) for each, _ in list(csv.reader(file))[1:]]
    assert samples == [2 * BATCH * each.step for each in decisions]


def test_a_run_without_metrics_tells_monitors_nothing(job: SimpleNamespace) -> None:
    assert not list((job.folder / "off").glob("fsmoe_*.csv"))
    lines = (job.folder / "off" / PLACEMENT).read_text().splitlines()
    assert {json.loads(line)["layer"] for line in lines} == {"L00", "L01"}

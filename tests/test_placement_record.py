# SPDX-License-Identifier: Apache-2.0
"""What a run tells of where its experts are: its record, monitors, the report and the pictures."""

from __future__ import annotations

import csv
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


def test_a_decision_is_measured_by_the_next_one_in_the_layer_that_was_fullest_as_it_was_done_last() -> None:
    rows = [row(10, "a", 2.5), row(10, "b", 2.0, 1.1), row(30, "b", 1.2), row(30, "a", 2.4, 1.3)]
    first, last = decisions_of(rows)
    assert (first.step, first.fullest["layer"], first.measured) == (10, "b", 1.2)
    assert (last.step, last.fullest["layer"], last.measured) == (30, "a", None)
    assert [each["layer"] for each in first.changed] == ["b"]
    before, again = decisions_of([row(10, "a", 2.0, 1.0), row(20, "a", 1.5), row(20, "a", 1.1), row(20, "b", 1.3)])
    assert before.measured == 1.1
    assert set(again.rows) == {"a", "b"}
    # Of one that changes nothing the fullest layer is told.
    assert (again.changed, again.fullest["why"]) == ([], "b at 20")


def page_of(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    tmp_path.mkdir(exist_ok=True)
    write_json(tmp_path / RUN, {"format": 1, "schedule": "best"})
    append_lines(tmp_path / PLACEMENT, rows)
    page = Page("a run")
    page.section(placement, read_run(tmp_path))
    return without_programs(page.html())


def test_of_many_changes_the_last_ones_are_shown_and_of_none_the_reason(tmp_path: Path) -> None:
    page = page_of(tmp_path / "stays", [row(10, "a", 1.2), row(10, "b", 1.0)])
    assert "was decided once, 0 times with a change" in page
    assert "Last decision: a at 10." in page
    assert "<table>" not in page
    assert not charts_of(page)
    rows = [row(10 * at, "a", 2.0, 1.5, gain_ms=None) for at in range(1, 42)]
    page = page_of(tmp_path, rows)
    assert "The last 30 changes of 41 are shown." in page
    steps = [int(each) for each in re.findall(r"<tr><td>(\d+)</td>", page)]
    assert steps == [10 * at for at in range(12, 42)]
    # Without times there is no gain to tell, and after the last decision nothing was measured.
    assert page.count("<td>1.50</td><td>2.00</td><td>-</td>") == 29
    assert page.count("<td>1.50</td><td>-</td><td>-</td>") == 1


# ---- pictures


def test_a_run_that_had_replicas_says_so_and_its_experts_are_drawn_without_them(tmp_path: Path) -> None:
    places = {"before": [0, 1, -1, 2, 3, -1], "after": [0, 2, -1, 1, 3, 0], "node_of_rank": [0, 0]}
    of_before = row(10, "a", 2.0, 1.0, rows_E=[4.0, 3.0, 2.0, 1.0], places=places, num_replicas=1)
    page = page_of(tmp_path, [of_before])
    assert "Experts had replicas on other ranks in this run" in page
    assert charts_of(page)
    assert "Experts had replicas" not in page_of(tmp_path / "now", [row(10, "a", 2.0, 1.0)])


def test_the_picture_of_the_docs_is_of_the_policy_that_comes_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the page says of its picture is what the script computes, and draws."""
    script = runpy.run_path(str(ROOT / "tools" / "draw_placement.py"), run_name="draw_placement")
    words = (ROOT / "docs" / "placement.md").read_text().split("![")[1].split("## ")[0]
    found, rows_GE, nodes = [], script["rows"](), script["NODE_OF_RANK"]
    for each in script["placements"]().values():
        loads = [sum(part for _, part in parts) for parts in rows_of_ranks(each, rows_GE.sum(axis=0))]
        found.append(f"{max(loads) / (sum(loads) / len(loads)):.2f}")
        assert sum(loads) == len(nodes) * script["NUM_TOKENS"] * script["K"]
    assert re.findall(r"\b\d\.\d\d\b", words) == found
    assert float(found[1]) < float(found[0])
    script["main"].__globals__["FILE"] = tmp_path / "drawn.png"
    script["main"]()
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("fullest rank") == 2


# ---- monitors


# ---- an engine

STEPS, EVERY = 12, 2


def train(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Some steps in which all tokens but every third choose the experts of the first rank."""
    import ds_fsmoe

    case = Case(ep_size=2, stage=1, k=2, drop_tokens=False)
    model = SmallModel(case, rank)
    block = {"enabled": True, "metrics": "detailed", "record": {"dir": f"{folder}/run"}}
    block |= {"placement": {"policy": "balanced", "every": EVERY}, "autotune": False}
    monitor = {"enabled": True, "output_path": folder, "job_name": "job"}
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


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("placed")
    return SimpleNamespace(folder=folder, ranks=run_on_ranks(train, 2, folder / "ranks", str(folder)))


def test_every_decision_is_recorded_with_what_came_of_it(job: SimpleNamespace) -> None:
    assert NUM_EXPERTS == 4
    run = read_run(job.folder / "run")
    assert not run.problems
    first, *others = decisions_of(run.placement)
    assert others
    assert first.step < STEPS
    tokens = sum(each["tokens"] for each in job.ranks)
    hot = sum(sum(at % 3 > 0 for at in range(each["tokens"])) for each in job.ranks)
    for label, each in first.rows.items():
        assert each["rows_E"] == [hot, hot, tokens - hot, tokens - hot]
        assert each["balance"] == pytest.approx(2 * hot / tokens)
        assert each["expected_balance"] == pytest.approx(1.0)
        assert (each["num_swaps"], each["gain_ms"]) == (1, None)
        assert each["places"]["before"] == [0, 1, 2, 3]
        assert sorted(each["places"]["after"]) == [0, 1, 2, 3]
        assert each["places"]["node_of_rank"] == [0, 0]
        before, *_, after = (each[label] for each in job.ranks[0]["places"])
        # It has come to be as was decided, and so was measured.
        assert [list(before), list(after)] == [each["places"]["before"], each["places"]["after"]]
        assert others[0].rows[label]["balance"] == pytest.approx(1.0)
        assert "places" not in others[0].rows[label]
    assert job.ranks[0]["places"] == job.ranks[1]["places"]


def test_monitors_are_told_at_each_decision(job: SimpleNamespace) -> None:
    def written(name: str) -> list[float]:
        with (job.folder / "job" / f"fsmoe_{name}.csv").open() as file:
            return [float(value) for _, value in list(csv.reader(file))[1:]]

    decisions = decisions_of(read_run(job.folder / "run").placement)
    of_layers = [list(each.rows.values()) for each in decisions]
    assert written("placement_balance") == pytest.approx([max(each["balance"] for each in rows) for rows in of_layers])
    assert written("placement_moved") == [sum(each["num_swaps"] for each in rows) for rows in of_layers]
    assert written("L00_placement_expected_balance")[0] == pytest.approx(1.0)
    with (job.folder / "job" / "fsmoe_placement_moved.csv").open() as file:
        samples = [int(each) for each, _ in list(csv.reader(file))[1:]]
    assert samples == [2 * BATCH * each.step for each in decisions]

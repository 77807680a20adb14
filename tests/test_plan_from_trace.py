# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe plan --from-trace``: a run that was tuned and traced, and one that only has a trace, planned from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe import cli
from ds_fsmoe.files.runs import CLUSTER, MEASURED, read_run
from ds_fsmoe.offline.plan.from_trace import calibrated
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.job.recorded_costs import job_from_data
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.small_model import Case, batch, small_engine

STEPS = 9


def train(rank: int, world_size: int, folder: str) -> list[Any]:
    """Record two runs, one after the other; return the step that the autotuner of the first one predicted, without and
    with another schedule, and the sizes that it planned for."""
    hurry()
    found = []
    tuned = {"autotune": {"enabled": True, "trials": 0, "watch_every": 0}, "num_chunks": {"max": 3}}
    given = {"autotune": {"enabled": False}, "num_chunks": {"forward": 1, "backward": 3}}
    for name, how in (("tuned", tuned), ("given", given)):
        case = Case(2, 0, "fp32", 2, 2, drop_tokens=name != "tuned")
        block = {
            "record": {"dir": f"{folder}/{name}"},
            "trace": {"enabled": True, "start_step": STEPS - 4, "num_steps": 2},
            "routing": {"record": f"{folder}/{name}/routing"},
        }
        engine = small_engine(case, rank, block | how)
        for step in range(STEPS):
            for micro in range(2):
                torch.manual_seed(100 * step + micro)  # the gate samples
                loss, _ = engine(*batch(10 * step + micro, rank, torch.float32))
                engine.backward(loss)
                engine.step()
        if name == "tuned":
            tuner = engine.fsmoe.autotune
            found = [tuner.result.step.chosen_ms, [each.labels for each in tuner.result.measured.kinds]]
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of the runs, and what the first of them planned."""
    folder = tmp_path_factory.mktemp("planned_from")
    return folder, run_on_ranks(train, 2, folder / "ranks", str(folder))[0]


@pytest.fixture
def folder(trained: tuple[Path, list[Any]]) -> Path:
    return trained[0]


def test_what_the_autotuner_planned_is_planned_again_from_its_file(trained: tuple[Path, list[Any]]) -> None:
    folder, (step_ms, labels) = trained
    run = read_run(folder / "tuned")
    job = job_from_data(run.measured)
    assert job.is_measured
    assert job.micro_batches == 2
    assert [list(kind.labels) for kind in job.kinds] == labels
    found = calibrated(folder / "tuned")
    assert found.predicted.step_ms == pytest.approx(step_ms)
    cluster = load_cluster(str(folder / "tuned" / CLUSTER))
    assert cluster.num_nodes == 1
    assert "measured by ds_fsmoe" in cluster.source
    assert "2 ranks of" in cluster.source


def test_predictions_are_held_against_what_the_run_took(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "tuned.json"
    arguments = ["plan", "--from-trace", str(folder / "tuned"), "--json", str(out), "--nodes", "3"]
    assert cli.main([*arguments, "--spare-experts", "1"]) == 0
    data, said = json.loads(out.read_text()), capsys.readouterr().out
    run = data["run"]
    assert run["off"] == pytest.approx(run["predicted_ms"] / run["measured_ms"] - 1)
    assert f"measured  {run['measured_ms']:.1f} ms a step, the median of {run['num_steps']}" in said
    assert [row["name"] for row in data["presets"]] == list(NAMES)
    for row in data["presets"]:
        assert row["gain"] == pytest.approx(run["measured_ms"] / row["step_ms"])
        assert f"{row['name']} " in said
    assert {tuple(row["degrees"]) for row in data["degrees"]} == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3)}
    asked = data["elsewhere"][0]
    assert asked["name"] == "--nodes 3"
    # One node was measured: nothing says what collectives between nodes cost.
    assert "inter." in asked["why_not"]
    layouts = {row["name"] for row in data["elsewhere"] if row["name"].startswith("ep_size ")}
    assert layouts == {"ep_size 1, expert_tensor_parallel_size 2"}
    assert [row["layer"] for row in data["placement"]["layers"]] == ["moes.0", "moes.1"]
    assert "corrected by its time in the trace of rank 0" in data["notes"][0]


def test_a_trace_alone_is_planned_from_and_what_is_not_known_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not job_from_data(read_run(folder / "given").measured).is_measured
    assert cli.main(["plan", "--from-trace", str(folder / "given")]) == 0
    said = capsys.readouterr().out
    assert "1 and 3 chunks" in said
    assert "fitted to the spans of the trace of rank 0" in said
    assert "presets that differ only in gradients look equal" in said
    assert "are unknown: add --cluster FILE" in said
    assert "placement has no effect" in said
    found = calibrated(folder / "given")
    assert found.what_if.as_ran(found.ran).step_ms == pytest.approx(
        found.times.parts_ms["forward"] + found.times.parts_ms["backward"], rel=0.5
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda of: (of / MEASURED).unlink(), f"contains no {MEASURED}"),
        (lambda of: shutil.rmtree(of / "trace"), "the costs of tasks are unknown: there is no trace of rank 0"),
        (lambda of: (of / "steps.jsonl").unlink(), "no step after the trials has a breakdown"),
        (lambda of: (of / "plans.json").write_text("{}"), "do not contain L00"),
        (lambda of: (of / "trace" / "rank0.json").write_text("{"), "the trace is of no use"),
    ],
)
def test_a_run_without_what_is_needed_is_refused_with_a_reason(
    folder: Path, tmp_path: Path, damage: Any, message: str
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(folder / "given", copied)
    damage(copied)
    with pytest.raises(ValueError, match=message):
        calibrated(copied)

# SPDX-License-Identifier: Apache-2.0
"""The runner of stages: what ends one stage ends no other, and what a stage had noted by then is in the summary."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import run as runner
from benchmarks.gpu.checks import Checks
from benchmarks.gpu.run import BUDGET_S, STAGES, Job, Run, Stage, limits

LONG_S, SHORT_S = 500.0, 6.0


def stage(name: str, group: int = 0, limit_s: float = LONG_S) -> Stage:
    return Stage(name, group, limit_s, "pretended", module="tests.benchmarks.pretended_stages")


def run(folder: Path, *stages: Stage, device_type: str = "cpu") -> tuple[dict[str, Job], dict[str, Any], str]:
    jobs = Run(folder, BUDGET_S, {"device_type": device_type, "small": True})(stages)
    summary = json.loads((folder / "summary.json").read_text())
    return {job.stage.name: job for job in jobs}, summary, (folder / "summary.md").read_text()


def statuses(job: Job) -> dict[str, str]:
    return {name: each["status"] for name, each in job.checks().items()}


def test_a_crash_or_a_lost_device_ends_one_check_and_the_stage_goes_on_behind_it(tmp_path: Path) -> None:
    jobs, summary, text = run(tmp_path, stage("crashes"), stage("is lost"), stage("is fine", 1))
    for name in ("crashes", "is lost"):
        assert statuses(jobs[name]) == {"first": "ok", "middle": "lost", "last": "ok"}
        assert jobs[name].status == "ok, after 2 starts"
        assert f"- **{name}: middle** (lost): the process ended in it" in text.splitlines()
    assert statuses(jobs["is fine"]) == dict.fromkeys(("first", "middle", "last"), "ok")
    assert [each["stage"] for each in summary["stages"]] == ["crashes", "is lost", "is fine"]
    assert "| is fine | ok |" in text


def test_a_stage_that_hangs_is_ended_with_its_processes_and_leaves_what_it_had_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "limits", lambda *_: {"hangs": SHORT_S, "is fine": LONG_S})
    jobs, _, text = run(tmp_path, stage("hangs"), stage("is fine", 1))
    assert jobs["hangs"].status == "ended at its limit"
    # A busy machine may have come no further than the first.
    assert set(statuses(jobs["hangs"]).items()) <= {("first", "ok"), ("middle", "begun")}
    if (file := tmp_path / "hangs" / "process").exists():
        process = Path("/proc", file.read_text())
        # Where nobody waits for it, what has ended stays in the list, without what it was started with.
        assert not process.exists() or not (process / "cmdline").read_bytes()
    assert "| hangs | ended at its limit |" in text
    assert jobs["is fine"].status == "ok"


def test_what_is_wrong_fails_or_cannot_be_done_is_told_apart(tmp_path: Path) -> None:
    jobs, _, text = run(tmp_path, stage("is wrong"), stage("raises"), stage("cannot"), stage("cannot begin"))
    assert "ImportError: no such module" in text
    assert jobs.pop("cannot begin").status == "exit status 1"
    assert [statuses(jobs[name])["middle"] for name in jobs] == ["wrong", "error", "skipped"]
    assert "- **is wrong: middle** (wrong): 2 for 1" in text
    assert "- **raises: middle** (error): two" in text
    assert "cannot: middle" not in text
    for name, cells in (("is wrong", "2 | 1 | 0 | 0"), ("raises", "2 | 0 | 1 | 0"), ("cannot", "2 | 0 | 0 | 1")):
        assert any(line.startswith(f"| {name} | ok |") and line.endswith(f"| {cells} |") for line in text.splitlines())


def test_on_a_gpu_what_failed_is_run_again_with_every_launch_waited_for(tmp_path: Path) -> None:
    stages = stage("crashes unless waited for"), stage("raises"), stage("is wrong")
    _, summary, text = run(tmp_path, *stages, device_type="cuda")
    again = {each["stage"]: each["again"] for each in summary["stages"]}
    (of_crash,) = again["crashes unless waited for"]
    assert (of_crash["name"], of_crash["status"], of_crash["facts"]) == ("middle", "ok", {"blocking": "1"})
    assert "(lost): the process ended in it With every launch waited for: ok." in text
    assert [each["status"] for each in again["raises"]] == ["error"]
    assert again["is wrong"] == []  # numbers do not change by waiting
    assert "CUDA_LAUNCH_BLOCKING" not in os.environ


def test_a_check_that_was_asked_for_alone_is_done_alone(tmp_path: Path) -> None:
    checks = Checks(str(tmp_path), 100.0, "cpu", only=["two"])
    done: list[str] = []
    for name in ("one", "two"):
        checks.check(name, lambda name=name: done.append(name))
    assert done == ["two"]
    assert [json.loads(line)["status"] for line in (tmp_path / "checks.jsonl").read_text().splitlines()] == [
        "begun",
        "ok",
    ]
    late = Checks(str(tmp_path), 1.0, "cpu")
    assert not late.check("three", lambda: done.append("three"))
    assert (done, late.check("two", lambda: done.append("two"))) == (["two"], True)
    with (tmp_path / "checks.jsonl").open("a") as opened:
        opened.write('{"name": "cut o')
    assert Checks(str(tmp_path), 1.0, "cpu").check("two", lambda: done.append("two"))


def test_limits_follow_the_budget_and_grow_where_few_stages_share_it() -> None:
    every = [each for each in STAGES if each.by_default]
    whole = limits(every, BUDGET_S)
    assert whole == {each.name: each.limit_s for each in every}
    assert limits(every, BUDGET_S / 2) == {name: limit_s / 2 for name, limit_s in whole.items()}
    few = [each for each in STAGES if each.name in ("facts", "gpu_tests", "parity")]
    found = limits(few, 265.0)
    assert found["facts"] + found["gpu_tests"] == pytest.approx(265.0)
    assert found["parity"] < found["gpu_tests"]


def test_stages_whose_times_matter_run_alone() -> None:
    for name in ("facts", "speed", "model", "links", "trace"):
        (one,) = (each for each in STAGES if each.name == name)
        assert [each.name for each in STAGES if each.group == one.group] == [name]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--stages", "facts,speeed"], "--stages speeed: there is no such stage; there are facts, smoke"), ([], "--out")],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.md").write_text("of an earlier run")
    with pytest.raises(SystemExit, match="2"):
        runner.main([*arguments, "--device", "cpu", "--out", str(tmp_path)])
    assert said in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["summary.md"]


@pytest.mark.long
def test_facts_and_smoke_are_right_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    out = tmp_path / "run"
    status = runner.main(["--device", "cpu", "--small", "--stages", "facts,smoke", "--out", str(out)])
    assert status == 0, (out / "summary.md").read_text()
    found = {each["stage"]: each for each in json.loads((out / "summary.json").read_text())["stages"]}
    assert {name: each["status"] for name, each in found.items()} == {"facts": "ok", "smoke": "ok"}
    assert all(each["status"] == "ok" for stage in found.values() for each in stage["checks"])
    assert len(found["smoke"]["checks"]) > 15

# SPDX-License-Identifier: Apache-2.0
"""The main job, small: both kinds of layer learn the same, to the last bit.

And the demo around it: what it calls the same, and what it does with a run that hangs or was not the one asked for.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import ds_fsmoe
from ds_fsmoe.observing.clock import Clock
from ds_fsmoe.tuning.when import STEPS_BEFORE
from tests.scripts import ROOT, START, Start
from tests.waiting import until

sys.path.insert(0, str(ROOT / "examples"))

import demo

SMALL = [
    *("--width", "26", "--heads", "2", "--layers", "2", "--seq-len", "31"),
    *("--num-experts", "4", "--eval-batches", "4"),
]


def main_job(folder: Path, start: Start, moe: str, config: str, steps: int = 25) -> dict:
    """What the main job measured."""
    metrics, checkpoints = folder / f"{moe}.json", folder / f"checkpoints_{moe}"
    arguments = [str(ROOT / "examples/train.py"), "--deepspeed_config", str(ROOT / "ds_configs" / config), "--moe", moe]
    arguments += [*SMALL, "--steps", str(steps), "--metrics", str(metrics), "--save-dir", str(checkpoints)]
    said = start(folder, *arguments)
    assert (f"ds_fsmoe {ds_fsmoe.__version__} is on for 2 MoE layer(s)" in said) == (moe == "fsmoe")
    tag = (checkpoints / "latest").read_text()
    written = {file.name for file in (checkpoints / tag).iterdir()}
    experts = {f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt" for layer in range(2) for e in range(4)}
    assert experts < written
    assert "mp_rank_00_model_states.pt" in written
    return json.loads(metrics.read_text())


@pytest.mark.daily("examples", 1)
@START
@pytest.mark.parametrize("config", ["gpt_moe_small.json", "gpt_moe_small_bf16_zero2.json"])
def test_the_main_job_learns_and_equals_stock(config: str, start: Start, tmp_path: Path) -> None:
    stock, ours = (main_job(tmp_path, start, moe, config) for moe in ("deepspeed", "fsmoe"))
    assert len(ours["losses"]) == len(ours["step_times_ms"]) == 25
    # From then on plans in chunks are tried, which round otherwise.
    assert ours["losses"][:STEPS_BEFORE] == stock["losses"][:STEPS_BEFORE]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-2)
    assert ours["validation_last"] == pytest.approx(stock["validation_last"], rel=1e-2)
    assert ours["validation_last"] < 0.8 * ours["validation_first"]
    assert (ours["moe"], stock["chosen"]) == ("ds_fsmoe, 2 layers", {})
    assert ours["chosen"]["gate"] == "topk, k = 2, capacity factor 1.25"


def measured(chosen: dict[str, str], losses: tuple[float, ...] = (3.0, 2.0, 1.0, 1.0)) -> dict:
    """What the main job writes, made up."""
    rest = {"validation_first": 5.0, "validation_last": 2.0, "step_ms": 1.0, "tokens_per_s": 1.0}
    rest["step_times_ms"] = [1.0] * len(losses)
    return {"moe": "layers of some kind", "losses": list(losses), "chosen": chosen, **rest}


def test_the_demo_calls_only_equal_finite_losses_the_same() -> None:
    stock = measured({})
    assert demo.compared_rows(stock, measured({}))[1] == 0
    one_bit_off = measured({}, (3.0, math.nextafter(2.0, 3.0), 1.0, 1.0))
    assert 0 < demo.compared_rows(stock, one_bit_off)[1] < 1e-15
    for lost in (math.nan, math.inf):
        diverged = measured({}, (3.0, 2.0, lost, 1.0))
        assert demo.compared_rows(stock, diverged)[1] == math.inf
        assert demo.compared_rows(diverged, diverged)[1] == math.inf


def test_the_demo_records_runs_and_traces_those_that_are_long_enough(tmp_path: Path) -> None:
    recorded = {"enabled": True, "record": {"dir": str(tmp_path)}}
    trace = {"enabled": True, "start_step": 94, "num_steps": 5}
    assert demo.recorded_config(tmp_path, 100)["fsmoe"] == recorded | {"trace": trace}
    assert demo.recorded_config(tmp_path, demo.FEWEST_TRACED)["fsmoe"] == recorded


@pytest.mark.daily("examples", 1)
def test_the_demo_leaves_a_report_with_a_timeline_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "RUNS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--steps", "12"])
    assert demo.main() == 0
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "stock DeepSpeed" in page
    for kind in demo.TITLE_OF_RUN:
        assert (tmp_path / "demo" / kind / "trace" / "trace.json").is_file(), kind


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lets the demo launch a script of the test's in place of DeepSpeed's launcher."""

    def put(script: str) -> None:
        file = tmp_path / "stand_in.py"
        file.write_text(script)
        popen = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", lambda _, **settings: popen([sys.executable, str(file)], **settings))

    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "RUNS", tmp_path)
    monkeypatch.setattr(demo, "num_ranks", lambda: 2)
    return put


@pytest.mark.parametrize(("moe", "chosen"), [("fsmoe", {}), ("deepspeed", {"gate": "topk"})])
def test_the_demo_refuses_to_compare_a_run_of_the_other_layers(moe: str, chosen: dict, stand_in, tmp_path) -> None:
    stand_in(f"open({str(tmp_path / moe)!r} + '.json', 'w').write({json.dumps(measured(chosen))!r})")
    with pytest.raises(SystemExit, match="trained with layers of some kind"):
        demo.run(moe, 4)


def test_the_demo_ends_a_launch_over_its_time_limit_with_all_its_ranks(stand_in, tmp_path) -> None:
    # A launcher that, like DeepSpeed's, waits for a rank that would outlive it and holds its output open.
    pid_file = tmp_path / "pid"
    rank = f"import os, signal; open({str(pid_file)!r}, 'w').write(str(os.getpid())); signal.pause()"
    stand_in(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])")

    class OverOnceTheRankIsThere(Clock):
        def wait(self, event: threading.Event, limit_s: float) -> bool:
            assert limit_s == 600
            until(lambda: pid_file.exists() and pid_file.read_text())
            return event.is_set()

    with pytest.raises(SystemExit, match="took longer than 600 s"):
        demo.run("deepspeed", 4, OverOnceTheRankIsThere())
    # Killed is not yet gone: on a busy machine the kernel takes a moment to take a process apart.
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(pid_file.read_text()))
        until(lambda: left.status() == psutil.STATUS_ZOMBIE)


def test_a_failed_launch_shows_its_last_lines(stand_in, capsys) -> None:
    stand_in("raise SystemExit('out of luck')")
    with pytest.raises(SystemExit, match=r"failed \(exit status 1\)"):
        demo.run("deepspeed", 4)
    assert "out of luck" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listed", "ranks"),
    [("NVIDIA-SMI has failed: no driver", 2), ("GPU 0: one\n  MIG 1g", 1), ("GPU 0: a\nGPU 1: b", 2)],
)
def test_the_demo_takes_one_rank_only_where_there_is_one_gpu(listed: str, ranks: int, tmp_path, monkeypatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<END\n{listed}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert demo.num_ranks() == ranks

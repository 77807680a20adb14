# SPDX-License-Identifier: Apache-2.0
"""bench_gpu in small and on threads: what it predicts before it measures, and what its rows say."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import bench_gpu, emulated_plans
from benchmarks.gpu.emulated_layer import CUT, KINDS, Computation
from benchmarks.gpu.emulated_plans import FULL, QUICK, Configuration, plan_all
from benchmarks.harness.harness import Effort
from benchmarks.harness.outcome import AA
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.observing.clock import HOST
from ds_fsmoe.observing.device_time import Delay
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.schedule import (
    Lane,
    Task,
)
from tests.benchmarks.test_emulated_links import gpu
from tests.fake_clock import FakeClock
from tests.lane_cases import NEEDS_GPU
from tests.pretended_device import Device, pretended

FIXTURES = (gpu, pretended)  # which pytest finds by their names here

CPU = torch.device("cpu")
PHASES = ("forward", "backward", "step")
Rows = list[dict[str, str]]


def read(file: Path) -> Rows:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def small_run(folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, *arguments: str) -> list[tuple[str, Any]]:
    """What happened in a run, in order: what was timed, and at each measurement what was in the files by then."""
    happened: list[tuple[str, Any]] = []
    time_computation, measure = bench_gpu.time_computation, bench_gpu.measure

    def timed(computation: Computation, *others: Any) -> Any:
        happened.append(("timed", computation.shape))
        return time_computation(computation, *others)

    def measured(run: Any, configuration: Configuration, *others: Any) -> Any:
        predicted, ran = folder / "gpu_predicted.csv", folder / "gpu.csv"
        happened.append(("measured", (read(predicted) if predicted.exists() else [], ran.exists(), configuration)))
        return measure(run, configuration, *others)

    monkeypatch.setattr(bench_gpu, "time_computation", timed)
    monkeypatch.setattr(bench_gpu, "measure", measured)
    common = ["--quick", "--blocks", "2", "--overhead", "never", "--results", str(folder)]
    # On a CPU nothing waits for real: what is measured there means nothing, and must not depend on who else is at work.
    host = HOST if device == "cuda" else FakeClock(tick_ns=10_000)
    assert bench_gpu.main(["--device", device, *common, *arguments], host) == 0
    return happened


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, Any]]]:
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return folder, small_run(folder, monkeypatch, "cpu")


def test_predictions_are_written_before_anything_is_measured(quick: tuple[Path, list[tuple[str, Any]]]) -> None:
    _, happened = quick
    rows, something_ran, _ = next(what for name, what in happened if name == "measured")
    assert not something_ran
    wanted = {(str(each), preset, phase) for each in QUICK for preset in NAMES for phase in PHASES}
    assert {(row["configuration"], row["preset"], row["phase"]) for row in rows} == wanted
    assert len(rows) == len(wanted)
    assert all(float(row["predicted"]) > 0 for row in rows)
    assert [name for name, _ in happened] == ["timed"] * 2 + ["measured"] * 3


def test_layers_that_are_held_out_are_not_timed(quick: tuple[Path, list[tuple[str, Any]]]) -> None:
    folder, happened = quick
    assert [what for name, what in happened if name == "timed"] == [each.shape for each in QUICK if each.timed]
    held_out = {row["configuration"]: row["held_out"] for row in read(folder / "gpu.csv")}
    assert held_out == {str(each): "" if each.timed else "widths" for each in QUICK}


def test_every_preset_is_measured_in_every_phase_as_it_was_predicted(quick: tuple[Path, list[tuple[str, Any]]]) -> None:
    folder, _ = quick
    predicted = {(r["configuration"], r["preset"], r["phase"]): r for r in read(folder / "gpu_predicted.csv")}
    rows = read(folder / "gpu.csv")
    measured = {(r["configuration"], r["preset"], r["phase"]): r for r in rows}
    assert len(measured) == len(rows)
    again = {(str(each), AA, phase) for each in QUICK for phase in PHASES}
    assert set(measured) == set(predicted) | again
    for key, row in measured.items():
        before = predicted[key] if key in predicted else predicted[key[0], "deepspeed", key[2]]
        same = ("date", "commit", "settings", "plan", "task_ms", "predicted", "predicted_ratio")
        assert all(row[name] == before[name] for name in same)
        assert before["at"] <= row["at"]
        assert (row["device"], row["quick"], row["unit"]) == ("cpu", "True", "ms")
        assert (row["blocks"], row["wanted_blocks"]) == ("2", "2")
        assert float(row["off"]) == pytest.approx(float(row["measured"]) / float(row["predicted"]) - 1, abs=1e-4)
        assert float(row["p20"]) <= float(row["measured"]) <= float(row["p80"])
    for configuration in map(str, QUICK):
        assert measured[configuration, "deepspeed", "step"]["ratio"] == "1"
        # Nobody can be through before the busiest lane is.
        for name in NAMES:
            row = measured[configuration, name, "forward"]
            assert float(row["predicted"]) >= max(float(row[f"predicted_{lane}_ms"]) for lane in Lane) - 1e-4
            assert float(row["measured_inter_ms"]) > 0


def test_lines_are_kept_with_what_they_are_drawn_through(quick: tuple[Path, list[tuple[str, Any]]]) -> None:
    rows = read(quick[0] / "gpu_lines.csv")
    timed = [row for row in rows if row["kind"] != "delay"]
    assert len(rows) == len(timed) + 1
    # Of each timed layer, and of all in fp32 and in bf16.
    assert {row["kind"] for row in timed} == set(KINDS)
    assert len(timed) == 4 * len(KINDS)
    assert all(len(row["sizes"].split()) == len(row["times_ms"].split()) >= 4 for row in rows)


def test_without_time_predictions_are_written_and_rows_say_that_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gpu, "QUICK", QUICK[:1])
    monkeypatch.setattr(emulated_plans, "NAMES", ("deepspeed", "fsmoe"))
    happened = small_run(tmp_path, monkeypatch, "cpu", "--budget", "0.01")
    assert [name for name, _ in happened] == ["timed"]
    rows = read(tmp_path / "gpu.csv")
    assert len(rows) == 3 * 3
    assert all((row["blocks"], row["wanted_blocks"], row["measured"]) == ("0", "2", "") for row in rows)
    assert len(read(tmp_path / "gpu_predicted.csv")) == 2 * 3
    printed = capsys.readouterr().out
    assert "no time left for testbed_a" in printed
    assert "not measured" in printed
    assert "this says nothing of a GPU" in printed


def test_a_layer_that_fails_does_not_keep_the_others_from_being_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "QUICK", (QUICK[0], QUICK[1]))
    monkeypatch.setattr(emulated_plans, "NAMES", ("deepspeed", "fsmoe"))
    measure = bench_gpu.measure

    def failing(run: Any, configuration: Configuration, *others: Any) -> Any:
        if configuration == QUICK[0]:
            raise torch.OutOfMemoryError("too little memory")
        return measure(run, configuration, *others)

    monkeypatch.setattr(bench_gpu, "measure", failing)
    arguments = ["--device", "cpu", "--quick", "--blocks", "2", "--results", str(tmp_path)]
    assert bench_gpu.main(arguments, FakeClock(tick_ns=10_000)) == 1
    blocks = {row["configuration"]: row["blocks"] for row in read(tmp_path / "gpu.csv")}
    assert blocks == {str(QUICK[0]): "0", str(QUICK[1]): "2"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_nothing_is_measured_as_if_there_were_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_gpu.main(["--results", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- on a GPU, a pretended one and a real one


@pytest.mark.parametrize("configuration", [FULL[0], FULL[-1]], ids=str)
def test_on_streams_that_cost_nothing_every_plan_takes_what_is_predicted(
    gpu: tuple[StreamLanes, Device], configuration: Configuration
) -> None:
    lanes, device = gpu
    computing = {kind: LinearCost(0.01, 2e-11 if kind in CUT else 1e-9) for kind in KINDS}

    def compute(task: Task) -> None:
        device.current.time += computing[task.kind].ms(task.size)

    stand_in = SimpleNamespace(device=torch.device("cuda"), lanes=lanes, delay=Delay(torch.device("cuda")))
    stand_in.computation, stand_in.used_s = lambda _: compute, lambda: 0.0
    planned = plan_all(configuration, computing, task_ms=0.0)
    found = bench_gpu.measure(stand_in, configuration, planned, Effort(blocks=3, steps=2, warmup=1), until_s=1.0)
    assert planned["best"].ms("step") <= planned["fsmoe"].ms("step") < planned["deepspeed"].ms("step")
    for name in (*NAMES, AA):
        each = planned["deepspeed" if name == AA else name]
        for phase in PHASES:
            times_ms = found.of(name, phase)
            assert times_ms.shape == (3, 2)
            assert times_ms == pytest.approx(each.ms(phase), rel=1e-4), (name, phase)
        for index, phase in enumerate(PHASES[:2]):
            assert found.issue_ms[name, phase] > 0
            for lane in Lane:
                busy_ms = each.timelines[index].busy_ms(lane)
                assert found.timelines[name, phase].busy_ms(lane) == pytest.approx(busy_ms, rel=1e-3), (name, lane)


@NEEDS_GPU
def test_a_quick_run_on_streams_measures_every_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(tmp_path, monkeypatch, "cuda")
    rows = read(tmp_path / "gpu.csv")
    assert {row["device"] for row in rows} == {"cuda"}
    assert {(row["configuration"], row["preset"]) for row in rows if row["blocks"] == "2"} == {
        (str(each), name) for each in QUICK for name in (*NAMES, AA)
    }

# SPDX-License-Identifier: Apache-2.0
"""bench_gpu in small and on threads: what it predicts before it measures, what its rows say, and that what is computed
and waited for is what the planner counts."""

from __future__ import annotations

import csv
import math
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import bench_gpu, emulated_plans
from benchmarks.emulated_layer import CUT, EXPERT_BACK, KINDS, Computation, whole_tasks
from benchmarks.emulated_links import link_bodies, modern_node
from benchmarks.emulated_plans import FULL, QUICK, Configuration, Lines, plan_all
from benchmarks.harness import Effort
from benchmarks.outcome import AA
from ds_fsmoe.components.written import WrittenExpert
from ds_fsmoe.ops import load_ops
from ds_fsmoe.planning.cluster import UNITS
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.presets import NAMES
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    ATTENTION,
    EXPERT,
    EXPERT_DW,
    EXPERT_DX,
    GATHER,
    Draft,
    Lane,
    Schedule,
    Task,
)
from ds_fsmoe.planning.timeline import simulate
from ds_fsmoe.planning.workload import GEMMS, Shape
from ds_fsmoe.runtime.clock import HOST
from ds_fsmoe.runtime.device_time import Delay, elapsed_ms
from ds_fsmoe.runtime.lanes import SerialLanes, make_lanes
from ds_fsmoe.runtime.spans import Recorder
from ds_fsmoe.runtime.stream_lanes import StreamLanes
from tests.fake_clock import FakeClock
from tests.lane_cases import NEEDS_GPU, assert_spans_fit
from tests.pretended_device import Device, pretended

FIXTURES = (pretended,)  # which pytest finds by their names here

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
    assert {row["kind"] for row in timed} == set(KINDS) - {EXPERT_BACK}
    assert len(timed) == 4 * (len(KINDS) - 1)
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


# ---- links


def links_only() -> tuple[Schedule, dict[str, LinearCost]]:
    """Two chunks, each 6 ms on one link and then 9 ms on the other."""
    draft = Draft()
    for chunk in range(2):
        entered = draft.add(A2A_IN, Lane.INTER, chunk=chunk, size=500.0)
        draft.add(GATHER, Lane.INTRA, chunk=chunk, size=700.0, after=[entered])
    return draft.finish(), {A2A_IN: LinearCost(1.0, 0.01), GATHER: LinearCost(2.0, 0.01)}


class Lazy(FakeClock):
    """Whoever sleeps wakes up late: a tenth of the time later, and half a millisecond."""

    def sleep(self, time_s: float) -> None:
        super().sleep(1.1 * time_s + 0.5e-3)


def test_emulated_links_take_what_is_predicted_of_them() -> None:
    schedule, costs = links_only()
    clock = Lazy()
    delay, lanes = Delay(CPU, clock), SerialLanes()
    took_ms = elapsed_ms(CPU, lambda: lanes.run(schedule, link_bodies(costs, costs, delay)), host=clock)
    assert took_ms == pytest.approx(2 * (6 + 9))
    # On lanes that overlap the second message goes in beside the first one going out.
    assert simulate(schedule, costs).makespan_ms == pytest.approx(6 + 9 + 9)


def test_delays_are_measured_anew_when_sleeping_has_become_longer() -> None:
    clock = FakeClock()
    delay = Delay(CPU, clock)
    delay(4.0)
    assert elapsed_ms(CPU, lambda: delay(4.0), host=clock) == pytest.approx(4.0)
    clock.sleep = lambda time_s: FakeClock.sleep(clock, 2 * time_s)  # type: ignore[method-assign]
    assert elapsed_ms(CPU, lambda: delay(4.0), host=clock) == pytest.approx(8.0)
    delay.calibrate()
    assert elapsed_ms(CPU, lambda: delay(4.0), host=clock) == pytest.approx(4.0)


@pytest.fixture
def gpu(pretended: tuple[StreamLanes, Device], monkeypatch: pytest.MonkeyPatch) -> tuple[StreamLanes, Device]:
    """Something that stands for a GPU of 2 GHz that takes 3 microseconds to start a kernel, and its lanes."""
    _, device = pretended

    def spin(cycles: int) -> None:
        assert type(cycles) is int
        assert cycles >= 0
        device.current.time += 0.003 + cycles / 2e6

    monkeypatch.setattr(torch.cuda, "_sleep", spin)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return pretended


def test_on_cuda_a_delay_is_as_many_cycles_as_it_needs(gpu: tuple[StreamLanes, Device]) -> None:
    device = torch.device("cuda")
    delay = Delay(device)
    for wanted_ms in (0.02, 1.0, 40.0):
        took_ms = elapsed_ms(device, lambda ms=wanted_ms: delay(ms), ahead=lambda: delay(7.0))
        assert took_ms == pytest.approx(wanted_ms, rel=1e-3)
    # Shorter than a kernel can be.
    assert elapsed_ms(device, lambda: delay(0.0)) == pytest.approx(0.003)


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
    assert planned["best"].ms("step") < planned["fsmoe"].ms("step") < planned["deepspeed"].ms("step")
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


def test_a_node_of_today_has_every_operation_and_faster_links_inside_than_between() -> None:
    cluster = modern_node()
    assert set(UNITS) == set(cluster.operations)
    for name in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
        inside, between = (cluster.operations[f"{link}.{name}"].cost for link in ("intra", "inter"))
        assert 0 < inside.ms(1e6) < between.ms(1e6)
    # 3 of 4 parts of 40 MB at 40 GB/s.
    assert cluster.operations["inter.all_to_all"].cost.ms(40e6) == pytest.approx(0.03 + 0.75)


# ---- computation


def computation(configuration: Configuration) -> Computation:
    return Computation(configuration.shape, configuration.groups, CPU, load_ops("reference", "cpu"))


@pytest.mark.parametrize("configuration", [*FULL, *QUICK], ids=str)
def test_rows_of_the_experts_are_as_many_as_the_planner_counts(configuration: Configuration) -> None:
    shape, groups = configuration.shape, configuration.groups
    assert shape.heads % groups.mp == 0
    of_rank = computation(configuration)
    assert set(of_rank.whole_size) == set(KINDS)
    rows, local_e = of_rank._amount[EXPERT], shape.E // groups.ep
    row_flops = 2 * GEMMS[shape.ffn] * shape.M * shape.H / groups.esp
    assert of_rank.whole_size[EXPERT] == pytest.approx(local_e * rows * row_flops, rel=4e-3)
    assert of_rank.whole_size[EXPERT_BACK] == of_rank.whole_size[EXPERT_DX] + of_rank.whole_size[EXPERT_DW]


def test_the_full_grid_holds_out_tokens_and_widths_on_every_cluster() -> None:
    lines = Lines({each.widths: {} for each in FULL if each.timed})
    for cluster in ("testbed_a", "testbed_b", "modern"):
        found = {lines.held_out(each) for each in FULL if each.cluster == cluster}
        assert found == {"", "tokens", "widths"}
    types = {each.shape.dtype_bytes for each in FULL if each.timed}
    assert types == {each.shape.dtype_bytes for each in FULL}


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_task_has_its_part_of_the_size(kind: str) -> None:
    of_rank = computation(QUICK[0])
    size, done = of_rank.of(kind, 0.5)
    done()
    share = size / of_rank.whole_size[kind]
    if kind.startswith(ATTENTION):  # half of the positions: less than half of the products with each other
        assert 0.3 < share < 0.5
    else:
        assert share == pytest.approx(0.5, rel=0.05)
    assert of_rank.of(kind, 1.0)[0] == of_rank.whole_size[kind]
    assert of_rank.of(kind, 0.5)[1] is done


@pytest.mark.parametrize("ffn", ["gpt", "mixtral"])
def test_experts_compute_what_autograd_does(ffn: str) -> None:
    """With what the forward keeps in place of random numbers, dX and dW are the gradients of the forward."""
    shape = Shape(2, 24, 16, 40, 4, heads=2, ffn=ffn)
    torch.manual_seed(0)
    of_rank = Computation(shape, Groups(4, 2, mp=2, esp=2, ep=2, dp=2), CPU, load_ops("reference", "cpu"))
    forms, sums = of_rank._experts
    assert len(forms) == 2  # 4 experts on 2 EP ranks
    rows = 7
    for index, form in enumerate(forms):
        assert isinstance(form, WrittenExpert)
        x_RM, dy_RM, _, _ = of_rank._rows[index]
        with torch.no_grad():
            kept = form.kept(x_RM)
            deltas, _ = form.backward_hidden(dy_RM @ form.down.weight, kept)
        of_rank._rows[index] = (x_RM, dy_RM, kept, deltas)
        x = x_RM[:rows].detach().requires_grad_()
        with torch.enable_grad():
            y = form.down(form.hidden(form.kept(x)))
        weights = [linear.weight for linear in form.linears]
        dx, *dws = torch.autograd.grad(y, [x, *weights], dy_RM[:rows])
        with torch.no_grad():
            torch.testing.assert_close(of_rank._expert(index, rows), y)
            torch.testing.assert_close(of_rank._expert_dx(index, rows), dx)
            of_rank._expert_dw(index, rows)
        for weight, dw in zip(weights, dws, strict=True):
            torch.testing.assert_close(sums._sum_of(weight).value(), dw)


def test_a_plan_computes_all_of_a_layer_whatever_its_chunks_are() -> None:
    """The parts of each kind of task in a schedule add up to that task, and every kind has a body and a cost."""
    configuration = FULL[2]
    of_rank = computation(configuration)
    computing = {kind: LinearCost(0.01, 1e-11) for kind in KINDS}
    for name, planned in plan_all(configuration, computing, 0.005).items():
        for schedule, phase in zip(planned.schedules, ("forward", "backward"), strict=True):
            parts: dict[str, float] = {}
            for task in schedule.tasks:
                parts[task.kind] = parts.get(task.kind, 0.0) + task.size
            layer = getattr(whole_tasks(configuration.shape, configuration.groups), phase)
            for work in (*layer.before, *layer.after, *layer.moe.enter, *layer.moe.leave):
                assert math.isclose(parts[work.kind], work.size), (name, work.kind)
            experts = sum(parts.get(kind, 0.0) for kind in CUT)
            assert math.isclose(experts, of_rank.whole_size[EXPERT] * (1 if phase == "forward" else 2)), name


# ---- on a GPU


@NEEDS_GPU
def test_emulated_links_on_streams_overlap() -> None:
    device = torch.device("cuda")
    schedule, costs = links_only()
    delay, recorder = Delay(device), Recorder(device)
    with closing(make_lanes(device)) as lanes:
        delay(5.0)
        lanes.run(schedule, link_bodies(costs, costs, delay), observer=recorder)
        assert_spans_fit(schedule, recorder, slack_ms=0.01)


@NEEDS_GPU
def test_a_quick_run_on_streams_measures_every_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(tmp_path, monkeypatch, "cuda")
    rows = read(tmp_path / "gpu.csv")
    assert {row["device"] for row in rows} == {"cuda"}
    assert {(row["configuration"], row["preset"]) for row in rows if row["blocks"] == "2"} == {
        (str(each), name) for each in QUICK for name in (*NAMES, AA)
    }

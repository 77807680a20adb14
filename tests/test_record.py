# SPDX-License-Identifier: Apache-2.0
"""The record of a run, of ours and of stock's, written while it trains and read again; and the folders of records,
routing and traces, of one job at a time, from which nothing is removed that no run has left."""

from __future__ import annotations

import atexit
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.files.runs import RUN, STEPS, NoRunError, Run, check_run_folder, clear_run, read_run
from ds_fsmoe.files.traces import read_trace
from ds_fsmoe.files.whole_files import OF_RECORD, OF_ROUTING, Ownership, owner_of
from ds_fsmoe.offline.report.comparison import losses_of, pair, times_of
from ds_fsmoe.offline.report.critical_path import BETWEEN, phases
from ds_fsmoe.routes.written import parts_of
from tests.ranks import run_on_ranks
from tests.small_model import Case, batch, small_engine, train_steps

NUM_STEPS = 8
NAMES = ("stock", "ours")


def train(rank: int, folder: str, name: str) -> tuple[list[float], str, int]:
    """Losses of rank 0's steps, the class of the engine, and the step at which the job ended."""
    block = {
        "enabled": name == "ours",
        "metrics_every": 3,
        "record": {"dir": str(Path(folder, name)), "stop_after": NUM_STEPS},
        "trace": {"enabled": True, "start_step": NUM_STEPS - 3, "num_steps": 2},
        "pipeline_degree": {"forward": 2, "backward": 2},
    }
    engine = small_engine(Case(2, 1, "fp32", 2, 2), rank, block)
    losses: list[float] = []
    with suppress(SystemExit):
        for step in range(NUM_STEPS + 5):
            of_step = []
            for micro in range(2):
                torch.manual_seed(100 * step + micro)  # the gate samples
                loss, _ = engine(*batch(10 * step + micro, rank, torch.float32))
                of_step.append(loss.item())
                if micro == 1:
                    losses.append(sum(of_step) / 2)
                engine.backward(loss)
                engine.step()
            engine.eval()
            engine(*batch(77, rank, torch.float32))
            engine.train()
    ended_at = engine.global_steps
    engine.destroy()
    return losses, type(engine).__name__, ended_at


def train_both(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {name: train(rank, folder, name) for name in NAMES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[dict[str, Any]]:
    """Of each rank."""
    return run_on_ranks(train_both, 2, folder / "ranks", str(folder))


@pytest.fixture(scope="module")
def runs(folder: Path, trained: list[dict[str, Any]]) -> dict[str, Run]:
    return {name: read_run(folder / name) for name in NAMES}


def test_both_engines_are_recorded_alike_with_what_they_trained(
    trained: list[dict[str, Any]], runs: dict[str, Run]
) -> None:
    assert [trained[0][name][1] for name in NAMES] == ["DeepSpeedEngine", "FSMoEEngine"]
    for name, run in runs.items():
        # A job ends after so many steps on every rank.
        assert [each[name][2] for each in trained] == [NUM_STEPS, NUM_STEPS]
        assert "ended" in run.facts
        assert [row["step"] for row in run.steps] == list(range(1, NUM_STEPS + 1))
        assert [row["loss"] for row in run.steps] == pytest.approx(trained[0][name][0])
        assert not run.problems
        for row in run.steps:
            assert 0 < row["forward_ms"] + row["backward_ms"] + row["optimizer_ms"] < row["step_ms"]
            # Two micro batches of three samples of seven tokens.
            assert row["tokens_of_rank"] == 2 * 3 * 7
            assert 0 < row["memory_bytes"] <= row["memory_peak_bytes"]
        assert run.facts["world_size"] == run.facts["token_ranks"] == 2
        assert run.facts["command"]
        assert "commit" in run.facts
        assert run.facts["config"]["fsmoe"]["enabled"] == (name == "ours")
        assert run.facts["config"]["train_micro_batch_size_per_gpu"]
        assert list(run.facts["layers"]) == ["L00", "L01"]
    stock, ours = pair([runs["ours"], runs["stock"]])
    assert (stock.name, ours.name) == ("stock DeepSpeed", "ds_fsmoe, best")
    found = losses_of(stock, ours)
    assert found.num_steps == NUM_STEPS
    assert found.largest_difference < 1e-5


def test_times_leave_out_what_is_slow_at_first(runs: dict[str, Run]) -> None:
    found = times_of(runs["stock"])
    assert found.num_steps == NUM_STEPS - 3
    assert set(found.parts_ms) == {"forward", "backward", "optimizer", "rest"}
    settled = runs["ours"].plans["settled_at"]
    assert times_of(runs["ours"]).num_steps == NUM_STEPS - max(3, settled)


def test_plans_and_routers_are_recorded_at_their_steps(runs: dict[str, Run]) -> None:
    planned = [(each["layer"], each["phase"], each["degree"]) for each in runs["ours"].plans["layers"]]
    assert planned == [(layer, phase, 2) for layer in ("L00", "L01") for phase in ("forward", "backward")]
    assert [row["step"] for row in runs["ours"].routers] == [3, 6]
    for row in runs["ours"].routers:
        # Two ranks, two micro batches, three samples of seven tokens, two choices.
        assert sum(row["layers"]["L01"]["tokens_E"]) == 2 * 2 * 3 * 7 * 2
    assert not runs["stock"].routers


def test_stock_is_traced_in_the_form_of_ours(folder: Path, runs: dict[str, Run]) -> None:
    for name in NAMES:
        traces = {rank: read_trace(folder / name / "trace" / f"rank{rank}.json") for rank in range(2)}
        for trace in traces.values():
            assert trace["otherData"]["complete"]
            assert trace["otherData"]["steps"] == [NUM_STEPS - 3, NUM_STEPS - 2]
        tasks = [each["args"] for each in traces[0]["traceEvents"] if each.get("ph") == "X"]
        found = phases(traces)
        # Two layers, two steps, two micro batches, both directions; no evaluation.
        of_layers = [each for each in found if each.key.label.startswith("L")]
        assert len(of_layers) == 2 * 2 * 2 * 2
        for each in of_layers:
            kinds = {task["kind"] for task in tasks if f"{task['layer']}/{task['phase']}" == each.key.label}
            assert {"A2A_IN", "A2A_OUT"} <= kinds
            assert {segment.what for segment in each.path} <= kinds | {BETWEEN}
            assert each.ms > 0
        if name == "stock":
            order = [each.key.label for each in found if each.key.step == NUM_STEPS - 3]
            assert [each for each in order if each[0] == "L"] == ["L00/fwd", "L01/fwd", "L01/bwd", "L00/bwd"] * 2
            assert "gradients/bwd" in order


def test_a_folder_without_a_run_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(NoRunError, match=r"no run has been recorded here.*found: notes.txt.*record"):
        read_run(tmp_path)
    for number in range(9):
        (tmp_path / f"{number}").write_text("")
    with pytest.raises(NoRunError, match=r"found: 0, 1, 2, 3, 4, 5, 6, 7\)"):  # of many files the first few
        read_run(tmp_path)
    with pytest.raises(NoRunError, match="nowhere: no such folder"):
        read_run(tmp_path / "nowhere")


def resume(rank: int, world_size: int, folder: str) -> tuple[list[int], list[int], str]:
    """Steps recorded and traced by a run that begins at step 100, and fails. Rank 0 alone has a monitor."""
    block = {"record": {"dir": folder}, "trace": {"enabled": True, "start_step": 101, "num_steps": 2}}
    monitor = {"enabled": rank == 0, "output_path": folder, "job_name": "job"}
    engine = small_engine(Case(2), rank, block | {"metrics_every": 1}, csv_monitor=monitor)
    engine.global_steps = 100  # as a checkpoint would have it
    for step in range(5):
        loss, _ = engine(*batch(step, rank, torch.float32))
        engine.backward(loss=loss)
        engine.step()
    sys.last_value = RuntimeError("out of memory")
    engine.fsmoe.telemetry.record._at_exit()
    del sys.last_value
    trace = read_trace(Path(folder) / "trace" / f"rank{rank}.json")
    engine.destroy()
    run = read_run(Path(folder)) if rank == 0 else Run(Path(folder))
    return [row["step"] for row in run.steps], trace["otherData"]["steps"], "; ".join(run.problems)


def test_a_run_that_was_resumed_and_failed_is_counted_from_its_own_first_step(tmp_path: Path) -> None:
    (steps, traced, said), (_, traced_by_other, _) = run_on_ranks(resume, 2, tmp_path / "ranks", str(tmp_path / "run"))
    assert steps == [101, 102, 103, 104, 105]
    assert traced == traced_by_other == [101, 102]
    assert said == "the run has failed, and what is here is shown: RuntimeError: out of memory"
    # A monitor on one rank alone leaves nobody waiting.
    assert (tmp_path / "run" / "job" / "fsmoe_expert_tokens_mean.csv").exists()


# ---- folders


MINE = {"cluster.json": '{"mine": 1}', "plans.json": '{"mine": 2}', "trace/mine.json": '{"mine": 3}'}


def refusal_of(rank: int, **block: Any) -> str:
    try:
        small_engine(Case(2, 1), rank, block)
    except ConfigError as error:
        return str(error)
    return ""


def refused(rank: int, world_size: int, folder: str) -> dict[Any, str]:
    """What is said of folders that cannot be taken."""
    root, said = Path(folder), {"routes": refusal_of(rank, routing={"record": f"{folder}/routes"})}
    trace = {"enabled": True, "path": str(root / "file" / "trace" if rank == 1 else root / "trace")}
    for enabled in (True, False):
        for name in ("record", "mine", "file/run"):
            said[name, enabled] = refusal_of(rank, enabled=enabled, record={"dir": str(root / name)})
        said["trace", enabled] = refusal_of(rank, enabled=enabled, trace=trace)
    return said


def test_a_folder_that_cannot_be_taken_is_refused_on_every_rank_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "mine" / "trace").mkdir(parents=True)
    for name, text in MINE.items():
        (tmp_path / "mine" / name).write_text(text)
    owners = []
    for name, of in (("record", OF_RECORD), ("routes", OF_ROUTING)):
        (tmp_path / name).mkdir()
        owners.append(Ownership(tmp_path / name, name=of))
    (tmp_path / "routes" / "rank_00000.0000.npy").write_text("another job's")
    for said in run_on_ranks(refused, 2, tmp_path / "ranks", str(tmp_path)):
        for enabled in (True, False):
            # Another job records there; files are there that no run has left; it is in a file; one rank cannot write.
            assert f'fsmoe.record.dir = "{tmp_path / "record"}": process {os.getpid()} on' in said["record", enabled]
            assert "contains plans.json, cluster.json, which are not from a recorded run" in said["mine", enabled]
            assert said["file/run", enabled].startswith("fsmoe.record.dir = ")
            assert said["trace", enabled].startswith("fsmoe.trace.path = ")
            assert "rank 1: cannot be written to" in said["trace", enabled]
        assert "fsmoe.routing.record" in said["routes"]
        assert f"process {os.getpid()} on" in said["routes"]
    for each in owners:
        each.release()
    assert not (tmp_path / "record" / RUN).exists()
    assert (tmp_path / "routes" / "rank_00000.0000.npy").read_text() == "another job's"
    assert {name: (tmp_path / "mine" / name).read_text() for name in MINE} == MINE


def held_and_forked(rank: int, world_size: int, folder: str) -> list[Any]:
    """End a forked child of each kind of engine as an interpreter ends, and return what the parent's files say."""
    found = []
    for enabled in (True, False):
        run = Path(folder, str(enabled))
        trace, routing = {"enabled": True, "start_step": 0, "num_steps": 9}, {"record": str(run)} if enabled else {}
        block = {"enabled": enabled, "autotune": False, "record": {"dir": str(run)}, "routing": routing, "trace": trace}
        engine = small_engine(Case(1, 1), rank, block)
        train_steps(engine, rank, range(2))
        child = os.fork()
        if not child:
            try:
                atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        owners = [owner_of(run, name) for name in (OF_RECORD, OF_ROUTING)[: 1 + enabled]]
        is_held = [(each.life, each.process) for each in owners] == [("alive", os.getpid())] * (1 + enabled)
        found.append((is_held, "ended" in read_run(run).facts, (run / "trace" / "rank0.json").exists()))
        train_steps(engine, rank, range(2))
        engine.destroy()
        is_held = any(owner_of(run, name) for name in (OF_RECORD, OF_ROUTING))
        found.append((is_held, "ended" in read_run(run).facts, (run / "trace" / "rank0.json").exists()))
        assert [row["step"] for row in read_run(run).steps] == [1, 2, 3, 4]
    return found


def test_folders_are_held_until_the_engine_ends_and_the_end_of_a_forked_process_is_not_that(tmp_path: Path) -> None:
    (found,) = run_on_ranks(held_and_forked, 1, tmp_path / "ranks", str(tmp_path))
    assert found == 2 * [(True, False, False), (False, True, True)]
    assert len(parts_of(tmp_path / "True")) == 1


def test_only_files_of_a_run_are_removed_ahead_of_the_next(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text(json.dumps({"format": 1, "schedule": "best"}))
    (tmp_path / "trace").mkdir()
    for name in (STEPS, "cluster.json", "notes.txt", "trace/rank0.json", "trace/trace.json", "trace/mine.json"):
        (tmp_path / name).write_text("")
    clear_run(tmp_path)
    left = sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file())
    assert left == ["notes.txt", "trace/mine.json"]
    check_run_folder(tmp_path)
    (tmp_path / RUN).write_text('{"format": "of somebody else"}')
    with pytest.raises(FileExistsError, match=r"run\.json, which are not from a recorded run"):
        clear_run(tmp_path)


def test_steps_that_do_not_grow_are_named(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text(json.dumps({"format": 1, "schedule": "best", "ended": "now"}))
    (tmp_path / STEPS).write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 3, 4)))
    (problem,) = read_run(tmp_path).problems
    assert "step 3 comes after step 3" in problem

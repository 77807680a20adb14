# SPDX-License-Identifier: Apache-2.0
"""Folders of records, routing and traces: one job at a time, and nothing is removed that no run has left."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_fsmoe
from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.files.runs import RUN, STEPS, check_run_folder, clear_run, read_run
from ds_fsmoe.files.whole_files import OF_RECORD, OF_ROUTING, Ownership, owner_of
from ds_fsmoe.routes.written import parts_of
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, batch

MINE = {"cluster.json": '{"mine": 1}', "plans.json": '{"mine": 2}', "trace/mine.json": '{"mine": 3}'}


def write_mine(folder: Path) -> None:
    (folder / "trace").mkdir(parents=True)
    for name, text in MINE.items():
        (folder / name).write_text(text)


def engine_of(rank: int, **block: Any) -> Any:
    case = Case(min(2, dist.get_world_size()), 1)
    model = SmallModel(case, rank)
    config = case.ds_config(fsmoe={"autotune": False, **block})
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        loss, _ = engine(*batch(step, rank, torch.float32))
        engine.backward(loss)
        engine.step()


def refusal_of(rank: int, **block: Any) -> str:
    try:
        engine_of(rank, **block)
    except ConfigError as error:
        return str(error)
    return ""


def refused(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What is said of folders that cannot be taken; then a run that takes them."""
    root = Path(folder)
    record, routes = {"dir": str(root / "record")}, {"record": str(root / "routes")}
    trace = {"enabled": True, "path": str(root / "file" / "trace" if rank == 1 else root / "trace")}
    said = {}
    for enabled in (True, False):
        said[f"owned record, {enabled}"] = refusal_of(rank, enabled=enabled, record=record)
        said[f"mine, {enabled}"] = refusal_of(rank, enabled=enabled, record={"dir": str(root / "mine")})
        said[f"no folder, {enabled}"] = refusal_of(rank, enabled=enabled, record={"dir": str(root / "file" / "run")})
        said[f"trace, {enabled}"] = refusal_of(rank, enabled=enabled, trace=trace)
    said["owned routes"] = refusal_of(rank, enabled=True, routing=routes)
    # The same process may go on, in folders that are nobody's.
    engine = engine_of(rank, enabled=True, record={"dir": str(root / "own")}, routing={"record": str(root / "own")})
    train(engine, rank)
    held = [owner_of(root / "own", name) for name in (OF_RECORD, OF_ROUTING)]
    said["held"] = [None if each is None else (each.life, each.process) for each in held]
    said["first process"] = os.getpid()
    dist.barrier()  # or a rank that is ahead releases what another one looks for
    engine.destroy()
    dist.barrier()
    said["released"] = [owner_of(root / "own", name) is None for name in (OF_RECORD, OF_ROUTING)]
    return said


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("folders")
    (folder / "file").write_text("no folder")
    write_mine(folder / "mine")
    owners = []
    for name, of in (("record", OF_RECORD), ("routes", OF_ROUTING)):
        (folder / name).mkdir()
        owners.append(Ownership(folder / name, name=of))
    (folder / "routes" / "rank_00000.0000.npy").write_text("another job's")
    found = run_on_ranks(refused, 2, folder / "ranks", str(folder))
    for each in owners:
        each.release()
    return folder, found


@pytest.mark.parametrize("enabled", [True, False])
def test_a_folder_that_cannot_be_taken_is_refused_on_every_rank_and_stays_as_it_is(
    enabled: bool, outcome: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, (one, other) = outcome
    for what in (f"owned record, {enabled}", "owned routes", f"mine, {enabled}", f"no folder, {enabled}"):
        assert one[what] == other[what]
    assert one[f"no folder, {enabled}"].startswith("fsmoe.record.dir = ")
    # Another job records there.
    assert f'fsmoe.record.dir = "{folder / "record"}": process {os.getpid()} on' in one[f"owned record, {enabled}"]
    assert not (folder / "record" / RUN).exists()
    # Another job records routing.
    assert "fsmoe.routing.record" in one["owned routes"]
    assert f"process {os.getpid()} on" in one["owned routes"]
    assert (folder / "routes" / "rank_00000.0000.npy").read_text() == "another job's"
    # There are files that no run has left.
    assert "contains plans.json, cluster.json, which are not from a recorded run" in one[f"mine, {enabled}"]
    assert {name: (folder / "mine" / name).read_text() for name in MINE} == MINE
    # One rank cannot write a trace.
    assert one[f"trace, {enabled}"].startswith("fsmoe.trace.path = ")
    for each in (one, other):
        assert "rank 1: cannot be written to" in each[f"trace, {enabled}"]


def test_folders_are_held_while_a_job_writes_there_and_released_with_its_engine(
    outcome: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, (one, other) = outcome
    assert one["held"] == other["held"] == 2 * [("alive", one["first process"])]
    assert one["released"] == other["released"] == [True, True]
    assert len(parts_of(folder / "own")) == 2
    assert [row["step"] for row in read_run(folder / "own").steps] == [1, 2]


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


def forked(rank: int, world_size: int, folder: str) -> list[Any]:
    """End a forked child of each kind of engine as an interpreter ends, and return what the parent's files say."""
    found = []
    for enabled in (True, False):
        run = Path(folder, str(enabled))
        block = {"record": {"dir": str(run)}, "trace": {"enabled": True, "start_step": 0, "num_steps": 9}}
        engine = engine_of(rank, enabled=enabled, routing={"record": str(run)} if enabled else {}, **block)
        train(engine, rank)
        child = os.fork()
        if not child:
            try:
                atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        trace = run / "trace" / "rank0.json"
        found.append(("ended" in read_run(run).facts, trace.exists(), owner_of(run, OF_RECORD).life))
        train(engine, rank)
        engine.destroy()
        found.append(("ended" in read_run(run).facts, trace.exists(), len(read_run(run).steps)))
    return found


def test_the_end_of_a_forked_process_is_not_that_of_the_run(tmp_path: Path) -> None:
    (found,) = run_on_ranks(forked, 1, tmp_path / "ranks", str(tmp_path))
    assert found == 2 * [(False, False, "alive"), (True, True, 4)]

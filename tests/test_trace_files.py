# SPDX-License-Identifier: Apache-2.0
"""The files that a trace leaves: one per rank, and all of them as one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.execution.lanes import Lanes
from ds_fsmoe.files.traces import TracedRun, merge_traces, rank_file, trace_of, write_trace
from ds_fsmoe.observing import trace as trace_module
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.schedule import Task
from tests.lane_cases import COMPUTE, CPU
from tests.trace_cases import (
    assert_no_overlap,
    assert_valid,
    events_of,
    lanes,
    make_tracer,
    row_names,
    run,
    two_chunks,
    written,
)

FIXTURES = (lanes, make_tracer)  # which pytest finds by their names here


def test_files_of_all_ranks_become_one(make_tracer: Callable[..., Tracer], tmp_path: Path, lanes: Lanes) -> None:
    tracers = [make_tracer(rank=rank) for rank in range(11)]
    for tracer in tracers:
        tracer.step(0)
        run(lanes, tracer, two_chunks(), f"L{tracer._rank:02d}/forward")
        tracer.step(1)
        about = written(tracer)
        about["otherData"]["world_size"] = 11
        write_trace(about, tracer.path)
    merged = merge_traces(tmp_path)
    assert merged == tmp_path / "trace.json"
    trace = json.loads(merged.read_text())
    assert_valid(trace)
    assert_no_overlap(trace)
    layer_of_pid = {(event["pid"], event["args"]["layer"]) for event in events_of(trace)}
    assert layer_of_pid == {(rank + 1, f"L{rank:02d}") for rank in range(11)}
    assert len(events_of(trace)) == 44
    assert len({tid for _, tid in row_names(trace)}) == len(row_names(trace)) == 33
    about = trace["otherData"]
    assert list(about["ranks"]) == [str(rank) for rank in range(11)]
    assert about["ranks"]["7"]["rank"] == 7
    assert (about["missing"], about["unreadable"], about["of_another_job"]) == ([], [], [])


def test_files_that_are_missing_or_truncated_are_named_and_the_others_merged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [TracedRun(0, "L00/forward", 0, (Task("EXPERT", COMPUTE),), 5000, [(6000, 9000)])]
    for rank in (0, 2, 3, 4):
        write_trace(trace_of(rank, "here", runs, {"world_size": 7}), rank_file(tmp_path, rank))
    whole = rank_file(tmp_path, 2).read_text()
    rank_file(tmp_path, 2).write_text(whole[: len(whole) // 2])
    rank_file(tmp_path, 4).write_text("[1, 2]")
    rank_file(tmp_path, 5).write_text('{"otherData": {}}')
    for stranger in ("rank3.json.99.tmp", "ranks.json", "rank_1.json", "rank1.json.old.json"):
        (tmp_path / stranger).write_text("no")
    trace = json.loads(merge_traces(tmp_path).read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 4}
    assert trace["otherData"]["missing"] == ["rank1.json", "rank6.json"]
    assert trace["otherData"]["unreadable"] == ["rank2.json", "rank4.json", "rank5.json"]
    assert "missing: rank1.json, rank6.json" in caplog.text
    assert "unreadable: rank2.json, rank4.json, rank5.json" in caplog.text


def test_files_of_a_larger_job_before_this_one_are_left_out(tmp_path: Path) -> None:
    for world_size in (5, 2):
        for rank in range(world_size):
            write_trace(trace_of(rank, "here", [], {"world_size": world_size}), rank_file(tmp_path, rank))
    about = json.loads(merge_traces(tmp_path).read_text())["otherData"]
    assert list(about["ranks"]) == ["0", "1"]
    assert about["of_another_job"] == ["rank2.json", "rank3.json", "rank4.json"]
    assert about["missing"] == []


def test_merging_nothing_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: no traces of ranks to merge; unreadable: no files"):
        merge_traces(tmp_path)
    rank_file(tmp_path, 3).write_text("{")
    with pytest.raises(FileNotFoundError, match=r"unreadable: rank3\.json"):
        merge_traces(tmp_path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rank_file(tmp_path, 0)
    write_trace({"traceEvents": [], "otherData": {}}, path)
    before, seen = path.read_text(), []

    def full(file: int) -> None:
        # All is written by now, and the old file is still there.
        seen.extend(each.stat().st_size for each in tmp_path.iterdir())
        raise OSError("No space left on device")

    with path.open() as reader:
        write_trace({"traceEvents": [1], "otherData": {}}, path)
        assert reader.read() == before
    before = path.read_text()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_trace({"traceEvents": [7] * 1009, "otherData": {}}, path)
    assert len(seen) == 2
    assert max(seen) > 3 * 1009
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["rank0.json"]


def test_an_earlier_trace_of_the_same_rank_is_not_taken_for_this_one(
    make_tracer: Callable[..., Tracer], tmp_path: Path
) -> None:
    rank_file(tmp_path, 0).write_text("of yesterday")
    tracer = make_tracer(start_step=10)
    assert not tracer.path.exists()


def test_a_folder_that_cannot_be_made_is_an_error_at_once_and_a_full_disk_ends_no_training(
    make_tracer: Callable[..., Tracer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Tracer(tmp_path / "file" / "folder", 0, 0, 1, CPU)

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(trace_module, "write_trace", full)
    tracer = make_tracer()
    tracer.step(0)
    tracer.step(1)
    assert "the trace of rank 0 was lost: No space left on device" in caplog.text

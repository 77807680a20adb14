# SPDX-License-Identifier: Apache-2.0
"""What a trace has for all ranks and beside what was measured: the files of ranks as one, and what was predicted."""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.files.traces import (
    MEASURED,
    PREDICTED,
    TracedRun,
    merge_traces,
    range_name,
    rank_file,
    read_trace,
    trace_of,
    write_trace,
)
from ds_fsmoe.observing import trace as trace_module
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import HOLD, Task
from ds_fsmoe.planning.timeline import Span, Timeline, simulate
from tests.fake_clock import FakeClock
from tests.lane_cases import COMPUTE, CPU, KINDS
from tests.ranks import run_on_ranks
from tests.trace_cases import (
    PredictingTracer,
    assert_no_overlap,
    assert_valid,
    events_by_row,
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


# ---- predicted rows


def test_what_was_predicted_stands_beside_each_run_from_where_it_began(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    schedule = two_chunks()
    a2a_in, expert = LinearCost(2.0, 0.0), LinearCost(3.0, 0.0)
    timeline = simulate(schedule, {"A2A_IN": a2a_in, "EXPERT": expert})
    clock = FakeClock()
    tracer = make_tracer(predicted={"L03/backward": timeline, "L09/forward": timeline}, host=clock)
    tracer.step(0)
    began_us = []
    for label in ("L03/forward", "L03/backward", "L03/backward"):
        began_us.append(clock.time_ns() // 1000)
        run(lanes, tracer, schedule, label, lambda task: clock.sleep(0.004))
    tracer.step(1)
    trace = written(tracer)
    assert_valid(trace)
    rows = events_by_row(trace)
    # Less was predicted than it took, so one row of each is enough; the runs without a prediction have none.
    assert set(rows) == {"compute", "inter", "predicted compute", "predicted inter"}
    for number in (1, 2):
        predicted = [event for event in events_of(trace, "predicted") if event["args"]["run"] == number]
        measured = [event for event in events_of(trace) if event["args"]["run"] == number]
        assert {event["name"] for event in predicted} == {event["name"] for event in measured}
        start_us = predicted[0]["ts"]
        assert began_us[number] == start_us == min(event["ts"] for event in measured)
        spans = {event["name"]: (event["ts"] - start_us, event["dur"]) for event in predicted}
        expected = {
            "fsmoe/L03/bwd/A2A_IN/chunk0": (0, 2000),
            "fsmoe/L03/bwd/EXPERT/chunk0": (2000, 3000),
            "fsmoe/L03/bwd/A2A_IN/chunk1": (2000, 2000),
            "fsmoe/L03/bwd/EXPERT/chunk1": (5000, 3000),
        }
        for name, (at_us, took_us) in expected.items():
            # Rounded down to microseconds, start and end each.
            assert abs(spans[name][0] - at_us) <= 1
            assert abs(spans[name][1] - took_us) <= 1
    assert len(events_of(trace, "predicted")) == 8


def test_predictions_that_reach_into_the_next_runs_have_further_rows_with_room_for_every_run() -> None:
    rng = random.Random(5)
    tasks, runs = (Task("EXPERT", COMPUTE),), []
    for number in range(200):
        timeline = Timeline((Span(tasks[0], 0.0, rng.choice((0.3, 1.7, 2.2, 9.1)), None),))
        start_ns = number * 10**6
        runs.append(TracedRun(number, "L00/forward", 0, tasks, start_ns, [(start_ns, start_ns + 10**6)], timeline))
    rng.shuffle(runs)
    trace = trace_of(0, "here", runs, {})
    assert_valid(trace)
    assert_no_overlap(trace)
    rows = events_by_row(trace)
    # At no moment are more than ten of them under way.
    further = [f"predicted compute ({number})" for number in range(2, len(rows))]
    assert set(rows) == {"compute", "predicted compute", *further}
    assert 5 < len(rows) - 1 <= 10
    assert sum(len(rows[row]) for row in rows) == 400


def test_tasks_next_to_each_other_by_nanoseconds_do_not_overlap_in_microseconds() -> None:
    rng = random.Random(3)
    at_ns, spans_ns = 1_790_000_000_123_456_789, []
    for _ in range(500):
        spans_ns.append((at_ns, at_ns + rng.randrange(5000)))
        at_ns = spans_ns[-1][1] + rng.choice((0, 0, 1, 700))
    tasks = tuple(Task("EXPERT", COMPUTE, chunk) for chunk in range(500))
    trace = trace_of(0, "here", [TracedRun(0, "L00/forward", 0, tasks, spans_ns[0][0], spans_ns)], {})
    assert_no_overlap(json.loads(json.dumps(trace)))
    # As a viewer reads them that has nothing but floats.
    assert all(int(float(event["ts"])) == event["ts"] for event in events_of(trace))


# ---- ranks

EXPERTS, CAPACITY, WIDTH = 4, 23, 13


def pipeline_on_a_rank(rank: int, world_size: int, folder: str, esp: int) -> list[list[tuple[str, str]]]:
    """(name, lane) of every task of each phase, in the order of the schedule."""
    groups = make_groups(world_size // esp, esp, ranks_per_node=1 if esp == 1 else None)
    degrees = {"forward": 3, "backward": 2}
    plans = [
        PhasePlan(BlockPlan(degree), groups.planned, backward=phase == "backward") for phase, degree in degrees.items()
    ]
    costs = dict.fromkeys((*KINDS, HOLD), LinearCost(0.1, 0.0))
    predicted = {
        f"L{n:02d}/{phase}": simulate(plan.schedule, costs)
        for n in (2, 3)
        for phase, plan in zip(degrees, plans, strict=True)
    }
    lanes, tracer = make_lanes(CPU), PredictingTracer(Path(folder), rank, 1, 2, CPU, predicted=predicted)
    collectives = Collectives(FlatAllToAll().exchange, groups.ep_group, groups.esp_group)
    layers = [LayerPipeline(lanes, collectives, *plans, label=f"L{number:02d}", observer=tracer) for number in (2, 3)]
    experts = ExpertSet([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS * esp // world_size)], keep_expert_dim=True)
    for step in range(4):
        tracer.step(step)
        x_RM = torch.randn(EXPERTS * CAPACITY, WIDTH, requires_grad=True)
        for layer in layers:
            x_RM = x_RM + layer(x_RM, EXPERTS, CAPACITY, experts)
        x_RM.sum().backward()
    lanes.close()
    return [
        [(range_name(f"L03/{phase}", task), str(task.lane)) for task in plan.schedule.tasks if task.kind != HOLD]
        for phase, plan in zip(degrees, plans, strict=True)
    ]


@pytest.mark.parametrize(("esp", "kinds"), [(1, ("A2A_IN", "A2A_OUT")), (2, ("GATHER", "REDUCE"))])
def test_two_ranks_trace_every_task_of_a_pipeline_and_nothing_else(
    esp: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    tasks_of_ranks = run_on_ranks(pipeline_on_a_rank, 2, tmp_path / "ranks", str(folder), esp)
    for rank, phases in enumerate(tasks_of_ranks):
        trace = read_trace(rank_file(folder, rank))
        assert_valid(trace)
        assert_no_overlap(trace)
        assert trace["otherData"]["complete"] is True
        assert trace["otherData"]["world_size"] == 2
        for category in ("measured", "predicted"):
            found = defaultdict(list)
            for event in events_of(trace, category):
                if event["args"]["layer"] == "L03":
                    found[event["args"]["step"], event["args"]["phase"]].append((event["name"], event["args"]["lane"]))
            expected = {(step, phase): phases[index] for step in (1, 2) for index, phase in enumerate(("fwd", "bwd"))}
            assert found == expected
        assert [name.rsplit("/", 2)[1] for name, _ in phases[0]].count("EXPERT") == 3
        assert {name.rsplit("/", 2)[1] for phase in phases for name, _ in phase} == {"EXPERT", *kinds}
        assert {lane for _, lane in phases[0]} == {"compute", "inter" if esp == 1 else "intra"}
    merged = json.loads(merge_traces(folder).read_text())
    assert_valid(merged)
    assert_no_overlap(merged)
    assert merged["otherData"]["missing"] == []
    for category in (MEASURED, PREDICTED):
        labels = {"/".join((each["args"]["layer"], each["args"]["phase"])) for each in events_of(merged, category)}
        assert labels == {"L02/bwd", "L02/fwd", "L03/bwd", "L03/fwd"}
    # A collective cannot end on one rank before it has begun on the other: their clocks are one.
    last = [event for event in events_of(merged) if event["args"]["kind"] == kinds[1] and event["args"]["step"] == 2]
    for name in {event["name"] for event in last}:
        starts, ends = zip(
            *((each["ts"], each["ts"] + each["dur"]) for each in last if each["name"] == name), strict=True
        )
        assert max(starts) <= min(ends) + 1000

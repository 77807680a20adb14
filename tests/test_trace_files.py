# SPDX-License-Identifier: Apache-2.0
"""What a trace has for all ranks and beside what was measured: the files of ranks as one, and what was predicted."""

from __future__ import annotations

import json
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
MakeTracer = Callable[..., Tracer]


def test_files_of_ranks_become_one_and_what_is_missing_or_truncated_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in range(12):
        runs = [TracedRun(0, f"L{rank:02d}/forward", 0, (Task("EXPERT", COMPUTE),), 5000, [(6000, 9000)])]
        write_trace(trace_of(rank, "here", runs, {"world_size": 13}), rank_file(tmp_path, rank))
    whole = rank_file(tmp_path, 2).read_text()
    for rank, text in ((2, whole[: len(whole) // 2]), (4, "[1, 2]"), (5, '{"otherData": {}}')):
        rank_file(tmp_path, rank).write_text(text)
    rank_file(tmp_path, 1).unlink()
    for stranger in ("rank3.json.99.tmp", "ranks.json", "rank_1.json", "rank1.json.old.json"):
        (tmp_path / stranger).write_text("no")
    merged = merge_traces(tmp_path)
    assert merged == tmp_path / "trace.json"
    trace, ranks = json.loads(merged.read_text()), [0, 3, *range(6, 12)]
    assert_valid(trace)
    assert_no_overlap(trace)
    assert {(event["pid"], event["args"]["layer"]) for event in events_of(trace)} == {
        (rank + 1, f"L{rank:02d}") for rank in ranks
    }
    assert len({tid for _, tid in row_names(trace)}) == len(row_names(trace)) == 3 * len(ranks)
    about = trace["otherData"]
    assert list(about["ranks"]) == [str(rank) for rank in ranks]
    assert about["ranks"]["7"]["rank"] == 7
    assert about["missing"] == ["rank1.json", "rank12.json"]
    assert about["unreadable"] == ["rank2.json", "rank4.json", "rank5.json"]
    assert "missing: rank1.json, rank12.json" in caplog.text
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


def test_a_folder_that_cannot_be_made_is_an_error_at_once_a_full_disk_ends_no_training_and_an_old_trace_is_removed(
    make_tracer: MakeTracer,
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
    rank_file(tmp_path, 0).write_text("of yesterday")
    tracer = make_tracer()
    assert not tracer.path.exists()
    tracer.step(0)
    tracer.step(1)
    assert "the trace of rank 0 was lost: No space left on device" in caplog.text


# ---- predicted rows


def test_what_was_predicted_stands_beside_each_run_from_where_it_began(make_tracer: MakeTracer, lanes: Lanes) -> None:
    schedule, clock = two_chunks(), FakeClock()
    timeline = simulate(schedule, {"A2A_IN": LinearCost(2.0, 0.0), "EXPERT": LinearCost(3.0, 0.0)})
    tracer = make_tracer(predicted={"L03/backward": timeline, "L09/forward": timeline}, host=clock)
    tracer.step(0)
    began_us = []
    for label in ("L03/forward", "L03/backward", "L03/backward"):
        began_us.append(clock.time_ns() // 1000)
        run(lanes, tracer, schedule, label, lambda task: clock.sleep(0.004))
    tracer.step(1)
    trace = written(tracer)
    assert_valid(trace)
    # Less was predicted than it took, so one row of each is enough; the runs without a prediction have none.
    assert set(events_by_row(trace)) == {"compute", "inter", "predicted compute", "predicted inter"}
    assert len(events_of(trace, "predicted")) == 8
    for number in (1, 2):
        predicted = [event for event in events_of(trace, "predicted") if event["args"]["run"] == number]
        measured = [event for event in events_of(trace) if event["args"]["run"] == number]
        start_us = predicted[0]["ts"]
        assert began_us[number] == start_us == min(event["ts"] for event in measured)
        spans = {event["name"]: (event["ts"] - start_us, event["dur"]) for event in predicted}
        assert set(spans) == {event["name"] for event in measured}
        for name, span_us in (
            ("fsmoe/L03/bwd/A2A_IN/chunk0", (0, 2000)),
            ("fsmoe/L03/bwd/EXPERT/chunk0", (2000, 3000)),
            ("fsmoe/L03/bwd/A2A_IN/chunk1", (2000, 2000)),
            ("fsmoe/L03/bwd/EXPERT/chunk1", (5000, 3000)),
        ):
            # Rounded down to microseconds, start and end each.
            assert spans[name] == pytest.approx(span_us, abs=1)


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
        assert (trace["otherData"]["complete"], trace["otherData"]["world_size"]) == (True, 2)
        for category in (MEASURED, PREDICTED):
            found = defaultdict(list)
            for event in events_of(trace, category):
                args = event["args"]
                found[args["layer"], args["step"], args["phase"]].append((event["name"][10:], args["lane"]))
            assert found == {
                (layer, step, phase): [(name[10:], lane) for name, lane in tasks]
                for layer in ("L02", "L03")
                for step in (1, 2)
                for phase, tasks in zip(("fwd", "bwd"), phases, strict=True)
            }
        assert [name.rsplit("/", 2)[1] for name, _ in phases[0]].count("EXPERT") == 3
        assert {name.rsplit("/", 2)[1] for phase in phases for name, _ in phase} == {"EXPERT", *kinds}
        assert {lane for _, lane in phases[0]} == {"compute", "inter" if esp == 1 else "intra"}
    merged = json.loads(merge_traces(folder).read_text())
    assert_valid(merged)
    assert_no_overlap(merged)
    assert merged["otherData"]["missing"] == []
    # A collective cannot end on one rank before it has begun on the other: their clocks are one.
    last = [event for event in events_of(merged) if event["args"]["kind"] == kinds[1] and event["args"]["step"] == 2]
    for name in {event["name"] for event in last}:
        both = [(each["ts"], each["ts"] + each["dur"]) for each in last if each["name"] == name]
        assert max(start for start, _ in both) <= min(end for _, end in both) + 1000

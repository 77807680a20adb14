# SPDX-License-Identifier: Apache-2.0
"""The trace: which tasks of which steps are in it, under which names, at which times; and the files it leaves."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.components.expert_calls import expert_set
from ds_fsmoe.planning.block import BlockPlan, equal_shares
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import HOLD, Draft, Lane, Schedule, Task
from ds_fsmoe.planning.timeline import Span, Timeline, simulate
from ds_fsmoe.runtime import trace as trace_module
from ds_fsmoe.runtime.groups import make_groups
from ds_fsmoe.runtime.lanes import Lanes, SerialLanes, make_lanes
from ds_fsmoe.runtime.pipeline import PhasePlan, Pipeline
from ds_fsmoe.runtime.stream_lanes import StreamLanes
from ds_fsmoe.runtime.thread_lanes import ThreadLanes
from ds_fsmoe.runtime.trace import Tracer
from ds_fsmoe.runtime.trace_files import (
    TracedRun,
    merge_traces,
    range_name,
    rank_file,
    read_trace,
    summary,
    trace_of,
    write_trace,
)
from ds_fsmoe.runtime.wires import Wires
from tests.ranks import run_on_ranks
from tests.test_lanes import KINDS, Device, pretended, random_schedule, run_pretended

assert pretended  # a fixture
COMPUTE, INTRA, INTER = Lane
CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: there is none")
ROOT = Path(__file__).resolve().parents[1]
Event = dict[str, Any]


class BodyError(Exception):
    pass


@pytest.fixture(params=["serial", "threads"])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    with closing(make_lanes(CPU, overlap=request.param == "threads")) as made:
        yield made


@pytest.fixture
def make_tracer(tmp_path: Path) -> Iterator[Callable[..., Tracer]]:
    """``make_tracer(start_step, num_steps, ...)``; closed after the test, whatever has become of it."""
    made: list[Tracer] = []

    def make(start_step: int = 0, num_steps: int = 1, rank: int = 0, **others: Any) -> Tracer:
        made.append(Tracer(tmp_path, rank, start_step, num_steps, others.pop("device", CPU), **others))
        return made[-1]

    yield make
    for tracer in made:
        tracer.close()


def two_chunks() -> Schedule:
    draft = Draft()
    for chunk in range(2):
        draft.add("A2A_IN", INTER, chunk=chunk)
        draft.add("EXPERT", COMPUTE, chunk=chunk, after=[2 * chunk])
    return draft.finish()


def nothing(task: Task) -> None:
    pass


def pausing(seed: int) -> Callable[[Task], None]:
    rng = random.Random(seed)
    return lambda task: time.sleep(rng.choice((0, 0, 0.0003, 0.001)))


def run(
    lanes: Lanes, tracer: Tracer, schedule: Schedule, label: str = "L03/forward", body: Callable[[Task], Any] = nothing
) -> None:
    lanes.run(schedule, dict.fromkeys(KINDS, body), label, tracer)


def written(tracer: Tracer) -> dict[str, Any]:
    return read_trace(tracer.path)


def events_of(trace: dict[str, Any], category: str = "measured") -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


def row_names(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    named = (event for event in trace["traceEvents"] if event["name"] == "thread_name")
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


def events_by_row(trace: dict[str, Any]) -> dict[str, list[Event]]:
    names, found = row_names(trace), defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append(event)
    return dict(found)


def assert_no_overlap(trace: dict[str, Any]) -> None:
    rows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert rows
    for spans in rows.values():
        for (_, end_us), (start_us, _) in itertools.pairwise(sorted(spans)):
            assert end_us <= start_us


def assert_valid(trace: dict[str, Any]) -> None:
    """What a viewer needs of every event, and each row and process with one name and one place."""
    used, metadata = set(), defaultdict(list)
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is int
        assert event["pid"] > 0
        if event["ph"] == "M":
            metadata[event["name"], event["pid"], event.get("tid")].append(event["args"])
        else:
            assert event["ph"] == "X"
            used.add((event["pid"], event["tid"]))
            assert [type(event[each]) for each in ("name", "cat", "tid", "ts", "dur")] == [str, str, int, int, int]
            assert event["dur"] >= 0
            needed = {"layer", "phase", "kind", "chunk", "step", "ms", "lane", "run"}
            assert needed <= event["args"].keys()
    assert all(len(each) == 1 for each in metadata.values())
    for pid, tid in used:
        assert metadata["process_name", pid, None]
        assert metadata["process_sort_index", pid, None]
        assert metadata["thread_name", pid, tid]
        assert metadata["thread_sort_index", pid, tid]


# ---- names and rows


@pytest.mark.parametrize(
    ("label", "task", "name"),
    [
        ("L03/backward", Task("A2A_IN", INTER, 1), "fsmoe/L03/bwd/A2A_IN/chunk1"),
        ("L11/forward", Task("EXPERT", COMPUTE, 0, layer=7), "fsmoe/L11/fwd/EXPERT/chunk0"),
        ("L03/recompute", Task("GATHER", INTRA, 2), "fsmoe/L03/recompute/GATHER/chunk2"),
        ("moe/forward", Task("REDUCE", INTRA, 5), "fsmoe/moe/fwd/REDUCE/chunk5"),
        # A run over several layers, of which each task knows its own; and one without a name.
        ("backward", Task("GRAD", INTER, 4, layer=7), "fsmoe/L07/bwd/GRAD/chunk4"),
        ("", Task("EXPERT", COMPUTE, 3), "fsmoe/L00/EXPERT/chunk3"),
    ],
)
def test_names_are_those_of_layer_phase_kind_and_chunk(label: str, task: Task, name: str) -> None:
    assert range_name(label, task) == name


def test_a_rank_is_a_process_with_a_row_per_lane(make_tracer: Callable[..., Tracer], lanes: Lanes) -> None:
    tracer = make_tracer(rank=3)
    tracer.step(0)
    run(lanes, tracer, two_chunks(), "L03/backward")
    tracer.step(1)
    trace = written(tracer)
    assert tracer.path.name == "rank3.json"
    assert_valid(trace)
    metadata = {event["name"]: event["args"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert metadata["process_name"] == {"name": f"rank 3, {socket.gethostname()}"}
    assert metadata["process_sort_index"] == {"sort_index": 3}
    names = row_names(trace)
    places = {
        (event["pid"], event["tid"]): event["args"]["sort_index"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_sort_index"
    }
    assert [names[each] for each in sorted(names, key=places.__getitem__)] == ["compute", "intra", "inter"]
    assert len(set(places.values())) == 3
    found = {row: [event["name"] for event in events] for row, events in events_by_row(trace).items()}
    assert found == {
        "inter": ["fsmoe/L03/bwd/A2A_IN/chunk0", "fsmoe/L03/bwd/A2A_IN/chunk1"],
        "compute": ["fsmoe/L03/bwd/EXPERT/chunk0", "fsmoe/L03/bwd/EXPERT/chunk1"],
    }
    last = events_of(trace)[-1]["args"]
    assert last | {"ms": 0} == {
        "layer": "L03",
        "phase": "bwd",
        "kind": "EXPERT",
        "chunk": 1,
        "lane": "compute",
        "step": 0,
        "run": 0,
        "ms": 0,
    }


def test_times_are_those_of_the_bodies_on_the_clock_of_the_host(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    tracer, seen = make_tracer(), {}

    def body(task: Task) -> None:
        start_us = time.time_ns() / 1e3
        time.sleep(0.02)
        seen[range_name("L03/forward", task)] = start_us, time.time_ns() / 1e3

    tracer.step(0)
    run(lanes, tracer, two_chunks(), body=body)
    tracer.step(1)
    events = events_of(written(tracer))
    assert len(events) == len(seen) == 4
    for event in events:
        start_us, end_us = seen[event["name"]]
        # The two clocks are read at different moments, and may be set meanwhile by a little.
        assert event["ts"] <= start_us + 2000
        assert event["ts"] + event["dur"] >= end_us - 2000
        assert event["dur"] >= 19_000
        assert abs(event["args"]["ms"] * 1e3 - event["dur"]) <= 1


def test_events_do_not_overlap_within_a_row_and_none_is_missing(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    schedules = [random_schedule(seed) for seed in range(30)]
    costs = dict.fromkeys((*KINDS, HOLD), LinearCost(0.3, 0.0))
    labels = [f"L{number:02d}/{phase}" for number in range(15) for phase in ("forward", "backward")]
    predicted = {label: simulate(schedule, costs) for label, schedule in zip(labels, schedules, strict=True)}
    tracer = make_tracer(0, 1, predicted=predicted)
    tracer.step(0)
    for number, (label, schedule) in enumerate(zip(labels, schedules, strict=True)):
        run(lanes, tracer, schedule, label, pausing(number) if number % 2 else nothing)
    tracer.step(1)
    trace = written(tracer)
    assert_valid(trace)
    assert_no_overlap(trace)
    expected = sorted(
        range_name(label, task)
        for label, schedule in zip(labels, schedules, strict=True)
        for task in schedule.tasks
        if task.kind != HOLD
    )
    for category in ("measured", "predicted"):
        assert sorted(event["name"] for event in events_of(trace, category)) == expected
    for row, events in events_by_row(trace).items():
        assert all(event["args"]["lane"] in row for event in events)


# ---- the window


def test_only_the_steps_asked_for_are_recorded_and_written_when_they_are_over(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    tracer, schedule = make_tracer(start_step=2, num_steps=2), two_chunks()
    run(lanes, tracer, schedule)  # before it is told of any step
    for step in range(6):
        for _ in range(2):  # an engine that accumulates gradients comes by several times per step
            tracer.step(step)
            run(lanes, tracer, schedule)
        assert tracer.path.exists() == (step >= 4)
    trace = written(tracer)
    assert [event["args"]["step"] for event in events_of(trace)] == [2] * 8 + [3] * 8
    assert sorted({event["args"]["run"] for event in events_of(trace)}) == [0, 1, 2, 3]
    about = trace["otherData"]
    assert about["rank"] == 0
    assert about["world_size"] == 1
    assert about["asked_for"] == "steps 2 to 3"
    assert about["steps"] == [2, 3]
    assert about["complete"] is True
    assert about["unfinished"] == []
    before = tracer.path.read_text()
    tracer.step(2)
    run(lanes, tracer, schedule)
    assert_holds_nothing(tracer)
    tracer.step(4)
    tracer.close()
    assert tracer.path.read_text() == before


def assert_holds_nothing(tracer: Tracer) -> None:
    assert tracer._runs == []
    assert tracer._open == ()


def test_runs_that_are_over_are_not_looked_through_again(make_tracer: Callable[..., Tracer], lanes: Lanes) -> None:
    tracer = make_tracer()
    tracer.step(0)
    for _ in range(3):
        run(lanes, tracer, two_chunks())
        assert len(tracer._open) == 1


def test_one_label_may_have_several_schedules(make_tracer: Callable[..., Tracer], lanes: Lanes) -> None:
    tracer = make_tracer()
    tracer.step(0)
    for num_tasks in (1, 3, 2):
        run(lanes, tracer, Schedule(tuple(Task("EXPERT", COMPUTE, chunk) for chunk in range(num_tasks))))
    tracer.step(1)
    assert [event["args"]["chunk"] for event in events_of(written(tracer))] == [0, 0, 1, 2, 0, 1]


def test_training_that_resumes_after_the_window_leaves_a_file_that_says_so(
    make_tracer: Callable[..., Tracer], caplog: pytest.LogCaptureFixture
) -> None:
    tracer = make_tracer(start_step=2, num_steps=3)
    tracer.step(1000)
    trace = written(tracer)
    assert events_of(trace) == []
    assert trace["otherData"]["complete"] is False
    assert trace["otherData"]["steps"] == []
    assert [record.getMessage() for record in caplog.records] == [
        f"{tracer.path.parent}: not all of steps 2 to 4: after the last step; steps there are: none"
    ]


def test_a_window_that_begins_or_ends_in_a_run_breaks_nothing(make_tracer: Callable[..., Tracer], lanes: Lanes) -> None:
    tracer, schedule = make_tracer(start_step=1), two_chunks()

    def next_step(task: Task) -> None:
        if task.kind == "EXPERT" and task.chunk == 0:
            tracer.step(steps.pop(0))

    steps = [1, 2]
    run(lanes, tracer, schedule, "L00/forward", next_step)
    run(lanes, tracer, schedule, "L01/forward", next_step)
    run(lanes, tracer, schedule, "L02/forward")
    trace = written(tracer)
    assert {event["args"]["layer"] for event in events_of(trace)} == {"L01"}
    (unfinished,) = trace["otherData"]["unfinished"]
    assert unfinished["under_way"][0] == "fsmoe/L01/fwd/EXPERT/chunk0"
    tracer.step(3)
    assert tracer._open == ()


def test_a_tracer_that_is_off_does_next_to_nothing(make_tracer: Callable[..., Tracer]) -> None:
    """Counted, not timed: between the call and its return there is no other call, of Python or of C."""
    schedule, tracer = two_chunks(), make_tracer(start_step=1)
    calls: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        calls.append(f"{event} {argument.__name__}" if event == "c_call" else f"{event} {frame.f_code.co_name}")

    def observed() -> list[str]:
        calls.clear()
        sys.setprofile(count)
        tracer.start(schedule, "L03/forward")
        tracer.begin(0, schedule.tasks[0])
        tracer.end(0, schedule.tasks[0])
        sys.setprofile(None)
        assert calls.pop() == "c_call setprofile"
        return [each for each in calls if "return" not in each]

    only_itself = ["call start", "call begin", "call end"]
    assert observed() == only_itself
    tracer.step(0)
    assert observed() == only_itself
    tracer.step(1)
    assert len(observed()) > 10
    tracer.step(2)
    assert observed() == only_itself


# ---- runs that fail, that hold others, and jobs that end early


def test_a_run_that_fails_is_marked_and_those_after_it_are_whole(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    tracer, schedule = make_tracer(), two_chunks()

    def fail(task: Task) -> None:
        if task.kind == "EXPERT" and task.chunk == 0:
            raise BodyError

    tracer.step(0)
    with pytest.raises(BodyError):
        run(lanes, tracer, schedule, body=fail)
    run(lanes, tracer, schedule)
    tracer.step(1)
    trace = written(tracer)
    assert_no_overlap(trace)
    first, second = ([event for event in events_of(trace) if event["args"]["run"] == number] for number in (0, 1))
    # The one that failed has an end too. What the other lane had done by then is a matter of chance.
    assert "fsmoe/L03/fwd/EXPERT/chunk0" in {event["name"] for event in first}
    assert "fsmoe/L03/fwd/EXPERT/chunk1" not in {event["name"] for event in first}
    assert all(event["args"]["cut_short"] for event in first)
    assert len(second) == 4
    assert not any("cut_short" in event["args"] for event in second)
    (unfinished,) = trace["otherData"]["unfinished"]
    assert unfinished == {"label": "L03/forward", "step": 0, "tasks": 4, "done": len(first), "under_way": []}
    assert [(row["label"], row["runs"]) for row in summary(trace)] == [("L03/fwd", 1)]


@pytest.mark.parametrize("has_same_schedule", [False, True])
def test_a_run_inside_a_body_may_fail_without_taking_the_outer_one_along(
    make_tracer: Callable[..., Tracer], has_same_schedule: bool
) -> None:
    tracer, lanes, schedule = make_tracer(), SerialLanes(), two_chunks()
    # If it is another, then one with fewer tasks.
    inner = schedule if has_same_schedule else Schedule((Task("EXPERT", COMPUTE), Task("EXPERT", COMPUTE)))

    def fail(task: Task) -> None:
        raise BodyError

    def body(task: Task) -> None:
        with pytest.raises(BodyError):
            run(lanes, tracer, inner, "L01/forward", fail)

    tracer.step(0)
    run(lanes, tracer, schedule, "L00/forward", body)
    tracer.step(1)
    trace = written(tracer)
    assert_no_overlap(trace)
    assert [event["args"]["chunk"] for event in events_of(trace) if event["args"]["layer"] == "L00"] == [0, 0, 1, 1]
    assert [(each["label"], each["done"]) for each in trace["otherData"]["unfinished"]] == [("L01/forward", 1)] * 4


@pytest.mark.parametrize("has_same_schedule", [False, True])
def test_a_run_inside_a_body_has_rows_of_its_own(make_tracer: Callable[..., Tracer], has_same_schedule: bool) -> None:
    tracer, lanes, outer = make_tracer(), SerialLanes(), two_chunks()
    inner = outer if has_same_schedule else random_schedule(4)
    depth = 0

    def body(task: Task) -> None:
        nonlocal depth
        time.sleep(0.001)
        if depth == 0 and task.kind == "EXPERT":
            depth += 1
            run(lanes, tracer, inner, "L01/forward", body)
            depth -= 1

    tracer.step(0)
    run(lanes, tracer, outer, "L00/forward", body)
    tracer.step(1)
    trace = written(tracer)
    assert trace["otherData"]["unfinished"] == []
    assert_no_overlap(trace)
    rows = events_by_row(trace)
    assert {row: {event["args"]["layer"] for event in events} for row, events in rows.items()} == {
        row: {"L01" if "(2)" in row else "L00"} for row in rows
    }
    assert {"compute", "inter", "compute (2)", "inter (2)"} <= set(rows)
    experts = [event for event in rows["compute"] if event["name"] == "fsmoe/L00/fwd/EXPERT/chunk0"]
    inside = [event for event in events_of(trace) if event["args"]["run"] == 1]
    assert len(inside) == sum(task.kind != HOLD for task in inner.tasks)
    assert all(experts[0]["ts"] <= event["ts"] for event in inside)
    assert all(event["ts"] + event["dur"] <= experts[0]["ts"] + experts[0]["dur"] for event in inside)


def test_runs_inside_a_body_on_lanes_of_their_own_are_told_apart(make_tracer: Callable[..., Tracer]) -> None:
    tracer, outer, inner = make_tracer(), random_schedule(6), random_schedule(7)
    tracer.step(0)
    with closing(ThreadLanes()) as of_outer, closing(ThreadLanes()) as of_inner:
        lock = threading.Lock()

        def body(task: Task) -> None:
            with lock:
                run(of_inner, tracer, inner, "L01/forward", pausing(task.chunk))

        run(of_outer, tracer, outer, "L00/forward", body)
    tracer.step(1)
    trace = written(tracer)
    assert trace["otherData"]["unfinished"] == []
    assert_no_overlap(trace)
    counts = [sum(task.kind != HOLD for task in schedule.tasks) for schedule in (outer, inner)]
    by_layer = [event["args"]["layer"] for event in events_of(trace)]
    assert [by_layer.count("L00"), by_layer.count("L01")] == [counts[0], counts[0] * counts[1]]


def test_closing_early_writes_what_there_is_and_says_so(
    make_tracer: Callable[..., Tracer], lanes: Lanes, caplog: pytest.LogCaptureFixture
) -> None:
    tracer, schedule = make_tracer(start_step=5, num_steps=3), two_chunks()
    for step in range(7):
        tracer.step(step)
        run(lanes, tracer, schedule)
    assert not tracer.path.exists()
    tracer.close()
    trace = written(tracer)
    assert [event["args"]["step"] for event in events_of(trace)] == [5] * 4 + [6] * 4
    about = trace["otherData"]
    assert (about["complete"], about["steps"], about["ended"]) == (False, [5, 6], "closed in step 6")
    assert "not all of steps 5 to 7: closed in step 6; steps there are: 5, 6" in caplog.text
    before = tracer.path.read_text()
    run(lanes, tracer, schedule)
    assert_holds_nothing(tracer)
    tracer.step(7)
    tracer.step(8)
    tracer.close()
    assert tracer.path.read_text() == before


def test_closing_in_the_last_step_is_early_too(make_tracer: Callable[..., Tracer]) -> None:
    tracer = make_tracer(start_step=5)
    tracer.step(5)
    tracer.close()
    assert written(tracer)["otherData"]["complete"] is False


def test_closing_before_the_first_step_leaves_a_file_too(make_tracer: Callable[..., Tracer]) -> None:
    tracer = make_tracer(start_step=5)
    tracer.close()
    trace = written(tracer)
    assert_valid(trace)
    assert (trace["otherData"]["ended"], trace["otherData"]["complete"]) == ("closed before the first step", False)


def test_closing_while_a_run_hangs_names_the_tasks_that_are_under_way(make_tracer: Callable[..., Tracer]) -> None:
    tracer, schedule = make_tracer(), two_chunks()
    hangs, goes_on = threading.Event(), threading.Event()

    def body(task: Task) -> None:
        if task.kind == "A2A_IN" and task.chunk == 1:
            hangs.set()
            assert goes_on.wait(30)

    tracer.step(0)
    with closing(ThreadLanes()) as lanes:
        thread = threading.Thread(target=run, args=(lanes, tracer, schedule, "L03/backward", body), daemon=True)
        thread.start()
        assert hangs.wait(30)
        # The watchdog is a thread of its own, and the others are stuck.
        tracer.close()
        goes_on.set()
        thread.join(30)
        assert not thread.is_alive()
        run(lanes, tracer, schedule, "L04/backward")
    (unfinished,) = written(tracer)["otherData"]["unfinished"]
    assert "fsmoe/L03/bwd/A2A_IN/chunk1" in unfinished["under_way"]
    assert unfinished["done"] in (1, 2)


def test_a_trace_that_is_written_is_not_kept_for_the_exit(
    make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", kept.append)
    monkeypatch.setattr(atexit, "unregister", kept.remove)
    first, second = make_tracer(rank=0), make_tracer(rank=1)
    assert kept == [first.close, second.close]
    first.step(1)
    assert kept == [second.close]
    second.close()
    assert kept == []


SCRIPT = """
import sys
from pathlib import Path
import torch
from ds_fsmoe.planning.schedule import Lane, Schedule, Task
from ds_fsmoe.runtime.lanes import SerialLanes
from ds_fsmoe.runtime.trace import Tracer

tracer = Tracer(Path(sys.argv[1]), 0, 7, 100, torch.device("cpu"))
tracer.step(7)
SerialLanes().run(Schedule((Task("EXPERT", Lane.COMPUTE),)), {"EXPERT": lambda task: None}, "L03/forward", tracer)
del tracer
raise ZeroDivisionError
"""


def test_a_job_that_dies_of_an_error_leaves_its_trace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ZeroDivisionError" in done.stderr
    trace = read_trace(rank_file(tmp_path, 0))
    assert [event["name"] for event in events_of(trace)] == ["fsmoe/L03/fwd/EXPERT/chunk0"]
    assert trace["otherData"]["ended"] == "closed in step 7"


# ---- predicted rows


def test_what_was_predicted_stands_beside_each_run_from_where_it_began(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    schedule = two_chunks()
    a2a_in, expert = LinearCost(2.0, 0.0), LinearCost(3.0, 0.0)
    timeline = simulate(schedule, {"A2A_IN": a2a_in, "EXPERT": expert})
    tracer = make_tracer(predicted={"L03/backward": timeline, "L09/forward": timeline})
    tracer.step(0)
    began_us = []
    for label in ("L03/forward", "L03/backward", "L03/backward"):
        began_us.append(time.time_ns() // 1000)
        run(lanes, tracer, schedule, label, lambda task: time.sleep(0.004))
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
        assert began_us[number] - 2000 <= start_us <= min(event["ts"] for event in measured)
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


def test_predictions_that_reach_into_the_next_run_have_further_rows() -> None:
    tasks = (Task("EXPERT", COMPUTE),)
    timeline = Timeline((Span(tasks[0], 0.0, 2.5, None),))
    runs = [
        TracedRun(n, "L00/forward", 0, tasks, n * 10**6, [(n * 10**6, (n + 1) * 10**6)], timeline) for n in range(6)
    ]
    trace = trace_of(0, "here", runs, {})
    assert_valid(trace)
    assert_no_overlap(trace)
    rows = {row: [event["args"]["run"] for event in events] for row, events in events_by_row(trace).items()}
    assert rows == {
        "compute": [0, 1, 2, 3, 4, 5],
        "predicted compute": [0, 3],
        "predicted compute (2)": [1, 4],
        "predicted compute (3)": [2, 5],
    }


def test_further_rows_have_room_for_every_run() -> None:
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
    assert [len(rows[row]) for row in rows if not row.startswith("predicted")] == [200]
    # At no moment are more than ten of them under way.
    assert 5 < len(rows) - 1 <= 10


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


# ---- files


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
    assert "the trace of rank 0 is lost: No space left on device" in caplog.text


# ---- summary


def test_the_summary_has_the_means_of_each_label() -> None:
    tasks = (Task("A2A_IN", INTER), Task("EXPERT", COMPUTE), Task("A2A_OUT", INTER))

    def traced(number: int, label: str, *spans_ms: tuple[int, int] | None, predicted_ms: float = 0) -> TracedRun:
        spans_ns = [None if span is None else (span[0] * 10**6, span[1] * 10**6) for span in spans_ms]
        timeline = Timeline((Span(tasks[0], 0.0, predicted_ms, None),)) if predicted_ms else None
        return TracedRun(number, label, number, tasks, number * 10**9, spans_ns, timeline)

    backward = [
        traced(0, "L03/backward", (1, 4), (2, 6), (6, 9), predicted_ms=7),
        traced(1, "L03/backward", (11, 16), (12, 18), (18, 21), predicted_ms=9),
    ]
    others = [traced(2, "L03/forward", (1, 4), (4, 9), (9, 10)), traced(3, "L03/backward", (0, 50), (0, 99), None)]
    forward, both = {"label": "L03/fwd"}, {"label": "L03/bwd"}
    both |= {"runs": 2, "ms": 9.0, "busy_ms": {"compute": 5.0, "intra": 0.0, "inter": 7.0}, "predicted_ms": 8.0}
    forward |= {"runs": 1, "ms": 9.0, "busy_ms": {"compute": 5.0, "intra": 0.0, "inter": 4.0}, "predicted_ms": None}
    expected = [both | {"hidden": 0.25}, forward | {"hidden": 0.0}]
    assert summary(trace_of(0, "here", backward + others, {})) == expected
    halves = [trace_of(rank, "here", backward[rank::2], {})["traceEvents"] for rank in range(2)]
    assert summary({"traceEvents": halves[0] + halves[1]}) == [expected[0]]


def test_the_share_hidden_is_that_of_the_lanes(make_tracer: Callable[..., Tracer]) -> None:
    schedule = Schedule((Task("A2A_IN", INTER), Task("GATHER", INTRA), Task("EXPERT", COMPUTE)))
    tracer, all_three = make_tracer(), threading.Barrier(3)

    def together(task: Task) -> None:
        all_three.wait(30)
        time.sleep(0.1)

    tracer.step(0)
    with closing(ThreadLanes()) as threads:
        run(threads, tracer, schedule, "L00/forward", together)
    run(SerialLanes(), tracer, schedule, "L01/forward", lambda task: time.sleep(0.02))
    tracer.step(1)
    at_once, one_by_one = summary(written(tracer))
    assert at_once["hidden"] > 0.4  # 2/3 if nothing disturbs
    assert -0.5 < one_by_one["hidden"] <= 0
    assert min(one_by_one["busy_ms"].values()) >= 19


# ---- torch's profiler


def test_tasks_are_ranges_of_the_profiler_inside_the_window_only(make_tracer: Callable[..., Tracer]) -> None:
    tracer, schedule = make_tracer(start_step=1), two_chunks()
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    names = {"fsmoe/L03/fwd/EXPERT/chunk0", "fsmoe/L03/fwd/EXPERT/chunk1"}
    links = {"fsmoe/L03/fwd/A2A_IN/chunk0", "fsmoe/L03/fwd/A2A_IN/chunk1"}
    with closing(ThreadLanes()) as threads:
        for step, settings, expected in ((0, None, set()), (1, None, names), (1, config, names | links)):
            tracer.step(step)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=settings
            ) as profile:
                run(threads, tracer, schedule, body=lambda task: torch.ones(7) @ torch.ones(7))
            ranges = {event.name: event for event in profile.events() if event.name.startswith("fsmoe/")}
            assert set(ranges) == expected
            for name in names & set(ranges):
                assert "aten::matmul" in {child.name for child in ranges[name].cpu_children}


def test_every_range_ends_where_it_began(make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, int]] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> Range:
            seen.append(("enter", self.name, threading.get_ident()))
            return self

        def __exit__(self, *_: Any) -> None:
            seen.append(("exit", self.name, threading.get_ident()))

    monkeypatch.setattr(trace_module, "record_function", Range)
    tracer, schedule = make_tracer(), two_chunks()
    tracer.step(0)
    with closing(ThreadLanes()) as threads:
        run(threads, tracer, schedule)
        assert seen == []  # no profiler is on
        monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        run(threads, tracer, schedule)
    for thread in {thread for *_, thread in seen}:
        mine = [(what, name) for what, name, where in seen if where == thread]
        assert mine == [(what, name) for _, name in mine[::2] for what in ("enter", "exit")]
    assert len(seen) == 8


# ---- ranks with a real pipeline

EXPERTS, CAPACITY, WIDTH = 4, 23, 13


def pipeline_on_a_rank(rank: int, world_size: int, folder: str, esp: int) -> list[list[tuple[str, str]]]:
    """(name, lane) of every task of each phase, in the order of the schedule."""
    groups = make_groups(world_size // esp, esp, ranks_per_node=1 if esp == 1 else None)
    degrees = {"forward": 3, "backward": 2}
    plans = [
        PhasePlan(BlockPlan(equal_shares(degree)), groups.planned, backward=phase == "backward")
        for phase, degree in degrees.items()
    ]
    costs = dict.fromkeys((*KINDS, HOLD), LinearCost(0.1, 0.0))
    predicted = {
        f"L{n:02d}/{phase}": simulate(plan.schedule, costs)
        for n in (2, 3)
        for phase, plan in zip(degrees, plans, strict=True)
    }
    lanes, tracer = make_lanes(CPU), Tracer(Path(folder), rank, 1, 2, CPU, predicted)
    wires = Wires(FlatAllToAll().exchange, groups.ep_group, groups.esp_group)
    layers = [Pipeline(lanes, wires, *plans, label=f"L{number:02d}", observer=tracer) for number in (2, 3)]
    experts = expert_set([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS * esp // world_size)], keep_expert_dim=True)
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
    began_us = time.time_ns() / 1e3
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
        assert all(began_us < event["ts"] < time.time_ns() / 1e3 for event in events_of(trace))
    merged = json.loads(merge_traces(folder).read_text())
    assert_valid(merged)
    assert_no_overlap(merged)
    assert merged["otherData"]["missing"] == []
    rows = summary(merged)
    assert [row["label"] for row in rows] == ["L02/bwd", "L02/fwd", "L03/bwd", "L03/fwd"]
    assert all(row["runs"] == 4 and row["ms"] > 0 and row["predicted_ms"] > 0 for row in rows)
    # A collective cannot end on one rank before it has begun on the other: their clocks are one.
    last = [event for event in events_of(merged) if event["args"]["kind"] == kinds[1] and event["args"]["step"] == 2]
    for name in {event["name"] for event in last}:
        starts, ends = zip(
            *((each["ts"], each["ts"] + each["dur"]) for each in last if each["name"] == name), strict=True
        )
        assert max(starts) <= min(ends) + 1000


# ---- streams, on a device that keeps account


def test_on_streams_times_are_those_of_events(
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer]
) -> None:
    _, device = pretended
    device.now = 10**6  # done as soon as it is given
    tracer = make_tracer(device=torch.device("cuda"))
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1, after=(0,)), Task("GATHER", INTRA, 2)))
    device.streams[0].do("before")
    tracer.step(0)
    before_us = time.time_ns() / 1e3
    for turn in range(2):
        run_pretended(pretended, schedule, f"L0{turn}/forward", tracer)
    tracer.step(1)
    trace = written(tracer)
    assert_valid(trace)
    assert_no_overlap(trace)
    assert trace["otherData"]["device"] == "cuda"
    start_us = min(event["ts"] for event in events_of(trace))
    # An operation takes a millisecond there, whatever the host's clock says.
    found = {event["name"]: (event["ts"] - start_us, event["dur"]) for event in events_of(trace)}
    assert found == {
        "fsmoe/L00/fwd/A2A_IN/chunk0": (0, 1000),
        "fsmoe/L00/fwd/EXPERT/chunk1": (1000, 1000),
        "fsmoe/L00/fwd/GATHER/chunk2": (0, 1000),
        "fsmoe/L01/fwd/A2A_IN/chunk0": (2000, 1000),
        "fsmoe/L01/fwd/EXPERT/chunk1": (3000, 1000),
        "fsmoe/L01/fwd/GATHER/chunk2": (2000, 1000),
    }
    assert before_us - 1e3 < start_us < before_us + 30e6


def test_on_streams_the_host_waits_at_the_first_step_and_not_at_the_others(
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, device = pretended
    device.now, waits = 10**6, []
    monkeypatch.setattr(Device.TimingEvent, "synchronize", lambda event: waits.append(event.time))
    tracer = make_tracer(start_step=1, num_steps=3, device=torch.device("cuda"))
    counts = []
    for step in range(5):
        tracer.step(step)
        counts.append(len(waits))
        run_pretended(pretended, two_chunks(), "L00/forward", tracer)
    assert counts[0] == 0
    assert counts[1] > 0
    assert counts[2:] == [counts[1]] * 3
    assert len(events_of(written(tracer))) == 12


def test_on_streams_closing_waits_a_little_and_leaves_out_what_the_device_has_not_done(
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, device = pretended
    monkeypatch.setattr(trace_module, "_PATIENCE_AT_CLOSE_S", 0.05)
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1, after=(0,)), Task("EXPERT", COMPUTE, 2)))
    timeline = simulate(schedule, dict.fromkeys(KINDS, LinearCost(1.0, 0.0)))
    tracer = make_tracer(device=torch.device("cuda"), predicted={"L01/forward": timeline})
    tracer.step(0)
    for turn in range(2):
        run_pretended(pretended, schedule, f"L0{turn}/forward", tracer)
    device.now = 2  # of three
    started_s = time.monotonic()
    tracer.close()
    assert 0.05 <= time.monotonic() - started_s < 20
    trace = written(tracer)
    assert [event["name"] for event in events_of(trace)] == [
        "fsmoe/L00/fwd/A2A_IN/chunk0",
        "fsmoe/L00/fwd/EXPERT/chunk1",
    ]
    # Nobody knows when the second run began, so nothing can stand beside it.
    assert events_of(trace, "predicted") == []
    first, second = trace["otherData"]["unfinished"]
    assert (first["done"], first["under_way"]) == (2, ["fsmoe/L00/fwd/EXPERT/chunk2"])
    assert (second["done"], second["tasks"], len(second["under_way"])) == (0, 3, 3)


def test_on_streams_a_device_that_has_failed_takes_nothing_along(
    pretended: tuple[StreamLanes, Device], make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "_PATIENCE_AT_CLOSE_S", 60)
    tracer = make_tracer(device=torch.device("cuda"))
    tracer.step(0)
    run_pretended(pretended, two_chunks(), "L00/forward", tracer)

    def fail(event: Device.Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Device.TimingEvent, "query", fail)
    started_s = time.monotonic()
    tracer.close()
    assert time.monotonic() - started_s < 30
    assert written(tracer)["otherData"]["unfinished"][0]["done"] == 0


@NEEDS_GPU
def test_on_a_gpu_times_are_those_of_the_device_on_the_clock_of_the_host(make_tracer: Callable[..., Tracer]) -> None:
    device = torch.device("cuda")
    lanes, tracer = make_lanes(device), make_tracer(device=device)
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1), Task("A2A_OUT", INTER, 2, after=(1,))))
    tracer.step(0)
    before_us = time.time_ns() / 1e3
    for number in range(5):
        run(lanes, tracer, schedule, f"L0{number}/forward", lambda task: torch.cuda._sleep(20_000_000))
    tracer.step(1)
    after_us = time.time_ns() / 1e3
    trace = written(tracer)
    assert_valid(trace)
    assert_no_overlap(trace)
    assert trace["otherData"]["unfinished"] == []
    for event in events_of(trace):
        assert before_us - 1000 < event["ts"] < event["ts"] + event["dur"] < after_us + 1000
        assert event["args"]["ms"] > 5
    assert all(row["hidden"] > 0.2 for row in summary(trace))

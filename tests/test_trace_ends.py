# SPDX-License-Identifier: Apache-2.0
"""The trace of runs that fail, of runs inside others, and of jobs that end early."""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ds_fsmoe.execution.lanes import Lanes, SerialLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.files.traces import rank_file, read_trace
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.schedule import HOLD, Schedule, Task
from tests.fake_clock import FakeClock
from tests.lane_cases import COMPUTE, BodyError, random_schedule
from tests.trace_cases import (
    assert_holds_nothing,
    assert_no_overlap,
    assert_valid,
    events_by_row,
    events_of,
    lanes,
    make_tracer,
    pausing,
    run,
    two_chunks,
    written,
)
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]

FIXTURES = (lanes, make_tracer)  # which pytest finds by their names here


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
    clock, lanes, outer = FakeClock(), SerialLanes(), two_chunks()
    tracer = make_tracer(host=clock)
    inner = outer if has_same_schedule else random_schedule(4)
    depth = 0

    def body(task: Task) -> None:
        nonlocal depth
        clock.sleep(0.001)
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
            assert goes_on.wait(LIMIT_S)

    tracer.step(0)
    with closing(ThreadLanes()) as lanes:
        thread = threading.Thread(target=run, args=(lanes, tracer, schedule, "L03/backward", body), daemon=True)
        thread.start()
        assert hangs.wait(LIMIT_S)
        # The watchdog is a thread of its own, and the others are stuck.
        tracer.close()
        goes_on.set()
        thread.join(LIMIT_S)
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
from ds_fsmoe.execution.lanes import SerialLanes
from ds_fsmoe.observing.trace import Tracer

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
        timeout=600,
        check=False,
    )
    assert "ZeroDivisionError" in done.stderr
    trace = read_trace(rank_file(tmp_path, 0))
    assert [event["name"] for event in events_of(trace)] == ["fsmoe/L03/fwd/EXPERT/chunk0"]
    assert trace["otherData"]["ended"] == "closed in step 7"

# SPDX-License-Identifier: Apache-2.0
"""The trace of runs that fail, of runs inside others, and of jobs that end early; and what is saved of it before."""

from __future__ import annotations

import atexit
import json
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.execution.lanes import Lanes, SerialLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.observing import trace as trace_module
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.observing.watchdog import Watchdog
from ds_fsmoe.planning.schedule import HOLD, Schedule, Task
from tests.fake_clock import FakeClock
from tests.lane_cases import COMPUTE, CPU, BodyError, random_schedule
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
from tests.waiting import LIMIT_S, linger, until
from tests.watchdog_cases import Hangs, file, nobody_looks_after_sigterm, run_once

FIXTURES = (lanes, make_tracer, file, nobody_looks_after_sigterm)  # which pytest finds by their names here


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


def test_closing_in_the_last_step_or_before_the_first_is_early_too(make_tracer: Callable[..., Tracer]) -> None:
    for rank, ended in enumerate(("closed before the first step", "closed in step 5")):
        tracer = make_tracer(start_step=5, rank=rank)
        if rank == 1:
            tracer.step(5)
        tracer.close()
        trace = written(tracer)
        assert_valid(trace)
        assert (trace["otherData"]["ended"], trace["otherData"]["complete"]) == (ended, False)


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


# ---- saved while it goes on, by the watchdog


def test_the_error_of_a_run_saves_the_trace_whoever_catches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = {"enabled": True, "start_step": 0, "num_steps": 2, "path": "trace"}
    running = LayerRuntime(FSMoEBlock.model_validate({"enabled": True, "trace": trace}), CPU)
    assert running.tracer is not None

    def fail(task: Task) -> None:
        raise BodyError("on purpose")

    with closing(running):
        running.at_step(0)
        run(running.lanes, running.tracer, two_chunks())
        with pytest.raises(BodyError):
            run(running.lanes, running.tracer, two_chunks(), "L03/backward", fail)
        saved = written(running.tracer)
        assert saved["otherData"]["ended"] == "error: BodyError: on purpose"
        assert [each["label"] for each in saved["otherData"]["unfinished"]] == ["L03/backward"]
        # Someone has caught it, and training goes on: so does the trace.
        run(running.lanes, running.tracer, two_chunks())
        running.at_step(1)
        run(running.lanes, running.tracer, two_chunks())
        running.at_step(2)
    whole = written(running.tracer)["otherData"]
    assert (whole["complete"], whole["runs"], whole["ended"]) == (True, 4, "after the last step")


# ---- what is called at the end


def test_what_is_called_at_the_end_hears_why_once_the_report_is_written(file: Path) -> None:
    heard: list[tuple[str, str]] = []
    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        hangs.watchdog.at_end.append(lambda reason: heard.append((reason, file.read_text())))
        run_once(lanes, lambda task: hangs.hang())
    ((reason, report),) = heard
    assert reason.startswith("hang: ")
    assert f"reason: {reason}\n" in report


def test_what_hangs_or_fails_at_the_end_keeps_no_process(file: Path) -> None:
    called: list[str] = []
    goes_on = threading.Event()

    def fail(reason: str) -> NoReturn:
        called.append("fails")
        raise SystemExit("on purpose")

    def hang(reason: str) -> None:
        called.append("hangs")
        goes_on.wait()

    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        hangs.watchdog.at_end += [fail, hang, called.append]
        hangs.clock.gives_up = lambda thread: thread.name == "fsmoe-at-end" and "hangs" in called
        run_once(lanes, lambda task: hangs.hang())
        assert hangs.files == [file]
        assert called == ["fails", "hangs"]
        goes_on.set()
        until(lambda: len(called) == 3)


def test_sigterm_waits_for_what_is_saved_before_it_goes_on(file: Path) -> None:
    called: list[str] = []

    def save(reason: str) -> None:
        linger()
        called.append(reason)

    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append("the handler that was there"))
    try:
        with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)) as watchdog:
            watchdog.at_end.append(save)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == ["SIGTERM", "the handler that was there"]


# ---- saving


def test_saving_changes_nothing_of_what_is_written_at_the_end(make_tracer: Callable[..., Tracer], lanes: Lanes) -> None:
    tracer, schedule = make_tracer(0, 2), two_chunks()
    saved: list[dict[str, Any]] = []

    def save() -> None:
        tracer.save("to see")
        saved.append(written(tracer))

    for step in range(2):
        tracer.step(step)
        save()
        run(lanes, tracer, schedule)
    save()
    tracer.step(2)
    assert [(each["otherData"]["runs"], each["otherData"]["complete"]) for each in saved] == [
        *((0, False), (1, False), (2, False))
    ]
    assert {each["otherData"]["ended"] for each in saved} == {"to see"}
    whole = written(tracer)
    assert whole["otherData"]["complete"]
    assert events_of(whole) == events_of(saved[-1])
    assert_holds_nothing(tracer)
    # Nothing more is written.
    save()
    assert saved[-1] == whole


def test_what_is_saved_in_the_middle_of_a_task_names_it_and_it_is_traced_to_its_end(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    tracer = make_tracer()
    tracer.step(0)

    def save(task: Task) -> None:
        if task.kind == "EXPERT" and task.chunk == 0:
            tracer.save("to see")

    run(lanes, tracer, two_chunks(), body=save)
    (unfinished,) = written(tracer)["otherData"]["unfinished"]
    assert "fsmoe/L03/fwd/EXPERT/chunk0" in unfinished["under_way"]
    tracer.step(1)
    assert written(tracer)["otherData"]["unfinished"] == []
    assert len(events_of(written(tracer))) == 4


@pytest.mark.parametrize("is_held_by", ["who starts a run", "who writes the end"])
def test_saving_waits_for_nobody(
    make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch, is_held_by: str
) -> None:
    """The main thread may be stopped anywhere by the handler of a signal, which then waits for what is saved."""
    tracer, lanes = make_tracer(), SerialLanes()
    tracer.step(0)
    run(lanes, tracer, two_chunks())
    stopped, goes_on = threading.Event(), threading.Event()
    put = trace_module.write_trace

    def stop(trace: Any, path: Path) -> None:
        if threading.current_thread() is holder:
            stopped.set()
            goes_on.wait()
        put(trace, path)

    def hold() -> None:
        if is_held_by == "who starts a run":
            with tracer._lock:
                stopped.set()
                goes_on.wait()
        else:
            tracer.close()

    monkeypatch.setattr(trace_module, "write_trace", stop)
    holder = threading.Thread(target=hold)
    holder.start()
    try:
        stopped.wait()
        saving = threading.Thread(target=tracer.save, args=("SIGTERM",), daemon=True)
        saving.start()
        saving.join(LIMIT_S)
        assert not saving.is_alive()
        saved = json.loads(tracer.path.read_text())
        assert (saved["otherData"]["ended"], saved["otherData"]["runs"]) == ("SIGTERM", 1)
        assert len(events_of(saved)) == 4
    finally:
        goes_on.set()
        holder.join()

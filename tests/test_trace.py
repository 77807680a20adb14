# SPDX-License-Identifier: Apache-2.0
"""The trace: which tasks of which steps are in it, under which names, at which times; what fails, runs inside others or
ends early; and what is saved before the end."""

from __future__ import annotations

import gc
import json
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.execution.lanes import Lanes, SerialLanes, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.files.traces import range_name
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.observing import trace as trace_module
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import HOLD, Schedule, Task
from ds_fsmoe.planning.timeline import simulate
from tests.fake_clock import FakeClock
from tests.lane_cases import COMPUTE, CPU, INTER, INTRA, KINDS, NEEDS_GPU, BodyError, random_schedule
from tests.pretended_device import Device, pretended, run_pretended
from tests.trace_cases import (
    assert_holds_nothing,
    assert_no_overlap,
    assert_valid,
    events_by_row,
    events_of,
    lanes,
    make_tracer,
    nothing,
    pausing,
    row_names,
    run,
    two_chunks,
    written,
)
from tests.waiting import LIMIT_S, until
from tests.watchdog_cases import Hangs, file, nobody_looks_after_sigterm, run_once

FIXTURES = (file, lanes, make_tracer, nobody_looks_after_sigterm, pretended)  # which pytest finds by their names here
MakeTracer = Callable[..., Tracer]
Pretended = tuple[StreamLanes, Device]


def trace_of_step(tracer: Tracer, act: Callable[[], object]) -> dict[str, Any]:
    """What is written of a step, in which something is done."""
    tracer.step(0)
    act()
    tracer.step(1)
    trace = written(tracer)
    assert_valid(trace)
    assert_no_overlap(trace)
    return trace


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


def test_a_rank_is_a_process_with_a_row_per_lane(make_tracer: MakeTracer, lanes: Lanes) -> None:
    tracer = make_tracer(rank=3)
    trace = trace_of_step(tracer, lambda: run(lanes, tracer, two_chunks(), "L03/backward"))
    assert tracer.path.name == "rank3.json"
    events, names = trace["traceEvents"], row_names(trace)
    metadata = {event["name"]: event["args"] for event in events if event["ph"] == "M"}
    assert metadata["process_name"] == {"name": f"rank 3, {socket.gethostname()}"}
    assert metadata["process_sort_index"] == {"sort_index": 3}
    places = [event for event in events if event["name"] == "thread_sort_index"]
    rows = {event["args"]["sort_index"]: names[event["pid"], event["tid"]] for event in places}
    assert [rows[place] for place in sorted(rows)] == ["compute", "intra", "inter"]
    found = {row: [event["name"] for event in events] for row, events in events_by_row(trace).items()}
    assert found == {
        "inter": ["fsmoe/L03/bwd/A2A_IN/chunk0", "fsmoe/L03/bwd/A2A_IN/chunk1"],
        "compute": ["fsmoe/L03/bwd/EXPERT/chunk0", "fsmoe/L03/bwd/EXPERT/chunk1"],
    }
    assert events_of(trace)[-1]["args"] | {"ms": 0} == {
        **{"layer": "L03", "phase": "bwd", "kind": "EXPERT", "chunk": 1, "lane": "compute"},
        **{"step": 0, "run": 0, "ms": 0, "index": 3, "waits_for": [1, 2]},
    }


def test_times_are_those_of_the_bodies_on_the_clock_of_the_host(make_tracer: MakeTracer, lanes: Lanes) -> None:
    # No two readings are equal, so that times tell what came before what.
    clock, seen = FakeClock(tick_ns=1000), {}
    tracer = make_tracer(host=clock)

    def body(task: Task) -> None:
        start_us = clock.time_ns() // 1000
        clock.sleep(0.02)
        seen[range_name("L03/forward", task)] = start_us, clock.time_ns() // 1000

    events = events_of(trace_of_step(tracer, lambda: run(lanes, tracer, two_chunks(), body=body)))
    assert len(events) == len(seen) == 4
    for event in events:
        start_us, end_us = seen[event["name"]]
        assert event["ts"] < start_us
        assert event["ts"] + event["dur"] > end_us
        # The other lane may sleep meanwhile, and both read the clock.
        assert round((event["dur"] - 20_000) % 20_000) <= 20
        assert abs(event["args"]["ms"] * 1e3 - event["dur"]) <= 1


def test_events_do_not_overlap_within_a_row_and_none_is_missing(make_tracer: MakeTracer, lanes: Lanes) -> None:
    costs = dict.fromkeys((*KINDS, HOLD), LinearCost(0.3, 0.0))
    labels = [f"L{number:02d}/{phase}" for number in range(15) for phase in ("forward", "backward")]
    schedules = {label: random_schedule(seed) for seed, label in enumerate(labels)}
    tracer = make_tracer(predicted={label: simulate(schedule, costs) for label, schedule in schedules.items()})

    def run_all() -> None:
        for number, (label, schedule) in enumerate(schedules.items()):
            run(lanes, tracer, schedule, label, pausing(number) if number % 2 else nothing)

    trace = trace_of_step(tracer, run_all)
    tasks = [(label, task) for label, schedule in schedules.items() for task in schedule.tasks if task.kind != HOLD]
    for category in ("measured", "predicted"):
        found = sorted(event["name"] for event in events_of(trace, category))
        assert found == sorted(range_name(*each) for each in tasks)
    for row, events in events_by_row(trace).items():
        assert all(event["args"]["lane"] in row for event in events)


def test_one_label_may_have_several_schedules(make_tracer: MakeTracer, lanes: Lanes) -> None:
    tracer = make_tracer()
    schedules = [Schedule(tuple(Task("EXPERT", COMPUTE, chunk) for chunk in range(count))) for count in (1, 3, 2)]
    trace = trace_of_step(tracer, lambda: [run(lanes, tracer, schedule) for schedule in schedules])
    assert [event["args"]["chunk"] for event in events_of(trace)] == [0, 0, 1, 2, 0, 1]


# ---- the window


def test_only_the_steps_asked_for_are_recorded_and_written_when_they_are_over(
    make_tracer: MakeTracer, lanes: Lanes
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
    assert {event["args"]["run"] for event in events_of(trace)} == {0, 1, 2, 3}
    about = {"rank": 0, "world_size": 1, "asked_for": "steps 2 to 3", "steps": [2, 3], "complete": True}
    assert trace["otherData"] == trace["otherData"] | about | {"unfinished": []}
    before = tracer.path.read_text()
    tracer.step(2)
    run(lanes, tracer, schedule)
    assert_holds_nothing(tracer)
    tracer.step(4)
    tracer.close()
    assert tracer.path.read_text() == before


def test_a_window_that_begins_or_ends_in_a_run_breaks_nothing(make_tracer: MakeTracer, lanes: Lanes) -> None:
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


def test_a_tracer_that_is_off_does_next_to_nothing(make_tracer: MakeTracer) -> None:
    """Between the call and its return there is no other call, of Python or of C."""
    schedule, tracer = two_chunks(), make_tracer(start_step=1)
    calls: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name if event == "call" else argument.__name__)

    def observed() -> list[str]:
        calls.clear()
        gc.disable()  # what it calls is nobody's
        sys.setprofile(count)
        of_run = tracer.of_run(schedule, "L03/forward")
        of_run.begin(0, schedule.tasks[0])
        of_run.end(0, schedule.tasks[0])
        sys.setprofile(None)
        gc.enable()
        return calls

    only_itself = ["of_run", "begin", "end", "setprofile"]
    assert observed() == only_itself
    tracer.step(0)
    assert observed() == only_itself
    tracer.step(1)
    assert len(observed()) > 10
    tracer.step(2)
    assert observed() == only_itself


# ---- torch's profiler


def test_tasks_are_ranges_of_the_profiler_inside_the_window_only(make_tracer: MakeTracer) -> None:
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


# ---- on streams: the times are those of the device's events


def test_on_streams_times_are_those_of_events(pretended: Pretended, make_tracer: MakeTracer) -> None:
    _, device = pretended
    device.now = 10**6  # done as soon as it is given
    clock = FakeClock()
    tracer = make_tracer(device=torch.device("cuda"), host=clock)
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1, after=(0,)), Task("GATHER", INTRA, 2)))
    device.streams[0].do("before")
    labels = ("L00/forward", "L01/forward")
    trace = trace_of_step(tracer, lambda: [run_pretended(pretended, schedule, label, tracer) for label in labels])
    assert trace["otherData"]["device"] == "cuda"
    # The clock of the host says when the first of them was issued.
    start_us = clock.time_ns() // 1000
    found = {event["name"]: (event["ts"] - start_us, event["dur"]) for event in events_of(trace)}
    # An operation takes a millisecond there, whatever the host's clock says.
    assert found == {
        f"fsmoe/L0{turn}/fwd/{name}": (at_us + after_us, 1000)
        for turn, at_us in enumerate((0, 2000))
        for name, after_us in (("A2A_IN/chunk0", 0), ("EXPERT/chunk1", 1000), ("GATHER/chunk2", 0))
    }


def test_on_streams_the_host_waits_at_the_first_step_and_not_at_the_others(
    pretended: Pretended, make_tracer: MakeTracer, monkeypatch: pytest.MonkeyPatch
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
    pretended: Pretended, make_tracer: MakeTracer
) -> None:
    _, device = pretended
    clock = FakeClock()
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1, after=(0,)), Task("EXPERT", COMPUTE, 2)))
    timeline = simulate(schedule, dict.fromkeys(KINDS, LinearCost(1.0, 0.0)))
    tracer = make_tracer(device=torch.device("cuda"), predicted={"L01/forward": timeline}, host=clock)
    tracer.step(0)
    for turn in range(2):
        run_pretended(pretended, schedule, f"L0{turn}/forward", tracer)
    device.now = 2  # of three
    tracer.close()
    assert clock.slept_s == pytest.approx(trace_module._PATIENCE_AT_CLOSE_S, rel=0.01)
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
    pretended: Pretended, make_tracer: MakeTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    tracer = make_tracer(device=torch.device("cuda"), host=clock)
    tracer.step(0)
    run_pretended(pretended, two_chunks(), "L00/forward", tracer)

    def fail(event: Device.Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Device.TimingEvent, "query", fail)
    tracer.close()
    assert clock.slept_s == 0, "waits for a device that has failed"
    assert written(tracer)["otherData"]["unfinished"][0]["done"] == 0


@NEEDS_GPU
def test_on_a_gpu_times_are_those_of_the_device_from_when_the_host_set_them(make_tracer: MakeTracer) -> None:
    device, clock = torch.device("cuda"), FakeClock()
    lanes, tracer = make_lanes(device), make_tracer(device=device, host=clock)
    schedule = Schedule((Task("A2A_IN", INTER, 0), Task("EXPERT", COMPUTE, 1), Task("A2A_OUT", INTER, 2, after=(1,))))

    def run_five() -> None:
        for number in range(5):
            run(lanes, tracer, schedule, f"L0{number}/forward", lambda task: torch.cuda._sleep(20_000_000))
        # The tracer waits by its own clock, on which no time passes for the device.
        torch.cuda.synchronize()

    trace = trace_of_step(tracer, run_five)
    assert trace["otherData"]["unfinished"] == []
    for event in events_of(trace):
        assert event["ts"] >= clock.time_ns() // 1000
        assert event["args"]["ms"] > 0
    # Of two kernels that need nothing of each other, on two streams, each began before the other was done.
    for number in range(5):
        a2a_in, expert, _ = (event for event in events_of(trace) if event["args"]["run"] == number)
        assert max(a2a_in["ts"], expert["ts"]) < min(each["ts"] + each["dur"] for each in (a2a_in, expert))


# ---- what fails, runs inside others or ends early


def test_a_run_that_fails_is_marked_and_those_after_it_are_whole(make_tracer: MakeTracer, lanes: Lanes) -> None:
    tracer, schedule = make_tracer(), two_chunks()

    def fail(task: Task) -> None:
        if task.kind == "EXPERT" and task.chunk == 0:
            raise BodyError

    def act() -> None:
        with pytest.raises(BodyError):
            run(lanes, tracer, schedule, body=fail)
        run(lanes, tracer, schedule)

    trace = trace_of_step(tracer, act)
    first, second = ([event for event in events_of(trace) if event["args"]["run"] == number] for number in (0, 1))
    # The one that failed has an end too. What the other lane had done by then is a matter of chance.
    experts = {event["args"]["chunk"] for event in first if event["args"]["kind"] == "EXPERT"}
    assert experts == {0}
    assert all(event["args"]["cut_short"] for event in first)
    assert len(second) == 4
    assert not any("cut_short" in event["args"] for event in second)
    (unfinished,) = trace["otherData"]["unfinished"]
    assert unfinished == {"label": "L03/forward", "step": 0, "tasks": 4, "done": len(first), "under_way": []}


@pytest.mark.parametrize("has_same_schedule", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_inside_a_body_has_rows_of_its_own_and_may_fail_without_taking_the_outer_one_along(
    make_tracer: MakeTracer, has_same_schedule: bool, fails: bool
) -> None:
    clock, lanes, outer = FakeClock(), SerialLanes(), two_chunks()
    tracer = make_tracer(host=clock)
    # If it is another, then one with fewer tasks.
    inner = outer if has_same_schedule else Schedule((Task("EXPERT", COMPUTE), Task("EXPERT", COMPUTE)))

    def inside(task: Task) -> None:
        clock.sleep(0.001)
        if fails:
            raise BodyError

    def body(task: Task) -> None:
        clock.sleep(0.001)
        if task.kind == "EXPERT":
            with pytest.raises(BodyError) if fails else nullcontext():
                run(lanes, tracer, inner, "L01/forward", inside)

    trace = trace_of_step(tracer, lambda: run(lanes, tracer, outer, "L00/forward", body))
    unfinished = [(each["label"], each["done"]) for each in trace["otherData"]["unfinished"]]
    assert unfinished == ([("L01/forward", 1)] * 2 if fails else [])
    rows = events_by_row(trace)
    for row, events in rows.items():
        assert {event["args"]["layer"] for event in events} == {"L01" if "(2)" in row else "L00"}
    assert [event["args"]["chunk"] for event in events_of(trace) if event["args"]["layer"] == "L00"] == [0, 0, 1, 1]
    (first,) = (event for event in rows["compute"] if event["args"]["chunk"] == 0)
    events = [event for event in events_of(trace) if event["args"]["run"] == 1]
    assert len(events) == (1 if fails else len(inner.tasks))
    assert all(first["ts"] <= event["ts"] for event in events)
    assert all(event["ts"] + event["dur"] <= first["ts"] + first["dur"] for event in events)


@pytest.mark.parametrize(
    ("steps", "traced", "ended"),
    [
        (range(7), [5, 6], "closed in step 6"),
        ([5], [5], "closed in step 5"),
        ([], [], "closed before the first step"),
        ([1000], [], "after the last step"),
    ],
    ids=["in the window", "in its first step", "before any step", "resumed after the window"],
)
def test_a_trace_that_ends_early_has_what_there_is_and_says_so(
    steps: Sequence[int],
    traced: list[int],
    ended: str,
    make_tracer: MakeTracer,
    lanes: Lanes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracer, schedule = make_tracer(start_step=5, num_steps=3), two_chunks()
    for step in steps:
        tracer.step(step)
        run(lanes, tracer, schedule)
    tracer.close()
    trace = written(tracer)
    assert_valid(trace)
    assert [event["args"]["step"] for event in events_of(trace)] == [step for step in traced for _ in schedule.tasks]
    about = trace["otherData"]
    assert (about["complete"], about["steps"], about["ended"]) == (False, traced, ended)
    there = ", ".join(map(str, traced)) or "none"
    assert f"not all of steps 5 to 7: {ended}; steps there are: {there}" in caplog.text
    before = tracer.path.read_text()
    run(lanes, tracer, schedule)
    assert_holds_nothing(tracer)
    tracer.step(7)
    tracer.step(8)
    tracer.close()
    assert tracer.path.read_text() == before


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


# ---- saving


def test_saving_changes_nothing_of_what_is_written_at_the_end_and_names_the_task_that_it_is_in(
    make_tracer: MakeTracer, lanes: Lanes
) -> None:
    tracer, schedule = make_tracer(0, 2), two_chunks()
    saved: list[dict[str, Any]] = []

    def save() -> None:
        tracer.save("to see")
        saved.append(written(tracer))

    tracer.step(0)
    run(lanes, tracer, schedule, body=lambda task: task.kind == "EXPERT" and task.chunk == 0 and save())
    save()
    tracer.step(1)
    run(lanes, tracer, schedule)
    save()
    tracer.step(2)
    (unfinished,) = saved[0]["otherData"]["unfinished"]
    assert "fsmoe/L03/fwd/EXPERT/chunk0" in unfinished["under_way"]
    about = [each["otherData"] for each in saved]
    assert [(each["runs"], each["complete"], each["ended"]) for each in about] == [
        (runs, False, "to see") for runs in (1, 1, 2)
    ]
    whole = written(tracer)
    assert (whole["otherData"]["complete"], whole["otherData"]["unfinished"]) == (True, [])
    assert events_of(whole) == events_of(saved[-1])
    assert len(events_of(whole)) == 8
    assert_holds_nothing(tracer)
    # Nothing more is written.
    save()
    assert saved[-1] == whole


@pytest.mark.parametrize("is_held_by", ["who starts a run", "who writes the end"])
def test_saving_waits_for_nobody(make_tracer: MakeTracer, monkeypatch: pytest.MonkeyPatch, is_held_by: str) -> None:
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

# SPDX-License-Identifier: Apache-2.0
"""The trace: which tasks of which steps are in it, under which names, at which times."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from ds_fsmoe.execution.lanes import Lanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.files.traces import range_name
from ds_fsmoe.observing import trace as trace_module
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import HOLD, Schedule, Task
from ds_fsmoe.planning.timeline import simulate
from tests.fake_clock import FakeClock
from tests.lane_cases import COMPUTE, INTER, INTRA, KINDS, random_schedule
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

FIXTURES = (lanes, make_tracer)  # which pytest finds by their names here


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
        "index": 3,
        "waits_for": [1, 2],
    }


def test_times_are_those_of_the_bodies_on_the_clock_of_the_host(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    # No two readings are equal, so that times tell what came before what.
    clock, seen = FakeClock(tick_ns=1000), {}
    tracer = make_tracer(host=clock)

    def body(task: Task) -> None:
        start_us = clock.time_ns() // 1000
        clock.sleep(0.02)
        seen[range_name("L03/forward", task)] = start_us, clock.time_ns() // 1000

    tracer.step(0)
    run(lanes, tracer, two_chunks(), body=body)
    tracer.step(1)
    events = events_of(written(tracer))
    assert len(events) == len(seen) == 4
    for event in events:
        start_us, end_us = seen[event["name"]]
        assert event["ts"] < start_us
        assert event["ts"] + event["dur"] > end_us
        # The other lane may sleep meanwhile, and both read the clock.
        assert round((event["dur"] - 20_000) % 20_000) <= 20
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


def test_a_tracer_that_is_off_does_next_to_nothing(make_tracer: Callable[..., Tracer]) -> None:
    """Counted, not timed: between the call and its return there is no other call, of Python or of C."""
    schedule, tracer = two_chunks(), make_tracer(start_step=1)
    calls: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        calls.append(f"{event} {argument.__name__}" if event == "c_call" else f"{event} {frame.f_code.co_name}")

    def observed() -> list[str]:
        calls.clear()
        sys.setprofile(count)
        of_run = tracer.of_run(schedule, "L03/forward")
        of_run.begin(0, schedule.tasks[0])
        of_run.end(0, schedule.tasks[0])
        sys.setprofile(None)
        assert calls.pop() == "c_call setprofile"
        return [each for each in calls if "return" not in each]

    only_itself = ["call of_run", "call begin", "call end"]
    assert observed() == only_itself
    tracer.step(0)
    assert observed() == only_itself
    tracer.step(1)
    assert len(observed()) > 10
    tracer.step(2)
    assert observed() == only_itself


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

# SPDX-License-Identifier: Apache-2.0
"""Lanes: progress and measured spans."""

from __future__ import annotations

import threading

import pytest

from ds_fsmoe.execution.lanes import Lanes, SerialLanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.schedule import Lane, Task
from tests.fake_clock import FakeClock
from tests.lane_cases import (
    COMPUTE,
    INTER,
    INTRA,
    KINDS,
    Arithmetic,
    BodyError,
    assert_spans_fit,
    device_for,
    failing,
    lanes,
    random_schedule,
    schedule_of,
    threads,
)
from tests.waiting import LIMIT_S

FIXTURES = (lanes, threads)  # which pytest finds by their names here


def test_progress_names_the_task_begun_last_and_the_one_finished_last(threads: ThreadLanes) -> None:
    assert threads.progress() == dict.fromkeys(Lane, ("", ""))
    schedule = schedule_of(("EXPERT", COMPUTE, ()), ("A2A_IN", INTER, ()), ("A2A_IN", INTER, (0,)))
    seen = []

    def stuck(task: Task) -> None:
        if task.chunk == 2:
            seen.append(threads.progress())

    threads.run(schedule, {"EXPERT": lambda task: None, "A2A_IN": stuck}, "forward 3")
    at = "forward 3/L00"
    assert seen[0][INTER] == (f"{at}/A2A_IN/chunk2", f"{at}/A2A_IN/chunk1")
    assert threads.progress() == {
        COMPUTE: (f"{at}/EXPERT/chunk0",) * 2,
        INTRA: ("", ""),
        INTER: (f"{at}/A2A_IN/chunk2",) * 2,
    }
    with pytest.raises(ZeroDivisionError):
        threads.run(schedule_of(("EXPERT", COMPUTE, ())), {"EXPERT": lambda task: 1 // 0})
    assert threads.progress()[COMPUTE] == ("L00/EXPERT/chunk0", f"{at}/EXPERT/chunk0")


def test_spans_have_no_overlap_within_a_lane_and_respect_after(lanes: Lanes) -> None:
    recorder = Recorder(device_for(lanes))
    for seed in range(10):
        schedule = random_schedule(seed)
        case = Arithmetic(schedule, device_for(lanes), (0.3, 0.0, 0.5))
        lanes.run(schedule, case.bodies, observer=recorder)
        assert_spans_fit(schedule, recorder, slack_ms=0.01 if isinstance(lanes, StreamLanes) else 0.0)


def test_spans_measure_the_bodies_and_show_their_overlap(threads: ThreadLanes) -> None:
    schedule = schedule_of(("EXPERT", COMPUTE, ()), ("A2A_IN", INTER, ()), ("A2A_OUT", INTER, (0,)))
    clock = FakeClock()
    recorder, both = Recorder(host=clock), threading.Barrier(2, timeout=LIMIT_S)

    def body(task: Task) -> None:
        if task.kind == "A2A_OUT":
            clock.sleep(0.01)
            return
        both.wait()
        if task.kind == "EXPERT":
            clock.sleep(0.04)
        both.wait()

    threads.run(schedule, dict.fromkeys(KINDS, body), observer=recorder)
    spans = [(span.start_ms, span.end_ms) for span in recorder.timeline(schedule).spans]
    assert spans == [(0, 40), (0, 40), (40, 50)]


def test_a_recorder_has_the_last_run_only_and_all_of_it() -> None:
    schedule, other = random_schedule(1), random_schedule(2)
    recorder, lanes = Recorder(), SerialLanes()
    with pytest.raises(ValueError, match="the last observed run is of another schedule"):
        recorder.timeline(schedule)
    lanes.run(other, Arithmetic(other).bodies, observer=recorder)
    with pytest.raises(ValueError, match="the last observed run is of another schedule"):
        recorder.timeline(schedule)
    with pytest.raises(BodyError):
        lanes.run(schedule, failing(Arithmetic(schedule), 15, BodyError()), observer=recorder)
    names = ", ".join(task.name for task in schedule.tasks[16:])
    with pytest.raises(ValueError, match=f"it has no spans for {names}"):
        recorder.timeline(schedule)

# SPDX-License-Identifier: Apache-2.0
"""Lanes: streams.

The claims about streams are tested twice: on a GPU where there is one, and here on a device that is a few lines of
Python, which knows of every operation what it was ordered after.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_fsmoe.execution.lanes import dependencies_of, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.schedule import HOLD, Draft, Lane, Task
from tests.lane_cases import (
    COMPUTE,
    EVERY_LANE,
    INTER,
    INTRA,
    KINDS,
    NEEDS_GPU,
    Arithmetic,
    BodyError,
    Log,
    assert_spans_fit,
    pause,
    random_schedule,
    schedule_of,
    serial_outcome,
)
from tests.pretended_device import Device, pretended, run_pretended

FIXTURES = (pretended,)  # which pytest finds by their names here


# ---- streams, on a device that keeps account


def test_streams_wait_for_all_that_is_needed(pretended: tuple[StreamLanes, Device]) -> None:
    _, device = pretended
    compute, *links = device.streams
    assert [link.priority for link in links] == [-1, -1]
    stream_of = dict(zip(Lane, (compute, *links), strict=True))
    for seed in range(200):
        schedule = random_schedule(seed, num_tasks=seed % 40)
        compute.do(f"before {seed}")
        issued = run_pretended(pretended, schedule, f"run {seed}")
        done = [index for index, task in enumerate(schedule.tasks) if task.kind != HOLD]
        assert list(issued) == done
        for index in done:
            task = schedule.tasks[index]
            stream, after = issued[index]
            assert stream is stream_of[task.lane]
            assert f"before {seed}" in after
            assert {(f"run {seed}", each) for each in task.after if each in issued} <= after
        assert {(f"run {seed}", index) for index in done} <= compute.seen
        assert device.current is compute


def test_what_links_do_after_a_pause_waits_for_what_was_computed_in_it(pretended: tuple[StreamLanes, Device]) -> None:
    """The other half may have given up memory in between that its own stream still reads."""
    lanes, device = pretended
    schedule = schedule_of(*((("A2A_IN", INTER, ()), ("GATHER", INTRA, ()), ("EXPERT", COMPUTE, ())) * 3))
    for pauses in ((3,), (3, 6), (1, 5), (4, 8)):
        seen: dict[int, frozenset] = {}

        def body(task: Task, seen: dict[int, frozenset] = seen) -> None:
            seen[task.chunk] = device.current.seen
            device.current.do(("of the run", task.chunk))

        run, parts = lanes.begin(schedule, dict.fromkeys(KINDS, body)), []
        for stop in pauses:
            run.go(stop)
            parts.append(range(0 if not parts else parts[-1].stop, stop))
            device.current.do(("in the pause", pauses, stop))
        run.finish()
        for part, stop in zip([*parts[1:], range(pauses[-1], 9)], pauses, strict=True):
            assert all(("in the pause", pauses, stop) in seen[task] for task in part), (pauses, part)


def test_a_hold_keeps_a_stream_waiting(pretended: tuple[StreamLanes, Device]) -> None:
    draft = Draft()
    draft.add("A2A_IN", INTER, INTRA, chunk=0)
    draft.add("GATHER", INTRA, chunk=2)
    issued = run_pretended(pretended, draft.finish(), "run")
    assert ("run", 0) in issued[2][1]


def test_streams_wait_no_more_than_the_crossings(pretended: tuple[StreamLanes, Device]) -> None:
    _, device = pretended
    for seed in range(50):
        schedule, before = random_schedule(seed), device.num_waits
        run_pretended(pretended, schedule)
        crossings = dependencies_of(schedule)
        assert device.num_waits - before == crossings.count + len(crossings.links)


def test_streams_stay_apart_where_nothing_is_needed(pretended: tuple[StreamLanes, Device]) -> None:
    schedule = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, ()), ("GATHER", INTRA, ()), ("GATHER", INTRA, ()))
    issued = run_pretended(pretended, schedule, "run")
    assert [after for _, after in issued.values()] == [frozenset()] * 3 + [frozenset({("run", 2)})]


def test_events_are_made_once_and_used_again(pretended: tuple[StreamLanes, Device]) -> None:
    _, device = pretended
    for seed in range(200):
        run_pretended(pretended, random_schedule(seed))
    assert device.num_events == 256


def test_a_schedule_with_more_crossings_than_events_takes_none_twice(pretended: tuple[StreamLanes, Device]) -> None:
    """The last task waits for the first: for its own event, not for one that has been recorded again since."""
    _, device = pretended
    draft, num_tasks = Draft(), 701
    draft.add("A2A_IN", INTER)
    for chunk in range(1, num_tasks):
        after = [chunk - 1] * (chunk > 1) + [0] * (chunk == num_tasks - 1)
        draft.add("EXPERT", INTRA if chunk % 2 else COMPUTE, chunk=chunk, after=after)
    schedule = draft.finish()
    assert dependencies_of(schedule).count == num_tasks - 1
    for turn in range(3):
        issued = run_pretended(pretended, schedule, f"turn {turn}")
        assert all((f"turn {turn}", chunk - 1) in issued[chunk][1] for chunk in range(2, num_tasks))
        assert (f"turn {turn}", 0) in issued[num_tasks - 1][1]
    assert device.num_events <= num_tasks + 1


def test_the_compute_lane_is_the_stream_that_is_current(pretended: tuple[StreamLanes, Device]) -> None:
    _, device = pretended
    side = device.Stream(device)
    side.do("before")
    with device.stream(side):
        issued = run_pretended(pretended, schedule_of(("EXPERT", COMPUTE, ()), ("A2A_IN", INTER, ())), "run")
    assert issued[0][0] is side
    assert "before" in issued[1][1]
    assert {("run", 0), ("run", 1)} <= side.seen
    assert device.streams[0].seen == frozenset()


@EVERY_LANE
def test_after_an_error_the_compute_stream_waits_for_what_was_issued(
    pretended: tuple[StreamLanes, Device], lane: Lane
) -> None:
    lanes, device = pretended
    order = [*(each for each in Lane if each is not lane), lane, *Lane]
    schedule, log = schedule_of(*(("EXPERT", each, ()) for each in order)), Log()

    def body(task: Task) -> None:
        if task.lane is lane:
            raise BodyError
        device.current.do(task.chunk)

    with pytest.raises(BodyError) as caught:
        lanes.run(schedule, {"EXPERT": body}, observer=log)
    assert caught.value.__notes__ == [f"raised by task 2 of the schedule, {schedule.tasks[2].name}, on lane {lane}"]
    assert max(log.events) == ("end", 2)
    assert device.streams[0].seen >= {0, 1}
    assert device.current is device.streams[0]
    issued = run_pretended(pretended, schedule, "again")
    assert len(issued) == 6
    assert {("again", index) for index in range(6)} <= device.streams[0].seen


def test_a_run_inside_a_body_is_refused_on_streams(pretended: tuple[StreamLanes, Device]) -> None:
    lanes, _ = pretended
    schedule = schedule_of(("EXPERT", COMPUTE, ()))
    with pytest.raises(RuntimeError, match="StreamLanes are running already"):
        lanes.run(schedule, {"EXPERT": lambda task: lanes.run(schedule, {"EXPERT": lambda task: None})})
    assert len(run_pretended(pretended, schedule)) == 1


def test_progress_on_streams_is_what_was_issued_and_what_the_device_has_done(
    pretended: tuple[StreamLanes, Device],
) -> None:
    lanes, device = pretended
    schedule = schedule_of(
        ("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, (0,)), ("A2A_OUT", INTER, (1,)), ("EXPERT", COMPUTE, (2,))
    )
    assert lanes.progress() == dict.fromkeys(Lane, ("", ""))
    device.now = -1
    run_pretended(pretended, schedule, "one")
    run_pretended(pretended, schedule, "two")
    issued = {COMPUTE: "two/L00/EXPERT/chunk3", INTRA: "", INTER: "two/L00/A2A_OUT/chunk2"}
    done = []
    for device.now in (-1, 1, 2, 3, 7):
        progress = lanes.progress()
        assert {lane: begun for lane, (begun, _) in progress.items()} == issued
        done.append((progress[COMPUTE][1], progress[INTER][1]))
    one, two = "one/L00", "two/L00"
    assert done == [
        ("", ""),
        ("", f"{one}/A2A_IN/chunk0"),
        (f"{one}/EXPERT/chunk1", f"{one}/A2A_IN/chunk0"),
        (f"{one}/EXPERT/chunk1", f"{one}/A2A_OUT/chunk2"),
        (f"{two}/EXPERT/chunk1", f"{two}/A2A_OUT/chunk2"),
    ]


def test_spans_on_streams_are_the_lanes_own_times(pretended: tuple[StreamLanes, Device]) -> None:
    for seed in range(20):
        schedule, recorder = random_schedule(seed), Recorder(torch.device("cuda", 0))
        run_pretended(pretended, schedule, "run", recorder)
        assert_spans_fit(schedule, recorder)
        # Every operation takes one unit of time there.
        took_ms = [span.end_ms - span.start_ms for span in recorder.timeline(schedule).spans]
        assert took_ms == [float(task.kind != HOLD) for task in schedule.tasks]


# ---- streams, on a GPU


@NEEDS_GPU
@pytest.mark.parametrize("pair", list(itertools.combinations(Lane, 2)), ids=lambda pair: "+".join(pair))
def test_two_streams_overlap(pair: tuple[Lane, Lane]) -> None:
    lanes, recorder = make_lanes(torch.device("cuda")), Recorder(torch.device("cuda"))
    schedule = schedule_of(*(("EXPERT", lane, ()) for lane in pair))
    for _ in range(3):
        lanes.run(schedule, {"EXPERT": lambda task: pause(200, torch.device("cuda"))}, observer=recorder)
        one, other = recorder.timeline(schedule).spans
    assert max(one.start_ms, other.start_ms) < min(one.end_ms, other.end_ms)


@NEEDS_GPU
def test_a_run_on_streams_does_not_wait_for_the_device() -> None:
    lanes, schedule = make_lanes(torch.device("cuda")), random_schedule(4)
    # Once before: the first use of a kernel loads it, and that may wait.
    lanes.run(schedule, Arithmetic(schedule, torch.device("cuda")).bodies)
    case = Arithmetic(schedule, torch.device("cuda"), (20.0,))
    torch.cuda.synchronize()
    lanes.run(schedule, case.bodies)
    end = torch.cuda.Event()
    end.record()
    assert not end.query()
    assert case.outcome() == serial_outcome(schedule)


@NEEDS_GPU
def test_streams_wait_for_the_callers_stream_and_it_waits_for_them() -> None:
    lanes, side = make_lanes(torch.device("cuda")), torch.cuda.Stream()
    schedule = schedule_of(("A2A_IN", INTER, ()))
    with torch.cuda.stream(side):
        for _ in range(10):
            x = torch.zeros(1009, device="cuda")
            pause(5, x.device)
            x.add_(3)

            def double(task: Task, x: torch.Tensor = x) -> None:
                pause(5, x.device)
                x.mul_(2)

            lanes.run(schedule, {"A2A_IN": double})
            assert x.add(1).tolist() == [7.0] * 1009

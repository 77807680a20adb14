# SPDX-License-Identifier: Apache-2.0
"""Lanes on streams: what waits for what, how far the device is behind the host, and graphs that are captured; on a
device that is a few lines of Python, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import itertools
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ds_fsmoe.execution import device_tables as captures
from ds_fsmoe.execution.lanes import dependencies_of, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.schedule import HOLD, Draft, Lane, Schedule, Task
from tests.lane_cases import (
    COMPUTE,
    EVERY_LANE,
    INTER,
    INTRA,
    KINDS,
    NEEDS_GPU,
    BodyError,
    Log,
    pause,
    random_schedule,
    schedule_of,
)
from tests.pretended_device import Device, pretended, run_pretended
from tests.watchdog_cases import LOOKS_FOR_A_HANG, Hangs, file, nobody_looks_after_sigterm

FIXTURES = (pretended, file, nobody_looks_after_sigterm)  # which pytest finds by their names here
ONE_OF_EACH = schedule_of(("A2A_IN", INTER, ()), ("GATHER", INTRA, (0,)), ("EXPERT", COMPUTE, (1,)))
GLOBAL, RELAXED = 0, 2


# ---- streams, on a device that keeps account


def needed_by(schedule: Schedule) -> list[set[int]]:
    """Return for each task those that are over when it begins: what it needs, and what is before it on its lane."""
    found: list[set[int]] = []
    last: dict[Lane, int] = {}
    for index, task in enumerate(schedule.tasks):
        before = {*task.after, *([last[task.lane]] if task.lane in last else [])}
        found.append(before.union(*(found[each] for each in before)))
        last[task.lane] = index
    return found


def test_streams_wait_for_all_that_is_needed_and_no_more(pretended: tuple[StreamLanes, Device]) -> None:
    _, device = pretended
    compute, *links = device.streams
    assert [link.priority for link in links] == [-1, -1]
    stream_of = dict(zip(Lane, (compute, *links), strict=True))
    for seed in range(80):
        schedule, num_waits = random_schedule(seed, num_tasks=seed % 40), device.num_waits
        compute.do(f"before {seed}")
        issued = run_pretended(pretended, schedule, f"run {seed}")
        done = [index for index, task in enumerate(schedule.tasks) if task.kind != HOLD]
        assert list(issued) == done
        for index, needed in enumerate(needed_by(schedule)):
            if index in issued:
                stream, after = issued[index]
                assert stream is stream_of[schedule.tasks[index].lane]
                assert f"before {seed}" in after
                assert {each for each in done if (f"run {seed}", each) in after} == needed & set(done)
        assert {(f"run {seed}", index) for index in done} <= compute.seen
        assert device.current is compute
        crossings = dependencies_of(schedule)
        assert device.num_waits - num_waits == crossings.count + len(crossings.links)


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


def test_events_are_made_once_and_none_is_used_twice_in_a_run(pretended: tuple[StreamLanes, Device]) -> None:
    """The last task waits for the first: for its own event, not for one that has been recorded again since."""
    _, device = pretended
    for seed in range(200):
        run_pretended(pretended, random_schedule(seed))
    assert device.num_events == 256
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


def test_the_compute_lane_is_the_stream_that_is_current_and_a_run_ends_with_it(
    pretended: tuple[StreamLanes, Device],
) -> None:
    lanes, device = pretended
    side = device.Stream(device)
    side.do("before")
    with device.stream(side):
        issued = run_pretended(pretended, schedule_of(("EXPERT", COMPUTE, ()), ("A2A_IN", INTER, ())), "run")
    assert issued[0][0] is side
    assert "before" in issued[1][1]
    assert {("run", 0), ("run", 1)} <= side.seen
    assert device.streams[0].seen == frozenset()
    device.now = side.time - 1
    assert lanes.is_behind()
    device.now = side.time
    assert not lanes.is_behind()


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
    device.now = max(stream.time for stream in device.streams) - 1
    assert lanes.is_behind()
    device.now += 1
    assert not lanes.is_behind()
    run_pretended(pretended, schedule, "again")
    assert {("again", index) for index in range(6)} <= device.streams[0].seen


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


# ---- the host runs ahead: a run is over when it has been issued


def test_streams_are_behind_until_the_device_has_reached_the_end_of_the_last_run_or_failed(
    pretended: tuple[StreamLanes, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, device = pretended
    device.now = -1
    assert not lanes.is_behind()
    for seed in range(1, 50):
        run_pretended(pretended, random_schedule(seed), f"run {seed}")
        end = device.streams[0].time
        # All that the links were given is done by then, too.
        assert end == max(stream.time for stream in device.streams)
        device.now = end - 1
        assert lanes.is_behind()
        device.now = end
        assert not lanes.is_behind()
    # What the caller computes after the run is no matter of the lanes.
    device.current.do("the rest of the model")
    assert not lanes.is_behind()
    # A thread that asks is not to make a context on another device.
    assert set(device.selected) == {torch.device("cuda", 0)}
    device.now = -1
    assert lanes.is_behind()

    def fail(event: Device.Event) -> NoReturn:
        raise RuntimeError("an illegal memory access was encountered")

    # A failure is no hang: the error comes out where the device is used next.
    monkeypatch.setattr(Device.Event, "query", fail)
    assert not lanes.is_behind()


def test_while_the_host_runs_something_between_two_parts_of_a_run_rows_that_have_not_come_are_seen(
    pretended: tuple[StreamLanes, Device],
) -> None:
    lanes, device = pretended
    run_pretended(pretended, ONE_OF_EACH, "the run before")
    device.now = device.streams[0].time
    assert not lanes.is_behind()
    run = lanes.begin(ONE_OF_EACH, dict.fromkeys(KINDS, lambda task: device.current.do(task)))
    run.go(2, joins=True)
    # The experts' module runs now and may wait for its rows: a watchdog asks whether there is anything to wait for.
    assert lanes.is_behind()
    device.now = device.streams[0].time
    assert not lanes.is_behind()
    run.finish()
    assert lanes.is_behind()


# ---- a watchdog asks no event while a graph is captured, and never one that belongs to a graph


class Driver:
    """Stands for CUDA's: each thread has a mode, and asking for events in the usual one ends captures."""

    def __init__(self) -> None:
        self.modes: dict[int, int] = {}
        self.queries: list[tuple[Device.Event, bool, int]] = []
        """Event, whether something is captured, mode of the thread that asks."""

    def exchange(self, mode: Any) -> int:
        thread, asked = threading.get_ident(), mode._obj
        before = self.modes.get(thread, GLOBAL)
        self.modes[thread], asked.value = asked.value, before
        return 0


@pytest.fixture
def driver(pretended: tuple[StreamLanes, Device], monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver of the pretended device."""
    _, device = pretended
    made, query = Driver(), Device.Event.query

    def noted(event: Device.Event) -> bool:
        made.queries.append((event, device.is_capturing, made.modes.get(threading.get_ident(), GLOBAL)))
        return query(event)

    monkeypatch.setattr(Device.Event, "query", noted)
    monkeypatch.setattr(captures, "_exchange_capture_mode", lambda: made.exchange)
    return made


def in_a_thread(ask: Any) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


def test_no_event_is_asked_from_a_run_that_is_captured_to_the_next_that_is_not_and_a_long_capture_is_no_hang(
    pretended: tuple[StreamLanes, Device], driver: Driver, file: Path
) -> None:
    lanes, device = pretended
    device.now = -1
    run_pretended(pretended, ONE_OF_EACH, "warm up")
    assert in_a_thread(lanes.is_behind)
    driver.queries.clear()

    def ask(task: Task | None = None) -> None:
        assert not in_a_thread(lanes.is_behind)
        assert all(finished == "" for _, finished in in_a_thread(lanes.progress).values())

    def fail(task: Task) -> NoReturn:
        raise BodyError

    device.is_capturing = True
    with Hangs(lanes, file) as hangs:
        for number in range(3):
            run_pretended(pretended, random_schedule(number), f"captured {number}")
            ask()
        lanes.run(ONE_OF_EACH, dict.fromkeys(KINDS, ask))
        hangs.look(3 * LOOKS_FOR_A_HANG)
        assert hangs.files == []
    with pytest.raises(BodyError):
        lanes.run(ONE_OF_EACH, dict.fromkeys(KINDS, fail))
    device.is_capturing = False
    assert not in_a_thread(lanes.is_behind)
    assert driver.queries == []
    run_pretended(pretended, ONE_OF_EACH, "after")
    device.now = device.streams[0].time
    assert not in_a_thread(lanes.is_behind)
    assert in_a_thread(lanes.progress)[Lane.INTER][1].startswith("after/")
    assert driver.queries
    assert not any(event.is_captured for event, _, _ in driver.queries)


def test_a_capture_of_which_the_lanes_know_nothing_is_not_ended_by_a_question(
    pretended: tuple[StreamLanes, Device], driver: Driver
) -> None:
    lanes, device = pretended
    device.now = -1
    run_pretended(pretended, ONE_OF_EACH, "before")
    device.is_capturing = True  # by somebody else, of something else

    def ask() -> int:
        lanes.is_behind(), lanes.progress()
        return driver.modes[threading.get_ident()]

    assert in_a_thread(ask) == GLOBAL  # as it was
    assert driver.queries
    assert {mode for _, _, mode in driver.queries} == {RELAXED}
    assert not any(event.is_captured for event, _, _ in driver.queries)


@pytest.mark.parametrize("exchange", [None, lambda mode: 999], ids=["none", "not initialised"])
def test_where_there_is_no_driver_events_are_asked_as_ever(
    pretended: tuple[StreamLanes, Device], driver: Driver, monkeypatch: pytest.MonkeyPatch, exchange: Any
) -> None:
    lanes, device = pretended
    monkeypatch.setattr(captures, "_exchange_capture_mode", lambda: exchange)
    device.now = -1
    run_pretended(pretended, ONE_OF_EACH)
    assert in_a_thread(lanes.is_behind)
    assert driver.modes == {}


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
def test_on_a_gpu_streams_are_behind_while_it_works() -> None:
    lanes, device = make_lanes(torch.device("cuda")), torch.device("cuda")
    assert isinstance(lanes, StreamLanes)
    lanes.run(ONE_OF_EACH, dict.fromkeys(KINDS, lambda task: pause(1, device)))
    torch.cuda.synchronize()
    assert not lanes.is_behind()
    lanes.run(ONE_OF_EACH, dict.fromkeys(KINDS, lambda task: pause(100, device)))
    assert in_a_thread(lanes.is_behind)
    torch.cuda.synchronize()
    assert not in_a_thread(lanes.is_behind)


@NEEDS_GPU
def test_on_a_gpu_the_driver_knows_the_mode_and_gives_it_back() -> None:
    torch.zeros(1, device="cuda")
    exchange = captures._exchange_capture_mode()
    assert exchange is not None
    with captures.allow_queries_in_captures():
        mode = ctypes.c_int(RELAXED)
        assert exchange(ctypes.byref(mode)) == 0
        assert mode.value == RELAXED
    mode = ctypes.c_int(GLOBAL)
    assert exchange(ctypes.byref(mode)) == 0
    assert mode.value == GLOBAL

# SPDX-License-Identifier: Apache-2.0
"""Lanes: schedules run for real, on threads and on streams, held against one task after another."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from contextlib import closing

import pytest
import torch

from ds_fsmoe.execution.lanes import Body, Lanes, SerialLanes, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.planning.schedule import HOLD, Draft, Lane, Schedule, Task
from tests.lane_cases import (
    COMPUTE,
    CPU,
    EVERY_LANE,
    INTER,
    INTRA,
    KINDS,
    Arithmetic,
    Log,
    device_for,
    in_time,
    lanes,
    overlapping,
    random_schedule,
    schedule_of,
    serial_outcome,
    threads,
)
from tests.waiting import LIMIT_S, linger

FIXTURES = (lanes, overlapping, threads)  # which pytest finds by their names here


# ---- values and order


def test_the_serial_lanes_do_the_list_from_first_to_last() -> None:
    schedule, log = random_schedule(3), Log()
    SerialLanes().run(schedule, Arithmetic(schedule).bodies, observer=log)
    assert log.events == [(what, index) for index in range(len(schedule.tasks)) for what in ("begin", "end")]


def test_the_arithmetic_of_these_tests_sees_a_task_that_comes_too_early_and_a_lane_out_of_order() -> None:
    schedule = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, (0,)), ("GATHER", INTER, ()))
    early, swapped = Arithmetic(schedule), Arithmetic(schedule)
    for index in (1, 0, 2):
        early.do(schedule.tasks[index])
    for index in (2, 0, 1):
        swapped.do(schedule.tasks[index])
    values, orders = serial_outcome(schedule)
    assert early.outcome()[0] != values
    assert swapped.outcome()[0] == values
    assert swapped.outcome()[1] != orders


def test_200_runs_with_random_pauses_equal_the_serial_run(lanes: Lanes) -> None:
    rng = random.Random(7)
    for seed in range(200):
        schedule = random_schedule(seed, num_tasks=rng.randint(1, 19))
        expected = serial_outcome(schedule)
        pauses_ms = tuple(rng.choice((0.0, 0.0, 0.2, 1.1)) for _ in schedule.tasks)
        case = Arithmetic(schedule, device_for(lanes), pauses_ms)
        lanes.run(schedule, case.bodies, f"run {seed}")
        assert case.outcome() == expected, f"seed {seed}\n{schedule}"


def test_one_schedule_runs_many_times(lanes: Lanes) -> None:
    schedule = random_schedule(11)
    expected = serial_outcome(schedule)
    for turn in range(50):
        case = Arithmetic(schedule, device_for(lanes), (0.0, 0.3, 0.1) if turn % 2 else (0.2, 0.0))
        lanes.run(schedule, case.bodies)
        assert case.outcome() == expected


def test_a_task_begins_when_what_it_needs_and_the_one_before_on_its_lane_have_ended(threads: ThreadLanes) -> None:
    rng = random.Random(5)
    for seed in range(40):
        schedule, log = random_schedule(seed), Log()
        case = Arithmetic(schedule, pauses_ms=tuple(rng.choice((0.0, 0.5)) for _ in range(5)))
        threads.run(schedule, case.bodies, observer=log)
        assert sorted(log.events) == sorted((what, i) for i in range(len(schedule.tasks)) for what in ("begin", "end"))
        at = {event: position for position, event in enumerate(log.events)}
        for index, task in enumerate(schedule.tasks):
            assert at["begin", index] < at["end", index]
            for needed in task.after:
                assert at["end", needed] < at["begin", index]
        for indices in schedule.lanes.values():
            for one, other in itertools.pairwise(indices):
                assert at["end", one] < at["begin", other]


def test_an_empty_schedule_is_done_at_once(lanes: Lanes) -> None:
    lanes.run(Schedule(()), {})
    assert set(lanes.progress().values()) == {("", "")}


def test_a_hold_keeps_its_lane_waiting_and_needs_no_body(threads: ThreadLanes) -> None:
    draft, log = Draft(), Log()
    draft.add("A2A_IN", INTER, INTRA)
    draft.add("GATHER", INTRA)
    schedule = draft.finish()
    assert [task.kind for task in schedule.tasks] == ["A2A_IN", HOLD, "GATHER"]
    threads.run(schedule, {"A2A_IN": lambda task: linger(), "GATHER": lambda task: None}, observer=log)
    assert log.events == [(what, index) for index in range(3) for what in ("begin", "end")]


def test_a_hold_is_not_done_even_if_there_is_a_body_for_it(lanes: Lanes) -> None:
    done: list[str] = []
    lanes.run(schedule_of((HOLD, INTRA, ()), (HOLD, COMPUTE, (0,))), {HOLD: lambda task: done.append(task.name)})
    assert done == []


def test_compute_is_the_callers_thread_and_each_link_keeps_one_of_its_own(threads: ThreadLanes) -> None:
    seen: list[tuple[Lane, int]] = []
    bodies = {"A2A_IN": lambda task: seen.append((task.lane, threading.get_ident()))}
    schedule = schedule_of(*(("A2A_IN", lane, ()) for lane in (COMPUTE, INTRA, INTER, COMPUTE, INTRA)))
    for _ in range(3):
        threads.run(schedule, bodies)
    assert len(seen) == 15
    by_lane = {lane: {ident for at, ident in seen if at is lane} for lane in Lane}
    assert by_lane[COMPUTE] == {threading.get_ident()}
    assert [len(idents) for idents in by_lane.values()] == [1, 1, 1]
    assert len(set.union(*by_lane.values())) == 3


def test_threads_are_made_for_the_links_that_have_tasks_and_when_they_first_do(threads: ThreadLanes) -> None:
    before = set(threading.enumerate())

    def num_made() -> int:
        # Of those before, one that an earlier test has forgotten may end meanwhile.
        return len(set(threading.enumerate()) - before)

    threads.run(schedule_of(("EXPERT", COMPUTE, ())), {"EXPERT": lambda task: None})
    assert num_made() == 0
    threads.run(schedule_of(("A2A_IN", INTER, ())), {"A2A_IN": lambda task: None})
    assert num_made() == 1


# ---- overlap


@pytest.mark.parametrize("pair", list(itertools.combinations(Lane, 2)), ids=lambda pair: "+".join(pair))
def test_two_lanes_overlap(threads: ThreadLanes, pair: tuple[Lane, Lane]) -> None:
    meeting = threading.Barrier(2, timeout=LIMIT_S)
    schedule = schedule_of(*(("EXPERT", lane, ()) for lane in pair))
    in_time(lambda: threads.run(schedule, {"EXPERT": lambda task: meeting.wait() and None}))


def test_all_three_lanes_are_at_work_at_once(threads: ThreadLanes) -> None:
    meeting = threading.Barrier(3, timeout=LIMIT_S)
    schedule = schedule_of(*(("EXPERT", lane, ()) for lane in Lane))
    in_time(lambda: threads.run(schedule, {"EXPERT": lambda task: meeting.wait() and None}))


def test_a_compute_task_that_waits_does_not_hold_up_the_links(threads: ThreadLanes) -> None:
    """The links are handed all their tasks before the caller computes."""
    schedule = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, (0,)), ("GATHER", INTRA, ()))
    gathered = threading.Event()
    bodies: dict[str, Body] = {
        "A2A_IN": lambda task: None if gathered.wait(LIMIT_S) else pytest.fail("GATHER never ran"),
        "EXPERT": lambda task: None,
        "GATHER": lambda task: gathered.set(),
    }
    in_time(lambda: threads.run(schedule, bodies))


# ---- what a caller can do wrong


def test_kinds_without_a_body_are_named_before_anything_begins(lanes: Lanes) -> None:
    schedule = schedule_of(("A2A_IN", INTER, ()), ("REDUCE", INTRA, ()), ("EXPERT", COMPUTE, (0,)), (HOLD, INTRA, (2,)))
    done, log = [], Log()
    with pytest.raises(ValueError, match="no body for EXPERT, REDUCE; bodies exist for A2A_IN"):
        lanes.run(schedule, {"A2A_IN": done.append}, observer=log)
    assert (done, log.events) == ([], [])
    lanes.run(schedule, dict.fromkeys(("A2A_IN", "REDUCE", "EXPERT"), done.append))
    assert len(done) == 3


@EVERY_LANE
def test_a_run_inside_a_body_is_refused_and_the_lanes_go_on(overlapping: Lanes, lane: Lane) -> None:
    inner = schedule_of(("A2A_IN", INTER, ()))
    outer = schedule_of(("EXPERT", lane, ()))
    inside: list[Task] = []
    bodies = {"EXPERT": lambda task: overlapping.run(inner, {"A2A_IN": inside.append})}
    with pytest.raises(RuntimeError, match="running already: a nested run"):
        in_time(lambda: overlapping.run(outer, bodies))
    assert inside == []
    case = Arithmetic(random_schedule(1), device_for(overlapping))
    overlapping.run(case.schedule, case.bodies)
    assert case.outcome() == serial_outcome(case.schedule)


def test_the_serial_lanes_run_inside_a_body() -> None:
    lanes, inside = SerialLanes(), random_schedule(1)
    case = Arithmetic(inside)
    lanes.run(schedule_of(("EXPERT", COMPUTE, ())), {"EXPERT": lambda task: lanes.run(inside, case.bodies)})
    assert case.outcome() == serial_outcome(inside)


@EVERY_LANE
def test_lanes_of_its_own_run_inside_a_body(overlapping: Lanes, lane: Lane) -> None:
    inside = random_schedule(1)
    case = Arithmetic(inside, device_for(overlapping))
    outer = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", lane, ()), ("A2A_OUT", INTER, (1,)))
    with closing(make_lanes(device_for(overlapping))) as other:
        bodies = dict.fromkeys(KINDS, lambda task: None) | {"EXPERT": lambda task: other.run(inside, case.bodies)}
        in_time(lambda: overlapping.run(outer, bodies))
        assert case.outcome() == serial_outcome(inside)


def test_a_second_thread_that_runs_meanwhile_is_refused(threads: ThreadLanes) -> None:
    schedule = schedule_of(("EXPERT", COMPUTE, ()))
    refused: list[str] = []

    def from_elsewhere() -> None:
        try:
            threads.run(schedule, {"EXPERT": lambda task: None})
        except RuntimeError as error:
            refused.append(str(error))

    def body(task: Task) -> None:
        thread = threading.Thread(target=from_elsewhere)
        thread.start()
        thread.join()

    threads.run(schedule, {"EXPERT": body})
    assert len(refused) == 1
    assert "or a run of a second thread" in refused[0]


def test_closed_lanes_do_not_run(lanes: Lanes) -> None:
    schedule = schedule_of(("A2A_IN", INTER, ()))
    lanes.run(schedule, {"A2A_IN": lambda task: None})
    lanes.close()
    with pytest.raises(RuntimeError, match="these lanes are closed"):
        lanes.run(schedule, {"A2A_IN": lambda task: None})
    lanes.close()


def test_lanes_cannot_be_closed_in_a_run(lanes: Lanes) -> None:
    schedule = schedule_of(("EXPERT", COMPUTE, ()))
    with pytest.raises(RuntimeError, match="cannot be closed during a run"):
        lanes.run(schedule, {"EXPERT": lambda task: lanes.close()})
    lanes.run(schedule, {"EXPERT": lambda task: None})


def link_threads(lanes: ThreadLanes) -> set[threading.Thread]:
    """Those that a first run makes."""
    before = set(threading.enumerate())
    lanes.run(schedule_of(("A2A_IN", INTER, ()), ("GATHER", INTRA, ())), dict.fromkeys(KINDS, lambda task: None))
    made = set(threading.enumerate()) - before
    assert len(made) == 2
    return made


def test_close_ends_the_threads() -> None:
    lanes = ThreadLanes()
    made = link_threads(lanes)
    lanes.close()
    assert not any(thread.is_alive() for thread in made)


def test_lanes_that_are_forgotten_end_their_threads() -> None:
    lanes = ThreadLanes()
    made = link_threads(lanes)
    del lanes
    gc.collect()
    for thread in made:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in made)


def test_make_lanes_goes_by_the_device() -> None:
    with closing(make_lanes(CPU)) as lanes:
        assert type(lanes) is ThreadLanes
    assert type(make_lanes(CPU, overlap=False)) is SerialLanes
    assert type(make_lanes(torch.device("cuda"), overlap=False)) is SerialLanes
    assert type(make_lanes(torch.device("meta"), overlap=False)) is SerialLanes
    with pytest.raises(ValueError, match="device meta: lanes can overlap on cpu and cuda"):
        make_lanes(torch.device("meta"))


@pytest.mark.parametrize("kind", [SerialLanes, ThreadLanes, StreamLanes])
def test_every_kind_of_lanes_says_what_each_lane_may_overlap_with(kind: type[Lanes]) -> None:
    assert list(kind.overlap) == list(Lane)
    if kind is SerialLanes:
        assert all("overlaps with nothing" in text for text in kind.overlap.values())
    else:
        assert "overlaps with both links" in kind.overlap[COMPUTE]
        assert "overlaps with COMPUTE and INTER" in kind.overlap[INTRA]
        assert "overlaps with COMPUTE and INTRA" in kind.overlap[INTER]

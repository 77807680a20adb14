# SPDX-License-Identifier: Apache-2.0
"""Lanes: schedules run for real, on threads and on streams, held against one task after another; what lanes keep of a
run, the caller's modes in the bodies, progress and measured spans."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from ds_fsmoe.execution import lanes as crossings_module
from ds_fsmoe.execution.lanes import Body, Lanes, SerialLanes, dependencies_of, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.schedule import HOLD, Draft, Lane, Schedule, Task
from tests.fake_clock import FakeClock
from tests.lane_cases import (
    COMPUTE,
    CPU,
    EVERY_LANE,
    INTER,
    INTRA,
    KINDS,
    LINKS,
    Arithmetic,
    BodyError,
    Log,
    assert_spans_fit,
    device_for,
    failing,
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


def test_runs_with_random_pauses_equal_the_serial_run(lanes: Lanes) -> None:
    rng = random.Random(7)
    for seed in range(100):
        schedule = random_schedule(seed, num_tasks=rng.randint(1, 19))
        expected = serial_outcome(schedule)
        pauses_ms = tuple(rng.choice((0.0, 0.0, 0.2, 1.1)) for _ in schedule.tasks)
        for turn in range(1 + (seed % 10 == 0)):  # a schedule runs many times
            case = Arithmetic(schedule, device_for(lanes), pauses_ms)
            lanes.run(schedule, case.bodies, f"run {seed}")
            assert case.outcome() == expected, f"seed {seed}, turn {turn}\n{schedule}"


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


# ---- overlap


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


# ---- what is kept


class Held:
    """Stands for a tensor that a body holds."""


@pytest.mark.parametrize("fails_on", [None, *Lane])
def test_nothing_of_a_run_is_kept_once_it_is_over(overlapping: Lanes, fails_on: Lane | None) -> None:
    schedule = schedule_of(*(("EXPERT", lane, ()) for lane in Lane), ("EXPERT", COMPUTE, (1, 2)))

    def run() -> weakref.ref:
        held = Held()

        def body(task: Task, held: Held = held) -> None:
            if task.lane is fails_on:
                raise BodyError(task.lane)

        try:
            overlapping.run(schedule, {"EXPERT": body}, observer=Log())
        except BodyError as error:
            assert fails_on in error.args  # noqa: PT017
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert [run()() for _ in range(20)] == [None] * 20
    finally:
        gc.enable()


def test_what_is_worked_out_for_a_schedule_lives_as_long_as_it_does() -> None:
    gc.collect()
    before = len(crossings_module._known)
    schedule = random_schedule(2)
    assert dependencies_of(schedule) is dependencies_of(schedule)
    assert dependencies_of(random_schedule(2)) is not dependencies_of(schedule)
    assert len(crossings_module._known) == before + 1
    del schedule
    assert len(crossings_module._known) == before


def test_a_lane_waits_once_and_for_the_last_only() -> None:
    schedule = schedule_of(
        ("A2A_IN", INTER, ()),
        ("A2A_IN", INTER, ()),
        ("EXPERT", COMPUTE, (0, 1)),  # 1 is enough: 0 is before it on its lane
        ("EXPERT", COMPUTE, (0, 2)),  # has been waited for; is on the same lane
        ("A2A_OUT", INTER, (2, 3)),
        ("GATHER", INTRA, (1,)),
    )
    crossings = dependencies_of(schedule)
    assert [step.needs for step in crossings.steps] == [(), (), (0,), (), (1,), (2,)]
    assert [step.feeds for step in crossings.steps] == [(), (0, 2), (), (1,), (4,), (3,)]
    assert (crossings.joins, crossings.count, crossings.links) == ((3, 4), 5, (INTRA, INTER))


# ---- thread-local state


@contextmanager
def autocast_for_cuda() -> Iterator[None]:
    """As ``torch.autocast("cuda")`` leaves it, also where there is no GPU."""
    was = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", was[0])
        torch.set_autocast_dtype("cuda", was[1])


MODES: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.enable_grad(),
    "no_grad": lambda: torch.no_grad(),
    "inference_mode": lambda: torch.inference_mode(),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast_fp16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "autocast_cuda": autocast_for_cuda,
}


def state_here() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "cache": torch.is_autocast_cache_enabled(),
    }


def test_bodies_run_under_the_callers_modes_and_those_of_this_run_only(lanes: Lanes) -> None:
    schedule = schedule_of(*(("EXPERT", lane, ()) for lane in (*Lane, *Lane)))
    states = set()
    for mode in (*MODES, *reversed(MODES)):
        seen: list[dict[str, Any]] = []
        with MODES[mode]():
            lanes.run(schedule, {"EXPERT": lambda task: seen.append(state_here())})  # noqa: B023
            assert seen == [state_here()] * 6, mode
        states.add(str(seen[0]))
    assert len(states) == len(MODES)


@LINKS
def test_an_autocast_block_in_a_body_does_not_clear_the_callers_cache_of_casts(
    threads: ThreadLanes, link: Lane
) -> None:
    weight_MM = torch.randn(13, 13, requires_grad=True)

    def body(task: Task) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pass

    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = weight_MM @ torch.ones(13, 13)
        threads.run(schedule_of(("EXPERT", link, ())), {"EXPERT": body})
        after = weight_MM @ torch.ones(13, 13)

    def cast_of(product: torch.Tensor) -> Any:
        return product.grad_fn.next_functions[0][0]

    assert cast_of(before).name() == "ToCopyBackward0"
    assert cast_of(before) is cast_of(after)


# ---- progress and measured spans


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

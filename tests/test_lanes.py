# SPDX-License-Identifier: Apache-2.0
"""Lanes: schedules run for real, on threads and on streams, held against one task after another; what lanes keep of a
run, the caller's modes in the bodies, progress and measured spans; errors, and Ctrl-C at any moment."""

from __future__ import annotations

import gc
import itertools
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.execution import thread_lanes
from ds_fsmoe.execution.lanes import Body, Lanes, Observer, SerialLanes, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.schedule import HOLD, Lane, Task
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
from tests.ranks import run_on_ranks
from tests.waiting import LIMIT_S, linger, until

FIXTURES = (lanes, overlapping, threads)  # which pytest finds by their names here


# ---- values and order


def test_runs_with_random_pauses_equal_the_serial_run_and_holds_need_no_body(lanes: Lanes) -> None:
    rng = random.Random(7)
    for seed in range(100):
        schedule = random_schedule(seed, num_tasks=seed % 20)
        expected = serial_outcome(schedule)
        pauses_ms = tuple(rng.choice((0.0, 0.0, 0.2, 1.1)) for _ in schedule.tasks)
        for turn in range(1 + (seed % 10 == 0)):  # a schedule runs many times
            case = Arithmetic(schedule, device_for(lanes), pauses_ms)
            bodies = case.bodies | ({HOLD: lambda task: pytest.fail("it is done")} if seed % 2 else {})
            lanes.run(schedule, bodies, f"run {seed}")
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


def test_all_three_lanes_are_at_work_at_once_also_while_a_compute_task_waits(threads: ThreadLanes) -> None:
    """The links are handed all their tasks before the caller computes."""
    meeting, gathered = threading.Barrier(3, timeout=LIMIT_S), threading.Event()
    at_once = [("EXPERT", lane, ()) for lane in Lane]
    schedule = schedule_of(*at_once, ("A2A_IN", INTER, ()), ("A2A_OUT", COMPUTE, (3,)), ("GATHER", INTRA, ()))
    bodies: dict[str, Body] = {
        "EXPERT": lambda task: meeting.wait() and None,
        "A2A_IN": lambda task: None if gathered.wait(LIMIT_S) else pytest.fail("GATHER never ran"),
        "A2A_OUT": lambda task: None,
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
def test_a_run_inside_a_body_is_refused_one_on_other_lanes_is_not_and_the_lanes_go_on(
    overlapping: Lanes, lane: Lane
) -> None:
    inner, outer = random_schedule(1), schedule_of(("EXPERT", lane, ()), ("A2A_OUT", INTER, ()))
    case = Arithmetic(inner, device_for(overlapping))
    nothing: dict[str, Body] = dict.fromkeys(KINDS, lambda task: None)
    with pytest.raises(RuntimeError, match="running already: a nested run"):
        in_time(lambda: overlapping.run(outer, nothing | {"EXPERT": lambda task: overlapping.run(inner, case.bodies)}))
    assert case.kept == []
    with closing(make_lanes(device_for(overlapping))) as other:
        in_time(lambda: overlapping.run(outer, nothing | {"EXPERT": lambda task: other.run(inner, case.bodies)}))
        assert case.outcome() == serial_outcome(inner)


def test_the_serial_lanes_run_inside_a_body() -> None:
    lanes, inside = SerialLanes(), random_schedule(1)
    case = Arithmetic(inside)
    lanes.run(schedule_of(("EXPERT", COMPUTE, ())), {"EXPERT": lambda task: lanes.run(inside, case.bodies)})
    assert case.outcome() == serial_outcome(inside)


def test_a_second_thread_that_runs_meanwhile_is_refused(threads: ThreadLanes) -> None:
    schedule = schedule_of(("EXPERT", COMPUTE, ()))
    with ThreadPoolExecutor(1) as elsewhere:

        def body(task: Task) -> None:
            elsewhere.submit(threads.run, schedule, {"EXPERT": lambda task: None}).result(LIMIT_S)

        with pytest.raises(RuntimeError, match="or a run of a second thread"):
            threads.run(schedule, {"EXPERT": body})


def test_lanes_are_closed_between_runs_alone_and_do_not_run_then(lanes: Lanes) -> None:
    schedule = schedule_of(("EXPERT", COMPUTE, ()))
    with pytest.raises(RuntimeError, match="cannot be closed during a run"):
        lanes.run(schedule, {"EXPERT": lambda task: lanes.close()})
    lanes.run(schedule, {"EXPERT": lambda task: None})
    for _ in range(2):
        lanes.close()
        with pytest.raises(RuntimeError, match="these lanes are closed"):
            lanes.run(schedule, {"EXPERT": lambda task: None})


@pytest.mark.parametrize("is_closed", [True, False])
def test_lanes_that_are_closed_or_forgotten_end_their_threads(is_closed: bool) -> None:
    before, lanes = set(threading.enumerate()), ThreadLanes()
    lanes.run(schedule_of(("A2A_IN", INTER, ()), ("GATHER", INTRA, ())), dict.fromkeys(KINDS, lambda task: None))
    made = set(threading.enumerate()) - before
    assert len(made) == 2
    if is_closed:
        lanes.close()
        assert not any(thread.is_alive() for thread in made)
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


# ---- what is kept


@pytest.mark.parametrize("fails_on", [None, *Lane])
def test_nothing_of_a_run_is_kept_once_it_is_over(overlapping: Lanes, fails_on: Lane | None) -> None:
    schedule = schedule_of(*(("EXPERT", lane, ()) for lane in Lane), ("EXPERT", COMPUTE, (1, 2)))

    def run() -> weakref.ref:
        held = Log()

        def body(task: Task, held: Log = held) -> None:
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


def test_spans_have_no_overlap_within_a_lane_and_respect_after(lanes: Lanes) -> None:
    recorder = Recorder(device_for(lanes))
    for seed in range(10):
        schedule = random_schedule(seed)
        case = Arithmetic(schedule, device_for(lanes), (0.3, 0.0, 0.5))
        lanes.run(schedule, case.bodies, observer=recorder)
        assert_spans_fit(schedule, recorder, slack_ms=0.01 if isinstance(lanes, StreamLanes) else 0.0)


# ---- errors


@EVERY_LANE
@pytest.mark.parametrize("error_type", [BodyError, KeyboardInterrupt])
def test_the_error_of_a_body_comes_out_and_the_lanes_run_again(
    lanes: Lanes, lane: Lane, error_type: type[BaseException]
) -> None:
    for seed in range(12):
        schedule = random_schedule(seed, num_tasks=23)
        indices = [index for index in schedule.lanes[lane] if schedule.tasks[index].kind != HOLD]
        index = indices[len(indices) // 2]
        error, log = error_type("on purpose"), Log()
        bodies = failing(Arithmetic(schedule, device_for(lanes), (0.0, 0.1)), index, error)
        with pytest.raises(error_type) as caught:
            in_time(lambda: lanes.run(schedule, bodies, "forward", log))  # noqa: B023
        assert caught.value is error
        note = f"raised by task {index} of the schedule, forward/{schedule.tasks[index].name}, on lane {lane}"
        assert error.__notes__ == [note]
        begun = [i for what, i in log.events if what == "begin"]
        assert sorted(begun) == sorted(i for what, i in log.events if what == "end")
        # Nothing on that lane after it, and nothing that needs it.
        assert [i for i in begun if i in schedule.lanes[lane]][-1] == index
        assert not any(index in schedule.tasks[i].after for i in begun)
        again = Arithmetic(schedule, device_for(lanes))
        in_time(lambda: lanes.run(schedule, again.bodies))  # noqa: B023
        assert again.outcome() == serial_outcome(schedule)


def when_a_run_fails(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once the lanes have taken note of the first error."""
    failed, fail = threading.Event(), thread_lanes._ThreadRun.fail

    def noted(run: Any, error: BaseException) -> None:
        fail(run, error)
        failed.set()

    monkeypatch.setattr(thread_lanes._ThreadRun, "fail", noted)
    return failed


@EVERY_LANE
def test_after_an_error_nothing_begins_and_what_runs_ends_first(
    threads: ThreadLanes, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lane fails while the others are in a body; each has a second task, which never begins."""
    others = [each for each in Lane if each is not lane]
    failed = when_a_run_fails(monkeypatch)
    schedule = schedule_of(*(("EXPERT", each, ()) for each in (lane, *others, lane, *others)))
    running = threading.Barrier(3, timeout=LIMIT_S)
    begun, ended = [], []

    def body(task: Task) -> None:
        begun.append(task.chunk)
        running.wait()
        if task.lane is lane:
            raise BodyError
        failed.wait(LIMIT_S)
        linger()  # were anything to begin after the error, or the run to end before its tasks
        ended.append(task.chunk)

    with pytest.raises(BodyError):
        in_time(lambda: threads.run(schedule, {"EXPERT": body}))
    assert (sorted(begun), sorted(ended)) == ([0, 1, 2], [1, 2])


def test_of_two_errors_the_first_comes_out_and_tells_of_the_other(
    threads: ThreadLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, failed = threading.Barrier(2, timeout=LIMIT_S), when_a_run_fails(monkeypatch)

    def body(task: Task) -> None:
        running.wait()
        if task.lane is COMPUTE:
            failed.wait(LIMIT_S)
        raise BodyError(task.lane)

    schedule = schedule_of(("EXPERT", COMPUTE, ()), ("EXPERT", INTER, ()))
    with pytest.raises(BodyError, match="inter") as caught:
        in_time(lambda: threads.run(schedule, {"EXPERT": body}))
    assert len(caught.value.__notes__) == 2
    assert caught.value.__notes__[1].startswith("meanwhile: BodyError(")
    assert "task 0 of the schedule, L00/EXPERT/chunk0, on lane compute" in caught.value.__notes__[1]


@EVERY_LANE
def test_the_error_of_an_observer_is_that_of_its_task(lanes: Lanes, lane: Lane) -> None:
    class Fails(Observer):
        def begin(self, index: int, task: Task) -> None:
            if task.lane is lane:
                raise BodyError

    schedule = schedule_of(*(("EXPERT", each, ()) for each in Lane))
    with pytest.raises(BodyError) as caught:
        in_time(lambda: lanes.run(schedule, {"EXPERT": lambda task: None}, observer=Fails()))
    assert caught.value.__notes__[0].endswith(f"on lane {lane}")


# ---- Ctrl-C, in a process of its own: some signals are for the main thread only


def raise_at(number: int, armed: list[bool] | None = None) -> list[bool]:
    """From now on this signal raises in the main thread; return a list that grows with each.

    With `armed` it raises only while that is not empty, and empties it: the kernel may give an alarm to a
    thread that the processor takes up only after the alarm was switched off.  A list, as the lock of an
    event could be held by the very thread that is interrupted.
    """
    raised: list[bool] = []

    def interrupt(*_: Any) -> None:
        if armed is not None:
            if not armed:
                return
            armed.clear()
        raised.append(True)
        raise KeyboardInterrupt

    signal.signal(number, interrupt)
    return raised


def interrupt(raised: list[bool], count: int) -> None:
    """Interrupt the main thread, which is about to wait and should be at it."""
    linger()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    until(lambda: len(raised) == count)


def interrupted_twice(first: str) -> tuple[list[str], list[str]]:
    """What of a link that is stuck had ended when the run was over, and what has after another run."""
    raised, lanes, ended = raise_at(signal.SIGINT), ThreadLanes(), []
    schedule = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, ()), ("A2A_OUT", INTER, ()))
    computing, computed, is_out = threading.Event(), threading.Event(), threading.Event()

    def stuck(task: Task) -> None:
        (computing if first == "while it computes" else computed).wait(LIMIT_S)
        for count in (1, 2):
            interrupt(raised, count)
        is_out.wait(LIMIT_S)
        ended.append("stuck")

    def compute(task: Task) -> None:
        computing.set()
        if first == "while it computes":
            until(lambda: False)
        computed.set()

    with pytest.raises(KeyboardInterrupt):
        lanes.run(schedule, {"A2A_IN": stuck, "EXPERT": compute, "A2A_OUT": stuck})
    then = list(ended)
    is_out.set()
    lanes.run(schedule, dict.fromkeys(KINDS, lambda task: ended.append(task.kind)))
    return then, [kind for kind in ended if kind != "EXPERT"]


def interrupted_anywhere() -> int:
    """How many runs were interrupted; after each the lanes compute what they should."""
    rng, lanes, armed = random.Random(1), ThreadLanes(), list[bool]()
    raised = raise_at(signal.SIGALRM, armed)
    cases = [(random_schedule(seed), serial_outcome(random_schedule(seed))) for seed in range(10)]
    while len(raised) < 100:
        schedule, expected = cases[rng.randrange(10)]
        case = Arithmetic(schedule)
        with suppress(KeyboardInterrupt):
            try:
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
                lanes.run(schedule, case.bodies)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                armed.clear()
        case = Arithmetic(schedule)
        lanes.run(schedule, case.bodies)
        assert case.outcome() == expected
    return len(raised)


def interrupted(rank: int, world_size: int) -> list[Any]:
    return [interrupted_twice("while it computes"), interrupted_twice("while it waits"), interrupted_anywhere()]


def test_ctrl_c_at_any_moment_leaves_the_lanes_usable_and_a_second_one_waits_for_no_link_that_is_stuck(
    tmp_path: Path,
) -> None:
    [(*twice, anywhere)] = run_on_ranks(interrupted, 1, tmp_path)
    assert twice == [([], ["stuck", "A2A_IN", "A2A_OUT"])] * 2
    assert anywhere == 100

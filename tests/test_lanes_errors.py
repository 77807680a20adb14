# SPDX-License-Identifier: Apache-2.0
"""Lanes: a body that raises, an observer that raises, and Ctrl-C at any moment."""

from __future__ import annotations

import random
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.execution import thread_lanes
from ds_fsmoe.execution.lanes import Lanes, Observer
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.planning.schedule import HOLD, Lane, Task
from tests.lane_cases import (
    COMPUTE,
    EVERY_LANE,
    INTER,
    KINDS,
    Arithmetic,
    BodyError,
    Log,
    device_for,
    failing,
    in_time,
    lanes,
    random_schedule,
    schedule_of,
    serial_outcome,
    threads,
)
from tests.ranks import run_on_ranks
from tests.waiting import LIMIT_S, linger, until

FIXTURES = (lanes, threads)  # which pytest finds by their names here


@EVERY_LANE
@pytest.mark.parametrize("error_type", [BodyError, KeyboardInterrupt])
def test_the_error_of_a_body_comes_out_and_the_lanes_run_again(
    lanes: Lanes, lane: Lane, error_type: type[BaseException]
) -> None:
    for seed in range(12):
        schedule = random_schedule(seed, num_tasks=23)
        indices = [index for index in schedule.lanes[lane] if schedule.tasks[index].kind != HOLD]
        if not indices:
            continue
        index = indices[len(indices) // 2]
        error, log = error_type("on purpose"), Log()
        case = Arithmetic(schedule, device_for(lanes), (0.0, 0.1))
        bodies = failing(case, index, error)
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


def test_an_observer_hears_the_end_of_a_task_that_fails(lanes: Lanes) -> None:
    schedule, log = schedule_of(("EXPERT", COMPUTE, ())), Log()
    with pytest.raises(ZeroDivisionError):
        lanes.run(schedule, {"EXPERT": lambda task: 1 // 0}, observer=log)
    assert log.events == [("begin", 0), ("end", 0)]


# ---- Ctrl-C, in a process of its own: some signals are for the main thread only


def raise_at(number: int) -> list[bool]:
    """From now on this signal raises in the main thread; return a list that grows with each."""
    raised: list[bool] = []

    def interrupt(*_: Any) -> None:
        raised.append(True)
        raise KeyboardInterrupt

    signal.signal(number, interrupt)
    return raised


def interrupt(raised: list[bool], count: int) -> None:
    """Interrupt the main thread, which is about to wait and should be at it."""
    linger()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    until(lambda: len(raised) == count)


def interrupted_once(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What had ended when the run was over, and what has after another run."""
    raised, lanes, ended = raise_at(signal.SIGINT), ThreadLanes(), []
    schedule = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, (0,)), ("A2A_OUT", INTER, (1,)))

    def note(task: Task) -> None:
        ended.append(task.kind)

    def slow(task: Task) -> None:
        interrupt(raised, 1)
        linger()
        note(task)

    with pytest.raises(KeyboardInterrupt):
        lanes.run(schedule, {"A2A_IN": slow, "EXPERT": note, "A2A_OUT": note})
    then = list(ended)
    lanes.run(schedule, dict.fromkeys(KINDS, note))
    return then, ended


def test_ctrl_c_while_the_caller_waits_ends_the_run_and_leaves_the_lanes_usable(tmp_path: Path) -> None:
    [outcome] = run_on_ranks(interrupted_once, 1, tmp_path)
    assert outcome == (["A2A_IN"], ["A2A_IN", "A2A_IN", "EXPERT", "A2A_OUT"])


def interrupted_twice(rank: int, world_size: int, first: str) -> tuple[list[str], list[str]]:
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


@pytest.mark.parametrize("first", ["while it computes", "while it waits"])
def test_a_second_ctrl_c_does_not_wait_for_a_link_that_is_stuck(first: str, tmp_path: Path) -> None:
    [outcome] = run_on_ranks(interrupted_twice, 1, tmp_path, first)
    assert outcome == ([], ["stuck", "A2A_IN", "A2A_OUT"])


def interrupted_anywhere(rank: int, world_size: int) -> int:
    """How many runs were interrupted; after each the lanes compute what they should."""
    rng, lanes, raised = random.Random(1), ThreadLanes(), raise_at(signal.SIGALRM)
    cases = [(random_schedule(seed), serial_outcome(random_schedule(seed))) for seed in range(10)]
    while len(raised) < 100:
        schedule, expected = cases[rng.randrange(10)]
        case = Arithmetic(schedule)
        with suppress(KeyboardInterrupt):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
                lanes.run(schedule, case.bodies)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        case = Arithmetic(schedule)
        lanes.run(schedule, case.bodies)
        assert case.outcome() == expected
    return len(raised)


def test_ctrl_c_at_any_moment_leaves_the_lanes_usable(tmp_path: Path) -> None:
    assert run_on_ranks(interrupted_anywhere, 1, tmp_path) == [100]

# SPDX-License-Identifier: Apache-2.0
"""Lanes: schedules run for real, on threads and on streams, held against one task after another.

The claims about streams are tested twice: on a GPU where there is one, and here on a device that is a few lines of
Python, which knows of every operation what it was ordered after.
"""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.planning.schedule import HOLD, Draft, Lane, Schedule, Task
from ds_fsmoe.runtime import crossings as crossings_module
from ds_fsmoe.runtime.crossings import crossings_of
from ds_fsmoe.runtime.lanes import Body, Lanes, Observer, SerialLanes, make_lanes
from ds_fsmoe.runtime.spans import Recorder
from ds_fsmoe.runtime.stream_lanes import StreamLanes
from ds_fsmoe.runtime.thread_lanes import ThreadLanes
from tests.ranks import run_on_ranks

COMPUTE, INTRA, INTER = Lane
CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: there is none")
LINKS = pytest.mark.parametrize("link", [INTRA, INTER])
EVERY_LANE = pytest.mark.parametrize("lane", Lane)
KINDS = ("A2A_IN", "GATHER", "EXPERT", "REDUCE", "A2A_OUT")
# What no test comes near unless something hangs.
LIMIT_S = 30


@pytest.fixture(params=["serial", "threads", pytest.param("streams", marks=NEEDS_GPU)])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    """Every kind of lanes."""
    made = make_lanes(device_of(request.param), overlap=request.param != "serial")
    yield made
    made.close()


@pytest.fixture(params=["threads", pytest.param("streams", marks=NEEDS_GPU)])
def overlapping(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    made = make_lanes(device_of(request.param))
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadLanes]:
    with closing(ThreadLanes()) as made:
        yield made


def device_of(name: str) -> torch.device:
    return torch.device("cuda") if name == "streams" else CPU


def device_for(lanes: Lanes) -> torch.device:
    return torch.device("cuda") if isinstance(lanes, StreamLanes) else CPU


def in_time(function: Callable[[], None]) -> None:
    """``function()`` in a thread of its own; fails, instead of hanging, if that does not come back."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), f"still at it after {LIMIT_S} s"
    if raised:
        raise raised[0]


def schedule_of(*tasks: tuple[str, Lane, tuple[int, ...]]) -> Schedule:
    """From (kind, lane, after); a task's chunk is its index."""
    return Schedule(tuple(Task(kind, lane, chunk, after=after) for chunk, (kind, lane, after) in enumerate(tasks)))


def random_schedule(seed: int, num_tasks: int = 17) -> Schedule:
    """Tasks on random lanes, some on two at once, that need random earlier ones; a task's chunk is its index."""
    rng = random.Random(seed)
    draft, count = Draft(), 0
    while count < num_tasks:
        on = rng.sample(list(Lane), 2 if rng.random() < 0.15 else 1)
        after = rng.sample(range(count), min(count, rng.choice((0, 1, 1, 2, 3))))
        draft.add(rng.choice(KINDS), *on, chunk=count, after=after)
        count += len(on)
    return draft.finish()


class Arithmetic:
    """Bodies whose results tell whether each task saw all that it needs, and the order within each lane.

    ``values`` [tasks, 3]: what each task made of its needs' values, 0 before it has; ``orders`` [lanes]: numbers that
    depend on the order of the tasks of a lane.
    """

    MODULUS = 10007

    def __init__(self, schedule: Schedule, device: torch.device = CPU, pauses_ms: tuple[float, ...] = (0.0,)) -> None:
        self.schedule = schedule
        self.device = device
        self.values = torch.zeros(len(schedule.tasks), 3, dtype=torch.int64, device=device)
        self.orders = {lane: torch.zeros((), dtype=torch.int64, device=device) for lane in Lane}
        self.kept: list[torch.Tensor] = []  # made on one lane, and maybe read on another: until the run is over
        self.pauses_ms = dict(zip(range(len(schedule.tasks)), itertools.cycle(pauses_ms), strict=False))
        self.bodies: dict[str, Body] = dict.fromkeys(KINDS, self.do)

    def do(self, task: Task) -> None:
        index = task.chunk
        assert self.schedule.tasks[index] is task
        pause(self.pauses_ms[index], self.device)
        value = torch.full((3,), 7 * index + 3, dtype=torch.int64, device=self.device)
        for needed in task.after:
            value = value + self.values[needed] * (needed + 2)
        self.kept.append(value)
        self.values[index].copy_(value % self.MODULUS)
        self.orders[task.lane].mul_(31).add_(value[0]).remainder_(self.MODULUS)

    def outcome(self) -> tuple[list[list[int]], list[int]]:
        return self.values.tolist(), [order.item() for order in self.orders.values()]


def pause(pause_ms: float, device: torch.device) -> None:
    """Keep the lane busy."""
    if device.type == "cuda":
        torch.cuda._sleep(int(pause_ms * 1e6))  # in cycles, of which there are one to two million in a millisecond
    elif pause_ms:
        time.sleep(pause_ms / 1e3)


def serial_outcome(schedule: Schedule) -> tuple[list[list[int]], list[int]]:
    case = Arithmetic(schedule)
    SerialLanes().run(schedule, case.bodies)
    return case.outcome()


class Log(Observer):
    """What happened, in order: ("begin" or "end", index)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def begin(self, index: int, task: Task) -> None:
        self.events.append(("begin", index))

    def end(self, index: int, task: Task) -> None:
        self.events.append(("end", index))


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
    threads.run(schedule, {"A2A_IN": lambda task: time.sleep(0.05), "GATHER": lambda task: None}, observer=log)
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
    before = threading.active_count()
    threads.run(schedule_of(("EXPERT", COMPUTE, ())), {"EXPERT": lambda task: None})
    assert threading.active_count() == before
    threads.run(schedule_of(("A2A_IN", INTER, ())), {"A2A_IN": lambda task: None})
    assert threading.active_count() == before + 1


# ---- overlap


@pytest.mark.parametrize("pair", list(itertools.combinations(Lane, 2)), ids=lambda pair: "+".join(pair))
def test_two_lanes_overlap(threads: ThreadLanes, pair: tuple[Lane, Lane]) -> None:
    schedule = schedule_of(*(("EXPERT", lane, ()) for lane in pair))
    took_ms: list[float] = []
    # Until it has been seen, within reason: another process may have had the processor.
    while not took_ms or (min(took_ms) >= 80 and len(took_ms) < 20):
        start_s = time.perf_counter()
        threads.run(schedule, {"EXPERT": lambda task: time.sleep(0.05)})
        took_ms.append((time.perf_counter() - start_s) * 1e3)
    assert 50 <= min(took_ms) < 80


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
    with pytest.raises(ValueError, match="no body for EXPERT, REDUCE: there are bodies for A2A_IN"):
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
    with pytest.raises(RuntimeError, match="in a run already: a run inside a body"):
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
    assert "or from a second thread" in refused[0]


def test_closed_lanes_do_not_run(lanes: Lanes) -> None:
    schedule = schedule_of(("A2A_IN", INTER, ()))
    lanes.run(schedule, {"A2A_IN": lambda task: None})
    lanes.close()
    with pytest.raises(RuntimeError, match="these lanes are closed"):
        lanes.run(schedule, {"A2A_IN": lambda task: None})
    lanes.close()


def test_lanes_cannot_be_closed_in_a_run(lanes: Lanes) -> None:
    schedule = schedule_of(("EXPERT", COMPUTE, ()))
    with pytest.raises(RuntimeError, match="cannot be closed in a run"):
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
    with pytest.raises(ValueError, match="device meta: lanes overlap on cpu and cuda"):
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


# ---- errors


class BodyError(Exception):
    pass


def failing(case: Arithmetic, index: int, error: BaseException) -> dict[str, Body]:
    """The bodies of a case, of which that of one task raises."""

    def body(task: Task) -> None:
        if task.chunk == index:
            raise error
        case.do(task)

    return dict.fromkeys(KINDS, body)


@EVERY_LANE
@pytest.mark.parametrize("error_type", [BodyError, KeyboardInterrupt])
def test_the_error_of_a_body_comes_out_and_the_lanes_run_again(
    lanes: Lanes, lane: Lane, error_type: type[BaseException]
) -> None:
    for seed in range(25):
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


@EVERY_LANE
def test_after_an_error_nothing_begins_and_what_runs_ends_first(threads: ThreadLanes, lane: Lane) -> None:
    """One lane fails while the others are in a body; each has a second task, which never begins."""
    others = [each for each in Lane if each is not lane]
    schedule = schedule_of(*(("EXPERT", each, ()) for each in (lane, *others, lane, *others)))
    running = threading.Barrier(3, timeout=LIMIT_S)
    begun, ended = [], []

    def body(task: Task) -> None:
        begun.append(task.chunk)
        running.wait()
        if task.lane is lane:
            raise BodyError
        time.sleep(0.1)
        ended.append(task.chunk)

    with pytest.raises(BodyError):
        in_time(lambda: threads.run(schedule, {"EXPERT": body}))
    assert (sorted(begun), sorted(ended)) == ([0, 1, 2], [1, 2])


def test_of_two_errors_the_first_comes_out_and_tells_of_the_other(threads: ThreadLanes) -> None:
    running = threading.Barrier(2, timeout=LIMIT_S)

    def body(task: Task) -> None:
        running.wait()
        if task.lane is COMPUTE:
            time.sleep(0.1)
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


def python(script: str, *arguments: str) -> str:
    """What a script prints, in a process of its own: some signals are for the main thread only."""
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


INTERRUPTED_WAIT = """
import signal, threading, time
from tests.test_lanes import COMPUTE, INTER, ThreadLanes, schedule_of
lanes, ended = ThreadLanes(), []
schedule = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, (0,)), ("A2A_OUT", INTER, (1,)))
def slow(task):
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(0.3)
    ended.append(task.kind)
try:
    lanes.run(schedule, {"A2A_IN": slow, "EXPERT": ended.append, "A2A_OUT": ended.append})
except KeyboardInterrupt:
    print("interrupted", ended)
lanes.run(schedule, dict.fromkeys(("A2A_IN", "EXPERT", "A2A_OUT"), lambda task: ended.append(task.kind)))
print(ended)
"""


def test_ctrl_c_while_the_caller_waits_ends_the_run_and_leaves_the_lanes_usable() -> None:
    lines = python(INTERRUPTED_WAIT).splitlines()
    assert lines == ["interrupted ['A2A_IN']", "['A2A_IN', 'A2A_IN', 'EXPERT', 'A2A_OUT']"]


INTERRUPTED_TWICE = """
import signal, sys, threading, time
from tests.test_lanes import COMPUTE, INTER, ThreadLanes, schedule_of
lanes, ended, main = ThreadLanes(), [], threading.main_thread().ident
schedule = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, ()), ("A2A_OUT", INTER, ()))
def stuck(task):
    for _ in range(2):
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGINT)
    time.sleep(0.7)
    ended.append("stuck")
def compute(task):
    if sys.argv[1] == "while it computes":
        time.sleep(0.5)
try:
    lanes.run(schedule, {"A2A_IN": stuck, "EXPERT": compute, "A2A_OUT": stuck})
except KeyboardInterrupt:
    print("interrupted", ended)
lanes.run(schedule, dict.fromkeys(("A2A_IN", "EXPERT", "A2A_OUT"), lambda task: ended.append(task.kind)))
print([kind for kind in ended if kind != "EXPERT"])
"""


@pytest.mark.parametrize("first", ["while it computes", "while it waits"])
def test_a_second_ctrl_c_does_not_wait_for_a_link_that_is_stuck(first: str) -> None:
    lines = python(INTERRUPTED_TWICE, first).splitlines()
    assert lines == ["interrupted []", "['stuck', 'A2A_IN', 'A2A_OUT']"]


INTERRUPTED_ANYWHERE = """
import random, signal
from tests.test_lanes import Arithmetic, ThreadLanes, random_schedule, serial_outcome
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
rng, lanes, count = random.Random(1), ThreadLanes(), 0
cases = [(random_schedule(seed), serial_outcome(random_schedule(seed))) for seed in range(10)]
for turn in range(400):
    schedule, expected = cases[turn % 10]
    case = Arithmetic(schedule)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
            lanes.run(schedule, case.bodies)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        count += 1
    case = Arithmetic(schedule)
    lanes.run(schedule, case.bodies)
    assert case.outcome() == expected
print(count)
"""


def test_ctrl_c_at_any_moment_leaves_the_lanes_usable() -> None:
    assert 40 <= int(python(INTERRUPTED_ANYWHERE)) <= 400


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
    assert crossings_of(schedule) is crossings_of(schedule)
    assert crossings_of(random_schedule(2)) is not crossings_of(schedule)
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
    crossings = crossings_of(schedule)
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
def test_what_a_link_computes_follows_the_callers_modes(threads: ThreadLanes, link: Lane) -> None:
    weight_MM = torch.randn(13, 13, requires_grad=True)
    found: dict[str, torch.Tensor] = {}

    def run_in(mode: str) -> torch.Tensor:
        with MODES[mode]():
            bodies = {"EXPERT": lambda task: found.update({mode: weight_MM @ weight_MM})}
            threads.run(schedule_of(("EXPERT", link, ())), bodies)
        return found[mode]

    assert run_in("no_grad").requires_grad is False
    assert run_in("inference_mode").is_inference()
    assert run_in("autocast").dtype is torch.bfloat16
    assert run_in("autocast_fp16").dtype is torch.float16
    plain = run_in("plain")
    assert (plain.requires_grad, plain.is_inference(), plain.dtype) == (True, False, torch.float32)
    plain.sum().backward()
    assert weight_MM.grad is not None


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


# ---- progress and spans


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


def assert_spans_fit(schedule: Schedule, recorder: Recorder, slack_ms: float = 0.0) -> None:
    """No overlap within a lane, nothing before what it needs, and what was waited for is the last of that.

    ``slack_ms`` is what the clock may be wrong by.
    """
    timeline = recorder.timeline(schedule)
    spans = timeline.spans
    assert tuple(span.task for span in spans) == schedule.tasks
    last: dict[Lane, int] = {}
    for index, span in enumerate(spans):
        assert 0 <= span.start_ms <= span.end_ms
        needed = [*span.task.after, *([last[span.task.lane]] if span.task.lane in last else [])]
        assert all(spans[each].end_ms <= span.start_ms + slack_ms for each in needed)
        assert (span.waited_for is None) == (not needed)
        if needed:
            assert span.waited_for in needed
            assert spans[span.waited_for].end_ms == max(spans[each].end_ms for each in needed)
        last[span.task.lane] = index
    for lane in Lane:
        assert timeline.busy_ms(lane) <= timeline.makespan_ms + slack_ms * len(spans) + 1e-9
    assert timeline.gantt()
    assert timeline.chrome_trace()
    path = timeline.critical_path()
    assert path[0].waited_for is None
    assert path[-1].end_ms == timeline.makespan_ms


def test_spans_have_no_overlap_within_a_lane_and_respect_after(lanes: Lanes) -> None:
    recorder = Recorder(device_for(lanes))
    for seed in range(10):
        schedule = random_schedule(seed)
        case = Arithmetic(schedule, device_for(lanes), (0.3, 0.0, 0.5))
        lanes.run(schedule, case.bodies, observer=recorder)
        assert_spans_fit(schedule, recorder, slack_ms=0.01 if isinstance(lanes, StreamLanes) else 0.0)


def test_spans_measure_the_bodies_and_show_their_overlap(threads: ThreadLanes) -> None:
    schedule = schedule_of(("EXPERT", COMPUTE, ()), ("A2A_IN", INTER, ()), ("A2A_OUT", INTER, (0,)))
    recorder = Recorder()
    threads.run(schedule, dict.fromkeys(KINDS, lambda task: time.sleep(0.04)), observer=recorder)
    expert, a2a_in, a2a_out = recorder.timeline(schedule).spans
    assert all(span.end_ms - span.start_ms >= 40 for span in (expert, a2a_in, a2a_out))
    assert a2a_in.start_ms < expert.end_ms
    assert expert.start_ms < a2a_in.end_ms
    assert a2a_out.start_ms >= max(expert.end_ms, a2a_in.end_ms)


def test_a_recorder_has_the_last_run_only_and_all_of_it() -> None:
    schedule, other = random_schedule(1), random_schedule(2)
    recorder, lanes = Recorder(), SerialLanes()
    with pytest.raises(ValueError, match="the last run that was observed is not one of this schedule"):
        recorder.timeline(schedule)
    lanes.run(other, Arithmetic(other).bodies, observer=recorder)
    with pytest.raises(ValueError, match="the last run that was observed is not one of this schedule"):
        recorder.timeline(schedule)
    with pytest.raises(BodyError):
        lanes.run(schedule, failing(Arithmetic(schedule), 15, BodyError()), observer=recorder)
    names = ", ".join(task.name for task in schedule.tasks[16:])
    with pytest.raises(ValueError, match=f"it has no spans for {names}"):
        recorder.timeline(schedule)


# ---- collectives


NUM_CHUNKS, ROWS, WIDTH = 5, 7, 13


def layer_schedule() -> Schedule:
    draft = Draft()
    rows = range(NUM_CHUNKS)
    a2a_in = [draft.add("A2A_IN", INTER, chunk=chunk) for chunk in rows]
    gather = [draft.add("GATHER", INTRA, chunk=chunk, after=[a2a_in[chunk]]) for chunk in rows]
    expert = [draft.add("EXPERT", COMPUTE, chunk=chunk, after=[gather[chunk]]) for chunk in rows]
    reduce = [draft.add("REDUCE", INTRA, chunk=chunk, after=[expert[chunk]]) for chunk in rows]
    for chunk in rows:
        draft.add("A2A_OUT", INTER, chunk=chunk, after=[reduce[chunk]])
    return draft.finish()


def layer_on_a_rank(rank: int, world_size: int) -> tuple[bool, bool, tuple[float, float, float]]:
    """Chunks through all five kinds, serial and on threads, with a process group per link; and a late rank.

    Returns:
        whether the two agree; whether all of it was computed; (start of A2A_IN, end of EXPERT, end of A2A_IN) in ms.
    """
    groups = {INTRA: dist.new_group(), INTER: dist.new_group()}
    x_cNM = torch.randn(NUM_CHUNKS, world_size * ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    weight_MM = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99))
    schedule = layer_schedule()

    def through(lanes: Lanes) -> torch.Tensor:
        arrived_cNM = torch.empty_like(x_cNM)
        gathered_cPNM = x_cNM.new_empty(NUM_CHUNKS, world_size * world_size * ROWS, WIDTH)
        computed_cPNM, shared_cPNM = torch.empty_like(gathered_cPNM), torch.empty_like(gathered_cPNM)
        reduced_cNM, out_cNM = torch.empty_like(x_cNM), torch.full_like(x_cNM, torch.nan)

        def reduce(task: Task) -> None:
            shared = shared_cPNM[task.chunk]
            dist.all_to_all_single(shared, computed_cPNM[task.chunk], group=groups[INTRA])
            torch.sum(shared.view(world_size, -1, WIDTH), 0, out=reduced_cNM[task.chunk])

        bodies: dict[str, Body] = {
            "A2A_IN": lambda t: dist.all_to_all_single(arrived_cNM[t.chunk], x_cNM[t.chunk], group=groups[INTER]),
            "GATHER": lambda t: dist.all_gather_into_tensor(
                gathered_cPNM[t.chunk], arrived_cNM[t.chunk], group=groups[INTRA]
            ),
            "EXPERT": lambda t: torch.mm(gathered_cPNM[t.chunk], weight_MM, out=computed_cPNM[t.chunk]),
            "REDUCE": reduce,
            "A2A_OUT": lambda t: dist.all_to_all_single(out_cNM[t.chunk], reduced_cNM[t.chunk], group=groups[INTER]),
        }
        lanes.run(schedule, bodies)
        return out_cNM

    expected = through(SerialLanes())
    # An all-gather of what the other rank has too, and a sum over ranks: every row comes back world_size times.
    is_right = torch.allclose(expected, world_size * (x_cNM @ weight_MM), rtol=1e-5, atol=1e-4)
    with closing(ThreadLanes()) as lanes:
        is_equal = all(torch.equal(through(lanes), expected) for _ in range(20))
        late, recorder = schedule_of(("A2A_IN", INTER, ()), ("EXPERT", COMPUTE, ())), Recorder()

        def exchange(task: Task) -> None:
            if rank == 1:
                time.sleep(0.5)
            dist.all_to_all_single(torch.empty_like(x_cNM[0]), x_cNM[0], group=groups[INTER])

        dist.barrier()
        lanes.run(late, {"A2A_IN": exchange, "EXPERT": lambda task: weight_MM @ weight_MM}, observer=recorder)
    a2a_in, expert = recorder.timeline(late).spans
    return is_equal, is_right, (a2a_in.start_ms, expert.end_ms, a2a_in.end_ms)


def test_two_ranks_run_collectives_on_both_links_and_compute_beside_them(tmp_path: Path) -> None:
    for is_equal, is_right, (a2a_start_ms, expert_end_ms, a2a_end_ms) in run_on_ranks(layer_on_a_rank, 2, tmp_path):
        assert is_equal
        assert is_right
        # The all-to-all waits for the late rank, and the product is done long before it ends.
        assert a2a_end_ms - a2a_start_ms > 200
        assert expert_end_ms < a2a_end_ms - 100


# ---- streams, on a device that keeps account


class Device:
    """Stands for a CUDA device. An operation is a name; a stream's ``seen`` are those its next one is ordered after.

    There is nothing in it to wait for the device with, apart from timing events.
    """

    def __init__(self) -> None:
        self.now = 0
        """The events recorded up to this time have come to pass."""
        self.num_events = 0
        self.num_waits = 0
        default = self.Stream(self)
        self.current = default
        self.streams = [default]

    class Stream:
        def __init__(self, device: Device, priority: int = 0) -> None:
            self.device, self.priority = device, priority
            self.seen: frozenset[Any] = frozenset()
            self.time = 0

        def do(self, operation: Any) -> None:
            self.seen |= {operation}
            self.time += 1

        def wait_event(self, event: Device.Event) -> None:
            assert event.stream is not None, "waits for an event that was never recorded"
            assert event.stream is not self, "waits for itself"
            self.seen |= event.seen
            self.time = max(self.time, event.time)
            self.device.num_waits += 1

        def wait_stream(self, stream: Device.Stream) -> None:
            event = Device.Event(self.device)
            event.record(stream)
            self.wait_event(event)

    class Event:
        def __init__(self, device: Device) -> None:
            self.device = device
            self.stream: Device.Stream | None = None
            device.num_events += 1

        def record(self, stream: Device.Stream | None = None) -> None:
            self.stream = stream or self.device.current
            self.seen, self.time = self.stream.seen, self.stream.time

        def query(self) -> bool:
            return self.time <= self.device.now

    class TimingEvent(Event):
        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Device.Event) -> float:
            return float(end.time - self.time)

    def make_stream(self, device: torch.device, priority: int = 0) -> Device.Stream:
        assert device == torch.device("cuda", 0)
        self.streams.append(self.Stream(self, priority))
        return self.streams[-1]

    def make_event(self, enable_timing: bool = False) -> Device.Event:
        return self.TimingEvent(self) if enable_timing else self.Event(self)

    @contextmanager
    def stream(self, stream: Device.Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> tuple[StreamLanes, Device]:
    """(lanes, their device)."""
    device = Device()
    for name, value in {
        "Stream": device.make_stream,
        "Event": device.make_event,
        "stream": device.stream,
        "current_stream": lambda _: device.current,
        "current_device": lambda: 0,
        "synchronize": lambda *_: pytest.fail("waits for the device"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    lanes = make_lanes(torch.device("cuda"))
    assert type(lanes) is StreamLanes
    return lanes, device


def run_pretended(
    pretended: tuple[StreamLanes, Device], schedule: Schedule, label: str = "", observer: Observer | None = None
) -> dict[int, tuple[Device.Stream, frozenset[Any]]]:
    """Task -> (the stream it was issued to, what it is ordered after)."""
    lanes, device = pretended
    found = {}

    def body(task: Task) -> None:
        found[task.chunk] = device.current, device.current.seen
        device.current.do((label, task.chunk))

    lanes.run(schedule, dict.fromkeys(KINDS, body), label, observer)
    return found


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
        crossings = crossings_of(schedule)
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
    assert crossings_of(schedule).count == num_tasks - 1
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
    with pytest.raises(RuntimeError, match="StreamLanes are in a run already"):
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
        lanes.run(schedule, {"EXPERT": lambda task: pause(50, torch.device("cuda"))}, observer=recorder)
        one, other = recorder.timeline(schedule).spans
    assert max(one.start_ms, other.start_ms) < min(one.end_ms, other.end_ms)
    assert recorder.timeline(schedule).makespan_ms < 1.3 * (one.end_ms - one.start_ms)


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

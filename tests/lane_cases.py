# SPDX-License-Identifier: Apache-2.0
"""Schedules, bodies and lanes for the tests of lanes: bodies whose results tell in which order they came."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from weakref import WeakSet

import pytest
import torch

from ds_fsmoe.execution.lanes import Body, Lanes, Observer, SerialLanes, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.schedule import Draft, Lane, Schedule, Task
from tests.waiting import LIMIT_S, linger

COMPUTE, INTRA, INTER = Lane
CPU = torch.device("cpu")
NEEDS_GPU, NEEDS_GPUS = pytest.mark.gpu, pytest.mark.gpu(count=2)
"""One CUDA device, and two; skipped where there are fewer (see ``tests/conftest.py``)."""
LINKS = pytest.mark.parametrize("link", [INTRA, INTER])
EVERY_LANE = pytest.mark.parametrize("lane", Lane)
KINDS = ("A2A_IN", "GATHER", "EXPERT", "REDUCE", "A2A_OUT")


OVERLAPPING = ["threads", "pretended streams", pytest.param("streams", marks=NEEDS_GPU)]
PRETENDED: WeakSet[Lanes] = WeakSet()
"""Lanes on streams of a pretended device (``tests/pretended_device.py``), whose bodies compute on the CPU at once."""


@pytest.fixture(params=["serial", *OVERLAPPING])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    """Every kind of lanes."""
    yield from _made(request)


@pytest.fixture(params=OVERLAPPING)
def overlapping(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    """Every kind of lanes that overlap."""
    yield from _made(request)


def _made(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    if request.param == "pretended streams":
        from tests.pretended_device import pretend

        made, _ = pretend(request.getfixturevalue("monkeypatch"))
        PRETENDED.add(made)
    else:
        device = torch.device("cuda") if request.param == "streams" else CPU
        made = make_lanes(device, overlap=request.param != "serial")
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadLanes]:
    with closing(ThreadLanes()) as made:
        yield made


def device_for(lanes: Lanes) -> torch.device:
    """Return the device that bodies on these lanes compute on."""
    return torch.device("cuda") if isinstance(lanes, StreamLanes) and lanes not in PRETENDED else CPU


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
        linger(pause_ms / 1e3)


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


class BodyError(Exception):
    pass


def failing(case: Arithmetic, index: int, error: BaseException) -> dict[str, Body]:
    """The bodies of a case, of which that of one task raises."""

    def body(task: Task) -> None:
        if task.chunk == index:
            raise error
        case.do(task)

    return dict.fromkeys(KINDS, body)


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

# SPDX-License-Identifier: Apache-2.0
"""A watchdog asks no event while a graph is captured, and never one that belongs to a graph."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.execution import device_tables as captures
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.planning.schedule import Lane, Task
from tests.lane_cases import COMPUTE, INTER, INTRA, NEEDS_GPU, BodyError, random_schedule, schedule_of
from tests.pretended_device import Device, pretended, run_pretended
from tests.watchdog_cases import LOOKS_FOR_A_HANG, Hangs, file, nobody_looks_after_sigterm

FIXTURES = (pretended, file, nobody_looks_after_sigterm)  # which pytest finds by their names here
ONE_OF_EACH = schedule_of(("A2A_IN", INTER, ()), ("GATHER", INTRA, (0,)), ("EXPERT", COMPUTE, (1,)))
GLOBAL, RELAXED = 0, 2


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


@pytest.fixture(autouse=True)
def driver(pretended: tuple[StreamLanes, Device], monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver of the pretended device."""
    _, device = pretended
    made, query = Driver(), Device.Event.query

    def noted(event: Device.Event) -> bool:
        made.queries.append((event, device.is_capturing, made.modes.get(threading.get_ident(), GLOBAL)))
        return query(event)

    @contextmanager
    def select(_: torch.device) -> Iterator[None]:
        yield

    monkeypatch.setattr(Device.Event, "query", noted)
    monkeypatch.setattr(torch.cuda, "device", select)
    monkeypatch.setattr(captures, "_exchange_capture_mode", lambda: made.exchange)
    return made


def in_a_thread(ask: Any) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


def test_no_event_is_asked_between_a_run_that_is_captured_and_the_next_that_is_not(
    pretended: tuple[StreamLanes, Device], driver: Driver
) -> None:
    lanes, device = pretended
    device.now = -1
    run_pretended(pretended, ONE_OF_EACH, "warm up")
    assert in_a_thread(lanes.is_behind)
    driver.queries.clear()
    device.is_capturing = True
    for number in range(3):
        run_pretended(pretended, random_schedule(number), f"captured {number}")
        assert not in_a_thread(lanes.is_behind)
        assert all(finished == "" for _, finished in in_a_thread(lanes.progress).values())
    device.is_capturing = False
    assert not in_a_thread(lanes.is_behind)
    assert driver.queries == []
    run_pretended(pretended, ONE_OF_EACH, "after")
    device.now = device.streams[0].time
    assert not in_a_thread(lanes.is_behind)
    assert in_a_thread(lanes.progress)[Lane.INTER][1].startswith("after/")
    assert driver.queries
    assert not any(event.is_captured for event, _, _ in driver.queries)


def test_a_body_that_is_running_in_a_capture_is_not_asked_about(
    pretended: tuple[StreamLanes, Device], driver: Driver
) -> None:
    lanes, device = pretended
    run_pretended(pretended, ONE_OF_EACH, "warm up")
    device.is_capturing = True

    def ask(task: Task) -> None:
        assert not in_a_thread(lanes.is_behind)
        in_a_thread(lanes.progress)

    lanes.run(ONE_OF_EACH, dict.fromkeys(("A2A_IN", "GATHER", "EXPERT"), ask))
    assert driver.queries == []


def test_a_capture_that_fails_leaves_no_event_to_be_asked(
    pretended: tuple[StreamLanes, Device], driver: Driver
) -> None:
    lanes, device = pretended
    device.is_capturing = True

    def fail(task: Task) -> None:
        raise BodyError

    with pytest.raises(BodyError):
        lanes.run(ONE_OF_EACH, dict.fromkeys(("A2A_IN", "GATHER", "EXPERT"), fail))
    device.is_capturing = False
    assert not in_a_thread(lanes.is_behind)
    assert driver.queries == []


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


def test_a_watchdog_takes_a_long_capture_for_no_hang(
    pretended: tuple[StreamLanes, Device], driver: Driver, file: Path
) -> None:
    lanes, device = pretended
    device.now = -1
    with Hangs(lanes, file) as hangs:
        device.is_capturing = True
        run_pretended(pretended, ONE_OF_EACH, "captured")
        hangs.look(3 * LOOKS_FOR_A_HANG)
        assert hangs.files == []
    assert driver.queries == []


def test_where_there_is_no_driver_events_are_asked_as_ever(
    pretended: tuple[StreamLanes, Device], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, device = pretended
    monkeypatch.setattr(captures, "_exchange_capture_mode", lambda: None)
    device.now = -1
    run_pretended(pretended, ONE_OF_EACH)
    assert in_a_thread(lanes.is_behind)
    monkeypatch.setattr(captures, "_exchange_capture_mode", lambda: lambda mode: 999)  # not initialised, say
    assert in_a_thread(lanes.is_behind)
    assert driver.modes == {}


@NEEDS_GPU
def test_on_a_gpu_the_driver_knows_the_mode_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
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

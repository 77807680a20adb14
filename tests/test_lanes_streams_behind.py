# SPDX-License-Identifier: Apache-2.0
"""On streams the host runs ahead: a run is over when it has been issued, and the lanes know whether the device is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.planning.schedule import Task
from tests.lane_cases import COMPUTE, INTER, INTRA, NEEDS_GPU, BodyError, in_time, pause, random_schedule, schedule_of
from tests.pretended_device import Device, pretended, run_pretended
from tests.watchdog_cases import LOOKS_FOR_A_HANG, Hangs, file, lane_rows, nobody_looks_after_sigterm

FIXTURES = (pretended, file, nobody_looks_after_sigterm)  # which pytest finds by their names here
ONE_OF_EACH = schedule_of(("A2A_IN", INTER, ()), ("GATHER", INTRA, (0,)), ("EXPERT", COMPUTE, (1,)))


@pytest.fixture(autouse=True)
def selected(pretended: tuple[StreamLanes, Device], monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were made the current one of a thread."""
    devices: list[torch.device] = []

    @contextmanager
    def select(device: torch.device) -> Iterator[None]:
        devices.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", select)
    return devices


def test_streams_are_behind_until_the_device_has_reached_the_end_of_the_last_run(
    pretended: tuple[StreamLanes, Device], selected: list[torch.device]
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
    assert set(selected) == {torch.device("cuda", 0)}


def test_the_end_is_that_of_the_stream_that_computes(pretended: tuple[StreamLanes, Device]) -> None:
    lanes, device = pretended
    side = device.Stream(device)
    with device.stream(side):
        run_pretended(pretended, ONE_OF_EACH)
    device.now = side.time - 1
    assert lanes.is_behind()
    device.now = side.time
    assert not lanes.is_behind()


def test_while_the_host_runs_something_between_two_parts_of_a_run_rows_that_have_not_come_are_seen(
    pretended: tuple[StreamLanes, Device],
) -> None:
    lanes, device = pretended
    run_pretended(pretended, ONE_OF_EACH, "the run before")
    device.now = device.streams[0].time
    assert not lanes.is_behind()
    run = lanes.begin(ONE_OF_EACH, dict.fromkeys(("A2A_IN", "GATHER", "EXPERT"), lambda task: device.current.do(task)))
    run.go(2, joins=True)
    # The experts' module runs now and may wait for its rows: a watchdog asks whether there is anything to wait for.
    assert lanes.is_behind()
    device.now = device.streams[0].time
    assert not lanes.is_behind()
    run.finish()
    assert lanes.is_behind()


def test_the_end_of_a_run_costs_the_host_one_record(
    pretended: tuple[StreamLanes, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, device = pretended
    num_records, record = 0, device.Event.record

    def count(event: Device.Event, stream: Device.Stream | None = None) -> None:
        nonlocal num_records
        num_records += 1
        record(event, stream)

    monkeypatch.setattr(Device.Event, "record", count)
    for num_runs in range(1, 300):
        run_pretended(pretended, schedule_of(("EXPERT", COMPUTE, ())))
        assert num_records == num_runs
    assert device.num_events <= 256


def test_after_an_error_streams_are_behind_until_what_was_issued_is_done(
    pretended: tuple[StreamLanes, Device],
) -> None:
    lanes, device = pretended
    device.now = 0

    def body(task: Task) -> None:
        if task.lane is COMPUTE:
            raise BodyError
        device.current.do(task.name)

    with pytest.raises(BodyError):
        lanes.run(ONE_OF_EACH, dict.fromkeys(("A2A_IN", "GATHER", "EXPERT"), body))
    assert device.streams[0].time == 2
    device.now = 1
    assert lanes.is_behind()
    device.now = 2
    assert not lanes.is_behind()


def test_a_device_that_has_failed_is_not_behind(
    pretended: tuple[StreamLanes, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no hang: the error comes out where the device is used next."""
    lanes, device = pretended
    device.now = -1
    run_pretended(pretended, ONE_OF_EACH)
    assert lanes.is_behind()

    def fail(event: Device.Event) -> NoReturn:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Device.Event, "query", fail)
    assert not lanes.is_behind()


def test_a_device_that_stands_still_after_the_run_is_a_hang_and_one_that_goes_on_is_none(
    pretended: tuple[StreamLanes, Device], file: Path
) -> None:
    lanes, device = pretended
    device.now = 0
    with Hangs(lanes, file) as hangs:
        run_pretended(pretended, ONE_OF_EACH, "L00/forward")
        for now in range(device.streams[0].time):
            device.now = now
            # Longer than the timeout in all, and the host in no run.
            hangs.look(LOOKS_FOR_A_HANG // 2)
        assert hangs.files == []
        hangs.hang()
        assert "run:    issued, not done" in file.read_text()
        assert lane_rows(file.read_text())["intra"] == ["L00/forward/L00/GATHER/chunk1"] * 2
        device.now = device.streams[0].time
        hangs.look(1)
    # Once all is done, an idle host is no hang.
    with Hangs(lanes, file.with_name("later.txt")) as hangs:
        run_pretended(pretended, ONE_OF_EACH, "L00/forward")
        device.now = device.streams[0].time
        hangs.look(3 * LOOKS_FOR_A_HANG)
        assert hangs.files == []


@NEEDS_GPU
def test_on_a_gpu_streams_are_behind_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    lanes, device = make_lanes(torch.device("cuda")), torch.device("cuda")
    assert isinstance(lanes, StreamLanes)
    lanes.run(ONE_OF_EACH, dict.fromkeys(("A2A_IN", "GATHER", "EXPERT"), lambda task: pause(1, device)))
    torch.cuda.synchronize()
    assert not lanes.is_behind()
    lanes.run(ONE_OF_EACH, dict.fromkeys(("A2A_IN", "GATHER", "EXPERT"), lambda task: pause(100, device)))
    answers: list[bool] = []

    def ask() -> None:
        thread = threading.Thread(target=lambda: answers.append(lanes.is_behind()))
        thread.start()
        thread.join()

    in_time(ask)
    torch.cuda.synchronize()
    in_time(ask)
    assert answers == [True, False]

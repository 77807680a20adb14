# SPDX-License-Identifier: Apache-2.0
"""A few lines of Python that stand for a GPU, and know of every operation what it was ordered after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_fsmoe.execution.lanes import Observer, make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.planning.schedule import Schedule, Task
from tests.lane_cases import KINDS


class Device:
    """Stands for a CUDA device. An operation is a name; a stream's ``seen`` are those its next one is ordered after.

    There is nothing in it to wait for the device with, apart from timing events.
    """

    def __init__(self) -> None:
        self.now = 0
        """The events recorded up to this time have come to pass."""
        self.num_events = 0
        self.num_waits = 0
        self.is_capturing = False
        """Whether the thread that uses it captures a graph of what it gives to any stream."""
        default = self.Stream(self)
        self.current = default
        self.streams = [default]
        self.selected: list[torch.device] = []
        """Devices that were made the current one of a thread."""

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
            self.is_captured = self.device.is_capturing
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
    def select(self, device: torch.device) -> Iterator[None]:
        self.selected.append(device)
        yield

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
    return pretend(monkeypatch)


def pretend(monkeypatch: pytest.MonkeyPatch, device: Device | None = None) -> tuple[StreamLanes, Device]:
    """Return lanes on a pretended device, and the device."""
    device = device or Device()
    for name, value in {
        "Stream": device.make_stream,
        "Event": device.make_event,
        "device": device.select,
        "stream": device.stream,
        "current_stream": lambda _: device.current,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: device.is_capturing,
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

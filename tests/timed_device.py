# SPDX-License-Identifier: Apache-2.0
"""The pretended GPU with a host that is slow to issue: a kernel starts when the host has issued it, not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from tests.fake_clock import SetClock
from tests.pretended_device import Device

CUDA = torch.device("cuda")
CYCLES_PER_MS = 2_000_000


class TimedDevice(Device):
    """Streams in milliseconds, beside a host's clock that passes with every launch.

    Args:
        launch_ms: what a launch takes the host.
    """

    def __init__(self, launch_ms: float) -> None:
        super().__init__()
        self.host = SetClock()
        self.launch_ms = launch_ms
        self.num_launches = 0

    def launch(self, kernel_ms: float, num_kernels: int = 1) -> None:
        """Issue kernels on the current stream, of so long altogether."""
        for _ in range(num_kernels):
            self.host.now_ms += self.launch_ms
            self.num_launches += 1
            self.current.time = max(self.current.time, self.host.now_ms) + kernel_ms / num_kernels

    def kernels(self, kernel_ms: float, num_kernels: int = 1) -> Callable[[], None]:
        """What launches them."""
        return lambda: self.launch(kernel_ms, num_kernels)

    def synchronize(self, device: object = None) -> None:
        """Have the host wait for all streams."""
        self.host.now_ms = max(self.host.now_ms, *(each.time for each in self.streams))

    def make_event(self, enable_timing: bool = False) -> Device.Event:
        return TimedEvent(self) if enable_timing else Device.Event(self)


class TimedEvent(Device.Event):
    """An event for which the host can wait. It comes to pass when the host has recorded it, at the earliest."""

    def record(self, stream: Device.Stream | None = None) -> None:
        super().record(stream)
        self.time = max(self.time, self.device.host.now_ms)

    def synchronize(self) -> None:
        self.device.host.now_ms = max(self.device.host.now_ms, self.time)

    def elapsed_time(self, end: Device.Event) -> float:
        return end.time - self.time


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TimedDevice, StreamLanes]]:
    """The device, which takes 0.05 ms to launch a kernel, and lanes on it."""
    device = TimedDevice(launch_ms=0.05)
    for name, value in {
        "Stream": device.make_stream,
        "Event": device.make_event,
        "stream": device.stream,
        "current_stream": lambda _: device.current,
        "current_device": lambda: 0,
        "synchronize": device.synchronize,
        "_sleep": lambda cycles: device.launch(0.003 + cycles / CYCLES_PER_MS),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    lanes = make_lanes(CUDA)
    assert isinstance(lanes, StreamLanes)
    yield device, lanes
    lanes.close()

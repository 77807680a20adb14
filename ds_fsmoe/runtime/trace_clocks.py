# SPDX-License-Identifier: Apache-2.0
"""What a trace reads the time from: the host's clock, or events on a GPU's streams."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from ds_fsmoe.runtime.clock import HOST, Clock


class HostClock:
    """Stamps are nanoseconds."""

    def __init__(self, host: Clock = HOST) -> None:
        self.now = host.perf_counter_ns

    @staticmethod
    def wait_for(stamp: int) -> None:
        """A stamp of the host has always come."""

    @staticmethod
    def has_come(stamp: int) -> bool:
        return True

    @staticmethod
    def elapsed_ns(one: int, other: int) -> int:
        return other - one


class StreamClock:
    """Stamps are events on the stream that is current."""

    @staticmethod
    def now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def wait_for(stamp: torch.cuda.Event) -> None:
        stamp.synchronize()

    @staticmethod
    def has_come(stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    @staticmethod
    def elapsed_ns(one: torch.cuda.Event, other: torch.cuda.Event) -> int:
        return round(one.elapsed_time(other) * 1e6)


def clock_of(device: torch.device, host: Clock = HOST) -> HostClock | StreamClock:
    """That of the lanes of a device."""
    return StreamClock() if device.type == "cuda" else HostClock(host)


def set_clock(clock: HostClock | StreamClock, host: Clock = HOST) -> tuple[Any, int]:
    """(a stamp, the nanoseconds since 1970 at which it was made), the closest pair of a few."""
    clock.wait_for(clock.now())  # what the device was given before
    pairs = []
    for _ in range(5):
        before_ns = host.time_ns()
        stamp = clock.now()
        clock.wait_for(stamp)
        took_ns = host.time_ns() - before_ns
        pairs.append((took_ns, stamp, before_ns + took_ns // 2))
    return min(pairs, key=itemgetter(0))[1:]

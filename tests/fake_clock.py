# SPDX-License-Identifier: Apache-2.0
"""Clocks on which time passes as a test says, to put in the place of the host's."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ds_fsmoe.observing.clock import Clock
from tests.waiting import LIMIT_S


class FakeClock(Clock):
    """Time passes where somebody sleeps or computes, and by a tick whenever the clock is read.

    Args:
        tick_ns: without one it stands still in between; with one, no two readings are equal, and so their order is that
            of what happened.
        unix_ns: nanoseconds since 1970 when it starts.
    """

    def __init__(self, tick_ns: int = 0, unix_ns: int = 1_790_000_000 * 10**9) -> None:
        self.slept_s = 0.0
        """By all who sleep."""
        self._tick_ns = tick_ns
        self._unix_ns = unix_ns
        self._now_ns = 0
        self._process_ns = 0
        self._lock = threading.Lock()

    def sleep(self, time_s: float) -> None:
        with self._lock:
            self._now_ns += round(time_s * 1e9)
            self.slept_s += time_s

    def compute(self, time_s: float) -> None:
        """Pass the time with the processor at work."""
        with self._lock:
            self._now_ns += round(time_s * 1e9)
            self._process_ns += round(time_s * 1e9)

    def perf_counter_ns(self) -> int:
        with self._lock:
            self._now_ns += self._tick_ns
            return self._now_ns

    def time_ns(self) -> int:
        return self._unix_ns + self.perf_counter_ns()

    def perf_counter(self) -> float:
        return self.perf_counter_ns() / 1e9

    monotonic = perf_counter

    def process_time(self) -> float:
        return self._process_ns / 1e9


class SetClock(Clock):
    """Shows what it is set to."""

    def __init__(self, now_ms: float = 0.0) -> None:
        self.now_ms = now_ms

    def perf_counter_ns(self) -> int:
        return round(self.now_ms * 1e6)

    def perf_counter(self) -> float:
        return self.now_ms / 1e3

    def sleep(self, time_s: float) -> None:
        self.now_ms += time_s * 1e3


class SteppedClock(Clock):
    """For who looks every so often, such as the watchdog: it looks when the test says, and as much time has passed as
    it would have waited. Threads are waited for until they end, or until the test says that they are given up."""

    def __init__(self) -> None:
        self.gives_up: Callable[[threading.Thread], object] = lambda thread: False
        """Whether a thread that has not ended is given up, because the limit for it is over."""
        self._now_s = 0.0
        self._changed = threading.Condition()
        self._allowed = 0
        self._waiting = 0
        self._is_over = False

    def monotonic(self) -> float:
        return self._now_s

    def pass_time(self, time_s: float) -> None:
        """Without a look."""
        self._now_s += time_s

    def wait(self, event: threading.Event, limit_s: float) -> bool:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            # Nobody notifies us of the event.
            while not (event.is_set() or self._allowed):
                self._changed.wait(0.01)
            self._is_over = event.is_set()
            if not self._is_over:
                self._allowed -= 1
                self._now_s += limit_s
            self._waiting -= 1
            self._changed.notify_all()
            return self._is_over

    def join(self, thread: threading.Thread, limit_s: float) -> None:
        while thread.is_alive() and not self.gives_up(thread):
            thread.join(0.01)

    def allow(self, times: int = 1) -> None:
        """Let it look so often, whenever it comes to that."""
        with self._changed:
            self._allowed += times
            self._changed.notify_all()

    def look(self, times: int = 1) -> None:
        """Have it look so often; returns when it has."""
        for _ in range(times):
            with self._changed:
                assert self._changed.wait_for(lambda: self._waiting, LIMIT_S)
                self.allow()
                # It has gone to look, and has come back to wait.
                assert self._changed.wait_for(lambda: not self._allowed, LIMIT_S)
                assert self._changed.wait_for(lambda: self._waiting or self._is_over, LIMIT_S)


class Patient(Clock):
    """The host's, by which a report is waited for, however long the disk takes."""

    def join(self, thread: threading.Thread, limit_s: float) -> None:
        thread.join()

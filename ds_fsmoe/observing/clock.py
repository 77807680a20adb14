# SPDX-License-Identifier: Apache-2.0
"""The host's time. Code that reads it or waits by it takes a clock, so that another can be put in its place."""

from __future__ import annotations

import threading
import time


class Clock:
    """Wraps what is used of the module ``time``, and waits with a limit.

    A test hands in a clock of its own, on which time passes as the test says.
    """

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    perf_counter_ns = staticmethod(time.perf_counter_ns)
    process_time = staticmethod(time.process_time)
    time_ns = staticmethod(time.time_ns)
    sleep = staticmethod(time.sleep)

    def wait(self, event: threading.Event, limit_s: float) -> bool:
        """Wait for an event, up to a limit; return whether it is set."""
        return event.wait(limit_s)

    def join(self, thread: threading.Thread, limit_s: float) -> None:
        """Wait for a thread to end, up to a limit."""
        thread.join(limit_s)


HOST = Clock()
"""The real clock."""

# SPDX-License-Identifier: Apache-2.0
"""Provides the host's time. Code that reads it or waits by it receives a clock, so that tests can replace it."""

from __future__ import annotations

import threading
import time


class Clock:
    """Wraps the used part of the module ``time``, and waits with a limit.

    A test passes its own clock, on which time passes as the test decides.
    """

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    perf_counter_ns = staticmethod(time.perf_counter_ns)
    process_time = staticmethod(time.process_time)
    time_ns = staticmethod(time.time_ns)
    sleep = staticmethod(time.sleep)

    def wait(self, event: threading.Event, limit_s: float) -> bool:
        """Wait for an event, up to a limit in seconds; return True if it is set."""
        return event.wait(limit_s)

    def join(self, thread: threading.Thread, limit_s: float) -> None:
        """Wait for a thread to end, up to a limit in seconds."""
        thread.join(limit_s)


HOST = Clock()
"""The real clock."""

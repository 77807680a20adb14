# SPDX-License-Identifier: Apache-2.0
"""For all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """In the background of a shell a process ignores Ctrl-C, and so would those that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

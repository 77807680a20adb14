# SPDX-License-Identifier: Apache-2.0
"""Waiting without judging by a clock: for a condition, at random, or for ever.

No other module of the tests reads the time (see ``tests/ruff.toml``). What depends on how fast a machine is fails on a
busy one; what happens before what, how often, and what a clock of :mod:`tests.fake_clock` says, does not.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 600.0
"""Nothing takes so long unless it hangs, however busy the machine is. It bounds a hang, and is no expectation."""


def until(is_so: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: it has not come to be so; then something hangs.
    """
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not so after {limit_s:.0f} s: something hangs")
        time.sleep(0.01)


def linger(pause_s: float = 0.05) -> None:
    """Give others the time to do what they must not do. A test passes without it, and says less."""
    time.sleep(pause_s)


def pause(rng: random.Random, *choices_s: float) -> None:
    """Wait for one of these times, so that the order in which things happen is another one each time."""
    time.sleep(rng.choice(choices_s))


def stand_still() -> None:
    """Hang, until this process is ended."""
    threading.Event().wait()


def make_older(file: Path, age_s: float) -> None:
    """Set a file's time back."""
    written_s = file.stat().st_mtime - age_s
    os.utime(file, (written_s, written_s))


def until_blocked(thread: threading.Thread) -> None:
    """Wait until a thread of this process sleeps in the kernel and does not wake up, as in a collective nobody joins.

    One that waits for the interpreter's lock wakes up all the time: its count of switches goes up.
    """
    status = Path(f"/proc/self/task/{thread.native_id}/status")
    seen: list[tuple[str, str]] = []

    def is_blocked() -> bool:
        fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        seen.append((fields["State"][0], fields["voluntary_ctxt_switches"]))
        return len(seen) >= 10 and len(set(seen[-10:])) == 1 and seen[-1][0] == "S"

    until(is_blocked)

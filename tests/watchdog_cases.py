# SPDX-License-Identifier: Apache-2.0
"""Runs to watch, a watchdog that ends nothing, and what its report says, for the tests of the watchdog."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ds_fsmoe.execution.lanes import Body, Lanes, make_lanes
from ds_fsmoe.observing.watchdog import Watchdog
from ds_fsmoe.planning.schedule import Lane, Schedule, Task
from tests.fake_clock import SteppedClock

COMPUTE = Lane.COMPUTE
# By the clock of the test: as many looks.
TIMEOUT_S = 4.0
# In the first two it sees that nothing has moved since the one before, by the host and by the device.
LOOKS_FOR_A_HANG = 2 + int(TIMEOUT_S)
ONE_TASK = Schedule((Task("EXPERT", COMPUTE),))


def lane_rows(report: str) -> dict[str, list[str]]:
    """Lane -> [begun last, finished last]."""
    return {row[0]: row[1:] for row in map(str.split, report.splitlines()) if row and row[0] in list(Lane)}


class Hangs:
    """A watchdog that looks when the test says so, and tells what it takes for a hang instead of ending the tests."""

    def __init__(self, lanes: Lanes, file: Path, first_use_s: float = 0.0) -> None:
        self.files: list[Path | None] = []
        self.clock = SteppedClock()
        self.watchdog = Watchdog(lanes, TIMEOUT_S, file, self.files.append, first_use_s, self.clock)

    def look(self, times: int) -> None:
        self.clock.look(times)

    def hang(self) -> int:
        """Let time pass until one more hang is reported; returns how often it has looked."""
        before, looks = len(self.files), 0
        while len(self.files) == before:
            assert looks < 1000, "nothing is taken for a hang"
            self.look(1)
            looks += 1
        return looks

    def __enter__(self) -> Hangs:
        return self

    def __exit__(self, *error: object) -> None:
        self.watchdog.close()


def run_once(lanes: Lanes, body: Body = lambda task: None, label: str = "L00/forward") -> None:
    lanes.run(ONE_TASK, {"EXPERT": body}, label)


@pytest.fixture(params=[True, False], ids=["threads", "serial"])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    with closing(make_lanes(torch.device("cpu"), request.param)) as made:
        yield made


@pytest.fixture(autouse=True)
def nobody_looks_after_sigterm() -> Iterator[None]:
    """Whatever ran in this process before: as in a process that has just begun."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "reports" / "rank0.txt"

# SPDX-License-Identifier: Apache-2.0
"""Runs to watch, a watchdog that ends nothing, and what its report says, for the tests of the watchdog."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ds_fsmoe.planning.schedule import Lane, Schedule, Task
from ds_fsmoe.runtime.lanes import Body, Lanes, make_lanes
from ds_fsmoe.runtime.watchdog import Watchdog

COMPUTE, INTRA, INTER = Lane
LIMIT_S = 30
# Where none may be found: long beside what a busy machine does to a thread.
TIMEOUT_S = 0.8
# Where one is to be found.
FAST_S = 0.2
TWO_CHUNKS = Schedule(
    (
        Task("A2A_IN", INTER, 0),
        Task("EXPERT", COMPUTE, 0, after=(0,)),
        Task("A2A_IN", INTER, 1),
        Task("EXPERT", COMPUTE, 1, after=(2,)),
    )
)
ONE_TASK = Schedule((Task("EXPERT", COMPUTE),))


def wait_for(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {LIMIT_S} s"
        time.sleep(0.01)


def lane_rows(report: str) -> dict[str, list[str]]:
    """Lane -> [begun last, finished last]."""
    return {row[0]: row[1:] for row in map(str.split, report.splitlines()) if row and row[0] in list(Lane)}


class Hangs:
    """A watchdog that tells what it takes for a hang instead of ending the tests."""

    def __init__(self, lanes: Lanes, file: Path, timeout_s: float = FAST_S, first_use_s: float = 0.0) -> None:
        self.files: list[Path | None] = []
        self.watchdog = Watchdog(lanes, timeout_s, file, self.files.append, first_use_s)

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

# SPDX-License-Identifier: Apache-2.0
"""The watchdog: what is a hang and what is none, and what its report says."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from ds_fsmoe.execution.lanes import Lanes, SerialLanes, make_lanes
from ds_fsmoe.observing.watchdog import Watchdog
from ds_fsmoe.planning.schedule import Lane, Task
from tests.fake_clock import SteppedClock
from tests.waiting import until
from tests.watchdog_cases import (
    COMPUTE,
    LOOKS_FOR_A_HANG,
    TIMEOUT_S,
    Hangs,
    file,
    lane_rows,
    lanes,
    nobody_looks_after_sigterm,
    run_once,
)

FIXTURES = (file, lanes, nobody_looks_after_sigterm)  # which pytest finds by their names here


def test_time_between_runs_is_no_hang(file: Path) -> None:
    with closing(make_lanes(torch.device("cpu"))) as lanes, Hangs(lanes, file) as hangs:
        hangs.look(3 * LOOKS_FOR_A_HANG)
        run_once(lanes)
        hangs.look(3 * LOOKS_FOR_A_HANG)
        assert hangs.files == []
    assert not file.parent.exists()


def test_a_run_that_is_slow_but_goes_on_is_no_hang(lanes: Lanes, file: Path) -> None:
    # Longer than the timeout, all the time in a task, in runs that look the same each time.
    with Hangs(lanes, file) as hangs:
        for _ in range(6):
            run_once(lanes, lambda task: hangs.look(LOOKS_FOR_A_HANG - 1))
        assert hangs.files == []
    assert not file.parent.exists()


def test_each_hang_is_reported_once_and_what_comes_after_it_too(lanes: Lanes, file: Path) -> None:
    with Hangs(lanes, file) as hangs:
        run_once(lanes, lambda task: hangs.hang())
        run_once(lanes)
        run_once(lanes, lambda task: (hangs.hang(), hangs.look(3 * LOOKS_FOR_A_HANG)), "L01/forward")
        assert hangs.files == [file] * 2
    assert file.read_text().count("reason: hang") == 2
    assert lane_rows(file.read_text())["compute"] == ["L01/forward/L00/EXPERT/chunk0", "L00/forward/L00/EXPERT/chunk0"]


def test_the_first_run_may_take_longer(file: Path) -> None:
    with closing(SerialLanes()) as lanes:
        with Hangs(lanes, file, first_use_s=100) as hangs:
            run_once(lanes, lambda task: hangs.look(99))
            assert hangs.files == []
            hangs.look(1)
            run_once(lanes, lambda task: hangs.hang() == LOOKS_FOR_A_HANG or pytest.fail("it took longer"))
        # Told apart by the label alone, where no time lies between the runs.
        with Hangs(lanes, file, first_use_s=100) as hangs:
            run_once(lanes, label="L00/backward")
            run_once(lanes, lambda task: hangs.hang() == LOOKS_FOR_A_HANG or pytest.fail("too long"), "L01/backward")


def test_a_hang_in_the_first_run_is_found_too(file: Path) -> None:
    with closing(SerialLanes()) as lanes, Hangs(lanes, file, first_use_s=100) as hangs:
        run_once(lanes, lambda task: hangs.hang() == 2 + 100 or pytest.fail("not when the first use is over"))
        assert hangs.files == [file]


def test_a_watchdog_may_be_closed_by_what_it_calls(file: Path) -> None:
    with closing(SerialLanes()) as lanes:
        closed: list[Watchdog] = []
        clock = SteppedClock()

        def close(file: Path | None) -> None:
            watchdog.close()
            closed.append(watchdog)

        watchdog = Watchdog(lanes, TIMEOUT_S, file, close, 0, clock)
        run_once(lanes, lambda task: clock.look(LOOKS_FOR_A_HANG))
        assert closed == [watchdog]
        until(lambda: not watchdog._thread.is_alive())
        watchdog.close()


def test_a_process_that_was_stopped_does_not_hang(file: Path) -> None:
    def stop(task: Task) -> None:
        hangs.look(3)
        hangs.clock.pass_time(300)
        # It counts as two looks, as the process may have had no time for its tasks.
        assert hangs.hang() == LOOKS_FOR_A_HANG - 3 - 1

    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        run_once(lanes, stop)
        assert hangs.files == [file]


class LanesOfADevice(SerialLanes):
    """As streams are: a run is over when it has been issued, and what is done is for the driver to say."""

    def __init__(self) -> None:
        super().__init__()
        self.done = ""
        self.driver = threading.Event()
        self.driver.set()

    def is_behind(self) -> bool:
        self.driver.wait()
        return self.done != "all"

    def progress(self) -> dict[Lane, tuple[str, str]]:
        self.driver.wait()
        return {COMPUTE: (super().progress()[COMPUTE][0], self.done)}


def test_a_device_that_hangs_after_the_run_is_found(file: Path) -> None:
    with closing(LanesOfADevice()) as lanes, Hangs(lanes, file) as hangs:
        run_once(lanes)
        for number in range(6):
            lanes.done = f"chunk{number}"
            hangs.look(3)
        assert hangs.files == []
        hangs.hang()
        assert lane_rows(file.read_text())["compute"] == ["L00/forward/L00/EXPERT/chunk0", "chunk5"]
        assert "run:    issued, not done" in file.read_text()
        lanes.done = "all"
        hangs.look(3 * LOOKS_FOR_A_HANG)
        assert len(hangs.files) == 1


def test_a_driver_that_does_not_answer_is_a_hang_with_a_report_of_what_is_known(file: Path) -> None:
    with closing(LanesOfADevice()) as lanes, Hangs(lanes, file) as hangs:
        lanes.done = "all"
        run_once(lanes)
        hangs.look(3 * LOOKS_FOR_A_HANG)
        assert hangs.files == []
        lanes.driver.clear()
        hangs.clock.gives_up = lambda thread: thread.name == "fsmoe-progress"
        hangs.hang()
        report = file.read_text()
        assert lane_rows(report)["compute"] == ["L00/forward/L00/EXPERT/chunk0", "all"]
        assert "the device's driver does not answer" in report
        # However often it was asked.
        assert report.count(" fsmoe-progress\n") == 1
        lanes.driver.set()


@contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ds_fsmoe")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def test_the_log_says_where_the_report_is_or_what_it_would_say(tmp_path: Path, file: Path) -> None:
    (tmp_path / "taken").touch()
    with closing(SerialLanes()) as lanes, logged() as lines:
        for each in (file, tmp_path / "taken" / "rank0.txt"):
            with Hangs(lanes, each) as hangs:
                run_once(lanes, lambda task: hangs.hang())
            assert hangs.files == [each if each is file else None]
    assert re.fullmatch(rf"rank 0: hang: .*; stacks and tasks: {file}", lines[0])
    assert "compute  L00/forward/L00/EXPERT/chunk0" in lines[1]
    assert "no report could be written: " in lines[1]


def test_what_was_printed_is_not_lost_with_the_process(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "printed").open("w") as out, closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        monkeypatch.setattr(sys, "stdout", out)
        print("step 7")
        assert (tmp_path / "printed").read_text() == ""
        run_once(lanes, lambda task: hangs.hang())
        assert (tmp_path / "printed").read_text() == "step 7\n"


def test_a_disk_that_does_not_answer_does_not_keep_the_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait())
    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        hangs.clock.gives_up = lambda thread: thread.name == "fsmoe-report"
        run_once(lanes, lambda task: hangs.hang())
        assert hangs.files == [None]
    answers.set()

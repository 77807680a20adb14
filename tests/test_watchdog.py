# SPDX-License-Identifier: Apache-2.0
"""The watchdog: what is a hang and what is none, and what its report says."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.runtime import watchdog as watchdog_module
from ds_fsmoe.runtime.lanes import Lanes, SerialLanes, make_lanes
from ds_fsmoe.runtime.watchdog import Watchdog
from tests.watchdog_cases import (
    COMPUTE,
    FAST_S,
    LIMIT_S,
    TIMEOUT_S,
    Hangs,
    file,
    lane_rows,
    lanes,
    nobody_looks_after_sigterm,
    run_once,
    wait_for,
)

FIXTURES = (file, lanes, nobody_looks_after_sigterm)  # which pytest finds by their names here


def test_time_between_runs_is_no_hang(file: Path) -> None:
    with closing(make_lanes(torch.device("cpu"))) as lanes, Hangs(lanes, file) as hangs:
        time.sleep(3 * FAST_S)
        run_once(lanes)
        time.sleep(3 * FAST_S)
        assert hangs.files == []
    assert not file.parent.exists()


def test_a_run_that_is_slow_but_goes_on_is_no_hang(lanes: Lanes, file: Path) -> None:
    # Longer than the timeout, all the time in a task, in runs that look the same each time.
    with Hangs(lanes, file, TIMEOUT_S) as hangs:
        for _ in range(6):
            run_once(lanes, lambda task: time.sleep(TIMEOUT_S / 4))
        assert hangs.files == []
    assert not file.parent.exists()


def test_each_hang_is_reported_once_and_what_comes_after_it_too(lanes: Lanes, file: Path) -> None:
    with Hangs(lanes, file) as hangs:
        run_once(lanes, lambda task: wait_for(lambda: hangs.files))
        run_once(lanes)
        run_once(lanes, lambda task: (wait_for(lambda: hangs.files[1:]), time.sleep(3 * FAST_S)), "L01/forward")
        assert hangs.files == [file] * 2
    assert file.read_text().count("reason: hang") == 2
    assert lane_rows(file.read_text())["compute"] == ["L01/forward/L00/EXPERT/chunk0", "L00/forward/L00/EXPERT/chunk0"]


def test_the_first_run_may_take_longer(file: Path) -> None:
    with closing(SerialLanes()) as lanes:
        with Hangs(lanes, file, first_use_s=LIMIT_S) as hangs:
            run_once(lanes, lambda task: time.sleep(4 * FAST_S))
            assert hangs.files == []
            time.sleep(FAST_S)
            run_once(lanes, lambda task: wait_for(lambda: hangs.files))
        # Told apart by the label alone, where no time lies between the runs.
        with Hangs(lanes, file, first_use_s=LIMIT_S) as hangs:
            run_once(lanes, label="L00/backward")
            run_once(lanes, lambda task: wait_for(lambda: hangs.files), "L01/backward")


def test_a_hang_in_the_first_run_is_found_too(file: Path) -> None:
    with closing(SerialLanes()) as lanes, Hangs(lanes, file, first_use_s=4 * FAST_S) as hangs:
        begun_s = time.monotonic()
        run_once(lanes, lambda task: wait_for(lambda: hangs.files))
        assert time.monotonic() - begun_s > 3 * FAST_S


def test_a_watchdog_may_be_closed_by_what_it_calls(file: Path) -> None:
    with closing(SerialLanes()) as lanes:
        closed: list[Watchdog] = []

        def close(file: Path | None) -> None:
            watchdog.close()
            closed.append(watchdog)

        watchdog = Watchdog(lanes, FAST_S, file, close, 0)
        run_once(lanes, lambda task: wait_for(lambda: closed))
        wait_for(lambda: not watchdog._thread.is_alive())
        watchdog.close()


def test_a_process_that_was_stopped_does_not_hang(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter((0.0, 0.0, 0.0, 300.0))
    passed_s = 0.0

    class Clock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            nonlocal passed_s
            passed_s += next(jumps, 0.0)
            return time.monotonic() + passed_s

    monkeypatch.setattr(watchdog_module, "time", Clock)
    with closing(SerialLanes()) as lanes, Hangs(lanes, file, timeout_s=2) as hangs:
        # The watchdog looks every half second. Between its second and its third look, 300 s seem to pass.
        run_once(lanes, lambda task: time.sleep(1.7))
        assert passed_s == 300
        assert hangs.files == []


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
    with closing(LanesOfADevice()) as lanes, Hangs(lanes, file, TIMEOUT_S) as hangs:
        run_once(lanes)
        for number in range(6):
            lanes.done = f"chunk{number}"
            time.sleep(TIMEOUT_S / 4)
        assert hangs.files == []
        wait_for(lambda: hangs.files)
        assert lane_rows(file.read_text())["compute"] == ["L00/forward/L00/EXPERT/chunk0", "chunk5"]
        assert "run:    issued, not done" in file.read_text()
        lanes.done = "all"
        time.sleep(TIMEOUT_S / 2)
        assert len(hangs.files) == 1


def test_a_driver_that_does_not_answer_is_a_hang_with_a_report_of_what_is_known(file: Path) -> None:
    with closing(LanesOfADevice()) as lanes, Hangs(lanes, file) as hangs:
        lanes.done = "all"
        run_once(lanes)
        time.sleep(TIMEOUT_S / 2)
        assert hangs.files == []
        lanes.driver.clear()
        wait_for(lambda: hangs.files)
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
                run_once(lanes, lambda task: wait_for(lambda: hangs.files))
            assert hangs.files == [each if each is file else None]
    assert re.fullmatch(rf"rank 0: hang: .*; what it was doing: {file}", lines[0])
    assert "compute  L00/forward/L00/EXPERT/chunk0" in lines[1]
    assert "no report could be written: " in lines[1]


def test_what_was_printed_is_not_lost_with_the_process(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "printed").open("w") as out, closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        monkeypatch.setattr(sys, "stdout", out)
        print("step 7")
        assert (tmp_path / "printed").read_text() == ""
        run_once(lanes, lambda task: wait_for(lambda: hangs.files))
        assert (tmp_path / "printed").read_text() == "step 7\n"


def test_a_disk_that_does_not_answer_does_not_keep_the_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "_REPORT_LIMIT_S", 0.3)
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait(60))
    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        run_once(lanes, lambda task: wait_for(lambda: hangs.files))
        assert hangs.files == [None]
    answers.set()

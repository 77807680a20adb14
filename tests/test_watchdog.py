# SPDX-License-Identifier: Apache-2.0
"""The watchdog: what is a hang and what is none, and what its report says."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from ds_fsmoe.distributed import waits
from ds_fsmoe.distributed.waits import at_work, waiting, working
from ds_fsmoe.execution.lanes import Body, Lanes, SerialLanes, make_lanes
from ds_fsmoe.observing import other_ranks
from ds_fsmoe.observing.other_ranks import PeerReports
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


def test_the_first_run_alone_may_take_longer_and_a_hang_in_it_is_found_too(file: Path) -> None:
    def hangs_after(looks: int) -> Body:
        return lambda task: hangs.hang() == looks or pytest.fail("not when its time was over")

    # The last two of what is done before the run that hangs are told apart by the label, or by the time between.
    for before, hangs_in, looks in (
        ((), "L00/forward", 2 + 100),
        (("L00/forward", "look"), "L00/forward", LOOKS_FOR_A_HANG),
        (("L00/backward",), "L01/backward", LOOKS_FOR_A_HANG),
        (("L00/forward",), "L00/forward", LOOKS_FOR_A_HANG),
    ):
        with closing(SerialLanes()) as lanes, Hangs(lanes, file, first_use_s=100) as hangs:
            for label in before:
                hangs.look(1) if label == "look" else run_once(lanes, label=label)
            run_once(lanes, hangs_after(looks), hangs_in)
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


def test_the_log_says_where_the_report_is_or_what_it_would_say(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").touch()
    with closing(SerialLanes()) as lanes:
        for each in (file, tmp_path / "taken" / "rank0.txt"):
            with Hangs(lanes, each) as hangs:
                run_once(lanes, lambda task: hangs.hang())
            assert hangs.files == [each if each is file else None]
    lines = [record.getMessage() for record in caplog.records]
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


# ---- waits outside of lanes


@pytest.fixture
def hangs(file: Path) -> Iterator[Hangs]:
    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as made:
        yield made


def test_a_wait_outside_of_lanes_that_lasts_is_a_hang_that_is_said_once(hangs: Hangs, file: Path) -> None:
    with waiting("the counts of", "model.layers.0"):
        # In the first look it is seen.
        assert hangs.hang() == 1 + int(TIMEOUT_S)
        hangs.look(3 * LOOKS_FOR_A_HANG)
    assert hangs.files == [file]
    report = file.read_text()
    assert (
        "\nreason: hang: waits for other ranks in the counts of model.layers.0 (fsmoe.debug.hang_timeout_s = 4)\n"
        in report
    )
    assert "\nrank:   waits for other ranks in the counts of model.layers.0, since " in report
    assert ", called from " in report
    with waiting("another"):
        hangs.hang()
    assert len(hangs.files) == 2


def test_many_short_waits_are_no_hang(hangs: Hangs) -> None:
    for _ in range(5):
        with waiting("the counts of", "model.layers.0"):
            hangs.look(int(TIMEOUT_S))
    assert hangs.files == []
    assert waiting.now() == []


def test_a_wait_of_any_thread_is_seen_and_an_error_ends_it(hangs: Hangs) -> None:
    ends = threading.Event()

    def wait() -> None:
        with suppress(ValueError), waiting("gradients"):
            ends.wait()
            raise ValueError

    thread = threading.Thread(target=wait)
    thread.start()
    until(waiting.now)
    hangs.hang()
    ends.set()
    thread.join()
    assert waiting.now() == []


def test_a_wait_within_work_with_files_is_said_once_and_goes_on(hangs: Hangs, file: Path) -> None:
    @at_work("saving a checkpoint")
    def save() -> int:
        with waiting("whether a rank has failed"):
            hangs.look(5 * LOOKS_FOR_A_HANG)
        return 3

    assert save() == 3
    assert hangs.files == []
    assert file.read_text().count("files are written or read meanwhile, so it goes on waiting") == 1
    assert "; is saving a checkpoint, since " in file.read_text()
    assert working.now() == []


def test_a_wait_goes_on_as_long_as_any_rank_works_with_files(
    hangs: Hangs, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [("rank 0 waits", False), ("rank 1 saves", True), ("rank 2 waits", False)]
    monkeypatch.setattr(hangs.watchdog._others, "states", lambda: states)
    with waiting("whether a rank has failed"):
        hangs.look(3 * LOOKS_FOR_A_HANG)
        assert hangs.files == []
        states[1] = ("rank 1 waits", False)
        hangs.hang()


def test_what_is_said_names_the_last_forward_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits._Last, "forward", None)
    monkeypatch.setattr(waits._Last, "step", None)
    assert waits.describe_waits() == "is in no wait of ds_fsmoe; has run no forward"
    waits.forward_begins("forward 2 (training) of L00")
    waits.at_step(7)
    assert waits.describe_waits().startswith(
        "is in no wait of ds_fsmoe; last forward: forward 2 (training) of L00, since "
    )
    assert waits.describe_waits().endswith("; at step 7")


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    class Store:
        def set(self, key: str, value: str) -> None:
            answers.wait()

    monkeypatch.setattr(other_ranks, "world_size_now", lambda: 2)
    monkeypatch.setattr(other_ranks, "_own_store", Store)
    clock = SteppedClock()
    clock.gives_up = lambda thread: thread.name == "fsmoe-store"
    others = PeerReports(clock, 1.0, 1)
    assert others.check(True) is None
    assert others.states() == []
    answers.set()

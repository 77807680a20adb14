# SPDX-License-Identifier: Apache-2.0
"""The watchdog: what is a hang and what is none, what its report says, and its hooks for errors and SIGTERM."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.distributed.waits import at_work, waiting, working
from ds_fsmoe.execution.lanes import Body, Lanes, SerialLanes
from ds_fsmoe.observing import other_ranks
from ds_fsmoe.observing.other_ranks import PeerReports
from ds_fsmoe.observing.watchdog import Watchdog
from ds_fsmoe.planning.schedule import Lane, Task
from tests.fake_clock import Patient, SteppedClock
from tests.waiting import until
from tests.watchdog_cases import (
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
Names = Callable[[], list[str]]


def patient(lanes: Lanes, file: Path) -> Watchdog:
    """One that takes nothing for a hang, and waits for its reports."""
    return Watchdog(lanes, 300, file, host=Patient())


def test_time_between_runs_slow_tasks_and_many_short_waits_are_no_hang(lanes: Lanes, file: Path) -> None:
    with Hangs(lanes, file) as hangs:
        hangs.look(3 * LOOKS_FOR_A_HANG)
        # Longer than the timeout, all the time in a task, in runs that look the same each time.
        for _ in range(6):
            run_once(lanes, lambda task: hangs.look(LOOKS_FOR_A_HANG - 1))
        hangs.look(3 * LOOKS_FOR_A_HANG)
        for _ in range(5):
            with waiting("the counts of", "model.layers.0"):
                hangs.look(int(TIMEOUT_S))
        assert hangs.files == []
    assert waiting.now() == []
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
    """As streams are, whose device has done what was issued, where its driver answers."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = threading.Event()
        self.driver.set()

    def is_behind(self) -> bool:
        return not self.driver.wait()

    def progress(self) -> dict[Lane, tuple[str, str]]:
        self.driver.wait()
        return super().progress()


def test_a_driver_that_does_not_answer_is_a_hang_with_a_report_of_what_is_known(file: Path) -> None:
    with closing(LanesOfADevice()) as lanes, Hangs(lanes, file) as hangs:
        run_once(lanes)
        hangs.look(3 * LOOKS_FOR_A_HANG)
        assert hangs.files == []
        lanes.driver.clear()
        hangs.clock.gives_up = lambda thread: thread.name == "fsmoe-progress"
        hangs.hang()
        report = file.read_text()
        assert lane_rows(report)["compute"] == ["L00/forward/L00/EXPERT/chunk0"] * 2
        assert "the device's driver does not answer" in report
        # However often it was asked.
        assert report.count(" fsmoe-progress\n") == 1
        lanes.driver.set()


def test_the_log_says_where_the_report_is_or_what_it_would_say(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").touch()
    for each, reported in ((file, file), (tmp_path / "taken" / "rank0.txt", None)):
        with closing(SerialLanes()) as lanes, Hangs(lanes, each) as hangs:
            run_once(lanes, lambda task, hangs=hangs: hangs.hang())
            assert hangs.files == [reported]
    lines = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"rank 0: hang: .*; stacks and tasks: {file}", lines[0])
    assert "compute  L00/forward/L00/EXPERT/chunk0" in lines[1]
    assert "no report could be written: " in lines[1]


def test_what_was_printed_is_not_lost_and_a_disk_that_does_not_answer_does_not_keep_the_process(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    with (tmp_path / "printed").open("w") as out, closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        monkeypatch.setattr(sys, "stdout", out)
        print("step 7")
        assert (tmp_path / "printed").read_text() == ""
        run_once(lanes, lambda task: hangs.hang())
        assert (tmp_path / "printed").read_text() == "step 7\n"
        monkeypatch.setattr(os, "fsync", lambda _: answers.wait())
        hangs.clock.gives_up = lambda thread: thread.name == "fsmoe-report"
        run_once(lanes, lambda task: hangs.hang(), "L01/forward")
        assert hangs.files == [file, None]
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


# ---- errors


def fail(task: Task) -> None:
    raise ValueError("on purpose")


def test_an_error_of_a_run_is_reported_once_and_later_ones_beneath(lanes: Lanes, file: Path) -> None:
    with closing(patient(lanes, file)) as watchdog:
        for number in (1, 2):
            with pytest.raises(ValueError, match="on purpose") as caught:
                run_once(lanes, fail, f"L{number:02d}/forward")
            watchdog.failed(caught.value)
            watchdog.failed(caught.value)
            assert caught.value.__notes__[1:] == [f"stacks and tasks of this rank: {file}"]
            report = file.read_text()
            assert report.count("reason: error: ValueError: on purpose") == number
        assert ", in fail\n" in report
        assert report.index("L01/forward") < report.index("L02/forward")
        assert list(file.parent.iterdir()) == [file]
    error = ValueError("after it was closed")
    watchdog.failed(error)
    assert not hasattr(error, "__notes__")


def test_a_report_of_an_earlier_job_is_replaced_and_errors_that_go_on_do_not_fill_the_disk(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("reason: of an earlier job")
    counts = []
    with closing(SerialLanes()) as lanes, closing(patient(lanes, file)) as watchdog:
        assert file.read_text() == "reason: of an earlier job"
        for _ in range(19):
            watchdog.failed(ValueError())
            counts.append(file.read_text().count("reason:"))
    assert counts == [*range(1, 9), *range(1, 9), 1, 2, 3]


def test_two_watchdogs_of_a_process_report_to_files_of_their_own(file: Path) -> None:
    before = sys.excepthook
    with closing(SerialLanes()) as lanes:
        first, second = patient(lanes, file), patient(lanes, file)
        error = ValueError()
        sys.excepthook(ValueError, error, None)
        assert len(error.__notes__) == 2
        # In the order of their making, which is not that of a stack.
        first.close()
        assert sys.excepthook != before
        second.close()
    assert sys.excepthook is before
    assert sorted(file.parent.iterdir()) == [file, file.with_name("rank0_2.txt")] == [file, second.file]


# ---- hooks


@contextmanager
def sigterm_calls(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def our_threads() -> Names:
    """Names those of our threads that the test has made: one of an earlier test, which nobody joins, may be ending."""
    before = set(threading.enumerate())

    def names() -> list[str]:
        return sorted(each.name for each in set(threading.enumerate()) - before if each.name.startswith("fsmoe-"))

    return names


def test_close_ends_the_threads_and_puts_the_hooks_back(our_threads: Names) -> None:
    before = signal.getsignal(signal.SIGTERM), sys.excepthook
    with closing(SerialLanes()) as lanes:
        watchdog = Watchdog(lanes, 300)
        assert our_threads() == ["fsmoe-sigterm", "fsmoe-watchdog"]
        assert signal.getsignal(signal.SIGTERM) != before[0]
        assert sys.excepthook != before[1]
        watchdog.close()
        watchdog.close()
    until(lambda: our_threads() == [])
    assert (signal.getsignal(signal.SIGTERM), sys.excepthook) == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("has_event_loop", [False, True])
def test_a_handler_that_was_there_is_called_once_the_report_is_written_also_if_an_event_loop_has_come_since(
    file: Path, our_threads: Names, has_event_loop: bool
) -> None:
    found: list[str] = []
    with (
        sigterm_calls(lambda number, frame: found.append(file.read_text())),
        closing(SerialLanes()) as lanes,
        closing(patient(lanes, file)),
    ):
        if has_event_loop:
            signal.set_wakeup_fd(-1)
        run_once(lanes, lambda task: signal.raise_signal(signal.SIGTERM), "L02/forward")
        signal.raise_signal(signal.SIGTERM)
        assert "reason: SIGTERM" in found[0]
        assert lane_rows(found[0])["compute"] == ["L02/forward/L00/EXPERT/chunk0", "-"]
        # The first has come by the interpreter's pipe and by the handler, but is one.
        assert found == [found[0]] * 2
    until(lambda: our_threads() == [])
    assert file.read_text() == found[0]


def test_ending_a_job_by_hand_is_no_error_unless_it_was_in_a_run(file: Path) -> None:
    with closing(SerialLanes()) as lanes, closing(patient(lanes, file)) as watchdog:
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert not file.exists()
        watchdog.failed(KeyboardInterrupt())
        assert "reason: error: KeyboardInterrupt" in file.read_text()


def test_sigterm_that_is_ignored_or_looked_after_by_an_event_loop_is_left_alone(file: Path, our_threads: Names) -> None:
    with sigterm_calls(signal.SIG_IGN), closing(SerialLanes()) as lanes, closing(patient(lanes, file)):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    out, into = os.pipe()
    os.set_blocking(into, False)
    signal.set_wakeup_fd(into)
    with closing(SerialLanes()) as lanes, closing(patient(lanes, file)):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert our_threads() == ["fsmoe-watchdog"]
    assert signal.set_wakeup_fd(-1) == into
    os.close(out)
    os.close(into)


def test_hooks_that_someone_else_has_taken_over_pass_on_after_close(file: Path) -> None:
    calls: list[str] = []
    before = sys.excepthook
    with sigterm_calls(lambda number, frame: calls.append("stock")), closing(SerialLanes()) as lanes:
        sys.excepthook = lambda *error: calls.append("stock error")
        watchdog = patient(lanes, file)
        ours, our_excepthook = signal.getsignal(signal.SIGTERM), sys.excepthook
        theirs = [lambda number, frame: ours(number, frame), lambda *error: our_excepthook(*error)]
        signal.signal(signal.SIGTERM, theirs[0])
        sys.excepthook = theirs[1]
        watchdog.close()
        assert [signal.getsignal(signal.SIGTERM), sys.excepthook] == theirs
        # Another one on top: each hook calls the one before, none calls itself.
        with closing(patient(lanes, file)):
            signal.raise_signal(signal.SIGTERM)
            sys.excepthook(ValueError, ValueError("on purpose"), None)
        assert [signal.getsignal(signal.SIGTERM), sys.excepthook] == theirs
        sys.excepthook = before
    assert calls == ["stock", "stock error"]
    assert file.read_text().count("reason:") == 2


def test_a_watchdog_that_is_not_made_in_the_main_thread_leaves_signals_alone(file: Path) -> None:
    before, made = sys.excepthook, list[Hangs]()
    with closing(SerialLanes()) as lanes:
        making = threading.Thread(target=lambda: made.append(Hangs(lanes, file)))
        making.start()
        making.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with made[0] as hangs:
            run_once(lanes, lambda task: hangs.hang())
            assert hangs.files == [file]
    assert sys.excepthook is before


def test_lanes_that_are_forgotten_end_their_watchdog(file: Path, our_threads: Names) -> None:
    before = sys.excepthook
    lanes = SerialLanes()
    with Hangs(lanes, file) as hangs:
        run_once(lanes)
        hangs.look(2)
        del lanes
        gc.collect()
        hangs.clock.allow()
        until(lambda: not hangs.watchdog._thread.is_alive())
    until(lambda: our_threads() == [])
    with closing(SerialLanes()) as lanes, closing(patient(lanes, file)):
        assert our_threads() == ["fsmoe-sigterm", "fsmoe-watchdog"]
    until(lambda: our_threads() == [])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert sys.excepthook is before

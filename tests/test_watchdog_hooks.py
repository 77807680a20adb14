# SPDX-License-Identifier: Apache-2.0
"""The watchdog's hooks: errors, SIGTERM, and that all is as it was once it is closed."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.execution.lanes import Lanes, SerialLanes
from ds_fsmoe.observing.watchdog import Watchdog, report_file
from ds_fsmoe.planning.schedule import Task
from tests.fake_clock import SteppedClock
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


# ---- errors


def fail(task: Task) -> None:
    raise ValueError("on purpose")


def test_an_error_of_a_run_is_reported_once_and_later_ones_beneath(lanes: Lanes, file: Path) -> None:
    with closing(Watchdog(lanes, 300, file)) as watchdog:
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
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)) as watchdog:
        assert file.read_text() == "reason: of an earlier job"
        counts = []
        for _ in range(19):
            watchdog.failed(ValueError())
            counts.append(file.read_text().count("reason:"))
    assert counts == [*range(1, 9), *range(1, 9), 1, 2, 3]


def test_two_watchdogs_of_a_process_report_to_files_of_their_own(file: Path) -> None:
    before = sys.excepthook
    with closing(SerialLanes()) as lanes:
        first, second = Watchdog(lanes, 300, file), Watchdog(lanes, 300, file)
        assert second.file == file.with_name("rank0_2.txt")
        error = ValueError()
        sys.excepthook(ValueError, error, None)
        assert len(error.__notes__) == 2
        # In the order of their making, which is not that of a stack.
        first.close()
        assert sys.excepthook != before
        second.close()
    assert sys.excepthook is before
    assert sorted(file.parent.iterdir()) == [file, second.file]


def test_the_file_is_named_by_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "11")
    assert report_file() == tmp_path / "fsmoe_reports" / "rank11.txt"
    assert report_file("/elsewhere") == Path("/elsewhere/rank11.txt")


# ---- hooks


@contextmanager
def sigterm_calls(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def our_threads() -> Callable[[], list[str]]:
    """Names those of our threads that the test has made: one of an earlier test, which nobody joins, may be ending."""
    before = set(threading.enumerate())

    def names() -> list[str]:
        return sorted(each.name for each in set(threading.enumerate()) - before if each.name.startswith("fsmoe-"))

    return names


def test_close_ends_the_threads_and_puts_the_hooks_back(our_threads: Callable[[], list[str]]) -> None:
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


def test_a_handler_that_was_there_is_called_once_the_report_is_written(
    file: Path, our_threads: Callable[[], list[str]]
) -> None:
    found: list[str] = []
    with (
        sigterm_calls(lambda number, frame: found.append(file.read_text())),
        closing(SerialLanes()) as lanes,
        closing(Watchdog(lanes, 300, file)),
    ):
        run_once(lanes, lambda task: signal.raise_signal(signal.SIGTERM), "L02/forward")
        signal.raise_signal(signal.SIGTERM)
        assert len(found) == 2
        assert "reason: SIGTERM" in found[0]
        assert lane_rows(found[0])["compute"] == ["L02/forward/L00/EXPERT/chunk0", "-"]
        assert found[1] == found[0]
    # The first has come by the interpreter's pipe and by the handler, but is one.
    until(lambda: our_threads() == [])
    assert file.read_text() == found[0]


def test_sigterm_is_reported_also_if_an_event_loop_has_come_since(file: Path) -> None:
    found: list[bool] = []
    with (
        sigterm_calls(lambda number, frame: found.append(file.exists())),
        closing(SerialLanes()) as lanes,
        closing(Watchdog(lanes, 300, file)),
    ):
        signal.set_wakeup_fd(-1)
        signal.raise_signal(signal.SIGTERM)
    assert found == [True]


def test_ending_a_job_by_hand_is_no_error_unless_it_was_in_a_run(file: Path) -> None:
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)) as watchdog:
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert not file.exists()
        watchdog.failed(KeyboardInterrupt())
        assert "reason: error: KeyboardInterrupt" in file.read_text()


def test_sigterm_that_is_ignored_or_looked_after_by_an_event_loop_is_left_alone(
    file: Path, our_threads: Callable[[], list[str]]
) -> None:
    with sigterm_calls(signal.SIG_IGN), closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    out, into = os.pipe()
    os.set_blocking(into, False)
    signal.set_wakeup_fd(into)
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)):
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
        watchdog = Watchdog(lanes, 300, file)
        ours, our_excepthook = signal.getsignal(signal.SIGTERM), sys.excepthook
        theirs = [lambda number, frame: ours(number, frame), lambda *error: our_excepthook(*error)]
        signal.signal(signal.SIGTERM, theirs[0])
        sys.excepthook = theirs[1]
        watchdog.close()
        assert [signal.getsignal(signal.SIGTERM), sys.excepthook] == theirs
        # Another one on top: each hook calls the one before, none calls itself.
        with closing(Watchdog(lanes, 300, file)):
            signal.raise_signal(signal.SIGTERM)
            sys.excepthook(ValueError, ValueError("on purpose"), None)
        assert [signal.getsignal(signal.SIGTERM), sys.excepthook] == theirs
        sys.excepthook = before
    assert calls == ["stock", "stock error"]
    assert file.read_text().count("reason:") == 2


def test_a_watchdog_that_is_not_made_in_the_main_thread_leaves_signals_alone(file: Path) -> None:
    before = sys.excepthook
    hangs: list[Path | None] = []
    clock = SteppedClock()
    with closing(SerialLanes()) as lanes:
        made: list[Watchdog] = []
        making = threading.Thread(target=lambda: made.append(Watchdog(lanes, TIMEOUT_S, file, hangs.append, 0, clock)))
        making.start()
        making.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        run_once(lanes, lambda task: clock.look(LOOKS_FOR_A_HANG))
        made[0].close()
        assert hangs == [file]
    assert sys.excepthook is before


def test_lanes_that_are_forgotten_end_their_watchdog(file: Path, our_threads: Callable[[], list[str]]) -> None:
    before = sys.excepthook
    lanes = SerialLanes()
    with Hangs(lanes, file) as hangs:
        run_once(lanes)
        hangs.look(2)
        del lanes
        gc.collect()
        hangs.clock.allow()
        until(lambda: not hangs.watchdog._thread.is_alive())
    # The thread could not give SIGTERM back; the next watchdog has it.
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)):
        assert our_threads() == ["fsmoe-sigterm", "fsmoe-watchdog"]
    until(lambda: our_threads() == [])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert sys.excepthook is before

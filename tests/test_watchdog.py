# SPDX-License-Identifier: Apache-2.0
"""What a rank leaves behind when its job hangs, fails or is told to end; and that it leaves nothing otherwise."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.planning.schedule import Lane, Schedule, Task
from ds_fsmoe.runtime import watchdog as watchdog_module
from ds_fsmoe.runtime.lanes import Body, Lanes, SerialLanes, make_lanes
from ds_fsmoe.runtime.watchdog import HANG_STATUS, TERMINATED_STATUS, Watchdog, report_file
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[1]
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


# ---- on real ranks


def run_twice_with_one_missing(
    rank: int, world_size: int, folder: str, overlap: bool, is_hang: bool, misses_first: bool
) -> NoReturn:
    """All ranks run a forward; then rank 1 stays away from chunk 1 of the backward (or of the forward, at once)."""
    lanes = make_lanes(torch.device("cpu"), overlap)
    # The timeout is far from that of the test's process group, so it is the watchdog that ends the process.
    options: dict[str, Any] = {"first_use_s": 0} if misses_first else {}
    Watchdog(lanes, 2 if is_hang else 300, Path(folder, f"rank{rank}.txt"), **options)
    num_exchanged = 0

    def exchange(task: Task) -> None:
        nonlocal num_exchanged
        if rank == 1 and num_exchanged == (1 if misses_first else 3):
            raise TimeoutError
        num_exchanged += 1
        dist.all_to_all_single(torch.empty(6), torch.ones(6))

    bodies: dict[str, Body] = {"A2A_IN": exchange, "EXPERT": lambda task: None}
    if not misses_first:
        lanes.run(TWO_CHUNKS, bodies, "L03/forward")
        time.sleep(1.0 if is_hang else 0.0)  # so that the watchdog sees the end of the first use
    if rank == 0 and not is_hang:

        def terminate() -> None:
            wait_for(Path(folder, "missing").exists)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=terminate, daemon=True).start()
    with suppress(TimeoutError):
        lanes.run(TWO_CHUNKS, bodies, "L03/forward" if misses_first else "L03/backward")
    assert rank == 1, "rank 1 came after all"
    # In no run, so its own watchdog is content.
    Path(folder, "missing").touch()
    time.sleep(4 * LIMIT_S)
    raise AssertionError("nobody has ended this rank")


def fail_on_ranks(folder: Path, *args: bool) -> tuple[int, str]:
    """How rank 0 ended and what it left."""
    with pytest.raises(RuntimeError, match=r"exit codes \[") as caught:
        run_on_ranks(run_twice_with_one_missing, 2, folder, str(folder), *args, limit_s=60)
    codes = re.search(r"exit codes \[(-?\d+), (-?\d+)\]", str(caught.value))
    assert codes is not None, caught.value
    assert codes[2] == str(-signal.SIGKILL), caught.value  # rank 1 was at it still, and was ended by the test
    assert not list(folder.glob(".*")), "a report that is half written"
    return int(codes[1]), (folder / "rank0.txt").read_text()


@pytest.mark.parametrize("overlap", [True, False], ids=["threads", "serial, in the first run"])
def test_a_rank_whose_peer_never_comes_says_where_it_is_and_ends(tmp_path: Path, overlap: bool) -> None:
    code, report = fail_on_ranks(tmp_path, overlap, True, not overlap)
    assert code == HANG_STATUS == 86
    run = "L03/backward" if overlap else "L03/forward"
    assert lane_rows(report) == {
        "compute": [f"{run}/L00/EXPERT/chunk0"] * 2,
        "intra": ["-", "-"],
        "inter": [f"{run}/L00/A2A_IN/chunk1", f"{run}/L00/A2A_IN/chunk0"],
    }
    assert "ds_fsmoe: what rank 0 was doing" in report
    assert re.search(r"^reason: hang: a run is under way, and for \d\.\d s no task has begun or finished", report, re.M)
    assert "run:    under way" in report
    assert re.search(rf"^host:   {re.escape(os.uname().nodename)}, process \d+$", report, re.M)
    # The stack of the thread that waits, and the name of that thread.
    assert " in exchange\n" in report
    assert "MainThread" in report
    assert ("fsmoe-inter" in report) == overlap
    # A few seconds after it began.
    written = datetime.fromisoformat(re.search(r"^time:\s+(\S+)", report, re.M)[1]).timestamp()
    assert 1.5 <= written - (tmp_path / "missing").stat().st_mtime < 9


@pytest.mark.parametrize(
    ("overlap", "code"),
    # Where the main thread waits for a lane, Python's handlers run. In a collective they do not.
    [(True, -signal.SIGTERM), (False, TERMINATED_STATUS)],
    ids=["threads", "serial"],
)
def test_sigterm_in_a_collective_leaves_a_report_and_ends_the_process(tmp_path: Path, overlap: bool, code: int) -> None:
    ended_with, report = fail_on_ranks(tmp_path, overlap, False, False)
    assert ended_with == code
    assert "\nreason: SIGTERM\n" in report
    assert lane_rows(report)["inter"] == [f"L03/backward/L00/A2A_IN/chunk{chunk}" for chunk in (1, 0)]
    assert report.count("reason:") == 1


def be_forked(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A loader of data is forked, looks at its hooks, and is ended."""
    before = signal.getsignal(signal.SIGTERM), sys.excepthook
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, Path(folder, "report.txt"))):
        assert before[0] is signal.SIG_DFL
        ours = signal.getsignal(signal.SIGTERM)
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            is_stock = (signal.getsignal(signal.SIGTERM), sys.excepthook) == before
            os.write(into, b"stock" if is_stock and signal.set_wakeup_fd(-1) == -1 else b"taken")
            time.sleep(LIMIT_S)
            os._exit(0)
        found = os.read(out, 5)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        # If its signal had come to us, we would have a report, and be ended, by then.
        time.sleep(1.5)
        return {
            "hooks of the child": found,
            "the child ended by": os.waitstatus_to_exitcode(status),
            "ours are still there": signal.getsignal(signal.SIGTERM) == ours and signal.set_wakeup_fd(-1) != -1,
            "reports": os.listdir(folder),
        }


def test_the_sigterm_of_a_forked_process_is_its_own(tmp_path: Path) -> None:
    (reports := tmp_path / "reports").mkdir()
    assert run_on_ranks(be_forked, 1, tmp_path / "ranks", str(reports)) == [
        {
            "hooks of the child": b"stock",
            "the child ended by": -signal.SIGTERM,
            "ours are still there": True,
            "reports": [],
        }
    ]


def test_an_error_that_nobody_catches_leaves_a_report_and_is_shown_as_ever(tmp_path: Path) -> None:
    script = """
from ds_fsmoe.planning.schedule import Lane, Schedule, Task
from ds_fsmoe.runtime.lanes import SerialLanes
from ds_fsmoe.runtime.watchdog import Watchdog

class Engine:
    def __init__(self):
        self.lanes = SerialLanes()
        self.watchdog = Watchdog(self.lanes, 300)
    def __del__(self):  # when the interpreter takes its modules down
        self.watchdog.close()
        print("closed")
engine = Engine()
def expert(task):
    print("about to fail")
    raise ValueError("not enough \\udcff rows")
engine.lanes.run(Schedule((Task("EXPERT", Lane.COMPUTE, 2),)), {"EXPERT": expert}, "L05/backward")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANK": "7"}
    failed = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False
    )
    assert failed.returncode == 1
    assert failed.stdout.split(b"\n")[:2] == [b"about to fail", b"closed"]
    file = tmp_path / "fsmoe_reports" / "rank7.txt"
    assert b"Traceback" in failed.stderr
    assert b"ValueError: not enough" in failed.stderr
    assert f"what this rank was doing: {file}".encode() in failed.stderr
    report = file.read_text()
    assert "reason: error: ValueError: not enough \\udcff rows" in report
    assert lane_rows(report)["compute"] == ["L05/backward/L00/EXPERT/chunk2", "-"]
    assert "raised by task 0 of the schedule, L05/backward/L00/EXPERT/chunk2, on lane compute" in report
    assert ", in expert\n" in report
    assert [each.name for each in file.parent.iterdir()] == ["rank7.txt"]


# ---- the clock


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
    file.parent.mkdir()
    fifo = file.with_name(f".{file.name}.{os.getpid()}")
    os.mkfifo(fifo)  # opening it waits for a reader
    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        run_once(lanes, lambda task: wait_for(lambda: hangs.files))
        assert hangs.files == [None]
    fifo.open("rb").close()


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
            assert caught.value.__notes__[1:] == [f"what this rank was doing: {file}"]
            report = file.read_text()
            assert report.count("reason: error: ValueError: on purpose") == number
        assert ", in fail\n" in report
        assert report.index("L01/forward") < report.index("L02/forward")
        assert list(file.parent.iterdir()) == [file]
    error = ValueError("after it was closed")
    watchdog.failed(error)
    assert not hasattr(error, "__notes__")


def test_a_job_that_goes_on_after_errors_does_not_fill_the_disk(file: Path) -> None:
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)) as watchdog:
        counts = []
        for _ in range(19):
            watchdog.failed(ValueError())
            counts.append(file.read_text().count("reason:"))
    assert counts == [*range(1, 9), *range(1, 9), 1, 2, 3]


def test_a_report_of_an_earlier_job_is_replaced(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("of an earlier job")
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)) as watchdog:
        assert file.read_text() == "of an earlier job"
        watchdog.failed(ValueError())
        assert "of an earlier job" not in file.read_text()


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


def our_threads() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("fsmoe-"))


def test_close_ends_the_threads_and_puts_the_hooks_back() -> None:
    before = signal.getsignal(signal.SIGTERM), sys.excepthook
    with closing(SerialLanes()) as lanes:
        watchdog = Watchdog(lanes, 300)
        assert our_threads() == ["fsmoe-sigterm", "fsmoe-watchdog"]
        assert signal.getsignal(signal.SIGTERM) != before[0]
        assert sys.excepthook != before[1]
        watchdog.close()
        watchdog.close()
    wait_for(lambda: our_threads() == [])
    assert (signal.getsignal(signal.SIGTERM), sys.excepthook) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_that_was_there_is_called_once_the_report_is_written(file: Path) -> None:
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
    wait_for(lambda: our_threads() == [])
    assert file.read_text() == found[0]


def test_sigterm_is_reported_also_if_an_event_loop_has_come_since(file: Path) -> None:
    calls: list[int] = []
    with (
        sigterm_calls(lambda number, frame: calls.append(number)),
        closing(SerialLanes()) as lanes,
        closing(Watchdog(lanes, 300, file)),
    ):
        signal.set_wakeup_fd(-1)
        signal.raise_signal(signal.SIGTERM)
        assert calls == [signal.SIGTERM]
        assert file.exists()


def test_ending_a_job_by_hand_is_no_error_unless_it_was_in_a_run(file: Path) -> None:
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)) as watchdog:
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert not file.exists()
        watchdog.failed(KeyboardInterrupt())
        assert "reason: error: KeyboardInterrupt" in file.read_text()


def test_sigterm_that_is_ignored_or_looked_after_by_an_event_loop_is_left_alone(file: Path) -> None:
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
    with closing(SerialLanes()) as lanes:
        made: list[Watchdog] = []
        making = threading.Thread(target=lambda: made.append(Watchdog(lanes, FAST_S, file, hangs.append, 0)))
        making.start()
        making.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        run_once(lanes, lambda task: wait_for(lambda: hangs))
        made[0].close()
    assert sys.excepthook is before


def test_lanes_that_are_forgotten_end_their_watchdog(file: Path) -> None:
    before = sys.excepthook
    lanes = SerialLanes()
    with Hangs(lanes, file) as hangs:
        run_once(lanes)
        time.sleep(FAST_S)  # so that the watchdog has looked at them
        del lanes
        gc.collect()
        wait_for(lambda: not hangs.watchdog._thread.is_alive())
    # The thread could not give SIGTERM back; the next watchdog has it.
    with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)):
        assert our_threads() == ["fsmoe-sigterm", "fsmoe-watchdog"]
    wait_for(lambda: our_threads() == [])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert sys.excepthook is before

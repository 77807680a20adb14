# SPDX-License-Identifier: Apache-2.0
"""What a process leaves behind when its job hangs, fails or is told to end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.execution.lanes import Body, SerialLanes, make_lanes
from ds_fsmoe.observing import watchdog as exit_hooks
from ds_fsmoe.observing.watchdog import HANG_STATUS, TERMINATED_STATUS, Watchdog
from ds_fsmoe.planning.schedule import Task
from tests.fake_clock import SteppedClock
from tests.python_path import python_path
from tests.ranks import run_on_ranks
from tests.waiting import LIMIT_S, linger, stand_still
from tests.watchdog_cases import (
    TIMEOUT_S,
    TWO_CHUNKS,
    end_in_the_last_exchange,
    lane_rows,
    nobody_looks_after_sigterm,
)

ROOT = Path(__file__).resolve().parents[1]

FIXTURES = (nobody_looks_after_sigterm,)  # which pytest finds by their names here


def run_twice_with_one_missing(
    rank: int, world_size: int, folder: str, overlap: bool, is_hang: bool, misses_first: bool
) -> NoReturn:
    """All ranks run a forward; then rank 1 stays away from chunk 1 of the backward (or of the forward, at once)."""
    lanes = make_lanes(torch.device("cpu"), overlap)
    # Time passes for rank 0 alone, so it is its watchdog that ends the process, and no timeout of a collective.
    clock, missing = SteppedClock(), Path(folder, "missing")
    options: dict[str, Any] = {"first_use_s": 0} if misses_first else {}
    Watchdog(lanes, TIMEOUT_S, Path(folder, f"rank{rank}.txt"), host=clock, **options)
    # So long the main thread may take to end the process by the signal; in a collective it cannot.
    exit_hooks._MAIN_LIMIT_S = LIMIT_S if overlap else 0.2
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
        clock.look(1)  # so that the watchdog sees the end of the first use
    if rank == 0:
        ending = lanes, missing, clock, not is_hang
        threading.Thread(target=end_in_the_last_exchange, args=ending, daemon=True).start()
    with suppress(TimeoutError):
        lanes.run(TWO_CHUNKS, bodies, "L03/forward" if misses_first else "L03/backward")
    assert rank == 1, "rank 1 came after all"
    # In no run, so its own watchdog is content.
    missing.touch()
    stand_still()
    raise AssertionError("nobody has ended this rank")


def fail_on_ranks(folder: Path, *args: bool) -> tuple[int, str]:
    """How rank 0 ended and what it left."""
    with pytest.raises(RuntimeError, match=r"exit codes \[") as caught:
        run_on_ranks(run_twice_with_one_missing, 2, folder, str(folder), *args, grace_s=0)
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
    assert re.search(r"^reason: hang: a run is under way, and for 4\.0 s no task has begun or finished", report, re.M)
    assert "run:    under way" in report
    assert re.search(rf"^host:   {re.escape(os.uname().nodename)}, process \d+$", report, re.M)
    # The stack of the thread that waits, and the name of that thread.
    assert " in exchange\n" in report
    assert "MainThread" in report
    assert ("fsmoe-inter" in report) == overlap


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
            stand_still()
            os._exit(0)
        found = os.read(out, 5)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        # If its signal had come to us, we would leave a report now, and be ended.
        linger(0.5)
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
from ds_fsmoe.execution.lanes import SerialLanes
from ds_fsmoe.observing.watchdog import Watchdog

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
    environment = os.environ | {"PYTHONPATH": python_path(), "RANK": "7"}
    failed = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, timeout=600, check=False
    )
    assert failed.returncode == 1
    assert failed.stdout.split(b"\n")[:2] == [b"about to fail", b"closed"]
    file = tmp_path / "fsmoe_reports" / "rank7.txt"
    assert b"Traceback" in failed.stderr
    assert b"ValueError: not enough" in failed.stderr
    assert f"stacks and tasks of this rank: {file}".encode() in failed.stderr
    report = file.read_text()
    assert "reason: error: ValueError: not enough \\udcff rows" in report
    assert lane_rows(report)["compute"] == ["L05/backward/L00/EXPERT/chunk2", "-"]
    assert "raised by task 0 of the schedule, L05/backward/L00/EXPERT/chunk2, on lane compute" in report
    assert ", in expert\n" in report
    assert [each.name for each in file.parent.iterdir()] == ["rank7.txt"]

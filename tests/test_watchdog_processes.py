# SPDX-License-Identifier: Apache-2.0
"""What a process leaves behind when its job hangs, fails or is told to end, and what ranks hear of each other."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.distributed.waits import waiting, working
from ds_fsmoe.execution.lanes import Body, SerialLanes, make_lanes
from ds_fsmoe.execution.thread_lanes import ThreadLanes
from ds_fsmoe.files.traces import rank_file, read_trace
from ds_fsmoe.observing import watchdog as exit_hooks
from ds_fsmoe.observing.other_ranks import _collectives_begun, _key, _waits_now, describe_this_rank
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.observing.watchdog import HANG_STATUS, TERMINATED_STATUS, Watchdog
from ds_fsmoe.planning.schedule import Task
from tests.fake_clock import SteppedClock
from tests.lane_cases import COMPUTE, CPU, INTER
from tests.python_path import python_path
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.trace_cases import assert_no_overlap, assert_valid, events_of, two_chunks
from tests.waiting import LIMIT_S, linger, stand_still, until, until_blocked
from tests.watchdog_cases import LOOKS_FOR_A_HANG, TIMEOUT_S, Hangs, lane_rows, nobody_looks_after_sigterm

FIXTURES = (nobody_looks_after_sigterm,)  # which pytest finds by their names here


# ---- a rank that waits for one that never comes


def end_in_the_last_exchange(lanes: Any, missing: Path, clock: SteppedClock, by_signal: bool) -> None:
    """Once this rank waits for another in chunk 1, and the other one is known to be missing: time passes until the
    watchdog ends the process; or the process is told to end."""
    until(missing.exists)
    until(lambda: [name[-6:] for name in lanes.progress()[INTER]] == ["chunk1", "chunk0"])
    until(lambda: lanes.progress()[COMPUTE][1].endswith("chunk0"))
    if not by_signal:
        clock.allow(1000)
        return
    if not isinstance(lanes, ThreadLanes):  # then it sits in the collective itself
        until_blocked(threading.main_thread())
    os.kill(os.getpid(), signal.SIGTERM)


def run_until_one_is_missing(rank: int, world_size: int, folder: str, overlap: bool, is_hang: bool) -> NoReturn:
    """All ranks run a forward; then rank 1 stays away from chunk 1 of the backward."""
    lanes = make_lanes(CPU, overlap)
    # Time passes for rank 0 alone, so it is its watchdog that ends the process, and no timeout of a collective.
    clock, missing = SteppedClock(), Path(folder, "missing")
    watchdog = Watchdog(lanes, TIMEOUT_S, Path(folder, "reports", f"rank{rank}.txt"), host=clock)
    # So long the main thread may take to end the process by the signal; in a collective it cannot.
    exit_hooks._MAIN_LIMIT_S = LIMIT_S if overlap else 0.2
    tracer = Tracer(Path(folder, "trace"), rank, 5, 2, CPU)
    watchdog.at_end.append(tracer.save)
    num_exchanged = 0

    def exchange(task: Task) -> None:
        nonlocal num_exchanged
        if rank == 1 and num_exchanged == 3:
            raise TimeoutError
        num_exchanged += 1
        dist.all_to_all_single(torch.empty(6), torch.ones(6))

    bodies: dict[str, Body] = {"A2A_IN": exchange, "EXPERT": lambda task: None}
    tracer.step(5)
    lanes.run(two_chunks(), bodies, "L03/forward", tracer)
    clock.look(1)  # so that the watchdog sees the end of the first use
    if rank == 0:
        ending = lanes, missing, clock, not is_hang
        threading.Thread(target=end_in_the_last_exchange, args=ending, daemon=True).start()
    with suppress(TimeoutError):
        lanes.run(two_chunks(), bodies, "L03/backward", tracer)
    assert rank == 1, "rank 1 came after all"
    # In no run, so its own watchdog is content.
    missing.touch()
    stand_still()
    raise AssertionError("nobody has ended this rank")


HANG = "hang: a run is under way, and for 4.0 s no task has begun or finished"
ENDS = [
    (True, HANG_STATUS, HANG),
    (False, HANG_STATUS, HANG),
    # Where the main thread waits for a lane, Python's handlers run. In a collective they do not.
    (True, -signal.SIGTERM, "SIGTERM"),
    (False, TERMINATED_STATUS, "SIGTERM"),
]


@sampled(("overlap", "code", "reason"), ENDS, kept=[0, 3])
def test_a_rank_that_ends_in_a_collective_leaves_a_report_and_its_trace(
    tmp_path: Path, overlap: bool, code: int, reason: str
) -> None:
    with pytest.raises(RuntimeError, match=r"exit codes \[") as caught:
        run_on_ranks(run_until_one_is_missing, 2, tmp_path, str(tmp_path), overlap, reason == HANG, grace_s=0)
    # Rank 1 was at it still, and was ended by the test.
    assert re.search(rf"exit codes \[{code}, -9\]", str(caught.value)), caught.value
    assert HANG_STATUS == 86, "documented"
    report = (tmp_path / "reports" / "rank0.txt").read_text()
    assert "ds_fsmoe: what rank 0 was doing" in report
    assert len(re.findall(rf"^reason: {re.escape(reason)}", report, re.M)) == report.count("reason:") == 1
    assert "run:    under way" in report
    assert re.search(rf"^host:   {re.escape(os.uname().nodename)}, process \d+$", report, re.M)
    assert lane_rows(report) == {
        "compute": ["L03/backward/L00/EXPERT/chunk0"] * 2,
        "intra": ["-", "-"],
        "inter": ["L03/backward/L00/A2A_IN/chunk1", "L03/backward/L00/A2A_IN/chunk0"],
    }
    # The stack of the thread that waits, and the name of that thread.
    assert " in exchange\n" in report
    assert "MainThread" in report
    assert ("fsmoe-inter" in report) == overlap
    trace = read_trace(tmp_path / "trace" / "rank0.json")
    assert_valid(trace)
    assert_no_overlap(trace)
    about = trace["otherData"]
    assert about["ended"].startswith(reason)
    assert (about["complete"], about["steps"], about["asked_for"], about["runs"]) == (False, [5], "steps 5 to 6", 2)
    assert about["unfinished"] == [
        {"label": "L03/backward", "step": 5, "tasks": 4, "done": 2, "under_way": ["fsmoe/L03/bwd/A2A_IN/chunk1"]}
    ]
    done = [f"fwd/{kind}/chunk{chunk}" for kind in ("A2A_IN", "EXPERT") for chunk in (0, 1)]
    done += ["bwd/A2A_IN/chunk0", "bwd/EXPERT/chunk0"]
    assert {event["name"] for event in events_of(trace)} == {f"fsmoe/L03/{each}" for each in done}
    # The report was there first, nothing is half written, and nothing is of rank 1, which the test has killed.
    files = tmp_path / "reports" / "rank0.txt", tmp_path / "trace" / "rank0.json"
    assert files[0].stat().st_mtime_ns <= files[1].stat().st_mtime_ns
    assert [list(each.parent.iterdir()) for each in files] == [[each] for each in files]


FAILS = """
from pathlib import Path
import torch
from ds_fsmoe.planning.schedule import Lane, Schedule, Task
from ds_fsmoe.execution.lanes import SerialLanes
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.observing.watchdog import Watchdog

class Engine:
    def __init__(self):
        self.lanes = SerialLanes()
        self.watchdog = Watchdog(self.lanes, 300)
    def __del__(self):  # when the interpreter takes its modules down
        self.watchdog.close()
        print("closed")
engine = Engine()
tracer = Tracer(Path("trace"), 7, 7, 100, torch.device("cpu"))
tracer.step(7)
def expert(task):
    if task.chunk == 1:
        print("about to fail")
        raise ValueError("not enough \\udcff rows")
tasks = Task("EXPERT", Lane.COMPUTE), Task("EXPERT", Lane.COMPUTE, 1)
engine.lanes.run(Schedule(tasks[:1]), {"EXPERT": expert}, "L05/forward", tracer)
del tracer  # nobody but the exit of the process has it
engine.lanes.run(Schedule(tasks), {"EXPERT": expert}, "L05/backward")
"""


def test_an_error_that_nobody_catches_leaves_a_report_and_a_trace_and_is_shown_as_ever(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": python_path(), "RANK": "7"}
    failed = subprocess.run(
        [sys.executable, "-c", FAILS], cwd=tmp_path, env=environment, capture_output=True, timeout=600, check=False
    )
    assert failed.returncode == 1
    assert failed.stdout.split(b"\n")[:2] == [b"about to fail", b"closed"]
    file = tmp_path / "fsmoe_reports" / "rank7.txt"
    for words in (b"Traceback", b"ValueError: not enough", f"stacks and tasks of this rank: {file}".encode()):
        assert words in failed.stderr
    report = file.read_text()
    assert "reason: error: ValueError: not enough \\udcff rows" in report
    assert lane_rows(report)["compute"] == ["L05/backward/L00/EXPERT/chunk1", "L05/backward/L00/EXPERT/chunk0"]
    assert "raised by task 1 of the schedule, L05/backward/L00/EXPERT/chunk1, on lane compute" in report
    assert ", in expert\n" in report
    assert [each.name for each in file.parent.iterdir()] == ["rank7.txt"]
    trace = read_trace(rank_file(tmp_path / "trace", 7))
    assert trace["otherData"]["ended"] == "closed in step 7"
    assert [event["name"] for event in events_of(trace)] == ["fsmoe/L05/fwd/EXPERT/chunk0"]


def be_forked(rank: int, world_size: int, folder: str) -> None:
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
        assert os.read(out, 5) == b"stock"
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        # If its signal had come to us, we would leave a report now, and be ended.
        linger(0.5)
        assert signal.getsignal(signal.SIGTERM) == ours
        assert signal.set_wakeup_fd(-1) != -1
        assert os.listdir(folder) == []


def test_the_sigterm_of_a_forked_process_is_its_own(tmp_path: Path) -> None:
    (reports := tmp_path / "reports").mkdir()
    run_on_ranks(be_forked, 1, tmp_path / "ranks", str(reports))


# ---- waits outside of lanes


def read_frames_that_end(rank: int, world_size: int) -> None:
    """A thread reads the frames of this one. A collection in it lets this one leave some, as a finalizer may."""
    ended = looks = 0

    def call(depth: int, number: int) -> None:
        nonlocal ended
        if depth:
            (call if number % 2 else call_in_a_larger_frame)(depth - 1, number // 2)
        ended += 1

    def call_in_a_larger_frame(depth: int, number: int, a: Any = 0, b: Any = 0, c: Any = 0) -> None:
        call(depth, number)

    def wait_until_some_end(*_: Any) -> None:
        if threading.current_thread() is looking:
            before = ended
            while ended < before + 50:
                linger(0.0001)

    def look() -> None:
        nonlocal looks
        for number in range(100):
            gc.set_threshold(1 + number % 10)  # a collection begins at another allocation each time
            _waits_now()
            describe_this_rank()
            looks += 1

    looking = threading.Thread(target=look)
    gc.callbacks.append(wait_until_some_end)
    looking.start()
    rng = random.Random(7)
    while looking.is_alive():
        call(rng.randrange(20), rng.randrange(2**20))
    assert looks == 100
    assert gc.isenabled()


def test_frames_are_read_while_other_threads_leave_them(tmp_path: Path) -> None:
    run_on_ranks(read_frames_that_end, 1, tmp_path)


def wait_for_one(rank: int, world_size: int, folder: str) -> list[int]:
    """Returns how often this rank would have been ended beside one at work with files, and beside one that is not."""
    return [hangs_beside(rank, Path(folder), is_at_work) for is_at_work in (True, False)]


def hangs_beside(rank: int, folder: Path, is_at_work: bool) -> int:
    """Rank 0 waits for rank 1, which is at work with files, or is not, until it has reported that."""
    files = [folder / f"{is_at_work}{each}.txt" for each in range(2)]
    store = dist.distributed_c10d._get_default_store().clone()

    def look() -> None:
        if rank == 0:
            hangs.look(1 + int(TIMEOUT_S / 2))  # then it asks the others
            until(lambda: store.get(_key(1)).startswith(b"w" if is_at_work else b"-"))
        # Until what is expected is written; more looks than this mean that it never is.
        for _ in range(500):
            if files[0 if is_at_work else 1].exists():
                break
            hangs.look(1)
            linger(0.01)

    with closing(SerialLanes()) as lanes, Hangs(lanes, files[rank]) as hangs:
        dist.barrier()
        looking = threading.Thread(target=look)
        if rank == 0:
            with waiting("what every rank says"):
                looking.start()
                dist.barrier()
                looking.join()
        else:
            with working("saving a checkpoint") if is_at_work else nullcontext():
                looking.start()
                looking.join()
            dist.barrier()
    return len(hangs.files)


def test_a_rank_that_waits_for_one_at_work_with_files_is_not_ended_and_others_say_where_they_are(
    tmp_path: Path,
) -> None:
    assert run_on_ranks(wait_for_one, 2, tmp_path / "ranks", str(tmp_path)) == [[0, 1], [0, 0]]
    for is_at_work in (True, False):
        report = (tmp_path / f"{is_at_work}0.txt").read_text()
        assert "reason: hang: waits for other ranks in what every rank says" in report
        its_work = "\n        rank 1: is in no wait of ds_fsmoe; is saving a checkpoint, since "
        assert (its_work in report) == is_at_work
        assert (tmp_path / f"{is_at_work}1.txt").exists() != is_at_work, "the other rank reports where it was, too"


def deepspeeds_own(late: Callable[[], object]) -> None:
    from deepspeed.runtime.zero.utils import assert_lst_len_same_as_other_ranks

    late()
    assert_lst_len_same_as_other_ranks([1])


def of_the_script(late: Callable[[], object]) -> None:
    import deepspeed.comm

    late()
    deepspeed.comm.barrier()


def at_the_end_of_a_change(late: Callable[[], object]) -> None:
    """Rank 0 is late within the change."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        layer = torch.nn.Linear(2, 2)
    with deepspeed.zero.GatheredParameters(list(layer.parameters()), modifier_rank=0):
        late()


SHORT = 4
"""Waits of DeepSpeed's at one place, one after the other."""
WAITS = {"DeepSpeed": (deepspeeds_own, 1), "script": (of_the_script, 1), "change": (at_the_end_of_a_change, 0)}
"""Where ranks wait for which, which is late."""


def wait_in_deepspeed(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """The reports of the rank that waits, for which time passes until the other one comes after many looks."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = {}
    for name, (act, late_rank) in WAITS.items():
        waits_for_it, looked, report = (Path(folder, f"{name} {each}") for each in ("waits", "looked", "report.txt"))

        def late(waits_for_it: Path = waits_for_it, looked: Path = looked) -> None:
            waits_for_it.touch()
            until(looked.exists)

        def look(hangs: Hangs, waits_for_it: Path = waits_for_it, looked: Path = looked) -> None:
            until(waits_for_it.exists)
            until_blocked(threading.main_thread())
            hangs.look(2 * LOOKS_FOR_A_HANG)
            looked.touch()

        if rank == late_rank:
            act(late)
        else:
            files = hangs_while(lambda act=act: act(lambda: None), look, report)
            found[name] = [report.read_text() for _ in files]
    return found | {"many short ones": many_short_ones(rank, folder)}


def hangs_while(act: Callable[[], None], look: Callable[[Hangs], None], report: Path) -> list[Path | None]:
    """What a watchdog reports while this thread acts and another looks."""
    with closing(SerialLanes()) as lanes, Hangs(lanes, report) as hangs:
        looking = threading.Thread(target=look, args=(hangs,))
        looking.start()
        act()
        looking.join()
        hangs.look(1)
        assert waiting.now() == []
        return hangs.files


def many_short_ones(rank: int, folder: str) -> list[Any]:
    """Each is looked at, at one place, for less than a hang."""
    go = [Path(folder, f"go{number}") for number in range(SHORT)]

    def all_of_them() -> None:
        for each in go:
            deepspeeds_own((lambda each=each: until(each.exists)) if rank else lambda: None)

    def look(hangs: Hangs) -> None:
        for number, each in enumerate(go):
            until_blocked(threading.main_thread())
            hangs.look(LOOKS_FOR_A_HANG // 2)
            before = _collectives_begun()
            each.touch()
            until(lambda before=before, number=number: _collectives_begun() != before or number == SHORT - 1)

    if rank:
        all_of_them()
        return []
    return hangs_while(all_of_them, look, Path(folder, "short.txt"))


def test_a_wait_of_deepspeeds_that_lasts_is_a_hang_and_one_of_the_script_or_many_short_ones_are_not(
    tmp_path: Path,
) -> None:
    first, second = run_on_ranks(wait_in_deepspeed, 2, tmp_path / "ranks", str(tmp_path))
    (report,) = first.pop("DeepSpeed")
    assert first == {"script": [], "many short ones": []}
    assert second == {"change": [], "many short ones": []}
    reason = "hang: waits for other ranks in DeepSpeed's assert_lst_len_same_as_other_ranks (runtime/zero/utils.py:"
    assert f"\nreason: {reason}" in report
    assert "\nrank:   waits for other ranks in DeepSpeed's assert_lst_len_same_as_other_ranks" in report

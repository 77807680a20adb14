# SPDX-License-Identifier: Apache-2.0
"""A trace is not lost with its process: the watchdog has it written before a process that hangs or is told to end."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.execution.lanes import Body, Lanes, SerialLanes, make_lanes
from ds_fsmoe.files.traces import read_trace
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.observing import trace as trace_module
from ds_fsmoe.observing import watchdog as exit_hooks
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.observing.watchdog import HANG_STATUS, TERMINATED_STATUS, Watchdog
from ds_fsmoe.planning.schedule import Task
from tests.fake_clock import SteppedClock
from tests.lane_cases import CPU, BodyError
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, batch
from tests.trace_cases import (
    assert_holds_nothing,
    assert_no_overlap,
    assert_valid,
    events_of,
    lanes,
    make_tracer,
    run,
    two_chunks,
    written,
)
from tests.waiting import LIMIT_S, linger, stand_still, until
from tests.watchdog_cases import (
    TIMEOUT_S,
    TWO_CHUNKS,
    Hangs,
    end_in_the_last_exchange,
    file,
    nobody_looks_after_sigterm,
    run_once,
)

FIXTURES = (lanes, make_tracer, file, nobody_looks_after_sigterm)  # which pytest finds by their names here


# ---- on real ranks


def be_traced_until_one_is_missing(rank: int, world_size: int, folder: str, overlap: bool, is_hang: bool) -> NoReturn:
    """All ranks run a forward; then rank 1 stays away from chunk 1 of the backward."""
    lanes = make_lanes(torch.device("cpu"), overlap)
    clock, missing = SteppedClock(), Path(folder, "missing")
    watchdog = Watchdog(lanes, TIMEOUT_S, Path(folder, f"rank{rank}.txt"), host=clock)
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
    lanes.run(TWO_CHUNKS, bodies, "L03/forward", tracer)
    clock.look(1)  # so that the watchdog sees the end of the first use
    if rank == 0:
        ending = lanes, missing, clock, not is_hang
        threading.Thread(target=end_in_the_last_exchange, args=ending, daemon=True).start()
    with suppress(TimeoutError):
        lanes.run(TWO_CHUNKS, bodies, "L03/backward", tracer)
    assert rank == 1, "rank 1 came after all"
    missing.touch()
    stand_still()
    raise AssertionError("nobody has ended this rank")


@pytest.mark.parametrize(
    ("overlap", "is_hang", "code", "reason"),
    [
        (True, True, HANG_STATUS, "hang: a run is under way, and for "),
        (False, True, HANG_STATUS, "hang: a run is under way, and for "),
        # Where the main thread waits for a lane, Python's handlers run. In a collective they do not.
        (True, False, -signal.SIGTERM, "SIGTERM"),
        (False, False, TERMINATED_STATUS, "SIGTERM"),
    ],
    ids=["hang, threads", "hang, serial", "SIGTERM, threads", "SIGTERM, serial"],
)
def test_a_rank_that_ends_in_a_collective_leaves_its_trace(
    tmp_path: Path, overlap: bool, is_hang: bool, code: int, reason: str
) -> None:
    with pytest.raises(RuntimeError, match=r"exit codes \[") as caught:
        run_on_ranks(be_traced_until_one_is_missing, 2, tmp_path, str(tmp_path), overlap, is_hang, grace_s=0)
    assert re.search(rf"exit codes \[{code}, -9\]", str(caught.value)), caught.value
    trace = read_trace(tmp_path / "trace" / "rank0.json")
    assert_valid(trace)
    assert_no_overlap(trace)
    about = trace["otherData"]
    assert about["ended"].startswith(reason)
    assert (about["complete"], about["steps"], about["asked_for"], about["runs"]) == (False, [5], "steps 5 to 6", 2)
    assert about["unfinished"] == [
        {"label": "L03/backward", "step": 5, "tasks": 4, "done": 2, "under_way": ["fsmoe/L03/bwd/A2A_IN/chunk1"]}
    ]
    assert sorted(event["name"] for event in events_of(trace)) == [
        *("fsmoe/L03/bwd/A2A_IN/chunk0", "fsmoe/L03/bwd/EXPERT/chunk0"),
        *(f"fsmoe/L03/fwd/{kind}/chunk{chunk}" for kind in ("A2A_IN", "EXPERT") for chunk in (0, 1)),
    ]
    # The report was there first.
    assert (tmp_path / "rank0.txt").stat().st_mtime_ns <= (tmp_path / "trace" / "rank0.json").stat().st_mtime_ns
    # Nothing half written, and nothing of rank 1, which the test has killed.
    assert [each.name for each in (tmp_path / "trace").iterdir()] == ["rank0.json"]


def train_until_told_to_end(rank: int, world_size: int, folder: str) -> NoReturn:
    import ds_fsmoe

    os.chdir(folder)
    case = Case(1, 0)
    model = SmallModel(case, rank)
    block = {"enabled": True, "trace": {"enabled": True, "start_step": 1, "num_steps": 5, "path": "trace"}}
    engine, *_ = ds_fsmoe.initialize(
        model=model, model_parameters=list(model.parameters()), config=case.ds_config(fsmoe=block)
    )
    for step in range(5):
        loss, _ = engine(*batch(step, rank, torch.float32))
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        engine.backward(loss)
        engine.step()
    raise AssertionError("was not ended")


def test_a_job_that_is_told_to_end_leaves_the_trace_of_its_engine(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=rf"exit codes \[-{signal.SIGTERM:d}\]"):
        run_on_ranks(train_until_told_to_end, 1, tmp_path, str(tmp_path))
    trace = read_trace(tmp_path / "trace" / "rank0.json")
    assert trace["otherData"]["ended"] == "SIGTERM"
    assert trace["otherData"]["steps"] == [1, 2, 3]
    labels = {(event["args"]["step"], event["args"]["phase"]) for event in events_of(trace)}
    assert labels == {(1, "fwd"), (1, "bwd"), (2, "fwd"), (2, "bwd"), (3, "fwd")}


def test_the_error_of_a_run_saves_the_trace_whoever_catches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = {"enabled": True, "start_step": 0, "num_steps": 2, "path": "trace"}
    running = LayerRuntime(FSMoEBlock.model_validate({"enabled": True, "trace": trace}), CPU)
    assert running.tracer is not None

    def fail(task: Task) -> None:
        raise BodyError("on purpose")

    with closing(running):
        running.at_step(0)
        run(running.lanes, running.tracer, two_chunks())
        with pytest.raises(BodyError):
            run(running.lanes, running.tracer, two_chunks(), "L03/backward", fail)
        saved = written(running.tracer)
        assert saved["otherData"]["ended"] == "error: BodyError: on purpose"
        assert [each["label"] for each in saved["otherData"]["unfinished"]] == ["L03/backward"]
        # Someone has caught it, and training goes on: so does the trace.
        run(running.lanes, running.tracer, two_chunks())
        running.at_step(1)
        run(running.lanes, running.tracer, two_chunks())
        running.at_step(2)
    whole = written(running.tracer)["otherData"]
    assert (whole["complete"], whole["runs"], whole["ended"]) == (True, 4, "after the last step")


# ---- what is called at the end


def test_what_is_called_at_the_end_hears_why_once_the_report_is_written(file: Path) -> None:
    heard: list[tuple[str, str]] = []
    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        hangs.watchdog.at_end.append(lambda reason: heard.append((reason, file.read_text())))
        run_once(lanes, lambda task: hangs.hang())
    ((reason, report),) = heard
    assert reason.startswith("hang: ")
    assert f"reason: {reason}\n" in report


def test_what_hangs_or_fails_at_the_end_keeps_no_process(file: Path) -> None:
    called: list[str] = []
    goes_on = threading.Event()

    def fail(reason: str) -> NoReturn:
        called.append("fails")
        raise SystemExit("on purpose")

    def hang(reason: str) -> None:
        called.append("hangs")
        goes_on.wait()

    with closing(SerialLanes()) as lanes, Hangs(lanes, file) as hangs:
        hangs.watchdog.at_end += [fail, hang, called.append]
        hangs.clock.gives_up = lambda thread: thread.name == "fsmoe-at-end" and "hangs" in called
        run_once(lanes, lambda task: hangs.hang())
        assert hangs.files == [file]
        assert called == ["fails", "hangs"]
        goes_on.set()
        until(lambda: len(called) == 3)


def test_sigterm_waits_for_what_is_saved_before_it_goes_on(file: Path) -> None:
    called: list[str] = []

    def save(reason: str) -> None:
        linger()
        called.append(reason)

    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append("the handler that was there"))
    try:
        with closing(SerialLanes()) as lanes, closing(Watchdog(lanes, 300, file)) as watchdog:
            watchdog.at_end.append(save)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == ["SIGTERM", "the handler that was there"]


# ---- saving


def test_saving_changes_nothing_of_what_is_written_at_the_end(make_tracer: Callable[..., Tracer], lanes: Lanes) -> None:
    tracer, schedule = make_tracer(0, 2), two_chunks()
    saved: list[dict[str, Any]] = []

    def save() -> None:
        tracer.save("to see")
        saved.append(written(tracer))

    for step in range(2):
        tracer.step(step)
        save()
        run(lanes, tracer, schedule)
    save()
    tracer.step(2)
    assert [(each["otherData"]["runs"], each["otherData"]["complete"]) for each in saved] == [
        *((0, False), (1, False), (2, False))
    ]
    assert {each["otherData"]["ended"] for each in saved} == {"to see"}
    whole = written(tracer)
    assert whole["otherData"]["complete"]
    assert events_of(whole) == events_of(saved[-1])
    assert_holds_nothing(tracer)
    # Nothing more is written.
    save()
    assert saved[-1] == whole


def test_what_is_saved_in_the_middle_of_a_task_names_it_and_it_is_traced_to_its_end(
    make_tracer: Callable[..., Tracer], lanes: Lanes
) -> None:
    tracer = make_tracer()
    tracer.step(0)

    def save(task: Task) -> None:
        if task.kind == "EXPERT" and task.chunk == 0:
            tracer.save("to see")

    run(lanes, tracer, two_chunks(), body=save)
    (unfinished,) = written(tracer)["otherData"]["unfinished"]
    assert "fsmoe/L03/fwd/EXPERT/chunk0" in unfinished["under_way"]
    tracer.step(1)
    assert written(tracer)["otherData"]["unfinished"] == []
    assert len(events_of(written(tracer))) == 4


@pytest.mark.parametrize("is_held_by", ["who starts a run", "who writes the end"])
def test_saving_waits_for_nobody(
    make_tracer: Callable[..., Tracer], monkeypatch: pytest.MonkeyPatch, is_held_by: str
) -> None:
    """The main thread may be stopped anywhere by the handler of a signal, which then waits for what is saved."""
    tracer, lanes = make_tracer(), SerialLanes()
    tracer.step(0)
    run(lanes, tracer, two_chunks())
    stopped, goes_on = threading.Event(), threading.Event()
    put = trace_module.write_trace

    def stop(trace: Any, path: Path) -> None:
        if threading.current_thread() is holder:
            stopped.set()
            goes_on.wait()
        put(trace, path)

    def hold() -> None:
        if is_held_by == "who starts a run":
            with tracer._lock:
                stopped.set()
                goes_on.wait()
        else:
            tracer.close()

    monkeypatch.setattr(trace_module, "write_trace", stop)
    holder = threading.Thread(target=hold)
    holder.start()
    try:
        stopped.wait()
        saving = threading.Thread(target=tracer.save, args=("SIGTERM",), daemon=True)
        saving.start()
        saving.join(LIMIT_S)
        assert not saving.is_alive()
        saved = json.loads(tracer.path.read_text())
        assert (saved["otherData"]["ended"], saved["otherData"]["runs"]) == ("SIGTERM", 1)
        assert len(events_of(saved)) == 4
    finally:
        goes_on.set()
        holder.join()

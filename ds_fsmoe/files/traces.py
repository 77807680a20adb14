# SPDX-License-Identifier: Apache-2.0
"""Reads and writes trace files for Perfetto and chrome://tracing, one per rank, and merges those of a folder.

The tracer writes them; ``ds_fsmoe/offline`` reads them. Times are whole microseconds since 1970 by the host's clock.
Files of one host therefore fit together; those of several hosts fit if their clocks agree. They are whole, because a
float has too few digits, and rounded down, so that tasks without overlap never seem to overlap. The milliseconds in
``args`` are exact.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from ds_fsmoe.files.whole_files import write_whole
from ds_fsmoe.planning.schedule import HOLD, Lane, Task
from ds_fsmoe.planning.timeline import Timeline
from ds_fsmoe.shapes import Items, Known, Named, Number, Whole, fits
from ds_fsmoe.untrusted import MOST_RANKS, MOST_RUN_BYTES, read_json

logger = logging.getLogger("ds_fsmoe")

MERGED = "trace.json"
LEFT_OUT = ("missing", "unreadable", "of_another_job")
"""The reasons why a file is not in the merged one, as the merged file names them."""
MEASURED, PREDICTED = "measured", "predicted"
"""The categories of events."""
_PHASES = {"forward": "fwd", "backward": "bwd"}
_ROWS_OF_PROCESS = 1000
_Row = tuple[bool, int, int]
"""The row of an event: (predicted or measured, track, lane)."""


@dataclass(frozen=True, slots=True)
class TracedRun:
    """Represents one run of a schedule, with its times in nanoseconds since 1970."""

    number: int
    """The position of the run among all runs of the trace, by their beginnings."""
    label: str
    """The label, such as "L03/backward"."""
    step: int
    tasks: Sequence[Task]
    start_ns: int
    spans_ns: Sequence[tuple[int, int] | None]
    """The (begin, end) of each task; ``None`` for a task that has not ended."""
    predicted: Timeline | None = None

    @property
    def is_whole(self) -> bool:
        """Return True if the run has ended."""
        return None not in self.spans_ns


def place_of(label: str, task: Task) -> tuple[str, str]:
    """Return (layer, phase) of a task in a run with a label: "L03/backward" is ("L03", "bwd").

    A label without a layer, such as "backward", is a run over several layers; then the task names its layer.
    """
    layer, _, phase = label.rpartition("/")
    return layer or f"L{task.layer:02d}", _PHASES.get(phase, phase)


def range_name(label: str, task: Task) -> str:
    """Return the stable name of a task: ``fsmoe/L03/bwd/A2A_IN/chunk1``."""
    return "/".join(each for each in ("fsmoe", *place_of(label, task), task.kind, f"chunk{task.chunk}") if each)


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's trace."""
    return folder / f"rank{rank}.json"


# ---- one rank


def trace_of(rank: int, host: str, runs: Iterable[TracedRun], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's trace: a process for it, a row for each lane, and rows for predictions from each run's start.

    A lane has further rows where its runs overlap, because one started inside another or took less than predicted.
    """
    pid = rank + 1  # viewers take 0 for the kernel's
    drawn: list[tuple[_Row, dict[str, Any]]] = []
    ends_ns: dict[bool, list[int]] = {False: [], True: []}
    for run in sorted(runs, key=lambda run: run.start_ns):
        timed = zip(run.tasks, run.spans_ns, strict=True)
        measured = [(task, *span_ns) for task, span_ns in timed if span_ns is not None and task.kind != HOLD]
        if not measured:
            continue
        for is_predicted, spans in ((False, measured), (True, _predicted(run))):
            if spans:
                track = _free_track(ends_ns[is_predicted], run.start_ns, max(end_ns for *_, end_ns in spans))
                for span in spans:
                    row = is_predicted, track, list(Lane).index(span[0].lane)
                    drawn.append((row, _event(run, is_predicted, *span)))
    rows = sorted({row for row, _ in drawn} | {(False, 0, lane) for lane in range(len(Lane))})
    # No other process has the same numbers: some viewers would mix them up.
    tid_of_row = {row: pid * _ROWS_OF_PROCESS + place for place, row in enumerate(rows, start=1)}
    named = [
        _metadata("process_name", pid, name=f"rank {rank}, {host}"),
        _metadata("process_sort_index", pid, sort_index=rank),
    ]
    for row, tid in tid_of_row.items():
        named.append(_metadata("thread_name", pid, tid, name=_title(row)))
        named.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
    return {
        "traceEvents": named + [event | {"pid": pid, "tid": tid_of_row[row]} for row, event in drawn],
        "displayTimeUnit": "ms",
        "otherData": {"rank": rank, "host": host, "written_ns": time.time_ns(), **about},
    }


def _predicted(run: TracedRun) -> list[tuple[Task, int, int]]:
    spans = () if run.predicted is None else run.predicted.spans
    return [
        (each.task, run.start_ns + round(each.start_ms * 1e6), run.start_ns + round(each.end_ms * 1e6))
        for each in spans
        if each.task.kind != HOLD
    ]


def waits_for(tasks: Sequence[Task], index: int) -> list[int]:
    """Return the tasks that must end before a task can begin: its dependencies, and the task before it on its lane. A
    HOLD is replaced by its own dependencies."""
    before = next((at for at in reversed(range(index)) if tasks[at].lane is tasks[index].lane), None)
    found: dict[int, None] = {}
    for needed in (*tasks[index].after, *(() if before is None else (before,))):
        for each in waits_for(tasks, needed) if tasks[needed].kind == HOLD else (needed,):
            found[each] = None
    return sorted(found)


def _free_track(ends_ns: list[int], start_ns: int, end_ns: int) -> int:
    """Return the first track free at ``start_ns``, and reserve it until ``end_ns``."""
    track = next((track for track, until_ns in enumerate(ends_ns) if until_ns <= start_ns), len(ends_ns))
    ends_ns[track : track + 1] = [end_ns]
    return track


def _title(row: _Row) -> str:
    is_predicted, track, lane = row
    return f"{PREDICTED} " * is_predicted + list(Lane)[lane] + f" ({track + 1})" * (track > 0)


def _metadata(what: str, pid: int, tid: int | None = None, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, **({} if tid is None else {"tid": tid}), "args": args}


def _event(run: TracedRun, is_predicted: bool, task: Task, start_ns: int, end_ns: int) -> dict[str, Any]:
    layer, phase = place_of(run.label, task)
    args = {
        "layer": layer,
        "phase": phase,
        "kind": task.kind,
        "chunk": task.chunk,
        "lane": str(task.lane),
        "step": run.step,
        "run": run.number,
        "ms": (end_ns - start_ns) / 1e6,
    }
    if not is_predicted:
        index = next(at for at, each in enumerate(run.tasks) if each is task)
        args |= {"index": index, "waits_for": waits_for(run.tasks, index)}
    return {
        "name": range_name(run.label, task),
        "cat": PREDICTED if is_predicted else MEASURED,
        "ph": "X",
        "ts": start_ns // 1000,
        "dur": end_ns // 1000 - start_ns // 1000,
        "args": args if run.is_whole else args | {"cut_short": True},
    }


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Write a trace completely or not at all: a reader always finds the old file or the new one.

    Raises:
        OSError: it cannot be written.
    """
    # Two threads may write the same one: that of a job that ends, and that of the watchdog that sees it end.
    write_whole(path, json.dumps(trace))  # several times as fast as json.dump


def read_trace(path: Path) -> dict[str, Any]:
    """Read a file of :func:`write_trace`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no trace, or is incomplete.
    """
    try:
        trace = read_json(path, most_bytes=MOST_RUN_BYTES)
    except ValueError as error:
        raise ValueError(f"{path}: incomplete trace: {error}") from error
    parts = trace if isinstance(trace, dict) else {}
    if not isinstance(parts.get("traceEvents"), list) or not fits(parts.get("otherData"), _ABOUT):
        raise ValueError(f"{path}: not a trace of ds_fsmoe")
    for number, event in enumerate(trace["traceEvents"]):
        if not _is_event(event):
            raise ValueError(f"{path}: event {number} is not from a trace of ds_fsmoe")
    return trace


_ABOUT = create_model(
    "_ABOUT",
    __base__=Known,
    world_size=(Annotated[int, Field(ge=1, le=MOST_RANKS)], 1),
    written_ns=(Number, 0),
    steps=(Items[Whole], []),
    peers=(Named[Named[Items[Whole]]], {}),
    ended=(str, ""),
)
_SPAN = create_model(
    "_SPAN", __base__=Known, name=(str, ...), ts=(Number, ...), dur=(Number, ...), pid=(Whole, ...), args=(dict, ...)
)
_TASK = create_model(
    "_TASK",
    __base__=Known,
    **dict.fromkeys(("kind", "layer", "phase"), (str, ...)),
    **dict.fromkeys(("chunk", "step", "run"), (Whole, ...)),
    lane=(Literal[*map(str, Lane)], ...),
    index=(Whole, 0),
    waits_for=(Items[Whole], []),
)


def _is_event(event: Any) -> bool:
    """Return True if an event has the fields that are read here; other programs may have added other events."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        return isinstance(event, dict)
    if not fits(event, _SPAN):
        return False
    if event.get("cat") not in (MEASURED, PREDICTED):
        return True
    args = event["args"]
    # A task waits for earlier ones only, so following them comes to an end.
    return fits(args, _TASK) and all(each < args.get("index", 0) for each in args.get("waits_for", ()))


# ---- all ranks


def merge_traces(folder: Path) -> Path:
    """Merge the ranks' files in a folder into ``trace.json`` there, and return its path.

    ``otherData`` keeps each rank's description of its trace. It also names files that are missing, unreadable, or of a
    job with another number of ranks; a warning names them, too.

    Raises:
        FileNotFoundError: there is no file of a rank that can be read.
        OSError: the merged file cannot be written.
    """
    folder = Path(folder)
    found: dict[int, dict[str, Any]] = {}
    left_out: dict[str, list[str]] = {what: [] for what in LEFT_OUT}
    for path in sorted(folder.glob("rank*.json")):
        if number := re.fullmatch(r"rank(\d+)\.json", path.name):
            try:
                found[int(number[1])] = read_trace(path)
            except (OSError, ValueError):
                left_out["unreadable"].append(path.name)
    if not found:
        names = ", ".join(left_out["unreadable"]) or "no files"
        raise FileNotFoundError(f"{folder}: no traces of ranks to merge; unreadable: {names}")
    newest = max(found.values(), key=lambda trace: trace["otherData"].get("written_ns", 0))
    world_size = newest["otherData"].get("world_size", 1 + max(found))
    for rank in sorted(found):
        if found[rank]["otherData"].get("world_size", world_size) != world_size:
            left_out["of_another_job"].append(rank_file(folder, rank).name)
            del found[rank]
    expected = (rank_file(folder, rank).name for rank in range(world_size) if rank not in found)
    left_out["missing"] = [name for name in expected if name not in left_out["unreadable"]]
    for what, names in left_out.items():
        if names:
            logger.warning(
                "%s: the merged trace does not contain files that are %s: %s", folder, what, ", ".join(names)
            )
    ranks = {str(rank): found[rank]["otherData"] for rank in sorted(found)}
    merged = {
        "traceEvents": [event for rank in sorted(found) for event in found[rank]["traceEvents"]],
        "displayTimeUnit": "ms",
        "otherData": {"ranks": ranks} | left_out,
    }
    write_trace(merged, folder / MERGED)
    return folder / MERGED

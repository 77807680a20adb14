# SPDX-License-Identifier: Apache-2.0
"""Merges all ranks of a run into one Perfetto file, with a process for the critical path and idle time explained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ds_fsmoe.files.traces import LEFT_OUT, merge_traces, read_trace, write_trace
from ds_fsmoe.offline.report.critical_path import Phase, Traced, idle_spans, phases, tasks_of
from ds_fsmoe.planning.schedule import Lane

_PATH_PID = 1_000_000
"""The number of the process, larger than that of any rank."""
_IDLE_ROW = 500
"""The row for idle time within a rank, beyond the rows of its lanes."""


def merged(folder: Path) -> tuple[Path, dict[int, dict[str, Any]], list[Phase], list[str]]:
    """Merge what ranks have left in a folder into ``trace.json`` there.

    Returns:
        The file, the traces by rank, their phases, and what is missing from it, in words.

    Raises:
        FileNotFoundError: there is no file of a rank that can be read.
        OSError: the merged file cannot be written.
    """
    path = merge_traces(folder)
    trace = read_trace(path)
    traces = _by_rank(folder, trace)
    found = phases(traces)
    trace["traceEvents"] += [*_path_events(found), *_idle_events(traces)]
    write_trace(trace, path)
    lacks = {what.replace("_", " "): trace["otherData"].get(what, []) for what in LEFT_OUT}
    return path, traces, found, [f"{', '.join(names)}: {what}" for what, names in lacks.items() if names]


def _by_rank(folder: Path, trace: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    return {int(rank): read_trace(folder / f"rank{rank}.json") for rank in trace["otherData"]["ranks"]}


def _path_events(found: Iterable[Phase]) -> list[dict[str, Any]]:
    tid = _PATH_PID + 1
    events = [
        {"name": "process_name", "ph": "M", "pid": _PATH_PID, "args": {"name": "critical path"}},
        {"name": "process_sort_index", "ph": "M", "pid": _PATH_PID, "args": {"sort_index": -1}},
        {"name": "thread_name", "ph": "M", "pid": _PATH_PID, "tid": tid, "args": {"name": "of each phase"}},
    ]
    until_us = 0.0
    for phase in found:
        for each in phase.path:
            # Phases of ranks that are apart may overlap; a row may not.
            begin_us = max(each.begin_us, until_us)
            if each.end_us > begin_us:
                args = {"rank": each.rank, "step": phase.key.step, "before": each.name}
                name = f"{phase.key.label}: {each.what}, rank {each.rank}"
                events.append(_event(name, "critical path", _PATH_PID, tid, begin_us, each.end_us, args))
                until_us = each.end_us
    return events


def _idle_events(traces: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for rank, runs in tasks_of(traces).items():
        pid = rank + 1
        rows: set[int] = set()
        until_us: dict[int, float] = defaultdict(float)
        for tasks in runs:
            for place, lane in enumerate(Lane):
                spans = sorted((each for each in tasks.values() if each.lane == lane), key=_begin)
                tid = pid * 1000 + _IDLE_ROW + place
                for what, begin_us, end_us in idle_spans(tasks, spans) if spans else ():
                    if begin_us < until_us[tid]:
                        continue
                    rows.add(place)
                    events.append(_event(f"idle: {what}", "idle", pid, tid, begin_us, end_us, {}))
                    until_us[tid] = end_us
        for place in rows:
            tid, name = pid * 1000 + _IDLE_ROW + place, f"{list(Lane)[place]}, idle"
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
    return events


def _begin(task: Traced) -> float:
    return task.begin_us


def _event(
    name: str, category: str, pid: int, tid: int, begin_us: float, end_us: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    times = {"ts": begin_us, "dur": end_us - begin_us}
    return {"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, **times, "args": dict(args)}

# SPDX-License-Identifier: Apache-2.0
"""Finds the critical path of a traced phase: the chain of tasks that determined its length, and why lanes were idle.
The report's page and ``ds_fsmoe plan --from-trace`` call it.

A task begins when its dependencies and the task before it on its lane have ended. The path is found backwards from the
task that ends last, always to the one that was waited for longest. A collective really begins when the last of its
ranks arrives, so there the path moves to that rank. The time between two tasks of the path is spent by the host, or by
a busy processor.

Ranks' clocks are not corrected: across nodes, waiting times between ranks are as accurate as their clocks agree.

All ranks of a run can be merged into one Perfetto file, with a process for the critical path, and idle times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_fsmoe.files.traces import LEFT_OUT, MEASURED, merge_traces, read_trace, write_trace
from ds_fsmoe.planning.schedule import Lane

BETWEEN = "between tasks"
NOTHING_LEFT = "nothing left to do"
_SLACK_US = 1.0
"""The tolerance in microseconds, as times are whole microseconds."""


@dataclass(frozen=True)
class Key:
    """Names a phase of a layer in a step, on all ranks."""

    label: str
    """The label, such as "L03/bwd"."""
    step: int
    turn: int
    """The position among several runs of the phase in this step."""


@dataclass(frozen=True)
class MeasuredTask:
    """Holds one task of one run as traced by a rank."""

    layer: str
    phase: str
    """The phase, such as "bwd"."""
    step: int
    run: int
    """The position of the run among all runs of the trace."""
    kind: str
    chunk: int
    lane: Lane
    begin_us: float
    end_us: float
    """Whole microseconds, as the begin."""
    took_ms: float
    """The time of the task, exactly."""
    rank: int = 0
    index: int | None = None
    """The position among the tasks of the run; ``None``: it is not known."""
    waits_for: tuple[int, ...] = ()
    is_unfinished: bool = False
    """Whether the run did not get to its end."""

    @property
    def name(self) -> str:
        """Return the name of the task within its phase."""
        return f"{self.kind}/chunk{self.chunk}"

    @property
    def begin_ms(self) -> float:
        return self.begin_us / 1e3

    @property
    def end_ms(self) -> float:
        return self.begin_ms + self.took_ms


def measured_tasks(trace: Mapping[str, Any], rank: int = 0) -> list[MeasuredTask]:
    """Return the measured tasks in the trace of a rank, in the order of the file."""
    events = (each for each in trace["traceEvents"] if each.get("ph") == "X" and each.get("cat") == MEASURED)
    return [_task(each["args"], each["ts"], each["dur"], rank) for each in events]


def _task(args: Mapping[str, Any], begin_us: float, took_us: float, rank: int) -> MeasuredTask:
    names = ("layer", "phase", "step", "run", "kind", "chunk")
    times = begin_us, begin_us + took_us, args.get("ms", took_us / 1e3)
    more = args.get("index"), tuple(args.get("waits_for", ())), bool(args.get("cut_short"))
    return MeasuredTask(*(args[name] for name in names), Lane(args["lane"]), *times, rank, *more)


@dataclass(frozen=True)
class Segment:
    """Holds a part of the critical path."""

    rank: int
    what: str
    """The kind of a task, or :data:`BETWEEN`."""
    begin_us: float
    end_us: float
    name: str
    """The name of the task that ends the segment."""

    @property
    def ms(self) -> float:
        return (self.end_us - self.begin_us) / 1e3


@dataclass(frozen=True)
class TracedPhase:
    """Holds one phase of a layer, over all ranks."""

    key: Key
    path: tuple[Segment, ...]
    """The critical path, in order of time, without gaps."""
    idle_ms: Mapping[str, Mapping[str, float]]
    """Maps a lane -> what it waited for -> milliseconds, as a mean over ranks."""
    busy_ms: Mapping[str, float]
    """Maps a lane -> milliseconds in which it was busy, as a mean over ranks."""

    @property
    def ms(self) -> float:
        """Return the ms from the first begin to the last end on the critical path."""
        return (self.path[-1].end_us - self.path[0].begin_us) / 1e3 if self.path else 0.0

    def shares_ms(self) -> dict[str, float]:
        """Return the parts of the critical path by kind in ms, the largest first."""
        return added({each.what: each.ms} for each in self.path)


def added(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up numbers by name, and return them with the largest first."""
    found: dict[str, float] = defaultdict(float)
    for values in each:
        for name, value in values.items():
            found[name] += value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def phases(traces: Mapping[int, Mapping[str, Any]]) -> list[TracedPhase]:
    """Return every phase that a rank has traced to its end, in order of time.

    Args:
        traces: rank -> its trace from :func:`~ds_fsmoe.files.traces.read_trace`.
    """
    runs = _runs(traces)
    peers = {rank: trace["otherData"].get("peers", {}) for rank, trace in traces.items()}
    found = [_phase(key, of_ranks, peers) for key, of_ranks in runs.items()]
    # Times are whole microseconds, so a phase that took less has no path.
    return sorted((each for each in found if each.path), key=lambda each: each.path[0].begin_us)


def _runs(traces: Mapping[int, Mapping[str, Any]]) -> dict[Key, dict[int, dict[int, MeasuredTask]]]:
    """Return phase -> rank -> index of a task -> the task."""
    found: dict[Key, dict[int, dict[int, MeasuredTask]]] = defaultdict(dict)
    for rank, trace in traces.items():
        of_run: dict[tuple[str, int, int], dict[int, MeasuredTask]] = defaultdict(dict)
        for task in measured_tasks(trace, rank):
            if task.index is not None and not task.is_unfinished:
                of_run[f"{task.layer}/{task.phase}", task.step, task.run][task.index] = task
        turns: dict[tuple[str, int], int] = defaultdict(int)
        for (label, step, _), tasks in sorted(of_run.items(), key=lambda item: item[0][2]):
            found[Key(label, step, turns[label, step])][rank] = tasks
            turns[label, step] += 1
    return found


def _phase(
    key: Key,
    of_ranks: Mapping[int, Mapping[int, MeasuredTask]],
    peers: Mapping[int, Mapping[str, Mapping[str, Sequence[int]]]],
) -> TracedPhase:
    layer = key.label.partition("/")[0]

    def together(task: MeasuredTask) -> list[MeasuredTask]:
        """Return the same collective on all ranks that take part in it."""
        if task.lane == Lane.COMPUTE:
            return [task]
        ranks = peers.get(task.rank, {}).get(layer, {}).get(task.kind, of_ranks)
        found = (of_ranks.get(rank, {}).get(task.index) for rank in ranks)
        return [each for each in found if each is not None and each.kind == task.kind] or [task]

    idle: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    busy: dict[str, float] = defaultdict(float)
    for tasks in of_ranks.values():
        for lane, spans in _by_lane(tasks).items():
            busy[lane] += sum(each.end_us - each.begin_us for each in spans) / 1e3 / len(of_ranks)
            for what, begin_us, end_us in idle_spans(tasks, spans):
                idle[lane][what] += (end_us - begin_us) / 1e3 / len(of_ranks)
    plain = {lane: dict(sorted(each.items(), key=lambda item: -item[1])) for lane, each in idle.items()}
    return TracedPhase(key, tuple(_path(of_ranks, together)), plain, dict(busy))


def _path(of_ranks: Mapping[int, Mapping[int, MeasuredTask]], together: Any) -> list[Segment]:
    task: MeasuredTask | None = max(
        (each for tasks in of_ranks.values() for each in tasks.values()), key=lambda t: t.end_us
    )
    found: list[Segment] = []
    until_us = task.end_us
    while task is not None:
        last = max(together(task), key=lambda each: each.begin_us)
        begin_us = min(last.begin_us, until_us)
        if until_us > begin_us:
            found.append(Segment(task.rank, task.kind, begin_us, until_us, task.name))
        task, until_us = last, begin_us
        before = [of_ranks[task.rank][each] for each in task.waits_for if each in of_ranks[task.rank]]
        waited = max(before, key=lambda each: each.end_us, default=None)
        if waited is not None and until_us > waited.end_us:
            found.append(Segment(task.rank, BETWEEN, waited.end_us, until_us, task.name))
            until_us = waited.end_us
        task = waited
    return found[::-1]


def _by_lane(tasks: Mapping[int, MeasuredTask]) -> dict[str, list[MeasuredTask]]:
    found: dict[str, list[MeasuredTask]] = {}
    for each in sorted(tasks.values(), key=lambda each: (each.begin_us, each.index)):
        found.setdefault(each.lane, []).append(each)
    return found


def idle_spans(tasks: Mapping[int, MeasuredTask], spans: Sequence[MeasuredTask]) -> list[tuple[str, float, float]]:
    """Return (awaited task, begin, end) of each idle time of a rank's lane while its phase ran, in microseconds.

    Args:
        tasks: the tasks of the phase on this rank, by index.
        spans: the tasks of the lane, in order of time.
    """
    at_us = min(each.begin_us for each in tasks.values())
    end_us = max(each.end_us for each in tasks.values())
    found = []
    for task in spans:
        others = (tasks[each] for each in task.waits_for if each in tasks and tasks[each].lane != task.lane)
        waited = max(others, key=lambda each: each.end_us, default=None)
        if waited is not None and waited.end_us > at_us:
            found.append((f"for {waited.kind}", at_us, min(waited.end_us, task.begin_us)))
            at_us = min(waited.end_us, task.begin_us)
        found.append((BETWEEN, at_us, task.begin_us))
        at_us = max(at_us, task.end_us)
    found.append((NOTHING_LEFT, at_us, end_us))
    return [each for each in found if each[2] - each[1] >= _SLACK_US]


def tasks_of(traces: Mapping[int, Mapping[str, Any]]) -> dict[int, list[Mapping[int, MeasuredTask]]]:
    """Return rank -> the tasks of each phase that it has traced to its end."""
    found: dict[int, list[Mapping[int, MeasuredTask]]] = defaultdict(list)
    for of_ranks in _runs(traces).values():
        for rank, tasks in of_ranks.items():
            found[rank].append(tasks)
    return found


_PATH_PID = 1_000_000
"""The number of the process, larger than that of any rank."""
_IDLE_ROW = 500
"""The row for idle time within a rank, beyond the rows of its lanes."""


def merge_ranks(folder: Path) -> tuple[Path, dict[int, dict[str, Any]], list[TracedPhase], list[str]]:
    """Merge the traces of all ranks in a folder into ``trace.json`` there.

    Returns:
        The file, the traces by rank, their phases, and sentences about missing parts.

    Raises:
        FileNotFoundError: no file of a rank can be read.
        OSError: the merged file cannot be written.
    """
    path = merge_traces(folder)
    trace = read_trace(path)
    traces = {int(rank): read_trace(folder / f"rank{rank}.json") for rank in trace["otherData"]["ranks"]}
    found = phases(traces)
    trace["traceEvents"] += [*_path_events(found), *_idle_events(traces)]
    write_trace(trace, path)
    lacks = {what.replace("_", " "): trace["otherData"].get(what, []) for what in LEFT_OUT}
    return path, traces, found, [f"{', '.join(names)}: {what}" for what, names in lacks.items() if names]


def _path_events(found: Iterable[TracedPhase]) -> list[dict[str, Any]]:
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
            lanes = _by_lane(tasks)
            for place, lane in enumerate(Lane):
                tid = pid * 1000 + _IDLE_ROW + place
                for what, begin_us, end_us in idle_spans(tasks, lanes[lane]) if lane in lanes else ():
                    if begin_us < until_us[tid]:
                        continue
                    rows.add(place)
                    events.append(_event(f"idle: {what}", "idle", pid, tid, begin_us, end_us, {}))
                    until_us[tid] = end_us
        for place in rows:
            tid, name = pid * 1000 + _IDLE_ROW + place, f"{list(Lane)[place]}, idle"
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
    return events


def _event(
    name: str, category: str, pid: int, tid: int, begin_us: float, end_us: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    times = {"ts": begin_us, "dur": end_us - begin_us}
    return {"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, **times, "args": dict(args)}

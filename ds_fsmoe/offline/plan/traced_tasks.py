# SPDX-License-Identifier: Apache-2.0
"""The tasks of a recorded run as one rank has traced them, read from the events of its trace and put together.

It is the rank whose steps are logged. Its runs of layers, and what is between them, make up its steps, with its waiting
for others: where ranks drift apart, as they do in schedules with little overlap, that is part of what a step takes. Of
each run the rank that waits least, or of each task, would seem to take less than steps do.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ds_fsmoe.planning.schedule import A2A_IN_NODE, EXPERT, GRADIENT_TASKS, HOLD, SPREAD, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import ONCE_PER_NODE, AllToAll

_PHASES = {"fwd": False, "bwd": True}


@dataclass(frozen=True)
class TracedTask:
    """One task of one run as a rank has traced it."""

    label: str
    backward: bool
    step: int
    turn: int
    """The position among several runs of the phase in this step."""
    index: int
    kind: str
    chunk: int
    lane: Lane
    begin_ms: float
    end_ms: float


class Piece(NamedTuple):
    """A chunk of a kind of task, in a phase of a layer that was run in so many chunks."""

    label: str
    backward: bool
    alltoall: AllToAll
    degree: int
    kind: str
    chunk: int


@dataclass(frozen=True)
class Traced:
    """Holds what the trace of a rank tells of a job, in milliseconds."""

    pieces_ms: Mapping[Piece, float]
    """Piece -> its time, the median over runs."""
    runs_ms: Mapping[int, tuple[float, float]]
    """Step -> the time of all runs of layers in its forwards, and in its backwards."""
    behind_ms: float | None
    """The time from one layer to the next in the backward, the least of all pairs, as gradients may be sent there;
    ``None``: there is one layer."""


def traced_tasks(events: Iterable[Mapping[str, Any]]) -> list[TracedTask]:
    """Return the measured tasks of one rank.

    Args:
        events: the events of its trace, in Chrome's format; those of runs that did not end are left out.
    """
    found: dict[tuple[str, bool, int], dict[int, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        args = event.get("args", {})
        if event.get("ph") != "X" or event.get("cat") != "measured" or args.get("cut_short") or "index" not in args:
            continue
        if args["phase"] in _PHASES and args["kind"] != HOLD:
            found[args["layer"], _PHASES[args["phase"]], args["step"]][args["run"]].append(event)
    tasks = []
    for (label, backward, step), runs in found.items():
        for turn, (_, of_run) in enumerate(sorted(runs.items())):
            for event in of_run:
                args, begin_ms = event["args"], event["ts"] / 1e3
                what = args["index"], args["kind"], args["chunk"], Lane(args["lane"])
                tasks.append(TracedTask(label, backward, step, turn, *what, begin_ms, begin_ms + args["ms"]))
    return tasks


def read_tasks(tasks: Iterable[TracedTask], contention: Contention = IDEAL, settled: int = 0) -> Traced:
    """Return what the trace of a rank tells of a job.

    Args:
        tasks: the tasks of the rank whose steps are logged. Plans that were tried are welcome among them: they have
            chunks of other sizes.
        contention: how lanes slow each other down: what a task would have taken alone counts.
        settled: the first step in which nothing is tried any more: only from there on steps are told as a whole.
    """
    runs = _runs(tasks)
    behind: dict[int, list[float]] = defaultdict(list)
    for place, time_ms in _behind_ms({run: each for run, each in runs.items() if run.step >= settled}):
        behind[place].append(time_ms)
    pieces: dict[Piece, list[float]] = defaultdict(list)
    runs_ms: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for run, of_run in runs.items():
        if run.step >= settled:
            runs_ms[run.step][run.backward] += _end_ms(of_run) - _begin_ms(of_run)
        alltoall = _alltoall_of(of_run)
        degree = 1 + max((each.chunk for each in of_run if each.kind not in GRADIENT_TASKS), default=0)
        for each, alone_ms in zip(of_run, _alone_ms(of_run, contention), strict=True):
            pieces[Piece(each.label, each.backward, alltoall, degree, each.kind, each.chunk)].append(alone_ms)
    return Traced(
        _as_wholes({piece: statistics.median(each) for piece, each in pieces.items()}),
        {step: (each[0], each[1]) for step, each in sorted(runs_ms.items())},
        min(map(statistics.median, behind.values()), default=None),
    )


def _as_wholes(pieces_ms: dict[Piece, float]) -> dict[Piece, float]:
    """Return the same pieces with the experts' backward as one task: 0.2.0 could run it as two, the weights' later."""
    for piece in [each for each in pieces_ms if each.kind == "EXPERT_DX"]:
        whole_ms = pieces_ms.pop(piece) + pieces_ms.pop(piece._replace(kind="EXPERT_DW"), 0.0)
        pieces_ms.setdefault(piece._replace(kind=EXPERT), whole_ms)
    return pieces_ms


def _alltoall_of(tasks: Iterable[TracedTask]) -> AllToAll:
    """Return the all-to-all that a run had: its tasks tell."""
    kinds = {each.kind for each in tasks}
    return ONCE_PER_NODE if SPREAD in kinds else "2dh" if A2A_IN_NODE in kinds else "flat"


class _Run(NamedTuple):
    """A run of a phase of a layer."""

    label: str
    backward: bool
    step: int
    turn: int


def _runs(tasks: Iterable[TracedTask]) -> dict[_Run, list[TracedTask]]:
    found: dict[_Run, list[TracedTask]] = defaultdict(list)
    for each in tasks:
        found[_Run(each.label, each.backward, each.step, each.turn)].append(each)
    return found


def _begin_ms(tasks: list[TracedTask]) -> float:
    return min(each.begin_ms for each in tasks)


def _end_ms(tasks: list[TracedTask]) -> float:
    return max(each.end_ms for each in tasks)


def _behind_ms(runs: Mapping[_Run, list[TracedTask]]) -> list[tuple[int, float]]:
    """Return (place in the backward, time to the next layer) of the backwards of one rank."""
    backwards: dict[tuple[int, int], list[list[TracedTask]]] = defaultdict(list)
    for run, tasks in runs.items():
        if run.backward:
            backwards[run.step, run.turn].append(tasks)
    found = []
    for of_backward in backwards.values():
        ordered = sorted(of_backward, key=_begin_ms)
        for place, (before, after) in enumerate(itertools.pairwise(ordered)):
            found.append((place, max(0.0, _begin_ms(after) - _end_ms(before))))
    return found


def _alone_ms(tasks: list[TracedTask], contention: Contention) -> list[float]:
    """Return what each task of a run would have taken alone."""
    if contention == IDEAL:
        return [each.end_ms - each.begin_ms for each in tasks]
    edges = sorted({edge for each in tasks for edge in (each.begin_ms, each.end_ms)})
    found = [0.0] * len(tasks)
    for begin_ms, end_ms in itertools.pairwise(edges):
        under_way = [at for at, each in enumerate(tasks) if each.begin_ms <= begin_ms and each.end_ms >= end_ms]
        busy = {tasks[at].lane for at in under_way}
        for at in under_way:
            found[at] += (end_ms - begin_ms) / contention.slowdown(tasks[at].lane, busy)
    return found

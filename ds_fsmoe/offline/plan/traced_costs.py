# SPDX-License-Identifier: Apache-2.0
"""Derives the costs of tasks from the trace of a run: fitted to it, or measured before and corrected by it.
``from_trace.py`` calls it.

A line needs chunks of several sizes, as in phases with different degrees and in trials. From a single size, start-up
cannot be separated. It then comes from measurements or a cluster's file, or else is 0, and more chunks seem free. Known
contention of lanes is taken out of the spans; otherwise it stays in them.

The tasks are those of the rank whose steps are logged. Its runs of layers, and the time between them, make up its
steps, with its waiting for others. Where ranks drift apart, as in schedules with little overlap, that is part of a
step. Taking the rank that waits least, of each run or task, would give less than the time of steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ds_fsmoe.offline.report.critical_path import MeasuredTask, measured_tasks
from ds_fsmoe.planning.call_shape import moe_work
from ds_fsmoe.planning.chunks import chunk_shares
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import Cost, LayerCosts, LinearCost, fit
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.job.recorded_costs import RecordedAllToAll, RecordedJob, RecordedKind
from ds_fsmoe.planning.schedule import (
    A2A_IN_NODE,
    DEQUANTISING,
    EXPERT,
    GRADIENT_TASKS,
    HOLD,
    QUANTISING,
    REST,
    SPREAD,
)
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED, AllToAll, kind_costs

_PHASES = {"fwd": False, "bwd": True}
"""Phase -> whether it is the backward."""


class TracedChunk(NamedTuple):
    """Names a chunk of a kind of task, in a phase of a layer with a number of chunks."""

    label: str
    backward: bool
    alltoall: AllToAll
    degree: int
    kind: str
    chunk: int


@dataclass(frozen=True)
class TracedJob:
    """Holds the times in the trace of a rank, in ms."""

    slices_ms: Mapping[TracedChunk, float]
    """Piece -> its time, the median over runs."""
    runs_ms: Mapping[int, tuple[float, float]]
    """Step -> the time of all runs of layers in its forwards, and in its backwards."""
    behind_ms: float | None
    """The time from one layer to the next in the backward, the least of all pairs, as gradients may be sent there;
    ``None``: there is one layer."""


def counted_tasks(trace: Mapping[str, Any]) -> list[MeasuredTask]:
    """Return the tasks of the layers' phases in the trace of a rank, without those of unfinished runs."""
    return [
        each
        for each in measured_tasks(trace)
        if each.index is not None and not each.is_unfinished and each.phase in _PHASES and each.kind != HOLD
    ]


def read_tasks(tasks: Iterable[MeasuredTask], contention: Contention = IDEAL, settled: int = 0) -> TracedJob:
    """Return the times of a job from the trace of a rank.

    Args:
        tasks: the tasks of the rank whose steps are logged. Tried plans among them help, as they have
            chunks of other sizes.
        contention: how lanes slow each other down; times are those of tasks alone.
        settled: the first step after all trials; only later steps are returned as a whole.
    """
    of_phases: dict[tuple[str, str, int], dict[int, list[MeasuredTask]]] = defaultdict(lambda: defaultdict(list))
    for each in tasks:
        of_phases[each.layer, each.phase, each.step][each.run].append(each)
    # The position of a run among those of its phase in a step is the number of the micro-batch.
    of_runs = {
        (*phase, turn): of_run
        for phase, runs in of_phases.items()
        for turn, (_, of_run) in enumerate(sorted(runs.items()))
    }
    pieces: dict[TracedChunk, list[float]] = defaultdict(list)
    runs_ms: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    backwards: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for (label, phase, step, turn), of_run in of_runs.items():
        backward = _PHASES[phase]
        begin_ms, end_ms = min(each.begin_ms for each in of_run), max(each.end_ms for each in of_run)
        if step >= settled:
            runs_ms[step][backward] += end_ms - begin_ms
            if backward:
                backwards[step, turn].append((begin_ms, end_ms))
        kinds = {each.kind for each in of_run}
        alltoall: AllToAll = NODE_DEDUPLICATED if SPREAD in kinds else "2dh" if A2A_IN_NODE in kinds else "flat"
        degree = 1 + max((each.chunk for each in of_run if each.kind not in GRADIENT_TASKS), default=0)
        for each, alone_ms in zip(of_run, _alone_ms(of_run, contention), strict=True):
            pieces[TracedChunk(label, backward, alltoall, degree, each.kind, each.chunk)].append(alone_ms)
    # Place in the backward -> the times from one layer to the next.
    behind: dict[int, list[float]] = defaultdict(list)
    for of_backward in backwards.values():
        for place, ((_, end_ms), (begin_ms, _)) in enumerate(itertools.pairwise(sorted(of_backward))):
            behind[place].append(max(0.0, begin_ms - end_ms))
    return TracedJob(
        _as_wholes({piece: statistics.median(each) for piece, each in pieces.items()}),
        {step: (each[0], each[1]) for step, each in sorted(runs_ms.items())},
        min(map(statistics.median, behind.values()), default=None),
    )


def _as_wholes(pieces_ms: dict[TracedChunk, float]) -> dict[TracedChunk, float]:
    """Return the same chunks with the experts' backward as one task; version 0.2.0 could run it as two."""
    for piece in [each for each in pieces_ms if each.kind == "EXPERT_DX"]:
        whole_ms = pieces_ms.pop(piece) + pieces_ms.pop(piece._replace(kind="EXPERT_DW"), 0.0)
        pieces_ms.setdefault(piece._replace(kind=EXPERT), whole_ms)
    return pieces_ms


def _alone_ms(tasks: list[MeasuredTask], contention: Contention) -> list[float]:
    """Return the ms that each task of a run would have taken alone."""
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


_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
_APART = 1.25
"""Sizes that differ by less than this factor count as one: a line through them would be chance."""


def fit_costs(
    job: RecordedJob, traced: TracedJob, cluster: Cluster | None = None
) -> tuple[dict[str, LayerCosts], tuple[str, ...]]:
    """Return the costs of a job's tasks, fitted to its trace, for a job without measured costs.

    Args:
        job: the job with its layers.
        traced: the times of its trace.
        cluster: the cluster with start-up costs, if known.

    Returns:
        Label of a layer -> the costs of its tasks; and the kinds of tasks with only one size, whose start-up is
        unknown.

    Raises:
        ValueError: the trace has no task of a layer, or lacks a kind of task.
    """
    one_size: dict[str, None] = {}
    costs: dict[str, LayerCosts] = {}
    for kind in job.kinds:
        way = next(iter(kind.alltoalls.values()))
        written = {} if cluster is None else kind_costs(cluster, kind.groups, way.planned)
        points = _points(kind, way.planned, traced)
        if not points:
            raise ValueError(f"the trace has no task of {', '.join(kind.labels)}")
        lines = {key: _line(each) for key, each in points.items()}
        one_size |= {name: None for (_, name), line in lines.items() if line is None and name not in written}
        fitted = {key: line or _with_start_up(points[key], written.get(key[1])) for key, line in lines.items()}
        forward, backward = (_costs(kind, way.planned, fitted, each) for each in (False, True))
        costs |= dict.fromkeys(kind.labels, LayerCosts(forward, backward, is_per_launch=False))
    return costs, tuple(one_size)


def corrected(job: RecordedJob, traced: TracedJob) -> RecordedJob:
    """Return a job whose measured costs are corrected by the times of its trace.

    Measuring was short, and the trace is of the training. A kind of task with several sizes, as during trials, gets the
    line through them. One with a single size gets its measured cost times a factor. Kinds that are not in the trace are
    corrected like the rest of their lane.

    Args:
        job: the job, with measured costs.
        traced: the times of its trace, of tasks alone.
    """
    kinds = []
    for kind in job.kinds:
        ways: dict[str, RecordedAllToAll] = {}
        seen: set[AllToAll] = set()
        on_links: list[float] = []
        for name, way in kind.alltoalls.items():
            # Of two that have the same tasks the first one is taken for what was traced.
            points = {} if way.planned in seen else _points(kind, way.planned, traced)
            seen.add(way.planned)
            fitted = _corrected(job.costs_of(kind, name), points, on_links)
            ways[name] = replace(way, profile=None, fitted=fitted)
        kinds.append(replace(kind, alltoalls=ways))
    return replace(job, kinds=tuple(kinds), _costs={})


def with_slowdown_of(
    job: RecordedJob, tasks: Sequence[MeasuredTask], settled: int = 0
) -> tuple[RecordedJob, TracedJob]:
    """Return a job and the times of its trace, with the contention of lanes that the spans show.

    The contention was measured briefly, too. Several shares of it are tried. The best one puts concurrent tasks and
    tasks that ran alone nearest to one line.

    Args:
        job: the job, with measured costs.
        tasks: the tasks of the rank whose steps are logged.
        settled: the first step after all trials.
    """
    found: list[tuple[float, RecordedJob, TracedJob]] = []
    for share in _SHARES:
        factors = {pair: 1 + share * (factor - 1) for pair, factor in job.slowed.factors.items()}
        slowed = replace(job, slowed=Slowdowns(factors), _costs={})
        traced = read_tasks(tasks, slowed.contention, settled)
        found.append((_off_lines(slowed, traced), slowed, traced))
    _, best, traced = min(found, key=lambda each: each[0])
    return best, traced


def _off_lines(job: RecordedJob, traced: TracedJob) -> float:
    """Return the mean relative distance of traced times from the lines through them; 0 without lines."""
    off = []
    for kind in job.kinds:
        for alltoall in dict.fromkeys(way.planned for way in kind.alltoalls.values()):
            for points in _points(kind, alltoall, traced).values():
                line = _line(points)
                off += [abs(math.log(time_ms / line.ms(size))) for size, time_ms in points] if line else []
    return statistics.fmean(off) if off else 0.0


Points = Mapping[tuple[bool, str], Sequence[tuple[float, float]]]
"""(whether it is the backward, kind of task), see :func:`_pooled` -> (size, time) of what was traced."""


def _points(kind: RecordedKind, alltoall: AllToAll, traced: TracedJob) -> Points:
    """Return the traced (size, ms) of these layers with an all-to-all, without empty chunks."""
    found: dict[tuple[bool, str], list[tuple[float, float]]] = defaultdict(list)
    moes = [moe_work(kind.groups, backward, kind.shape, alltoall) for backward in (False, True)]
    works = [{each.kind: each for each in moe.stages} for moe in moes]
    for piece, time_ms in traced.slices_ms.items():
        if piece.label not in kind.labels or piece.alltoall != alltoall or piece.kind not in works[piece.backward]:
            continue
        share = chunk_shares(moes[piece.backward].capacity, piece.degree)[piece.chunk]
        if share:
            size = works[piece.backward][piece.kind].size * share
            found[_pooled(piece.backward, piece.kind)].append((size, time_ms))
    return found


def _corrected(costs: LayerCosts, points: Points, on_links: list[float]) -> LayerCosts:
    """Return costs corrected by traced times.

    Args:
        costs: the costs as measured.
        points: the traced (size, ms) of these tasks.
        on_links: the correction factors of earlier all-to-alls; those of this one are added.
    """
    lines = {key: _line(each) for key, each in points.items()}
    of_experts: dict[bool, list[float]] = {False: [], True: []}
    factors: dict[tuple[bool, str], float] = {}
    for (backward, name), found in points.items():
        cost = costs.of(backward)[0].get(name)
        expected = [(time_ms, cost.ms(size)) for size, time_ms in found] if cost is not None else []
        ratios = [time_ms / expected_ms for time_ms, expected_ms in expected if expected_ms]
        if ratios:
            factors[backward, name] = statistics.median(ratios)
            (of_experts[backward] if name == EXPERT else on_links).append(factors[backward, name])

    def phase(own: Mapping[str, Cost], backward: bool) -> dict[str, Cost]:
        found = {}
        for name, cost in own.items():
            key = _pooled(backward, name)
            others = of_experts[backward] if name == EXPERT else on_links
            factor = factors.get(key, statistics.median(others) if others else 1.0)
            line = lines.get(key)
            is_kept = name in (HOLD, REST, *GRADIENT_TASKS)
            found[name] = cost if is_kept else line if line is not None else cost.times(factor)
        return found

    rechunked = None if costs.rechunked is None else phase(costs.rechunked, True)
    return replace(
        costs, forward=phase(costs.forward, False), backward=phase(costs.backward, True), rechunked=rechunked
    )


def _costs(
    kind: RecordedKind, alltoall: AllToAll, fitted: Mapping[tuple[bool, str], LinearCost], backward: bool
) -> dict[str, Cost]:
    """Return the costs of the tasks of one kind of layer in a phase."""
    moe = moe_work(kind.groups, backward, kind.shape, alltoall)
    costs: dict[str, Cost] = {HOLD: LinearCost(0.0, 0.0), REST: LinearCost(0.0, 1.0)}
    for each in moe.stages:
        found = fitted.get(_pooled(backward, each.kind))
        if found is None and each.kind in (*QUANTISING, *DEQUANTISING):
            # Where conversions were no tasks, they are in the times of links.
            found = LinearCost(0.0, 0.0)
        if found is None:
            raise ValueError(f"the trace has no {each.kind} of {', '.join(kind.labels)}")
        costs[each.kind] = found
    return costs


def _pooled(backward: bool, kind: str) -> tuple[bool, str]:
    """Return the key under which times of alike tasks are pooled."""
    return (backward, kind) if kind == EXPERT else (False, kind)


def _line(points: Sequence[tuple[float, float]]) -> LinearCost | None:
    """Return the line through traced times, or None for a single size or too few points."""
    sizes, times_ms = zip(*points, strict=True)
    if len(points) < 3 or max(sizes) < _APART * min(sizes):
        return None
    cost = fit(sizes, times_ms).cost
    assert isinstance(cost, LinearCost)
    return cost


def _with_start_up(points: Sequence[tuple[float, float]], written: LinearCost | None) -> LinearCost:
    """Return a cost that reproduces the traced times of one size, with the start-up of another cost."""
    size, time_ms = (statistics.median(each) for each in zip(*points, strict=True))
    alpha_ms = 0.0 if written is None else min(written.alpha_ms, 0.9 * time_ms)
    return LinearCost(alpha_ms, (time_ms - alpha_ms) / size)

# SPDX-License-Identifier: Apache-2.0
"""Says what tasks cost by the trace of a run: fitted to it, or measured before and corrected by it.

Chunks of other sizes, as both phases have where their degrees differ, and plans that are tried, make a line. Of a
single size nobody can tell what of its time is start-up: measurements say it, or a cluster's file, or it is taken to be
none, and then more chunks seem to cost nothing. Where it is known how lanes slow each other down, that is taken out of
the spans; otherwise it stays in them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_fsmoe.offline.plan.traced_tasks import Traced, TracedTask, read_tasks
from ds_fsmoe.planning.call_shape import moe_work
from ds_fsmoe.planning.chunks import chunk_shares
from ds_fsmoe.planning.cluster import Cluster
from ds_fsmoe.planning.cost import Cost, LinearCost, fit
from ds_fsmoe.planning.layer_costs import LayerCosts
from ds_fsmoe.planning.measured import Slowdowns
from ds_fsmoe.planning.recorded_costs import RecordedJob, RecordedKind, RecordedWay, cost_times
from ds_fsmoe.planning.schedule import (
    EXPERT,
    GRADIENT_TASKS,
    HOLD,
    REST,
)
from ds_fsmoe.planning.workload import AllToAll, kind_costs

_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
_APART = 1.25
"""Sizes that differ by less than this factor count as one: a line through them would be chance."""


def fit_costs(
    job: RecordedJob, traced: Traced, cluster: Cluster | None = None
) -> tuple[dict[str, LayerCosts], tuple[str, ...]]:
    """Return what the tasks of a job cost that measured nothing.

    Args:
        job: what its layers are.
        traced: what its trace tells.
        cluster: what start-up costs, where that is known.

    Returns:
        Label of a layer -> the costs of its tasks; and the kinds of tasks that had one size, so that nobody can tell
        what of their time is start-up.

    Raises:
        ValueError: the trace has no task of a layer, or lacks a kind of task.
    """
    one_size: dict[str, None] = {}
    costs: dict[str, LayerCosts] = {}
    for kind in job.kinds:
        way = next(iter(kind.ways.values()))
        written = {} if cluster is None else kind_costs(cluster, kind.groups, way.planned)
        found = _costs(kind, way.planned, _points(kind, way.planned, traced), written, one_size)
        costs |= dict.fromkeys(kind.labels, found)
    return costs, tuple(one_size)


def corrected(job: RecordedJob, traced: Traced) -> RecordedJob:
    """Return a job whose measured costs are corrected by what tasks took in its trace.

    Measuring was a moment, and the trace is the training. Where a kind of task had several sizes there, as it has while
    plans are tried, its cost is the line through them; where it had one, the measured cost times a factor. What the
    trace does not have is corrected as the rest of its lane is.

    Args:
        job: the job, with measured costs.
        traced: what its trace tells, of tasks alone.
    """
    kinds = []
    for kind in job.kinds:
        ways: dict[str, RecordedWay] = {}
        seen: set[AllToAll] = set()
        on_links: list[float] = []
        for name, way in kind.ways.items():
            # Of two that have the same tasks the first one is taken for what was traced.
            points = {} if way.planned in seen else _points(kind, way.planned, traced)
            seen.add(way.planned)
            fitted = _corrected(job.costs_of(kind, name), points, on_links)
            ways[name] = replace(way, profile=None, fitted=fitted)
        kinds.append(replace(kind, ways=ways))
    return replace(job, kinds=tuple(kinds), _costs={})


def with_slowdown_of(job: RecordedJob, tasks: Sequence[TracedTask], settled: int = 0) -> tuple[RecordedJob, Traced]:
    """Return a job, and what its trace tells, with as much slowdown of lanes by each other as the spans show.

    How lanes slow each other down was measured in a moment, too. Of a few shares of that the one is taken with which
    tasks that ran beside others and tasks that ran alone lie nearest to one line.

    Args:
        job: the job, with measured costs.
        tasks: the tasks of the rank whose steps are logged.
        settled: the first step in which nothing is tried any more.
    """
    found: list[tuple[float, RecordedJob, Traced]] = []
    for share in _SHARES:
        factors = {pair: 1 + share * (factor - 1) for pair, factor in job.slowed.factors.items()}
        slowed = replace(job, slowed=Slowdowns(factors), _costs={})
        traced = read_tasks(tasks, slowed.contention, settled)
        found.append((_off_lines(slowed, traced), slowed, traced))
    _, best, traced = min(found, key=lambda each: each[0])
    return best, traced


def _off_lines(job: RecordedJob, traced: Traced) -> float:
    """Return how far what was traced lies off the lines through it, as a mean of shares; 0 where there are none."""
    off = []
    for kind in job.kinds:
        for alltoall in dict.fromkeys(way.planned for way in kind.ways.values()):
            for points in _points(kind, alltoall, traced).values():
                line = _line(points)
                off += [abs(math.log(time_ms / line.ms(size))) for size, time_ms in points] if line else []
    return statistics.fmean(off) if off else 0.0


Points = Mapping[tuple[bool, str], Sequence[tuple[float, float]]]
"""(whether it is the backward, kind of task), see :func:`_pooled` -> (size, time) of what was traced."""


def _points(kind: RecordedKind, alltoall: AllToAll, traced: Traced) -> Points:
    """Return what was traced of these layers with an all-to-all, without empty chunks."""
    found: dict[tuple[bool, str], list[tuple[float, float]]] = defaultdict(list)
    moes = [moe_work(kind.groups, backward, kind.shape, alltoall) for backward in (False, True)]
    works = [{each.kind: each for each in (*moe.collectives, moe.expert)} for moe in moes]
    for piece, time_ms in traced.pieces_ms.items():
        if piece.label not in kind.labels or piece.alltoall != alltoall or piece.kind not in works[piece.backward]:
            continue
        share = chunk_shares(moes[piece.backward].capacity, piece.degree)[piece.chunk]
        if share:
            size = works[piece.backward][piece.kind].size * share
            found[_pooled(piece.backward, piece.kind)].append((size, time_ms))
    return found


def _corrected(costs: LayerCosts, points: Points, on_links: list[float]) -> LayerCosts:
    """Return costs corrected by what was traced.

    Args:
        costs: the costs as measured.
        points: what was traced of these tasks.
        on_links: the factors by which all-to-alls before this one were corrected; those of this one are added.
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
            found[name] = cost if is_kept else line if line is not None else cost_times(cost, factor)
        return found

    rechunked = None if costs.rechunked is None else phase(costs.rechunked, True)
    return replace(
        costs, forward=phase(costs.forward, False), backward=phase(costs.backward, True), rechunked=rechunked
    )


def _costs(
    kind: RecordedKind,
    alltoall: AllToAll,
    points: Points,
    written: Mapping[str, LinearCost],
    one_size: dict[str, None],
) -> LayerCosts:
    """Return what tasks of one kind of layers cost, and note the kinds of tasks that had one size."""
    if not points:
        raise ValueError(f"the trace has no task of {', '.join(kind.labels)}")
    fitted: dict[tuple[bool, str], LinearCost] = {}
    for key, traced in points.items():
        line = _line(traced)
        if line is None and key[1] not in written:
            one_size.setdefault(key[1])
        fitted[key] = line or _with_start_up(traced, written.get(key[1]))
    phases: list[dict[str, Cost]] = []
    for backward in (False, True):
        moe = moe_work(kind.groups, backward, kind.shape, alltoall)
        costs: dict[str, Cost] = {HOLD: LinearCost(0.0, 0.0), REST: LinearCost(0.0, 1.0)}
        for each in (*moe.collectives, moe.expert):
            found = fitted.get(_pooled(backward, each.kind))
            if found is None:
                raise ValueError(f"the trace has no {each.kind} of {', '.join(kind.labels)}")
            costs[each.kind] = found
        phases.append(costs)
    return LayerCosts(phases[0], phases[1], is_per_launch=False)


def _pooled(backward: bool, kind: str) -> tuple[bool, str]:
    """Return under which name the times of a task are put together with those of its like."""
    return (backward, kind) if kind == EXPERT else (False, kind)


def _line(points: Sequence[tuple[float, float]]) -> LinearCost | None:
    """Return the line through what was traced; ``None`` where it had one size, or too few points."""
    sizes, times_ms = zip(*points, strict=True)
    if len(points) < 3 or max(sizes) < _APART * min(sizes):
        return None
    cost = fit(sizes, times_ms).cost
    assert isinstance(cost, LinearCost)
    return cost


def _with_start_up(points: Sequence[tuple[float, float]], written: LinearCost | None) -> LinearCost:
    """Return a cost that gives what was traced of one size, with the start-up of another one."""
    size, time_ms = (statistics.median(each) for each in zip(*points, strict=True))
    alpha_ms = 0.0 if written is None else min(written.alpha_ms, 0.9 * time_ms)
    return LinearCost(alpha_ms, (time_ms - alpha_ms) / size)

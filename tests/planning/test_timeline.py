# SPDX-License-Identifier: Apache-2.0
"""Timelines: one at a time or many at once they are what the definition says in exact arithmetic, task by task."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.batch import Template, makespans_ms
from ds_fsmoe.planning.block import BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import EXPERT, GATHER, GRAD, HOLD, REDUCE, Draft, Lane, Schedule, Task
from ds_fsmoe.planning.timeline import IDEAL, Contention, play, simulate
from tests.planning.layers import (
    CONTENTIONS,
    LAYOUTS,
    bare_block,
    bare_schedule,
    grad_lanes_of,
    layer_of,
    random_costs,
    random_phase,
)


def any_schedule(rng: random.Random, tasks: int) -> Schedule:
    """Any tasks on any lanes, some on two at once, waiting for any before them."""
    draft, indices = Draft(), []
    for name in range(tasks):
        lanes = rng.sample(list(Lane), rng.choice([1, 1, 1, 2]))
        after = rng.sample(indices, min(len(indices), rng.choice([0, 0, 1, 2])))
        indices.append(draft.add(str(name), *lanes, after=after))
    return draft.finish()


def exact_ends(
    schedule: Schedule, work: list[Fraction], slowdowns: tuple[Fraction, ...], host: list[Fraction]
) -> list[Fraction]:
    """The definition, in fractions: time goes on to whatever comes next; return when each task ends.

    Args:
        host: what the thread that issues all tasks takes for each.
    """
    links, compute, traffic = slowdowns
    ends: dict[int, Fraction] = {}
    left, now, issued = list(work), Fraction(0), list(accumulate(host))
    while len(ends) < len(schedule.tasks):
        heads = [next((i for i in indices if i not in ends), None) for indices in schedule.lanes.values()]
        free = [i for i in heads if i is not None and ends.keys() >= set(schedule.tasks[i].after)]
        running = [i for i in free if issued[i] <= now]
        busy = {schedule.tasks[i].lane for i in running}
        slow = {}
        for i in running:
            if schedule.tasks[i].lane is Lane.COMPUTE:
                slow[i] = 1 + compute * bool(busy - {Lane.COMPUTE})
            else:
                slow[i] = 1 + links * ({Lane.INTER, Lane.INTRA} <= busy) + traffic * (Lane.COMPUTE in busy)
        step = min([left[i] * slow[i] for i in running] + [issued[i] - now for i in free if i not in running])
        now += step
        for i in running:
            left[i] -= step / slow[i]
            if left[i] == 0:
                ends[i] = now
    return [ends[i] for i in range(len(schedule.tasks))]


QUARTERS = st.sampled_from([0, 1, 2, 4])


@settings(max_examples=120)
@given(st.integers(0, 10**9), st.integers(1, 14), st.tuples(*[QUARTERS] * 3), QUARTERS, st.booleans())
def test_any_schedule_takes_exactly_what_the_definition_says_task_by_task_alone_and_among_others(
    seed: int, tasks: int, quarters: tuple[int, ...], host: int, by_kind: bool
) -> None:
    rng = random.Random(seed)
    schedule, others = any_schedule(rng, tasks), [any_schedule(rng, rng.randint(1, 9)) for _ in range(4)]
    slowdowns = tuple(Fraction(each, 4) for each in quarters)
    contention = Contention(*map(float, slowdowns))
    # A HOLD is not launched.
    of_host = {t.kind: Fraction(rng.choice((0, host)) if by_kind else host, 4) for t in schedule.tasks}
    host_ms = {kind: float(each) for kind, each in of_host.items()} if by_kind else host / 4
    issued = [t.launches * of_host[t.kind] for t in schedule.tasks]

    def work_of(each: Schedule) -> list[list[Fraction]]:
        return [
            [Fraction(0 if t.kind == HOLD else rng.choice([0, 1, 2, 3, 5, 8])) for t in each.tasks] for _ in range(3)
        ]

    def job(
        each: Schedule, work: list[list[Fraction]], issue_ms: np.ndarray
    ) -> tuple[Template, np.ndarray, np.ndarray]:
        return Template.of(each), np.array([[float(ms) for ms in column] for column in work]).T, issue_ms

    work = work_of(schedule)
    mine = job(schedule, work, np.cumsum([float(each) for each in issued]))
    # So many at once that the other way of walking is taken.
    jobs = [mine, *(job(each, work_of(each), 0.25 * Template.of(each).launched) for each in others), mine]
    (alone,), (first, *_, last) = makespans_ms([mine], contention), makespans_ms(jobs, contention)
    for column in range(3):
        expected = [float(each) for each in exact_ends(schedule, work[column], slowdowns, issued)]
        for batch in (alone, first, last):
            assert batch[column] == pytest.approx(max(expected), rel=1e-12, abs=0)
        costs = {t.kind: LinearCost(float(w), 0.0) for t, w in zip(schedule.tasks, work[column], strict=True)}
        spans = simulate(schedule, costs, contention, host_ms).spans
        assert [each.end_ms for each in spans] == pytest.approx(expected, rel=1e-12, abs=1e-11)


def layers_schedule(rng: random.Random, layout: str) -> Schedule:
    work = rng.choice([layer_of(layout).forward, layer_of(layout).backward])
    degree, lanes = rng.randint(1, 9), grad_lanes_of(layout)
    grads = [tuple(Slice(GRAD, lanes, 400 * rng.random()) for _ in range(rng.randint(0, 2))) for _ in range(2)]
    links = rng.choice(["shared", "paper", "reduce_first"])
    plan = BlockPlan(degree, links, *grads)
    return block_schedule(work, plan)


@pytest.mark.parametrize("value", [-1e-9, float("inf"), float("nan")])
def test_a_task_that_takes_less_than_nothing_or_for_ever_and_a_slowdown_that_is_no_number_are_refused(
    value: float,
) -> None:
    """Time would stand still or run back, and the simulation would not end."""
    schedule = layers_schedule(random.Random(0), next(iter(LAYOUTS)))
    work_ms = [1.0] * (len(schedule.tasks) - 1) + [value]
    for contention in CONTENTIONS[:2]:
        with pytest.raises(ValueError, match="must be a finite number of at least 0"):
            play(schedule, work_ms, [0.0] * len(work_ms), contention)
    for field in ("links", "compute", "traffic"):
        with pytest.raises(ValueError, match=f"Contention: .*{field} = {value}"):
            Contention(**{field: value})


@pytest.mark.parametrize("contention", CONTENTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layer_a_critical_path_is_one(layout: str, contention: Contention) -> None:
    rng = random.Random(layout)
    for host_ms in (0.0, 0.05):
        timeline = simulate(layers_schedule(rng, layout), random_costs(rng), contention, host_ms)
        path = timeline.critical_path()
        assert path[-1].end_ms == timeline.makespan_ms == max(span.end_ms for span in timeline.spans)
        assert all(a.end_ms == pytest.approx(b.start_ms, abs=1e-9) for a, b in pairwise(path))
        if host_ms == 0:
            assert sum(span.end_ms - span.start_ms for span in path) == pytest.approx(timeline.makespan_ms)


def test_a_schedule_that_could_wait_for_ever_cannot_be_made() -> None:
    for needed in (0, 1, 2, -1):
        with pytest.raises(
            ValueError, match=rf"task 0 \(L00/EXPERT/chunk0\) needs task {needed}: a task may only need tasks issued"
        ):
            Schedule((Task(EXPERT, Lane.COMPUTE, after=(needed,)), Task(GATHER, Lane.INTRA)))


def test_a_kind_without_a_cost_for_its_lane_or_for_the_host_is_named() -> None:
    phase = random_phase(random.Random(3))
    schedule, costs = bare_schedule(phase, 2), bare_block(phase)[1]
    without = {kind: cost for kind, cost in costs.items() if kind != REDUCE}
    with pytest.raises(ValueError, match="no cost for REDUCE; costs exist for A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD"):
        simulate(schedule, without)
    with pytest.raises(ValueError, match="no host cost for REDUCE; host costs exist for A2A_IN, A2A_OUT, EXPERT"):
        simulate(schedule, costs, host_ms=dict.fromkeys(without, 0.1))
    with pytest.raises(ValueError, match="host_ms of EXPERT = -1: must be a finite number of at least 0"):
        simulate(schedule, costs, host_ms=dict.fromkeys(costs, 0.1) | {EXPERT: -1})


def test_a_timeline_can_be_looked_at_even_one_of_nothing() -> None:
    phase = random_phase(random.Random(4))
    schedule = bare_schedule(phase, 2)
    timeline = simulate(schedule, bare_block(phase)[1])
    assert "L00/A2A_IN/chunk1" in str(schedule)
    rows = timeline.gantt(60).splitlines()
    assert [row.split()[0] for row in rows[:3]] == ["compute", "intra", "inter"]
    assert all(len(row) <= 68 for row in rows[:3])
    events = json.loads(timeline.chrome_trace())["traceEvents"]
    assert len(events) == len(schedule.tasks)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(timeline.makespan_ms * 1e3)
    nothing = Draft().finish()
    line = simulate(nothing, {})
    assert (line.makespan_ms, line.critical_path(), line.gantt(20)[-8:]) == (0.0, (), "0.000 ms")
    for contention in (IDEAL, Contention(0.5)):
        (times,) = makespans_ms([(Template.of(nothing), np.zeros((0, 2)), np.zeros(0))], contention)
        assert times.tolist() == [0.0, 0.0]

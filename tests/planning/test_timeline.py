# SPDX-License-Identifier: Apache-2.0
"""Timelines: one at a time or many at once they are what the definition says in exact arithmetic, task by task."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.batch import Template, makespans_ms
from ds_fsmoe.planning.block import BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD, HOLD, REDUCE, Draft, Lane, Schedule, Task
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
    schedule: Schedule, work: list[Fraction], slowdowns: tuple[Fraction, Fraction, Fraction], host: Fraction
) -> list[Fraction]:
    """The definition, in fractions: time goes on to whatever comes next; return when each task ends."""
    links, compute, traffic = slowdowns
    ends: dict[int, Fraction] = {}
    left, now = list(work), Fraction(0)
    # A task is issued when the host has paid for its launches and those of all before it; a HOLD is none.
    issued = [host * sum(each.launches for each in schedule.tasks[: i + 1]) for i in range(len(schedule.tasks))]
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


@settings(max_examples=120, derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 14), st.tuples(QUARTERS, QUARTERS, QUARTERS), st.sampled_from([0, 1, 2]))
def test_any_schedule_takes_exactly_what_the_definition_says_task_by_task(
    seed: int, tasks: int, quarters: tuple[int, int, int], host: int
) -> None:
    rng = random.Random(seed)
    schedule, host_ms = any_schedule(rng, tasks), Fraction(host, 4)
    slowdowns = tuple(Fraction(each, 4) for each in quarters)
    contention = Contention(*map(float, slowdowns))
    template = Template.of(schedule)
    work = [
        [Fraction(0 if t.kind == HOLD else rng.choice([0, 1, 2, 3, 5, 8])) for t in schedule.tasks] for _ in range(3)
    ]
    table = np.array([[float(each) for each in column] for column in work]).T
    issue_ms = float(host_ms) * template.launched
    (batch,) = makespans_ms([(template, table, issue_ms)], contention)
    jobs = [(template, table, issue_ms)] * 5  # so many that the other way of walking is taken
    assert all(np.allclose(each, batch, rtol=1e-12, atol=0) for each in makespans_ms(jobs, contention))
    for column in range(3):
        expected = [float(each) for each in exact_ends(schedule, work[column], slowdowns, host_ms)]
        assert batch[column] == pytest.approx(max(expected), rel=1e-12, abs=0)
        costs = {t.kind: LinearCost(float(w), 0.0) for t, w in zip(schedule.tasks, work[column], strict=True)}
        spans = simulate(schedule, costs, contention, float(host_ms)).spans
        assert [each.end_ms for each in spans] == pytest.approx(expected, rel=1e-12, abs=1e-11)


@pytest.mark.parametrize("contention", [IDEAL, Contention(0.45), Contention(0.3, 0.2)], ids=str)
def test_different_schedules_at_once_do_not_mix(contention: Contention) -> None:
    rng = random.Random(1)
    jobs, expected = [], []
    for _ in range(30):
        schedule = any_schedule(rng, rng.randint(1, 30))
        work = np.array([[0.0 if t.kind == HOLD else rng.random() for _ in range(4)] for t in schedule.tasks])
        template = Template.of(schedule)
        jobs.append((template, work, 0.01 * template.launched))
        kinds = [t.kind for t in schedule.tasks]
        expected.append(
            [
                simulate(
                    schedule,
                    {k: LinearCost(float(w), 0.0) for k, w in zip(kinds, column, strict=True)},
                    contention,
                    0.01,
                ).makespan_ms
                for column in work.T
            ]
        )
    for got, right in zip(makespans_ms(jobs, contention), expected, strict=True):
        assert got == pytest.approx(right, rel=1e-9)


def layers_schedule(rng: random.Random, layout: str) -> Schedule:
    work = rng.choice([layer_of(layout).forward, layer_of(layout).backward])
    degree, lanes = rng.randint(1, 9), grad_lanes_of(layout)
    grads = [tuple(Slice(GRAD, lanes, 400 * rng.random()) for _ in range(rng.randint(0, 2))) for _ in range(2)]
    links = rng.choice(["shared", "paper", "reduce_first"])
    plan = BlockPlan(degree, links, *grads)
    return block_schedule(work, plan)


@pytest.mark.parametrize("time_ms", [-1e-9, float("inf"), float("nan")])
@pytest.mark.parametrize("contention", CONTENTIONS[:2], ids=str)
def test_a_task_that_takes_less_than_nothing_or_for_ever_is_refused(contention: Contention, time_ms: float) -> None:
    """Time would stand still or run back, and the simulation would not end."""
    schedule = layers_schedule(random.Random(0), next(iter(LAYOUTS)))
    work_ms = [1.0] * len(schedule.tasks)
    work_ms[-1] = time_ms
    with pytest.raises(ValueError, match="must be a finite number of at least 0"):
        play(schedule, work_ms, [0.0] * len(work_ms), contention)


@pytest.mark.parametrize("contention", CONTENTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layer_a_critical_path_is_one_and_nothing_runs_on_a_lane_that_is_held(
    layout: str, contention: Contention
) -> None:
    rng = random.Random(layout)
    for host_ms in (0.0, 0.05):
        costs, schedule = random_costs(rng), layers_schedule(rng, layout)
        timeline = simulate(schedule, costs, contention, host_ms)
        path, spans = timeline.critical_path(), timeline.spans
        assert path[-1].end_ms == timeline.makespan_ms == max(span.end_ms for span in spans)
        assert all(a.end_ms == pytest.approx(b.start_ms, abs=1e-9) for a, b in pairwise(path))
        if host_ms == 0:
            assert sum(span.end_ms - span.start_ms for span in path) == pytest.approx(timeline.makespan_ms)
        for index, task in enumerate(schedule.tasks):
            if task.kind == HOLD:
                (owner,) = task.after
                for other in (i for i in schedule.lanes[task.lane] if i != index):
                    before = spans[other].end_ms <= spans[owner].start_ms + 1e-9
                    behind = spans[other].start_ms >= spans[owner].end_ms - 1e-9
                    assert before or behind, "another task ran on a lane that was held"


def two_tasks(first: tuple[Lane, float], second: tuple[Lane, float], contention: Contention) -> list[float]:
    draft = Draft()
    for place, (lane, size) in enumerate((first, second)):
        draft.add(f"X{place}", lane, size=size)
    unit = LinearCost(0, 1)
    return [span.end_ms for span in simulate(draft.finish(), {"X0": unit, "X1": unit}, contention).spans]


def test_contention_slows_two_links_only_while_both_are_busy() -> None:
    """Inter 10 ms beside intra 4 ms at kappa 0.5: 6 ms together, then the inter link's remaining 6 ms alone."""
    both = two_tasks((Lane.INTER, 10), (Lane.INTRA, 4), Contention(links=0.5))
    assert both == pytest.approx([12.0, 6.0])


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["links", "compute", "traffic"])
def test_a_slowdown_that_is_no_number_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"Contention: .*{field} = {value}"):
        Contention(**{field: value})


def test_a_new_kind_of_operation_needs_a_name_a_lane_and_a_cost() -> None:
    draft = Draft()
    first = draft.add("COMPRESS", Lane.COMPUTE, size=2)
    draft.add("A2A_IN", Lane.INTER, size=3, after=[first])
    costs = {"COMPRESS": LinearCost(1, 1), "A2A_IN": LinearCost(0, 2)}
    assert simulate(draft.finish(), costs).makespan_ms == 9


def test_a_schedule_that_could_wait_for_ever_cannot_be_made() -> None:
    for needed in (0, 1, 2, -1):
        with pytest.raises(
            ValueError, match=rf"task 0 \(L00/EXPERT/chunk0\) needs task {needed}: a task may only need tasks issued"
        ):
            Schedule((Task(EXPERT, Lane.COMPUTE, after=(needed,)), Task(GATHER, Lane.INTRA)))


def test_a_kind_without_a_cost_is_named() -> None:
    phase = random_phase(random.Random(3))
    costs = bare_block(phase)[1]
    del costs[REDUCE]
    message = "no cost for REDUCE; costs exist for A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD"
    with pytest.raises(ValueError, match=message):
        simulate(bare_schedule(phase, 2), costs)


def test_a_timeline_can_be_looked_at() -> None:
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


def test_an_empty_schedule_takes_no_time_and_can_be_looked_at() -> None:
    nothing = simulate(Draft().finish(), {})
    assert (nothing.makespan_ms, nothing.critical_path()) == (0.0, ())
    assert nothing.gantt(20).endswith("0.000 ms")
    empty = Template.of(Draft().finish())
    for contention in (IDEAL, Contention(0.5)):
        (times,) = makespans_ms([(empty, np.zeros((0, 2)), np.zeros(0))], contention)
        assert times.tolist() == [0.0, 0.0]


# ---- the one thread that issues for all lanes


CHUNK_KINDS = {A2A_IN: Lane.INTER, EXPERT: Lane.COMPUTE, A2A_OUT: Lane.INTER}


def in_and_out(degree: int) -> Schedule:
    """All go in, are computed and come out, in so many equal chunks; the whole has size 1."""
    draft, before = Draft(), [[] for _ in range(degree)]
    for kind, lane in CHUNK_KINDS.items():
        before = [[draft.add(kind, lane, chunk=i, size=1 / degree, after=before[i])] for i in range(degree)]
    return draft.finish()


def test_what_the_host_takes_to_issue_adds_up_over_lanes() -> None:
    """In 2 ms, computed in 4 ms, out in 2 ms, by hand:

    without a host: 8 in one chunk; in two, IN 0-1 1-2, EXPERT 1-3 3-5, OUT 3-4 5-6.
    A host that needs 2 ms for each task: one chunk is in at 2-4, computed 4-8, out 8-10. Of two, the tasks are issued
    at 2, 4, .., 12, so the last one runs 12-13, though no lane is busy for more than 4 ms.
    Where it needs 0.5 ms for collectives and 3 ms for experts: one, 0.5-2.5, 3.5-7.5, 7.5-9.5. Two, EXPERT is issued at
    4 and 7, and runs 4-6 7-9; OUT 7.5-8.5 9-10.
    """
    costs = {A2A_IN: LinearCost(0, 2), EXPERT: LinearCost(0, 4), A2A_OUT: LinearCost(0, 2)}
    by_kind = {A2A_IN: 0.5, EXPERT: 3.0, A2A_OUT: 0.5}
    for contention in (Contention(), Contention(links=1e-13)):
        for host_ms, expected_ms in ((0.0, (8.0, 6.0)), (2.0, (10.0, 13.0)), (by_kind, (9.5, 10.0))):
            found_ms = [simulate(in_and_out(degree), costs, contention, host_ms).makespan_ms for degree in (1, 2)]
            assert found_ms == pytest.approx(expected_ms), host_ms


@pytest.mark.parametrize("contention", CONTENTIONS, ids=str)
def test_a_cost_of_the_host_by_kind_that_is_the_same_for_all_is_that_cost(contention: Contention) -> None:
    rng = random.Random(11)
    for layout in LAYOUTS:
        costs, schedule = random_costs(rng), layers_schedule(rng, layout)
        by_kind = {task.kind: 0.05 for task in schedule.tasks if task.kind != HOLD}
        one, other = (simulate(schedule, costs, contention, host_ms) for host_ms in (0.05, by_kind))
        assert one.makespan_ms == pytest.approx(other.makespan_ms)


def test_a_kind_without_a_cost_of_the_host_and_a_cost_that_is_none_are_named() -> None:
    costs = dict.fromkeys(CHUNK_KINDS, LinearCost(0, 1))
    with pytest.raises(ValueError, match="no host cost for EXPERT; host costs exist for A2A_IN, A2A_OUT"):
        simulate(in_and_out(2), costs, host_ms={A2A_IN: 0.1, A2A_OUT: 0.1})
    with pytest.raises(ValueError, match="host_ms of EXPERT = -1: must be a finite number of at least 0"):
        simulate(in_and_out(2), costs, host_ms=dict.fromkeys(CHUNK_KINDS, 0.1) | {EXPERT: -1})

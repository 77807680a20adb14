# SPDX-License-Identifier: Apache-2.0
"""Schedules and timelines: the laws of a schedule played against a clock."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from ds_fsmoe.planning.block import BlockPlan, Slice, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.degree import Load, Phase
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD, HOLD, REDUCE, Draft, Lane, Schedule, Task
from ds_fsmoe.planning.timeline import Contention, play, simulate
from tests.planning.layers import (
    LAYOUTS,
    bare_block,
    bare_schedule,
    grad_lanes_of,
    layer_of,
    random_costs,
    random_phase,
)

CONTENTIONS = [
    Contention(),
    Contention(links=0.5),
    Contention(links=0.4, compute=0.2),
    Contention(compute=0.7),
    Contention(0.3, 0.2, 0.4),
]


def random_schedule(rng: random.Random, layout: str) -> Schedule:
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
    schedule = random_schedule(random.Random(0), next(iter(LAYOUTS)))
    work_ms = [1.0] * len(schedule.tasks)
    work_ms[-1] = time_ms
    with pytest.raises(ValueError, match="must be a finite number of at least 0"):
        play(schedule, work_ms, [0.0] * len(work_ms), contention)


@pytest.mark.parametrize("contention", CONTENTIONS, ids=str)
@pytest.mark.parametrize("host_ms", [0.0, 0.05])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_timeline_keeps_its_laws(layout: str, contention: Contention, host_ms: float) -> None:
    rng = random.Random(layout)
    for _ in range(5):
        costs, schedule = random_costs(rng), random_schedule(rng, layout)
        timeline = simulate(schedule, costs, contention, host_ms)
        spans = timeline.spans
        for lane, indices in schedule.lanes.items():
            for first, second in pairwise(indices):
                assert spans[second].start_ms >= spans[first].end_ms - 1e-9, "two tasks of a lane overlap"
            alone_ms = sum(costs[schedule.tasks[i].kind].ms(schedule.tasks[i].size) for i in indices)
            assert alone_ms <= timeline.makespan_ms + 1e-9 or any(schedule.tasks[i].launches > 1 for i in indices)
            assert timeline.busy_ms(lane) <= timeline.makespan_ms + 1e-9
        most = (1 + contention.links + contention.traffic) * (1 + contention.compute)
        for index, (task, span) in enumerate(zip(schedule.tasks, spans, strict=True)):
            assert all(span.start_ms >= spans[needed].end_ms - 1e-9 for needed in task.after)
            launches = sum(each.launches for each in schedule.tasks[: index + 1])
            assert span.start_ms >= host_ms * launches - 1e-9
            alone_ms = costs[task.kind].ms(task.size, task.launches)
            assert alone_ms - 1e-9 <= span.end_ms - span.start_ms <= alone_ms * most + 1e-9
        path = timeline.critical_path()
        assert path[-1].end_ms == timeline.makespan_ms == max(span.end_ms for span in spans)
        assert all(a.end_ms == pytest.approx(b.start_ms, abs=1e-9) for a, b in pairwise(path))
        assert path[0].start_ms == pytest.approx(0.0) or host_ms > 0
        if host_ms == 0:
            assert sum(span.end_ms - span.start_ms for span in path) == pytest.approx(timeline.makespan_ms)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_task_on_two_lanes_has_both_to_itself(layout: str) -> None:
    rng = random.Random(7)
    for _ in range(5):
        costs, schedule = random_costs(rng), random_schedule(rng, layout)
        spans = simulate(schedule, costs, rng.choice(CONTENTIONS)).spans
        for index, task in enumerate(schedule.tasks):
            if task.kind != HOLD:
                continue
            (owner,) = task.after
            assert schedule.tasks[owner].lane is not task.lane
            others = [i for i in schedule.lanes[task.lane] if i != index]
            for other in others:
                before = spans[other].end_ms <= spans[owner].start_ms + 1e-9
                behind = spans[other].start_ms >= spans[owner].end_ms - 1e-9
                assert before or behind, "another task ran on a lane that was held"


def test_one_chunk_alone_takes_the_plain_sum() -> None:
    phase = random_phase(random.Random(5))
    timeline = simulate(bare_schedule(phase, 1, with_gradient=False), bare_block(phase)[1])
    a, g, e, s = phase.chunk_times_ms(1)
    assert timeline.makespan_ms == pytest.approx(2 * a + g + e + s)
    assert [span.task.kind for span in timeline.critical_path()] == [A2A_IN, GATHER, EXPERT, REDUCE, A2A_OUT]


@pytest.mark.parametrize("host_ms", [0.0, 0.2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_simulations_agree_where_there_is_no_contention(layout: str, host_ms: float) -> None:
    """A slowdown too small to matter takes the way of events; without one the list is walked."""
    rng = random.Random(2)
    for _ in range(5):
        costs, schedule = random_costs(rng), random_schedule(rng, layout)
        walked = simulate(schedule, costs, host_ms=host_ms)
        played = simulate(schedule, costs, Contention(links=1e-13), host_ms)
        for a, b in zip(walked.spans, played.spans, strict=True):
            assert (a.start_ms, a.end_ms) == pytest.approx((b.start_ms, b.end_ms), abs=1e-9)


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


def test_compute_is_slowed_by_traffic_and_traffic_not_by_compute() -> None:
    assert two_tasks((Lane.INTER, 3), (Lane.COMPUTE, 10), Contention(compute=0.5)) == pytest.approx([3.0, 3 + 8])
    assert two_tasks((Lane.INTRA, 30), (Lane.COMPUTE, 10), Contention(compute=0.5)) == pytest.approx([30.0, 15.0])
    assert two_tasks((Lane.INTER, 3), (Lane.COMPUTE, 10), Contention(links=0.5)) == pytest.approx([3.0, 10.0])


def test_traffic_is_slowed_by_computation_and_by_the_other_link_at_once() -> None:
    assert two_tasks((Lane.INTER, 3), (Lane.COMPUTE, 10), Contention(traffic=0.5)) == pytest.approx([4.5, 10.0])
    draft = Draft()
    for place, lane in enumerate((Lane.INTER, Lane.INTRA, Lane.COMPUTE)):
        draft.add(f"X{place}", lane, size=10)
    costs = dict.fromkeys(("X0", "X1", "X2"), LinearCost(0, 1))
    spans = simulate(draft.finish(), costs, Contention(links=0.5, traffic=0.5)).spans
    # 10 ms at half speed beside both others, then 5 ms of work at 1.5 beside the other link.
    assert [span.end_ms for span in spans] == pytest.approx([17.5, 17.5, 10.0])


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


def test_an_empty_schedule_and_one_that_takes_no_time_can_be_looked_at() -> None:
    nothing = simulate(Draft().finish(), {})
    assert (nothing.makespan_ms, nothing.critical_path()) == (0.0, ())
    assert nothing.gantt(20).endswith("0.000 ms")
    free = Load(LinearCost(0.0, 0.0), 1.0)
    phase = Phase(free, free, free, free)
    for contention in (Contention(), Contention(0.5, 0.5)):
        timeline = simulate(bare_schedule(phase, 3), bare_block(phase)[1], contention)
        assert timeline.makespan_ms == 0.0
        assert len(timeline.gantt(20).splitlines()) == 4


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
        costs, schedule = random_costs(rng), random_schedule(rng, layout)
        by_kind = {task.kind: 0.05 for task in schedule.tasks if task.kind != HOLD}
        one, other = (simulate(schedule, costs, contention, host_ms) for host_ms in (0.05, by_kind))
        assert one.makespan_ms == pytest.approx(other.makespan_ms)


def test_a_kind_without_a_cost_of_the_host_and_a_cost_that_is_none_are_named() -> None:
    costs = dict.fromkeys(CHUNK_KINDS, LinearCost(0, 1))
    with pytest.raises(ValueError, match="no host cost for EXPERT; host costs exist for A2A_IN, A2A_OUT"):
        simulate(in_and_out(2), costs, host_ms={A2A_IN: 0.1, A2A_OUT: 0.1})
    with pytest.raises(ValueError, match="host_ms of EXPERT = -1: must be a finite number of at least 0"):
        simulate(in_and_out(2), costs, host_ms=dict.fromkeys(CHUNK_KINDS, 0.1) | {EXPERT: -1})

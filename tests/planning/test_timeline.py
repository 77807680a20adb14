# SPDX-License-Identifier: Apache-2.0
"""Costs, schedules and timelines: the laws of a schedule played against a clock."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from ds_fsmoe.planning.cost import LinearCost, fit
from ds_fsmoe.planning.presets import PRESETS, LayerSizes, layer_schedule
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD, REDUCE, Draft, Lane, Schedule, Task
from ds_fsmoe.planning.timeline import Contention, simulate


def paper_layer(degree: int, sizes: dict[str, float], grad_size: float | None = None) -> Schedule:
    """Fig. 3(d): inter link IN1..INr, gradient, OUT1..OUTr; intra link G1..Gr, R1..Rr; compute E1..Er."""
    whole = LayerSizes(sizes[A2A_IN], sizes[GATHER], sizes[EXPERT], sizes[REDUCE])
    return layer_schedule(whole, degree, PRESETS["fsmoe"], () if grad_size is None else (grad_size,))


def random_layer(rng: random.Random) -> tuple[dict[str, LinearCost], dict[str, float], float, int]:
    kinds = (A2A_IN, GATHER, EXPERT, REDUCE)
    costs = {kind: LinearCost(rng.choice([0.0, rng.random()]), rng.random()) for kind in kinds}
    costs[A2A_OUT] = costs[A2A_IN]
    costs[GRAD] = LinearCost(0.1, 1.0)
    sizes = {kind: 20 * rng.random() for kind in kinds}
    return costs, sizes, rng.choice([0.0, 30 * rng.random()]), rng.randint(1, 16)


def test_the_closed_form_of_the_papers_order_is_the_simulation() -> None:
    """T = max{2ra + gar, 2a+g+e+s + (r-1)max(a,g,e,s), 2a+g+s + (r-1)(max(a,g)+max(a,s))}, also where g != s."""
    rng = random.Random(0)
    for _ in range(3000):
        costs, sizes, grad_size, r = random_layer(rng)
        a, g, e, s = (costs[k].ms(sizes[k] / r) for k in (A2A_IN, GATHER, EXPERT, REDUCE))
        gar = costs[GRAD].ms(grad_size)
        closed = max(
            2 * r * a + gar,
            2 * a + g + e + s + (r - 1) * max(a, g, e, s),
            2 * a + g + s + (r - 1) * (max(a, g) + max(a, s)),
        )
        assert simulate(paper_layer(r, sizes, grad_size), costs).makespan_ms == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize(
    "contention", [Contention(), Contention(links=0.5), Contention(links=0.4, compute=0.2)], ids=str
)
@pytest.mark.parametrize("host_ms", [0.0, 0.3])
def test_a_timeline_keeps_its_laws(contention: Contention, host_ms: float) -> None:
    rng = random.Random(1)
    for _ in range(200):
        costs, sizes, grad_size, r = random_layer(rng)
        schedule = paper_layer(r, sizes, grad_size)
        timeline = simulate(schedule, costs, contention, host_ms)
        spans = timeline.spans
        for lane, indices in schedule.lanes.items():
            for first, second in pairwise(indices):
                assert spans[second].start_ms >= spans[first].end_ms - 1e-9, "two tasks of a lane overlap"
            assert timeline.busy_ms(lane) <= timeline.makespan_ms + 1e-9
            assert timeline.busy_ms(lane) + timeline.idle_ms(lane) == pytest.approx(timeline.makespan_ms)
        for index, (task, span) in enumerate(zip(schedule.tasks, spans, strict=True)):
            assert all(span.start_ms >= spans[needed].end_ms - 1e-9 for needed in task.after)
            assert span.start_ms >= host_ms * (index + 1) - 1e-9
            assert span.end_ms - span.start_ms >= costs[task.kind].ms(task.size) - 1e-9
        path = timeline.critical_path()
        assert path[-1].end_ms == timeline.makespan_ms
        assert all(a.end_ms == pytest.approx(b.start_ms, abs=1e-9) for a, b in pairwise(path))
        assert path[0].start_ms == pytest.approx(0.0) or host_ms > 0
        chain_ms = sum(span.end_ms - span.start_ms for span in path)
        assert chain_ms <= timeline.makespan_ms + 1e-9
        if host_ms == 0:
            assert chain_ms == pytest.approx(timeline.makespan_ms)


def test_one_chunk_alone_takes_the_plain_sum() -> None:
    costs, sizes, _, _ = random_layer(random.Random(5))
    timeline = simulate(paper_layer(1, sizes), costs)
    total = 2 * costs[A2A_IN].ms(sizes[A2A_IN]) + sum(costs[k].ms(sizes[k]) for k in (GATHER, EXPERT, REDUCE))
    assert timeline.makespan_ms == pytest.approx(total)
    assert [span.task.kind for span in timeline.critical_path()] == [A2A_IN, GATHER, EXPERT, REDUCE, A2A_OUT]


def test_both_simulations_agree_where_there_is_no_contention() -> None:
    """A slowdown too small to matter takes the way of events; without one the list is walked."""
    rng = random.Random(2)
    for host_ms in (0.0, 0.2):
        for _ in range(200):
            costs, sizes, grad_size, r = random_layer(rng)
            schedule = paper_layer(r, sizes, grad_size)
            walked = simulate(schedule, costs, host_ms=host_ms)
            played = simulate(schedule, costs, Contention(links=1e-13), host_ms)
            for a, b in zip(walked.spans, played.spans, strict=True):
                assert (a.start_ms, a.end_ms) == (
                    pytest.approx(b.start_ms, abs=1e-9),
                    pytest.approx(b.end_ms, abs=1e-9),
                )


def test_contention_slows_two_links_only_while_both_are_busy() -> None:
    """Inter 10 ms beside intra 4 ms at kappa 0.5: 6 ms together, then the inter link's remaining 6 ms alone."""
    draft = Draft()
    draft.add("X", Lane.INTER, size=10)
    draft.add("Y", Lane.INTRA, size=4)
    cost = {"X": LinearCost(0, 1), "Y": LinearCost(0, 1)}
    inter, intra = simulate(draft.finish(), cost, Contention(links=0.5)).spans
    assert intra.end_ms == pytest.approx(6.0)
    assert inter.end_ms == pytest.approx(12.0)


def test_compute_is_slowed_by_traffic() -> None:
    draft = Draft()
    draft.add("X", Lane.INTER, size=3)
    draft.add("E", Lane.COMPUTE, size=10)
    cost = {"X": LinearCost(0, 1), "E": LinearCost(0, 1)}
    assert simulate(draft.finish(), cost, Contention(compute=0.5)).makespan_ms == pytest.approx(3 + 8)


def test_a_new_kind_of_operation_needs_a_name_a_lane_and_a_cost() -> None:
    draft = Draft()
    first = draft.add("COMPRESS", Lane.COMPUTE, size=2)
    draft.add("A2A_IN", Lane.INTER, size=3, after=[first])
    costs = {"COMPRESS": LinearCost(1, 1), "A2A_IN": LinearCost(0, 2)}
    assert simulate(draft.finish(), costs).makespan_ms == 9


def test_a_schedule_that_could_wait_for_ever_cannot_be_made() -> None:
    with pytest.raises(
        ValueError, match=r"task 0 \(L00/EXPERT/chunk0\) needs task 1: a task may only need tasks issued"
    ):
        Schedule((Task(EXPERT, Lane.COMPUTE, after=(1,)), Task(GATHER, Lane.INTRA)))


def test_a_kind_without_a_cost_is_named() -> None:
    costs, sizes, _, _ = random_layer(random.Random(3))
    del costs[REDUCE]
    with pytest.raises(
        ValueError, match="no cost for REDUCE: there are costs for A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD"
    ):
        simulate(paper_layer(2, sizes), costs)


def test_a_timeline_can_be_looked_at() -> None:
    costs, sizes, _, _ = random_layer(random.Random(4))
    schedule = paper_layer(2, sizes)
    timeline = simulate(schedule, costs)
    assert "L00/A2A_IN/chunk1" in str(schedule)
    rows = timeline.gantt(60).splitlines()
    assert [row.split()[0] for row in rows[:3]] == ["compute", "intra", "inter"]
    assert all(len(row) <= 68 for row in rows[:3])
    events = json.loads(timeline.chrome_trace())["traceEvents"]
    assert len(events) == len(schedule.tasks)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(timeline.makespan_ms * 1e3)
    assert schedule.degree() == 2


def test_a_line_is_fitted_and_a_bad_fit_is_not_called_good() -> None:
    sizes = [2.0**i for i in range(10, 25, 2)]
    exact = fit(sizes, [0.25 + 3e-7 * n for n in sizes])
    assert exact.cost.alpha_ms == pytest.approx(0.25)
    assert exact.cost.beta_ms == pytest.approx(3e-7)
    assert exact.r2 == pytest.approx(1.0)
    assert exact.require_good("a2a") == exact.cost
    hardly_growing = fit(sizes, [0.25 + 0.001 * (i % 2) for i in range(len(sizes))])
    assert hardly_growing.r2 < 0.5
    assert hardly_growing.is_good
    bad = fit([1, 2, 3, 4], [5, 1, 4, 2])
    assert not bad.is_good
    with pytest.raises(ValueError, match=r"all-reduce: a straight line does not describe .*r\^2 = "):
        bad.require_good("all-reduce")


def test_a_fit_never_goes_below_zero() -> None:
    assert fit([1, 2, 3], [0.5, 2.0, 3.5]).cost.alpha_ms == 0.0
    assert fit([1, 2, 3], [3.0, 2.0, 1.0]).cost == LinearCost(2.0, 0.0)


@pytest.mark.parametrize(
    ("sizes", "times_ms"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([1, 2, -3], [1, 2, 3])]
)
def test_impossible_measurements_are_refused(sizes: list, times_ms: list) -> None:
    with pytest.raises(ValueError, match="fit: "):
        fit(sizes, times_ms)


@pytest.mark.parametrize("coefficients", [(-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0), (0.0, float("inf"))])
def test_impossible_costs_are_refused(coefficients: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be a finite number of at least 0"):
        LinearCost(*coefficients)

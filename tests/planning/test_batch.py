# SPDX-License-Identifier: Apache-2.0
"""Many timelines at once give what one at a time gives, and both what exact arithmetic gives."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.batch import Template, makespans_ms
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import HOLD, Draft, Lane, Schedule
from ds_fsmoe.planning.timeline import IDEAL, Contention, simulate


def random_schedule(rng: random.Random, tasks: int) -> Schedule:
    """Any tasks on any lanes, some on two at once, waiting for any before them."""
    draft, indices = Draft(), []
    for name in range(tasks):
        lanes = rng.sample(list(Lane), rng.choice([1, 1, 1, 2]))
        after = rng.sample(indices, min(len(indices), rng.choice([0, 0, 1, 2])))
        indices.append(draft.add(str(name), *lanes, after=after))
    return draft.finish()


def exact_ms(schedule: Schedule, work: list[Fraction], links: Fraction, compute: Fraction, host: Fraction) -> Fraction:
    """The definition, in fractions: time goes on to whatever comes next."""
    done: set[int] = set()
    left, now = list(work), Fraction(0)
    # A task is issued when the host has paid for its launches and those of all before it; a HOLD is none.
    issued = [host * sum(each.launches for each in schedule.tasks[: i + 1]) for i in range(len(schedule.tasks))]
    while len(done) < len(schedule.tasks):
        heads = [next((i for i in indices if i not in done), None) for indices in schedule.lanes.values()]
        free = [i for i in heads if i is not None and done.issuperset(schedule.tasks[i].after)]
        running = [i for i in free if issued[i] <= now]
        busy = {schedule.tasks[i].lane for i in running}
        slow = {}
        for i in running:
            on_compute = schedule.tasks[i].lane is Lane.COMPUTE
            beside = bool(busy - {Lane.COMPUTE}) if on_compute else {Lane.INTER, Lane.INTRA} <= busy
            slow[i] = 1 + (compute if on_compute else links) if beside else Fraction(1)
        step = min([left[i] * slow[i] for i in running] + [issued[i] - now for i in free if i not in running])
        now += step
        for i in running:
            left[i] -= step / slow[i]
            if left[i] == 0:
                done.add(i)
    return now


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    st.integers(0, 10**9),
    st.integers(1, 14),
    st.sampled_from([0, 1, 2, 4]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0, 1, 2]),
)
def test_random_schedules_take_exactly_what_the_definition_says(
    seed: int, tasks: int, links: int, compute: int, host: int
) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng, tasks)
    kappa, traffic, host_ms = Fraction(links, 4), Fraction(compute, 4), Fraction(host, 4)
    contention = Contention(float(kappa), float(traffic))
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
        expected = float(exact_ms(schedule, work[column], kappa, traffic, host_ms))
        costs = {t.kind: LinearCost(float(w), 0.0) for t, w in zip(schedule.tasks, work[column], strict=True)}
        assert batch[column] == pytest.approx(expected, rel=1e-12, abs=0)
        played = simulate(schedule, costs, contention, float(host_ms)).makespan_ms
        assert played == pytest.approx(expected, rel=1e-12, abs=1e-11)


@pytest.mark.parametrize("contention", [IDEAL, Contention(0.45), Contention(0.3, 0.2)], ids=str)
def test_different_schedules_at_once_do_not_mix(contention: Contention) -> None:
    rng = random.Random(1)
    jobs, expected = [], []
    for _ in range(30):
        schedule = random_schedule(rng, rng.randint(1, 30))
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


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e9])
def test_times_scale_with_the_unit_they_are_given_in(scale: float) -> None:
    rng = random.Random(2)
    schedule = random_schedule(rng, 25)
    work = np.array([[0.0 if t.kind == HOLD else rng.random()] for t in schedule.tasks])
    template, at_once = Template.of(schedule), np.zeros(len(work))
    for contention in (IDEAL, Contention(0.5, 0.25)):
        (once,) = makespans_ms([(template, work, at_once)], contention)
        (scaled,) = makespans_ms([(template, work * scale, at_once)], contention)
        assert scaled == pytest.approx(once * scale, rel=1e-9, abs=0)
        costs = {t.kind: LinearCost(float(w[0]) * scale, 0.0) for t, w in zip(schedule.tasks, work, strict=True)}
        assert simulate(schedule, costs, contention).makespan_ms == pytest.approx(once[0] * scale, rel=1e-9, abs=1e-10)


def test_nothing_at_all_takes_no_time() -> None:
    empty = Template.of(Draft().finish())
    for contention in (IDEAL, Contention(0.5)):
        (times,) = makespans_ms([(empty, np.zeros((0, 2)), np.zeros(0))], contention)
        assert times.tolist() == [0.0, 0.0]

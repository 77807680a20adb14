# SPDX-License-Identifier: Apache-2.0
"""Simulates many schedules at once and returns only their makespans. The search over plans
(``decide/block_times.py``) uses it.

It gives the same result as ``timeline.simulate``, but each step advances every candidate by one event. So a thousand
candidates cost little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.planning.schedule import Lane, Schedule
from ds_fsmoe.planning.timeline import IDEAL, Contention

_LANES = tuple(Lane)
_COMPUTE, _INTRA, _INTER = (_LANES.index(each) for each in (Lane.COMPUTE, Lane.INTRA, Lane.INTER))
_NUM_LANES = len(_LANES)
_OTHERS = tuple(tuple(each for each in range(_NUM_LANES) if each != lane) for lane in range(_NUM_LANES))
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Template:
    """Holds the order of a schedule without its times. A lane keeps its order, so finished tasks are a count per
    lane.
    """

    launched: np.ndarray
    """The number of host launches up to and including each task."""
    lane_tasks: tuple[np.ndarray, ...]
    """The indices of each lane's tasks."""
    needs: tuple[np.ndarray, ...]
    """For each lane, how many tasks must be done on every lane before each of its tasks: [its tasks, lanes]."""
    after: tuple[tuple[int, ...], ...]
    """What each task waits for, including the task before it on its lane."""

    @classmethod
    def of(cls, schedule: Schedule) -> Template:
        """Compile a schedule into this form."""
        lane_tasks = [schedule.lanes[lane] for lane in _LANES]
        place = {index: (lane, i) for lane, tasks in enumerate(lane_tasks) for i, index in enumerate(tasks)}
        needs, after = [], [()] * len(schedule.tasks)
        for lane, tasks in enumerate(lane_tasks):
            table = np.zeros((len(tasks), len(_LANES)), dtype=np.int64)
            for i, index in enumerate(tasks):
                table[i, lane] = i
                for needed in schedule.tasks[index].after:
                    other, j = place[needed]
                    table[i, other] = max(table[i, other], j + 1)
                after[index] = (*schedule.tasks[index].after, *((tasks[i - 1],) if i else ()))
            needs.append(table)
        indices = tuple(np.asarray(each, dtype=np.int64) for each in lane_tasks)
        return cls(np.array(schedule.launched, dtype=np.int64), indices, tuple(needs), tuple(after))


Job = tuple[Template, np.ndarray, np.ndarray]
"""An order, its task times in ms, [tasks, candidates], and when the host has issued the tasks, [tasks]."""


def makespans_ms(jobs: Sequence[Job], contention: Contention = IDEAL) -> list[np.ndarray]:
    """Return the makespan of each candidate.

    Args:
        jobs: the orders with their candidates.
        contention: how lanes slow each other down.

    Returns:
        For each job the makespans of its candidates in ms, [candidates].
    """
    if not jobs:
        return []
    # Walking is quicker for one order with many candidates, stepping for many orders with few.
    if contention == IDEAL and len(jobs) <= 4:
        return [_walk(*job) for job in jobs]
    return _play(jobs, contention)


def _walk(template: Template, task_ms: np.ndarray, issue_ms: np.ndarray) -> np.ndarray:
    end_ms = np.empty_like(task_ms, dtype=float)
    for index, after in enumerate(template.after):
        start_ms = issue_ms[index]
        for needed in after:
            start_ms = np.maximum(start_ms, end_ms[needed])
        end_ms[index] = start_ms + task_ms[index]
    return end_ms.max(axis=0) if template.after else np.zeros(task_ms.shape[1])


def _play(jobs: Sequence[Job], contention: Contention) -> list[np.ndarray]:
    counts = [task_ms.shape[1] for _, task_ms, _ in jobs]
    starts = np.cumsum([0, *counts])
    needs, issue_ms, work_ms, width = _tables(jobs, starts)
    columns = np.arange(starts[-1])
    row = np.repeat(np.arange(len(jobs)) * width, counts)
    left_tasks = np.repeat([len(template.after) for template, _, _ in jobs], counts)
    instant_ms = 1e-13 * work_ms.sum(axis=(0, 1)) + 1e-300
    result_ms = np.zeros(starts[-1])
    has_host = bool(issue_ms.any())

    done = np.zeros((_NUM_LANES, starts[-1]), dtype=np.int64)
    left_ms = work_ms[:, 0].copy()
    now_ms = np.zeros(starts[-1])
    ready = np.empty_like(left_ms, dtype=bool)
    while len(columns):
        if not left_tasks.all():
            over = left_tasks == 0
            result_ms[columns[over]] = now_ms[over]
            columns, row, left_tasks, instant_ms, now_ms = (
                each[~over] for each in (columns, row, left_tasks, instant_ms, now_ms)
            )
            done, left_ms, ready = (np.ascontiguousarray(each[:, ~over]) for each in (done, left_ms, ready))
            continue
        at = row + done
        for lane in range(_NUM_LANES):
            # What it needs on its own lane is done: it is next.
            first, second = _OTHERS[lane]
            ready[lane] = (done[first] >= needs[lane, first][at[lane]]) & (
                done[second] >= needs[lane, second][at[lane]]
            )
        until_ms = np.inf
        if has_host:
            early_ms = np.stack([issue_ms[lane][at[lane]] for lane in range(_NUM_LANES)]) - now_ms
            held = ready & (early_ms > instant_ms)
            until_ms = np.where(held, early_ms, np.inf).min(axis=0)
            ready &= ~held
        slowdown = np.ones_like(left_ms)
        of_links = np.where(ready[_INTRA] & ready[_INTER], 1.0 + contention.links, 1.0)
        if contention.traffic:
            of_links = of_links + contention.traffic * ready[_COMPUTE]
        slowdown[_INTRA] = slowdown[_INTER] = of_links
        if contention.compute:
            slowdown[_COMPUTE] = np.where(ready[_INTRA] | ready[_INTER], 1.0 + contention.compute, 1.0)
        step_ms = np.minimum(np.where(ready, left_ms * slowdown, np.inf).min(axis=0), until_ms)
        now_ms = now_ms + step_ms
        left_ms -= ready * (step_ms / slowdown)
        ended = ready & (left_ms <= instant_ms)
        done += ended
        left_tasks = left_tasks - ended.sum(axis=0)
        for lane in range(_NUM_LANES):
            of = np.flatnonzero(ended[lane])
            left_ms[lane, of] = work_ms[lane, done[lane, of], columns[of]]
    return np.split(result_ms, starts[1:-1])


def _tables(jobs: Sequence[Job], starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return (needs, issue times, work times, width) of all tasks.

    ``needs`` counts, per lane and task, the tasks of each lane that must be finished. Times are in ms. ``width`` is the
    largest number of tasks on a lane, plus one.
    """
    width = 1 + max((len(tasks) for template, _, _ in jobs for tasks in template.lane_tasks), default=0)
    # Rows of one table: order by order, task by task. One more task than a lane has ends it: its needs are never met.
    needs = np.full((_NUM_LANES, _NUM_LANES, len(jobs) * width), _NEVER)
    issue_ms = np.zeros((_NUM_LANES, len(jobs) * width))
    work_ms = np.zeros((_NUM_LANES, width, starts[-1]))
    for job, (template, task_ms, issued_ms) in enumerate(jobs):
        for lane, tasks in enumerate(template.lane_tasks):
            here = slice(job * width, job * width + len(tasks))
            needs[lane, :, here] = template.needs[lane].T
            issue_ms[lane, here] = issued_ms[tasks]
            work_ms[lane, : len(tasks), starts[job] : starts[job + 1]] = task_ms[tasks]
    return needs, issue_ms, work_ms, width

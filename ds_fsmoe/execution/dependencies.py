# SPDX-License-Identifier: Apache-2.0
"""The lane crossings of a schedule: the waits that the order within the lanes does not already ensure.

A lane does its tasks in order, so a need within a lane costs nothing. Of several needs on one other lane the last is
enough, and a lane need not wait twice for the same task. What is left are the crossings, and every kind of lanes waits
for exactly these.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from ds_fsmoe.planning.schedule import HOLD, Lane, Schedule, Task


@dataclass(frozen=True, slots=True)
class Step:
    """A task as its lane runs it."""

    index: int
    """The index of the task in the schedule."""
    task: Task
    needs: tuple[int, ...]
    """The numbers of the crossings that the task waits for."""
    feeds: tuple[int, ...]
    """The numbers of the crossings that the task opens when it is done."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """A schedule that is ready to run."""

    steps: tuple[Step, ...]
    """The steps in the order of issue."""
    by_lane: dict[Lane, tuple[Step, ...]]
    """The steps of each lane."""
    links: tuple[Lane, ...]
    """The lanes besides COMPUTE that have tasks."""
    joins: tuple[int, ...]
    """The numbers of the crossings that COMPUTE waits for after its last task, so that all is done."""
    count: int
    """The number of crossings, numbered from 0."""
    kinds: frozenset[str]
    """The kinds that need a body: all but HOLD."""


# Kept per schedule object for as long as that lives. By identity: a schedule's hash goes through all of its tasks.
_known: dict[int, Dependencies] = {}


def dependencies_of(schedule: Schedule) -> Dependencies:
    """Return the crossings of a schedule, computed once per schedule object."""
    found = _known.get(id(schedule))
    if found is None:
        found = _find(schedule)
        # First: an interrupt in between must not leave an entry that outlives the schedule, whose id is used again.
        weakref.finalize(schedule, _known.pop, id(schedule), None)
        _known[id(schedule)] = found
    return found


def _find(schedule: Schedule) -> Dependencies:
    needs: list[list[int]] = [[] for _ in schedule.tasks]
    feeds: list[list[int]] = [[] for _ in schedule.tasks]
    count = 0
    seen = {(lane, other): -1 for lane in Lane for other in Lane}  # the last task of `other` that `lane` waited for

    def cross(needed: int, lane: Lane) -> int | None:
        """Return the number of a new crossing from a task to a lane, or ``None`` if the lane has waited already."""
        nonlocal count
        other = schedule.tasks[needed].lane
        if other is lane or needed <= seen[lane, other]:
            return None
        seen[lane, other] = needed
        feeds[needed].append(count)
        count += 1
        return count - 1

    for index, task in enumerate(schedule.tasks):
        # Downwards: the last needed one of a lane comes first and makes the others superfluous.
        found = (cross(needed, task.lane) for needed in sorted(task.after, reverse=True))
        needs[index] = [number for number in found if number is not None]
    links = tuple(lane for lane in Lane if lane is not Lane.COMPUTE and schedule.lanes[lane])
    joins = [cross(schedule.lanes[lane][-1], Lane.COMPUTE) for lane in links]
    steps = tuple(
        Step(index, task, tuple(needs[index]), tuple(feeds[index])) for index, task in enumerate(schedule.tasks)
    )
    return Dependencies(
        steps,
        {lane: tuple(steps[index] for index in schedule.lanes[lane]) for lane in Lane},
        links,
        tuple(number for number in joins if number is not None),
        count,
        frozenset(task.kind for task in schedule.tasks) - {HOLD},
    )

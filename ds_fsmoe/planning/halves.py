# SPDX-License-Identifier: Apache-2.0
"""Two halves of a micro-batch that take turns: while the tokens of one travel, the other computes.

A half's run of a layer is in two parts with a pause between them: what brings tokens to the experts, then experts and
what brings results back. In the pause the other half computes, and at the end nothing is waited for until the results
are needed. So both halves go ``enter a, enter b, experts a, experts b``, layer by layer and forward and backward alike,
and a half's attention, or whatever else lies between two layers, comes ahead of its ``enter``.
"""

from __future__ import annotations

from dataclasses import replace

from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, GATHER, HOLD, SPREAD, Lane, Schedule, Task

ENTERING = frozenset((A2A_IN_NODE, A2A_IN, GATHER, SPREAD))
"""The kinds of tasks that bring tokens to the experts."""
SETTING_OUT = ENTERING - {GATHER, SPREAD}
"""Those of them that are first."""
NUM_HALVES = 2


def entering_first(schedule: Schedule, kinds: frozenset[str] = ENTERING) -> tuple[Schedule, int]:
    """Return the same tasks with those that bring tokens to the experts ahead of all others, and how many they are.

    Args:
        schedule: the tasks.
        kinds: of the tasks that go ahead.

    Raises:
        ValueError: such a task needs the result of another one.
    """
    tasks = schedule.tasks

    def enters(task: Task) -> bool:
        # A lane that is held is held as long as what holds it.
        return task.kind in kinds or (task.kind == HOLD and enters(tasks[task.after[0]]))

    def needs(index: int) -> tuple[int, ...]:
        # What needs a second lane waits for what was issued there before it, which now comes behind.
        if tasks[index].kind not in kinds:
            return tasks[index].after
        return tuple(each for each in tasks[index].after if each not in overtaken.get(index, ()) or enters(tasks[each]))

    last: dict[Lane, int] = {}
    overtaken: dict[int, set[int]] = {}
    for index, task in enumerate(tasks):
        if task.kind == HOLD and task.lane in last:
            overtaken.setdefault(task.after[0], set()).add(last[task.lane])
        last[task.lane] = index
    order = sorted(range(len(tasks)), key=lambda index: not enters(tasks[index]))
    place = {index: at for at, index in enumerate(order)}
    moved = [replace(tasks[index], after=tuple(place[each] for each in needs(index))) for index in order]
    return Schedule(tuple(moved)), sum(map(enters, tasks))

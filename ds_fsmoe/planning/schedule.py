# SPDX-License-Identifier: Apache-2.0
"""Defines a schedule as data: a list of tasks, each on a lane, in the order in which they are issued.

The same list is simulated against a clock, run on streams, printed, and the same on every rank. Task names follow the
direction of the data, so they hold in both phases. Tokens (forward) or gradients (backward) go A2A_IN, GATHER, EXPERT,
REDUCE, A2A_OUT; with node-deduplicated dispatch A2A_IN, SPREAD, EXPERT, COLLECT, A2A_OUT.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property


class Lane(StrEnum):
    """Names a resource that does one task at a time."""

    COMPUTE = "compute"
    INTRA = "intra"
    """The links inside a node."""
    INTER = "inter"
    """The links between nodes."""


# Kinds are plain words, so that a new operation needs no change here: a name, a lane and a cost will do.
A2A_IN = "A2A_IN"
GATHER = "GATHER"
EXPERT = "EXPERT"
REDUCE = "REDUCE"
A2A_OUT = "A2A_OUT"
# A hierarchical all-to-all is two tasks: these are its part inside the node, the two above its part between nodes.
A2A_IN_NODE = "A2A_IN_NODE"
A2A_OUT_NODE = "A2A_OUT_NODE"
# In node-deduplicated dispatch, a token is copied to the ranks of its experts in a node, and results are added up.
SPREAD = "SPREAD"
COLLECT = "COLLECT"
# Rows sent in an 8-bit communication dtype are quantized ahead of a link and dequantized behind it: to the experts,
# back, and in node-deduplicated dispatch in both directions inside a node.
QUANTISE_IN, DEQUANTISE_IN = "QUANTISE_IN", "DEQUANTISE_IN"
QUANTISE_OUT, DEQUANTISE_OUT = "QUANTISE_OUT", "DEQUANTISE_OUT"
QUANTISE_SPREAD, DEQUANTISE_SPREAD = "QUANTISE_SPREAD", "DEQUANTISE_SPREAD"
QUANTISE_COLLECT, DEQUANTISE_COLLECT = "QUANTISE_COLLECT", "DEQUANTISE_COLLECT"
QUANTISING = (QUANTISE_IN, QUANTISE_SPREAD, QUANTISE_COLLECT, QUANTISE_OUT)
DEQUANTISING = (DEQUANTISE_IN, DEQUANTISE_SPREAD, DEQUANTISE_COLLECT, DEQUANTISE_OUT)
# The rest of a transformer block.
MP_GATHER = "MP_GATHER"
ATTENTION = "ATTENTION"
SOFTMAX = "SOFTMAX"
DENSE = "DENSE"
"""What is computed densely beside experts: layers without, shared experts, the head."""
ELEMENTWISE = "ELEMENTWISE"
"""Norms, activations and the loss, whose time is that of their bytes."""
MP_REDUCE = "MP_REDUCE"
ROUTE = "ROUTE"
ORDER = "ORDER"
RESTORE = "RESTORE"
REST = "REST"
"""Everything that a model does besides the experts' parts of its layers, measured as a whole."""
# Slices of gradients: of parameters on every data-parallel rank, and of experts among ranks with the same ones.
GRAD = "GRAD"
EXPERT_GRAD = "EXPERT_GRAD"
# A slice that is added up in two levels is two or three tasks: these are its parts inside the node, the above its part
# between nodes. The last is left out where each part of the sum is for one rank only.
GRAD_SCATTER = "GRAD_SCATTER"
GRAD_GATHER = "GRAD_GATHER"
GRADIENT_TASKS = (GRAD_SCATTER, GRAD, EXPERT_GRAD, GRAD_GATHER)
# ZeRO's further collectives: parameters that ranks gather, and at stage 3 gradients of which each rank gets its part.
# There is one kind for parameters on every data-parallel rank, and one for experts among ranks with the same ones.
PARAMETERS = "PARAMETERS"
EXPERT_PARAMETERS = "EXPERT_PARAMETERS"
GRAD_PARTS = "GRAD_PARTS"
EXPERT_GRAD_PARTS = "EXPERT_GRAD_PARTS"
HOLD = "HOLD"
"""A task that does nothing but keep a lane waiting while a task elsewhere needs it, too (see ``Draft.add``)."""


@dataclass(frozen=True, slots=True)
class Task:
    """Describes one operation on one chunk."""

    kind: str
    lane: Lane
    chunk: int = 0
    size: float = 0.0
    """The size in the unit of the kind's cost: bytes of traffic, floating-point operations of computation."""
    after: tuple[int, ...] = ()
    """The indices of the tasks whose results this one needs."""
    layer: int = 0
    launches: int = 1
    """The number of launches: each costs the kind's alpha."""

    @property
    def name(self) -> str:
        """Return the stable and readable name: ``L03/A2A_IN/chunk1``."""
        return f"L{self.layer:02d}/{self.kind}/chunk{self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """Holds tasks in the order of issue. A lane runs its tasks in this order, and each after those in ``after``.

    A task may only need tasks issued before it, so no schedule deadlocks.

    Raises:
        ValueError: a task needs one that is issued later, or itself, or one that does not exist.
    """

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        for index, task in enumerate(self.tasks):
            for needed in task.after:
                if not 0 <= needed < index:
                    raise ValueError(
                        f"task {index} ({task.name}) needs task {needed}: a task may only need tasks issued before it"
                    )

    @cached_property
    def lanes(self) -> dict[Lane, tuple[int, ...]]:
        """Return lane -> the indices of its tasks, in their order."""
        return {lane: tuple(i for i, task in enumerate(self.tasks) if task.lane is lane) for lane in Lane}

    @cached_property
    def launched(self) -> tuple[int, ...]:
        """Return the number of launches that the host has made once it has issued each task."""
        return tuple(itertools.accumulate(task.launches for task in self.tasks))

    def in_one_lane(self) -> Schedule:
        """Return the same tasks, one after another."""
        return Schedule(tuple(replace(task, lane=Lane.COMPUTE) for task in self.tasks))

    def __str__(self) -> str:
        width = len(str(len(self.tasks)))
        lines = []
        for index, task in enumerate(self.tasks):
            needs = f"  after {', '.join(map(str, task.after))}" if task.after else ""
            lines.append(f"{index:{width}d}  {task.lane:7s}  {task.name}{needs}")
        return "\n".join(lines)


class Draft:
    """Collects the tasks of a schedule in the order of issue; each is named by its index."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self._last: dict[Lane, int] = {}

    def add(
        self,
        kind: str,
        *lanes: Lane,
        chunk: int = 0,
        size: float = 0.0,
        after: Iterable[int] = (),
        layer: int = 0,
        launches: int = 1,
    ) -> int:
        """Append a task, and return its index.

        A task that needs two lanes at once runs on the first. It starts when the second has done what was issued to it
        before. A HOLD keeps the second waiting until the task is done.
        """
        lane, *others = lanes
        needs = dict.fromkeys((*after, *(self._last[each] for each in others if each in self._last)))
        index = self._append(Task(kind, lane, chunk, size, tuple(needs), layer, launches))
        for each in others:
            self._append(Task(HOLD, each, chunk, 0.0, (index,), layer, launches=0))
        return index

    def _append(self, task: Task) -> int:
        self._tasks.append(task)
        self._last[task.lane] = len(self._tasks) - 1
        return len(self._tasks) - 1

    def finish(self) -> Schedule:
        """Return the schedule."""
        return Schedule(tuple(self._tasks))

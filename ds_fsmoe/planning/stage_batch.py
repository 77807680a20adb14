# SPDX-License-Identifier: Apache-2.0
"""A batch through all stages of a pipeline, simulated: when each of them computes, sends and waits.

What a stage does is a static list (:mod:`~ds_fsmoe.planning.stage_schedule`); here it gets times. A send and its
receive are one transfer: it begins when both stages have come to it, and holds the link between them on both sides. As
DeepSpeed sends, nothing else of these two stages runs meanwhile. What is left is the stages' idle time, their bubbles.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from ds_fsmoe.planning.schedule import (
    BACKWARD,
    FORWARD,
    OPTIMIZER_STEP,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    REDUCE_GRADIENTS,
    REDUCE_TIED,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Lane,
    Schedule,
)
from ds_fsmoe.planning.stage_schedule import SENDS, peer, stage_schedule
from ds_fsmoe.planning.timeline import Span, Timeline

Order = Literal["1f1b", "gpipe"]
_Node = tuple[int, int]
"""A stage, and the index of one of its tasks. A transfer is that of its send."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of one stage's own work: those of one micro-batch, predicted or measured.

    Raises:
        ValueError: a time below 0, or none at all.
    """

    forward_ms: float
    backward_ms: float
    """The time of a backward that sends no gradients to be summed: of all micro-batches but the last one."""
    last_backward_ms: float
    """The time of the backward in which gradients travel."""
    gradients_ms: float = 0.0
    """The time of the gradients that are left after it."""
    optimizer_ms: float = 0.0

    def __post_init__(self) -> None:
        _check_times(self)

    def busy_ms(self, num_micro_batches: int) -> float:
        """Return the time of a whole batch of this stage alone, without sends."""
        m = num_micro_batches
        end_ms = self.gradients_ms + self.optimizer_ms
        return m * self.forward_ms + (m - 1) * self.backward_ms + self.last_backward_ms + end_ms


@dataclass(frozen=True, slots=True)
class StageLink:
    """The times of one micro-batch's transfers between a stage and the next.

    Raises:
        ValueError: a time below 0, or none at all.
    """

    activation_ms: float = 0.0
    gradient_ms: float = 0.0
    lane: Lane = Lane.INTER

    def __post_init__(self) -> None:
        _check_times(self)


@dataclass(frozen=True, slots=True)
class Bubbles:
    """The time in which a stage has nothing to do, in the three parts of a batch."""

    warm_up_ms: float
    """Until its first backward begins."""
    steady_ms: float
    """While it runs forwards and backwards by turns."""
    cool_down_ms: float
    """From the end of its last forward, or the beginning of the first backward if that is later, to the batch's end."""

    @property
    def all_ms(self) -> float:
        """The sum of the three."""
        return self.warm_up_ms + self.steady_ms + self.cool_down_ms


@dataclass(frozen=True)
class BatchTimeline:
    """The timelines of all stages in a batch, which begin together."""

    stages: tuple[Timeline, ...]

    @property
    def makespan_ms(self) -> float:
        """The time until the last stage is through."""
        return max(each.makespan_ms for each in self.stages)

    def bubbles(self, stage: int) -> Bubbles:
        """Return the idle time of a stage, up to the end of the batch."""
        spans = self.stages[stage].spans
        steady_ms = min(each.start_ms for each in spans if each.task.kind == BACKWARD)
        cool_ms = max(steady_ms, max(each.end_ms for each in spans if each.task.kind == FORWARD))
        parts = ((0.0, steady_ms), (steady_ms, cool_ms), (cool_ms, self.makespan_ms))
        return Bubbles(*(self._idle_ms(spans, *part) for part in parts))

    def sends_ms(self, stage: int) -> float:
        """Return how long the links of a stage are busy with its sends and receives, waiting not counted."""
        kinds = (*SENDS, *SENDS.values())
        spans = self.stages[stage].spans
        return sum(each.end_ms - each.start_ms for each in spans if each.task.kind in kinds)

    def _idle_ms(self, spans: Sequence[Span], start_ms: float, end_ms: float) -> float:
        """Return how much of a time is in no span."""
        idle_ms, until_ms = 0.0, start_ms
        for each in sorted(spans, key=lambda span: span.start_ms):
            if each.start_ms >= end_ms:
                break
            idle_ms += max(0.0, each.start_ms - until_ms)
            until_ms = max(until_ms, each.end_ms)
        return idle_ms + max(0.0, end_ms - until_ms)

    def gantt(self, width: int = 110) -> str:
        """Draw the batch as text, a row for each stage: F and B with the number of their micro-batch, > and < for what
        is sent to the next stage and to the one before, * for what follows the last backward, dots for bubbles."""
        scale = width / self.makespan_ms if self.makespan_ms else 0.0
        marks = {SEND_ACTIVATION: ">", RECV_ACTIVATION: ">", SEND_GRADIENT: "<", RECV_GRADIENT: "<"}
        rows = []
        for stage, timeline in enumerate(self.stages):
            row = ["."] * width
            for span in timeline.spans:
                if span.end_ms == span.start_ms:
                    continue
                first = min(width - 1, int(span.start_ms * scale))
                last = max(first + 1, min(width, int(span.end_ms * scale)))
                kind, length = span.task.kind, last - first
                text = marks.get(kind, "*") * length
                if kind in (FORWARD, BACKWARD):
                    text = f"{kind[0]}{span.task.chunk}".ljust(length, "-" if kind == FORWARD else "=")[:length]
                row[first:last] = text
            rows.append(f"stage {stage + 1:<3d} {''.join(row)}")
        return "\n".join([*rows, f"{self.makespan_ms:.3f} ms"])


def simulate_batch(
    stages: Sequence[StageTimes],
    num_micro_batches: int,
    links: Sequence[StageLink] = (),
    *,
    tied_ms: float = 0.0,
    order: Order = "1f1b",
    is_blocking: bool = True,
) -> BatchTimeline:
    """Simulate a batch of all stages of a pipeline.

    Args:
        stages: their times, from the front.
        num_micro_batches: of which a batch is made.
        links: between each stage and the next; none: sends take no time.
        tied_ms: to sum the gradients of what the first and the last stage share, once both are through.
        order: DeepSpeed's, or GPipe's.
        is_blocking: whether a stage computes nothing while it sends or receives, as with DeepSpeed; else transfers take
            turns on the links of a stage, in their order, and computation waits for what it needs alone.

    Raises:
        ValueError: a batch of nothing, another number of links than there are neighbours.
    """
    if not stages:
        raise ValueError("a pipeline of no stages: must have at least 1")
    if links and len(links) != len(stages) - 1:
        raise ValueError(f"{len(links)} links: must be one between each of {len(stages)} stages and the next")
    links = tuple(links) or (StageLink(),) * (len(stages) - 1)
    lanes = [each.lane for each in links]
    lists = [stage_schedule(each, len(stages), num_micro_batches, lanes, order) for each in range(len(stages))]
    return play_batch(lists, stages, links, tied_ms=tied_ms, is_blocking=is_blocking)


def batch_ms(
    stages: Sequence[StageTimes],
    num_micro_batches: int,
    send_ms: float | Sequence[float] = 0.0,
    send_gradient_ms: float | Sequence[float] | None = None,
) -> float:
    """Predict the time of a ``train_batch`` of DeepSpeed's pipeline engine from the times of its stages.

    Args:
        stages: the times of each stage's own work, from the front, measured or predicted.
        num_micro_batches: ``gradient_accumulation_steps``.
        send_ms: of one micro-batch's activation to the next stage; one number, or one for each pair of neighbours.
        send_gradient_ms: of one micro-batch's gradient to the stage before; ``None``: as long as the activation.

    Returns:
        The time from the first forward of the first stage until the slowest stage has updated its parameters.

    Raises:
        ValueError: no stages, a batch of nothing, as many sends as there are no neighbours.
    """
    pairs = len(stages) - 1
    there = _each_ms(send_ms, pairs, "send_ms")
    back = there if send_gradient_ms is None else _each_ms(send_gradient_ms, pairs, "send_gradient_ms")
    links = [StageLink(*each) for each in zip(there, back, strict=True)]
    return simulate_batch(stages, num_micro_batches, links).makespan_ms


def play_batch(
    lists: Sequence[Schedule],
    stages: Sequence[StageTimes],
    links: Sequence[StageLink],
    *,
    tied_ms: float = 0.0,
    is_blocking: bool = True,
) -> BatchTimeline:
    """Simulate given lists of tasks, one for each stage; see :func:`simulate_batch`.

    Raises:
        ValueError: a send without its receive, or stages that would wait for each other for ever.
    """
    nodes = _nodes(lists, is_tied=tied_ms > 0)
    needs: dict[_Node, set[_Node]] = {node: set() for row in nodes for node in row}
    for schedule, row in zip(lists, nodes, strict=True):
        for index, node in enumerate(row):
            needs[node] |= {row[each] for each in _before(schedule, index, is_blocking)} - {node}
    try:
        order = tuple(graphlib.TopologicalSorter(needs).static_order())
    except graphlib.CycleError as error:
        circle = " -> ".join(f"stage {stage + 1}: {lists[stage].tasks[index].name}" for stage, index in error.args[1])
        raise ValueError(f"stages wait for each other for ever: {circle}") from error
    last_backward = [max(i for i, each in enumerate(x.tasks) if each.kind == BACKWARD) for x in lists]
    start_ms: dict[_Node, float] = {}
    end_ms: dict[_Node, float] = {}
    for node in order:
        stage, index = node
        is_last = index == last_backward[stage]
        start_ms[node] = max((end_ms[each] for each in needs[node]), default=0.0)
        end_ms[node] = start_ms[node] + _task_ms(lists[stage].tasks[index].kind, stage, stages, links, is_last, tied_ms)
    spans = (
        tuple(Span(task, start_ms[node], end_ms[node], None) for task, node in zip(schedule.tasks, row, strict=True))
        for schedule, row in zip(lists, nodes, strict=True)
    )
    return BatchTimeline(tuple(map(Timeline, spans)))


def _nodes(lists: Sequence[Schedule], is_tied: bool) -> list[list[_Node]]:
    """Return stage by stage, task by task, what has one time: a receive is its send, and the first and last stage sum
    what they share together."""
    places = [{(task.kind, task.chunk): index for index, task in enumerate(each.tasks)} for each in lists]
    sends_of = {received: sent for sent, received in SENDS.items()}
    nodes: list[list[_Node]] = []
    for stage, schedule in enumerate(lists):
        row = []
        for index, task in enumerate(schedule.tasks):
            node = stage, index
            pair = SENDS.get(task.kind) or sends_of.get(task.kind)
            if pair is not None:
                other = peer(stage, task.kind)
                if not 0 <= other < len(lists) or (pair, task.chunk) not in places[other]:
                    raise ValueError(f"stage {stage + 1}: {task.name} has no {pair} on stage {other + 1}")
                if task.kind in sends_of:
                    node = other, places[other][pair, task.chunk]
            elif task.kind == REDUCE_TIED and is_tied and stage == len(lists) - 1:
                node = 0, places[0][REDUCE_TIED, task.chunk]
            row.append(node)
        nodes.append(row)
    return nodes


def _before(schedule: Schedule, index: int, is_blocking: bool) -> list[int]:
    """Return the tasks of a stage that have to be over before one of its tasks begins."""
    tasks = schedule.tasks
    if is_blocking or tasks[index].kind == REDUCE_TIED:
        return list(range(index)) if tasks[index].kind == REDUCE_TIED else [index - 1] if index else []
    task = tasks[index]
    same_lane = [each for each in range(index) if tasks[each].lane is task.lane][-1:]
    made_by = {
        FORWARD: (RECV_ACTIVATION,),
        BACKWARD: (RECV_GRADIENT,),
        SEND_ACTIVATION: (FORWARD,),
        SEND_GRADIENT: (BACKWARD,),
    }.get(task.kind, ())
    return same_lane + [
        each for each in range(index) if tasks[each].kind in made_by and tasks[each].chunk == task.chunk
    ]


def _task_ms(
    kind: str, stage: int, stages: Sequence[StageTimes], links: Sequence[StageLink], is_last: bool, tied_ms: float
) -> float:
    """Return what a task of a stage takes; of a transfer, its send's."""
    times = stages[stage]
    if kind == SEND_ACTIVATION:
        return links[stage].activation_ms
    if kind == SEND_GRADIENT:
        return links[stage - 1].gradient_ms
    if kind == REDUCE_TIED:
        return tied_ms if stage == 0 else 0.0
    return {
        FORWARD: times.forward_ms,
        BACKWARD: times.last_backward_ms if is_last else times.backward_ms,
        REDUCE_GRADIENTS: times.gradients_ms,
        OPTIMIZER_STEP: times.optimizer_ms,
    }.get(kind, 0.0)


def _each_ms(time_ms: float | Sequence[float], count: int, name: str) -> list[float]:
    """Return a time for each pair of neighbours."""
    if isinstance(time_ms, int | float):
        return [float(time_ms)] * count
    if len(time_ms) != count:
        raise ValueError(f"{name}: {len(time_ms)} times, must be one for each of {count} pairs of neighbours")
    return [float(each) for each in time_ms]


def _check_times(of: StageTimes | StageLink) -> None:
    for each in fields(of):
        value = getattr(of, each.name)
        if each.name.endswith("_ms") and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{type(of).__name__}: {each.name} = {value}: must be a finite number of at least 0")

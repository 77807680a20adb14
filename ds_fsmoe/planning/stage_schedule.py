# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline do in a batch, as data: one static list for each stage.

Time is thought of in slots, as many for a forward as for a backward. With p stages, stage s runs the forward of
micro-batch i in slot s + 2i and its backward in slot 2p - 1 - s + 2i, so that forwards and backwards take turns as soon
as the first gradient is there (1F1B). What a slot has made is sent in the next one: a gradient before the activation
of the next forward is received, an activation after the gradient of the next backward is. Neighbours do the opposite of
each other in every slot, so that the send of one is always the receive of the other.

That is the list that DeepSpeed 0.19.8 runs, in this order and nothing beside it: a stage waits in each send for the
stage that receives. Slots without work take no time; they only say what comes before what.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_fsmoe.planning.schedule import (
    BACKWARD,
    FORWARD,
    LOAD,
    OPTIMIZER_STEP,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    REDUCE_GRADIENTS,
    REDUCE_TIED,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Lane,
    Schedule,
    Task,
)

SENDS = {SEND_ACTIVATION: RECV_ACTIVATION, SEND_GRADIENT: RECV_GRADIENT}
"""Send -> the receive that is the same transfer on the other stage."""
TOWARDS_NEXT = (SEND_ACTIVATION, RECV_GRADIENT)
"""What a stage exchanges with the one behind it; the other transfers are with the one before it."""
AT_THE_END = (REDUCE_TIED, REDUCE_GRADIENTS, OPTIMIZER_STEP)
Instruction = tuple[str, int]
"""A kind of task, and its micro-batch."""


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> tuple[Instruction, ...]:
    """Return what a stage does in a batch in DeepSpeed's order, see the head of this file.

    Args:
        stage: counted from the front.
        num_stages: p.
        num_micro_batches: m; a batch is as many forwards and backwards.

    Raises:
        ValueError: no such stage, or a batch of nothing.
    """
    _check(stage, num_stages, num_micro_batches)
    is_first, is_last = stage == 0, stage == num_stages - 1
    found: list[Instruction] = []
    for slot in range(2 * (num_micro_batches + num_stages - 1)):
        forward = _micro_batch(slot, stage, num_micro_batches)
        backward = _micro_batch(slot, 2 * num_stages - 1 - stage, num_micro_batches)
        # What the slot before has made travels in this one.
        forward_before = _micro_batch(slot - 1, stage, num_micro_batches)
        backward_before = _micro_batch(slot - 1, 2 * num_stages - 1 - stage, num_micro_batches)
        if not is_first:
            found += [(SEND_GRADIENT, each) for each in backward_before]
            found += [(RECV_ACTIVATION, each) for each in forward]
        if not is_last:
            found += [(RECV_GRADIENT, each) for each in backward]
            found += [(SEND_ACTIVATION, each) for each in forward_before]
        if is_first or is_last:
            found += [(LOAD, each) for each in forward]
        found += [(FORWARD, each) for each in forward]
        found += [(BACKWARD, each) for each in backward]
    return (*found, *((kind, 0) for kind in AT_THE_END))


def all_forwards_first(stage: int, num_stages: int, num_micro_batches: int) -> tuple[Instruction, ...]:
    """Return what a stage does in a batch of GPipe: all forwards, then all backwards, the last micro-batch first.

    Args:
        stage, num_stages, num_micro_batches: see :func:`one_forward_one_backward`.

    Raises:
        ValueError: no such stage, or a batch of nothing.
    """
    _check(stage, num_stages, num_micro_batches)
    is_first, is_last = stage == 0, stage == num_stages - 1
    found: list[Instruction] = []
    for each in range(num_micro_batches):
        found += [] if is_first else [(RECV_ACTIVATION, each)]
        found += [(LOAD, each)] if is_first or is_last else []
        found.append((FORWARD, each))
        found += [] if is_last else [(SEND_ACTIVATION, each)]
    for each in reversed(range(num_micro_batches)):
        found += [] if is_last else [(RECV_GRADIENT, each)]
        found.append((BACKWARD, each))
        found += [] if is_first else [(SEND_GRADIENT, each)]
    return (*found, *((kind, 0) for kind in AT_THE_END))


ORDERS = {"1f1b": one_forward_one_backward, "gpipe": all_forwards_first}
"""Order by name -> what a stage does in it."""


def stage_schedule(
    stage: int, num_stages: int, num_micro_batches: int, lanes: Sequence[Lane] = (), order: str = "1f1b"
) -> Schedule:
    """Return what a stage does in a batch as tasks, each of which needs the one before it.

    Args:
        stage, num_stages, num_micro_batches: see :func:`one_forward_one_backward`.
        lanes: the link between each stage and the next, ``num_stages - 1`` of them; none: all are between nodes.
        order: "1f1b", which is DeepSpeed's, or "gpipe".

    Raises:
        ValueError: no such stage, a batch of nothing, another number of links, an unknown order.
    """
    if order not in ORDERS:
        raise ValueError(f"order = {order!r}: the choices are {', '.join(ORDERS)}")
    links = tuple(lanes) or (Lane.INTER,) * (num_stages - 1)
    if len(links) != num_stages - 1:
        raise ValueError(f"{len(links)} links: must be one between each of {num_stages} stages and the next")
    tasks = []
    for index, (kind, micro_batch) in enumerate(ORDERS[order](stage, num_stages, num_micro_batches)):
        lane = Lane.COMPUTE
        if kind in (*SENDS, *SENDS.values()):
            lane = links[stage if kind in TOWARDS_NEXT else stage - 1]
        tasks.append(Task(kind, lane, micro_batch, after=(index - 1,) if index else ()))
    return Schedule(tuple(tasks))


def peer(stage: int, kind: str) -> int:
    """Return the stage at the other end of a transfer."""
    return stage + 1 if kind in TOWARDS_NEXT else stage - 1


def _micro_batch(slot: int, first_slot: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return the micro-batch of a slot, the first one's being given and every second slot having one; or none."""
    micro_batch, between = divmod(slot - first_slot, 2)
    return (micro_batch,) if not between and 0 <= micro_batch < num_micro_batches else ()


def _check(stage: int, num_stages: int, num_micro_batches: int) -> None:
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches = {num_micro_batches}: must be at least 1")
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage = {stage}: must be from 0 to {num_stages - 1}, as there are {num_stages}")

# SPDX-License-Identifier: Apache-2.0
"""Runs one phase of one call of a layer's experts: the bodies of its tasks, and the present state of each chunk.

``call`` creates a :class:`PhaseRun` per phase. The layouts ``row_chunks`` and ``slot_chunks`` implement :class:`Chunks`
for unpadded and padded dispatch.

Letters: N ranks that rows come from, e experts on this rank, C slots per expert, M width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Body, dependencies_of
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    COLLECT,
    DEQUANTISE_COLLECT,
    DEQUANTISE_IN,
    DEQUANTISE_OUT,
    DEQUANTISE_SPREAD,
    GATHER,
    QUANTISE_COLLECT,
    QUANTISE_IN,
    QUANTISE_OUT,
    QUANTISE_SPREAD,
    REDUCE,
    SPREAD,
    Schedule,
    Task,
)

Direction = Literal["forward", "backward"]
Hook = Callable[[str, torch.Tensor, Direction, int], torch.Tensor]
"""Maps ``(point, tensor, direction, chunk)`` to the tensor to continue with; the points are the paper's hooks."""


class Chunks:
    """Represents the chunks of a phase: their layout and their sizes.

    Each subclass also has the operations of its rows. ``read`` returns the rows to send. ``dispatch``, ``gather``,
    ``reduce`` and ``combine`` send them, or ``leg`` sends by one of the two parts of an all-to-all. ``compute`` passes
    them to the experts, and ``write`` writes results to the places of their tokens. With node-deduplicated dispatch,
    ``copied`` comes ahead of ``gather`` and ``added`` behind ``reduce``.

    Args:
        collectives: the collectives to the other ranks.
        count: the number of chunks.
        shape: the shape of the rows that the phase starts with.
    """

    def __init__(self, collectives: Collectives, count: int, shape: torch.Size) -> None:
        self._collectives = collectives
        self.count = count
        self._shape = shape
        self._result_RM: torch.Tensor | None = None

    def check_hooked(self, point: str, before: torch.Tensor, after: torch.Tensor) -> None:
        """Raise if a hook changed a shape that it must keep; this default, for slots, checks nothing, as only their
        final shape must be right."""

    def quantised(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return a chunk converted to the communication dtype; this default, for slots, returns it unchanged."""
        return x

    def dequantised(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return a received chunk in its own dtype, the inverse of :meth:`quantised`; this default, for slots, returns
        it unchanged."""
        return x

    def stayed(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return a chunk that no task has sent, as it would be received.

        Args:
            x: the chunk.
            index: 0 for dispatch, 1 for combine.
        """
        return x

    def copied(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return the copies of a chunk for the ranks of a node, the input of :meth:`gather`."""
        return x

    def added(self, y: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return the sums of the results of :meth:`reduce` over the ranks of a node."""
        return y

    def dispatched(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of :meth:`dispatch` in the layout of :meth:`gather`."""
        return x

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows at the experts in the layout of experts in one module, [N, e, c, M]. Only for one chunk."""
        return x

    def parted(self, y_NecM: torch.Tensor) -> torch.Tensor:
        """Return results in the layout of the chunk, the inverse of :meth:`whole`."""
        return y_NecM

    def leaving(self, y: torch.Tensor) -> torch.Tensor:
        """Return the results in the layout of :meth:`combine`."""
        return y

    def weight_gradients(self) -> torch.Tensor | None:
        """Return the gradients of the weights of this rank's choices, after all tasks of a backward. Collective.

        ``None`` where the layer adds up results after combine.
        """
        return None

    def result(self) -> torch.Tensor:
        """Return as many rows as the phase started with."""
        return self._result_RM


class PhaseRun:
    """Moves the chunks through a phase: each task continues with the result of its chunk's previous task.

    Args:
        chunks: the chunks of the phase.
        hook: the layer's hook.
        direction: the phase, forward or backward.
        holds: whether to keep every tensor until the phase is over, for lanes that run behind the host.
    """

    def __init__(self, chunks: Chunks, hook: Hook | None, direction: Direction, holds: bool = False) -> None:
        self._chunks = chunks
        self._hook = hook
        self._direction: Direction = direction
        self._at: dict[int, torch.Tensor] = {}
        self._back: set[int] = set()
        # The memory of a tensor that another stream uses must not be reused before the join.
        self._kept_tensors: list[torch.Tensor] | None = [] if holds else None

    def communication(self, schedule: Schedule) -> dict[str, Body]:
        """Return kind -> body for the communication tasks."""
        travel = {A2A_IN: self._dispatch, GATHER: self._gather, REDUCE: self._reduce, A2A_OUT: self._combine}
        chunks, step, kinds = self._chunks, self._step, dependencies_of(schedule).kinds
        if SPREAD in kinds:
            travel |= {SPREAD: step(chunks.copied, chunks.gather), COLLECT: step(chunks.reduce, chunks.added)}
        if A2A_IN_NODE in kinds:
            travel[A2A_IN_NODE], travel[A2A_IN] = self._enter_node, self._enter_from_node
            travel[A2A_OUT], travel[A2A_OUT_NODE] = self._leave_to_node, self._leave_node
        if QUANTISE_IN in kinds:
            travel |= self._narrow_in(is_in_two=A2A_IN_NODE in kinds)
        if QUANTISE_OUT in kinds:
            travel |= self._narrow_out(is_in_two=A2A_OUT_NODE in kinds)
        return travel

    def _narrow_in(self, is_in_two: bool) -> dict[str, Body]:
        """Return the bodies of dispatch with conversions; bodies that send take rows in their present dtype.

        Args:
            is_in_two: whether the all-to-all is in two parts.
        """
        chunks, step = self._chunks, self._step
        legs = {each: step(partial(chunks.leg, each)) for each in (A2A_IN_NODE, A2A_IN) if is_in_two}
        return (
            {A2A_IN: step(chunks.dispatch)}
            | legs
            | {
                QUANTISE_IN: self._quantise_in,
                DEQUANTISE_IN: self._dequantise_in,
                QUANTISE_SPREAD: step(chunks.copied, chunks.quantised),
                SPREAD: step(chunks.gather),
                DEQUANTISE_SPREAD: step(chunks.dequantised),
            }
        )

    def _narrow_out(self, is_in_two: bool) -> dict[str, Body]:
        """Return the bodies of combine with conversions; see :meth:`_narrow_in`."""
        chunks, step = self._chunks, self._step
        legs = {each: step(partial(chunks.leg, each)) for each in (A2A_OUT, A2A_OUT_NODE) if is_in_two}
        return (
            {A2A_OUT: step(chunks.combine)}
            | legs
            | {
                QUANTISE_COLLECT: step(chunks.quantised),
                COLLECT: step(chunks.reduce),
                DEQUANTISE_COLLECT: step(chunks.dequantised, chunks.added),
                QUANTISE_OUT: self._quantise_out,
                DEQUANTISE_OUT: self._dequantise_out,
            }
        )

    def _step(self, *does: Callable[[torch.Tensor, int], torch.Tensor]) -> Body:
        """Return a body that applies these functions to a chunk, one after another."""

        def work(task: Task) -> None:
            x = self._at[task.chunk]
            for do in does:
                x = do(x, task.chunk)
            self._keep(task.chunk, x)

        return work

    def weight_gradients(self) -> torch.Tensor | None:
        """Return the gradients of the weights of this rank's choices; see :meth:`Chunks.weight_gradients`.
        Collective."""
        return self._chunks.weight_gradients()

    def arrived(self) -> torch.Tensor:
        """Return the rows of an unchunked phase, [N, e, C, M], after all tasks up to the experts have run."""
        return self._chunks.whole(self._arrived(0))

    def computed(self, y_NecM: torch.Tensor) -> None:
        """Store the experts' results for the rows of :meth:`arrived`."""
        self._keep(0, self._chunks.parted(y_NecM))

    def result(self) -> torch.Tensor:
        """Return the received results, in the order of the sent rows, after all tasks have run."""
        for chunk in range(self._chunks.count):
            # Without communication no task has written it.
            if chunk not in self._back:
                self._after_combine(chunk, self._chunks.stayed(self._before_combine(chunk), 1))
        return self._chunks.result()

    def compute(self, body: Callable[..., torch.Tensor]) -> Body:
        """Return the body that calls ``body(*place, rows)``, where the place is the chunk's range at the experts."""

        def work(task: Task) -> None:
            self._keep(task.chunk, self._chunks.compute(body, task.chunk, self._arrived(task.chunk)))

        return work

    def _dispatch(self, task: Task) -> None:
        self._after_dispatch(task.chunk, self._chunks.dispatch(self._before_dispatch(task.chunk), task.chunk))

    def _quantise_in(self, task: Task) -> None:
        self._keep(task.chunk, self._chunks.quantised(self._before_dispatch(task.chunk), task.chunk))

    def _dequantise_in(self, task: Task) -> None:
        self._after_dispatch(task.chunk, self._chunks.dequantised(self._at[task.chunk], task.chunk))

    def _enter_node(self, task: Task) -> None:
        x = self._before_dispatch(task.chunk)
        self._keep(task.chunk, self._chunks.leg(A2A_IN_NODE, x, task.chunk))

    def _enter_from_node(self, task: Task) -> None:
        self._after_dispatch(task.chunk, self._chunks.leg(A2A_IN, self._at[task.chunk], task.chunk))

    def _gather(self, task: Task) -> None:
        self._keep(task.chunk, self._chunks.gather(self._arrived(task.chunk).contiguous(), task.chunk))

    def _reduce(self, task: Task) -> None:
        self._keep(task.chunk, self._chunks.reduce(self._at[task.chunk].contiguous(), task.chunk))

    def _combine(self, task: Task) -> None:
        self._after_combine(task.chunk, self._chunks.combine(self._before_combine(task.chunk), task.chunk))

    def _quantise_out(self, task: Task) -> None:
        self._keep(task.chunk, self._chunks.quantised(self._before_combine(task.chunk), task.chunk))

    def _dequantise_out(self, task: Task) -> None:
        self._after_combine(task.chunk, self._chunks.dequantised(self._at.pop(task.chunk), task.chunk))

    def _leave_to_node(self, task: Task) -> None:
        y = self._before_combine(task.chunk)
        self._keep(task.chunk, self._chunks.leg(A2A_OUT, y, task.chunk))

    def _leave_node(self, task: Task) -> None:
        y = self._chunks.leg(A2A_OUT_NODE, self._at.pop(task.chunk), task.chunk)
        self._after_combine(task.chunk, y)

    def _arrived(self, chunk: int) -> torch.Tensor:
        if chunk not in self._at:  # with an EP group of one rank no task has sent it
            self._after_dispatch(chunk, self._chunks.stayed(self._before_dispatch(chunk), 0))
        return self._at[chunk]

    def _before_dispatch(self, chunk: int) -> torch.Tensor:
        """Return the chunk for dispatch, contiguous, after the hook."""
        x = self._chunks.read(chunk)
        if self._hook is not None:
            x = self._hooked("before_dispatch_hook", x, chunk)
        self._kept_tensors is None or self._kept_tensors.append(x)
        return x.contiguous()

    def _after_dispatch(self, chunk: int, x: torch.Tensor) -> None:
        """Store the chunk after dispatch and the hook."""
        if self._hook is not None:
            x = self._hooked("after_dispatch_hook", x, chunk)
        self._keep(chunk, self._chunks.dispatched(x))

    def _before_combine(self, chunk: int) -> torch.Tensor:
        """Return the chunk for combine, contiguous, after the hook."""
        y = self._chunks.leaving(self._at.pop(chunk))
        if self._hook is not None:
            y = self._hooked("before_combine_hook", y, chunk)
        self._kept_tensors is None or self._kept_tensors.append(y)
        return y.contiguous()

    def _after_combine(self, chunk: int, y: torch.Tensor) -> None:
        """Write the result of combine to the places of its tokens."""
        if self._hook is not None:
            y = self._hooked("after_combine_hook", y, chunk)
        self._kept_tensors is None or self._kept_tensors.append(y)
        self._back.add(chunk)
        self._chunks.write(y, chunk)

    def _keep(self, chunk: int, tensor: torch.Tensor) -> None:
        self._at[chunk] = tensor
        self._kept_tensors is None or self._kept_tensors.append(tensor)

    def _hooked(self, point: str, tensor: torch.Tensor, chunk: int) -> torch.Tensor:
        replaced = self._hook(point, tensor, self._direction, chunk)
        self._chunks.check_hooked(point, tensor, replaced)
        return replaced

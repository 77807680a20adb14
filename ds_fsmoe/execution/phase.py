# SPDX-License-Identifier: Apache-2.0
"""One phase of one call of a layer's experts: its chunks and their current state.

Letters: E experts of all ranks, C slots per expert, c a chunk of them, M width, G ranks of an EP group, P of an ESP
group, N = P * G, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch

from ds_fsmoe.execution.chunking import ChunkedRows, Cutting
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.dependencies import dependencies_of
from ds_fsmoe.execution.lanes import Body, Lanes, Observer
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    GATHER,
    REDUCE,
    Schedule,
    Task,
)

Direction = Literal["forward", "backward"]
Hook = Callable[[str, torch.Tensor, Direction, int], torch.Tensor]
"""Maps ``(point, tensor, direction, chunk)`` to the tensor to go on with; the points are the paper's hooks."""


class Phase:
    """Moves the chunks through a phase: each task takes its chunk from where the previous task left it.

    Args:
        wires: the collectives to the other ranks.
        num_experts: E.
        layout: the layout of rows in both phases.
        hook: the layer's hook.
        direction: the phase, forward or backward.
        cutting: the phase's cuts of the capacity.
        rows_RM: [E * C, M], the rows that the phase starts with.
        holds: whether to keep every tensor until the phase is over, for lanes that run behind the host.
    """

    def __init__(
        self,
        collectives: Collectives,
        num_experts: int,
        layout: Cutting,
        hook: Hook | None,
        direction: Direction,
        cutting: Cutting,
        rows_RM: torch.Tensor,
        holds: bool = False,
    ) -> None:
        self._wires = collectives
        self._num_experts = num_experts
        self._layout = layout
        self._hook = hook
        self._direction: Direction = direction
        self._cuts = cutting.chunks
        self._rows_RM = rows_RM
        self._source = self._chunked(rows_RM.contiguous())
        self._is_whole = len(self._cuts) == len(layout.chunks) == 1
        self._at: dict[int, torch.Tensor] = {}
        self._back: set[int] = set()
        self._result_RM: torch.Tensor | None = None
        # The memory of a tensor that another stream uses must not be given away before the join.
        self._held: list[torch.Tensor] | None = [] if holds else None

    def _chunked(self, rows_RM: torch.Tensor) -> ChunkedRows:
        return ChunkedRows(rows_RM, self._num_experts, self._layout)

    def run(
        self, lanes: Lanes, schedule: Schedule, compute: Mapping[str, Body], label: str, observer: Observer | None
    ) -> torch.Tensor:
        """Run the schedule and return [E * C, M].

        Args:
            lanes: the lanes to run on.
            schedule: the schedule of this phase, with as many chunks as the phase cuts.
            compute: kind -> body, for tasks that are not communication.
            label: the layer's label.
            observer: is told of the tasks.
        """
        lanes.run(schedule, self.travel(schedule) | dict(compute), f"{label}/{self._direction}", observer)
        return self.result()

    def travel(self, schedule: Schedule) -> dict[str, Body]:
        """Return kind -> body for the communication tasks."""
        travel = {A2A_IN: self._dispatch, GATHER: self._gather, REDUCE: self._reduce, A2A_OUT: self._combine}
        if A2A_IN_NODE in dependencies_of(schedule).kinds:
            travel[A2A_IN_NODE], travel[A2A_IN] = self._enter_node, self._enter_from_node
            travel[A2A_OUT], travel[A2A_OUT_NODE] = self._leave_to_node, self._leave_node
        return travel

    def arrived(self) -> torch.Tensor:
        """Return [N, e, C, M], the rows of an uncut phase after all tasks that bring them have run."""
        return self._arrived(0)

    def computed(self, y_NecM: torch.Tensor) -> None:
        """Store the experts' results for the rows of :meth:`arrived`."""
        self._keep(0, y_NecM)

    def result(self) -> torch.Tensor:
        """Return [E * C, M] after all tasks have run."""
        for chunk in range(len(self._cuts)):
            # Where nothing is sent, no task has brought it back.
            if chunk not in self._back:
                self._all_to_all_out(chunk)
        assert self._result_RM is not None
        return self._result_RM

    def compute(self, body: Callable[[int, int, torch.Tensor], torch.Tensor]) -> Body:
        """Return the task body that calls ``body(start, stop, rows [N, e, c, M])``."""

        def work(task: Task) -> None:
            chunk = task.chunk
            y_NecM = body(*self._cuts[chunk], self._arrived(chunk))
            if self._result_RM is None and not self._is_whole:
                # Not before: under autocast the experts' type is not that of their input.
                self._result_RM = y_NecM.new_empty(self._rows_RM.shape)
            self._keep(chunk, y_NecM)

        return work

    def _dispatch(self, task: Task) -> None:
        self._all_to_all_in(task.chunk)

    def _enter_node(self, task: Task) -> None:
        blocks = self._wires.blocks(self._before_dispatch(task.chunk))
        self._keep(task.chunk, self._wires.legs[A2A_IN_NODE](blocks))

    def _enter_from_node(self, task: Task) -> None:
        x_GecM = self._wires.legs[A2A_IN](self._at[task.chunk])
        self._after_dispatch(task.chunk, x_GecM.flatten(0, 1))

    def _gather(self, task: Task) -> None:
        self._keep(task.chunk, self._wires.gather(self._arrived(task.chunk).contiguous()))

    def _reduce(self, task: Task) -> None:
        self._keep(task.chunk, self._wires.reduce(self._at[task.chunk].contiguous()))

    def _combine(self, task: Task) -> None:
        self._all_to_all_out(task.chunk)

    def _leave_to_node(self, task: Task) -> None:
        blocks = self._wires.blocks(self._before_combine(task.chunk))
        self._keep(task.chunk, self._wires.legs[A2A_OUT](blocks))

    def _leave_node(self, task: Task) -> None:
        y_GecM = self._wires.legs[A2A_OUT_NODE](self._at.pop(task.chunk))
        self._after_combine(task.chunk, y_GecM.flatten(0, 1))

    def _arrived(self, chunk: int) -> torch.Tensor:
        if chunk not in self._at:  # with an EP group of one no task has sent it
            self._all_to_all_in(chunk)
        return self._at[chunk]

    def _all_to_all_in(self, chunk: int) -> None:
        """Send the chunk to the ranks that have the experts."""
        self._after_dispatch(chunk, self._wires.to_experts(self._before_dispatch(chunk)))

    def _before_dispatch(self, chunk: int) -> torch.Tensor:
        """Return the chunk before dispatch, [E, c, M], contiguous."""
        x_EcM = self._hooked("before_dispatch_hook", self._source.read(*self._cuts[chunk]), chunk)
        self._hold(x_EcM)
        return x_EcM.contiguous()

    def _after_dispatch(self, chunk: int, x_EcM: torch.Tensor) -> None:
        """Store the chunk after dispatch, as [G, e, c, M]."""
        self._keep(chunk, self._wires.blocks(self._hooked("after_dispatch_hook", x_EcM, chunk)))

    def _all_to_all_out(self, chunk: int) -> None:
        """Send the chunk to the ranks that have the tokens."""
        self._after_combine(chunk, self._wires.to_experts(self._before_combine(chunk)))

    def _before_combine(self, chunk: int) -> torch.Tensor:
        """Return the chunk before combine, [E, c, M], contiguous."""
        y_NecM = self._at.pop(chunk)
        y_EcM = y_NecM.reshape(self._num_experts, *y_NecM.shape[2:])
        y_EcM = self._hooked("before_combine_hook", y_EcM, chunk)
        self._hold(y_EcM)
        return y_EcM.contiguous()

    def _after_combine(self, chunk: int, y_EcM: torch.Tensor) -> None:
        """Write the result where its tokens are."""
        start, stop = self._cuts[chunk]
        y_EcM = self._hooked("after_combine_hook", y_EcM, chunk)
        self._hold(y_EcM)
        if y_EcM.shape != (self._num_experts, stop - start, self._rows_RM.shape[-1]):
            raise ValueError(
                f"{tuple(y_EcM.shape)} came back for {self._num_experts} experts of {stop - start} slots of width "
                f"{self._rows_RM.shape[-1]}: a hook or an expert has changed the shape"
            )
        self._back.add(chunk)
        if self._is_whole:
            self._result_RM = y_EcM.reshape(self._rows_RM.shape)
        else:
            self._chunked(self._result_RM).write(start, stop, y_EcM)

    def _keep(self, chunk: int, tensor: torch.Tensor) -> None:
        self._at[chunk] = tensor
        self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        if self._held is not None:
            self._held.append(tensor)

    def _hooked(self, point: str, tensor: torch.Tensor, chunk: int) -> torch.Tensor:
        return tensor if self._hook is None else self._hook(point, tensor, self._direction, chunk)

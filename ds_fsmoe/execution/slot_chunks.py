# SPDX-License-Identifier: Apache-2.0
"""Chunks of slots: as many for every expert on every rank, whether a token is in them or not.

Letters: E experts of all ranks, C slots per expert, c a chunk of them, M width, G ranks of an EP group, N ranks that
rows come from, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from ds_fsmoe.execution.chunking import ChunkedRows, Cutting, cut
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.phase import Direction
from ds_fsmoe.planning.schedule import A2A_IN_NODE, A2A_OUT


@dataclass(frozen=True)
class SlotLayout:
    """The chunks of one call whose experts have equally many slots."""

    num_experts: int
    """The number of experts of all ranks, E."""
    capacity: int
    """The number of slots per expert, C."""
    degrees: tuple[int, int]
    """The number of chunks in the forward and in the backward."""

    num_tokens = None
    """Slots are cut by their number."""

    @cached_property
    def cuttings(self) -> tuple[Cutting, Cutting]:
        """The cuts of the forward and of the backward."""
        return cut(self.capacity, self.degrees[0]), cut(self.capacity, self.degrees[1])

    @property
    def same_cuts(self) -> bool:
        """Whether the backward has the chunks of the forward."""
        return self.cuttings[0] == self.cuttings[1]

    def slots_per_expert(self, num_ranks: int, num_local: int) -> int:
        """Return the number of slots per expert and rank, C."""
        return self.capacity

    def chunks(self, collectives: Collectives, direction: Direction, rows_RM: torch.Tensor) -> SlotChunks:
        """Return the chunks of a phase that starts with these rows, [E * C, M]."""
        cuttings = self.cuttings
        return SlotChunks(collectives, self.num_experts, cuttings[0], cuttings[direction == "backward"], rows_RM)


class SlotChunks:
    """The chunks of a phase; see :class:`~ds_fsmoe.execution.phase.Chunks`.

    Args:
        collectives: the collectives to the other ranks.
        num_experts: E.
        layout: the layout of rows in both phases.
        cutting: the phase's cuts of the capacity.
        rows_RM: [E * C, M], the rows that the phase starts with.
    """

    def __init__(
        self, collectives: Collectives, num_experts: int, layout: Cutting, cutting: Cutting, rows_RM: torch.Tensor
    ) -> None:
        self._wires = collectives
        self._num_experts = num_experts
        self._layout = layout
        self._cuts = cutting.chunks
        self.count = len(cutting.chunks)
        self._shape = rows_RM.shape
        self._source = self._chunked(rows_RM.contiguous())
        self._is_whole = len(self._cuts) == len(layout.chunks) == 1
        self._result_RM: torch.Tensor | None = None

    def _chunked(self, rows_RM: torch.Tensor) -> ChunkedRows:
        return ChunkedRows(rows_RM, self._num_experts, self._layout)

    def read(self, chunk: int) -> torch.Tensor:
        """Return [E, c, M]."""
        return self._source.read(*self._cuts[chunk])

    def check_hooked(self, point: str, before: torch.Tensor, after: torch.Tensor) -> None:
        """Do nothing: what a hook returns may have any shape that is whole again after the last."""

    def dispatch(self, x_EcM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks that have the experts."""
        return self._wires.to_experts(x_EcM)

    def leg(self, kind: str, x: torch.Tensor, chunk: int) -> torch.Tensor:
        """Do one of the two parts of :meth:`dispatch` or :meth:`combine`."""
        if kind in (A2A_IN_NODE, A2A_OUT):
            return self._wires.legs[kind](self._wires.blocks(x))
        return self._wires.legs[kind](x).flatten(0, 1)

    def dispatched(self, x_EcM: torch.Tensor) -> torch.Tensor:
        """Return what :meth:`dispatch` returns as [G, e, c, M]."""
        return self._wires.blocks(x_EcM)

    def gather(self, x_GecM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Gather the rows of the ranks that share the experts."""
        return self._wires.gather(x_GecM)

    def compute(self, body: Callable[..., torch.Tensor], chunk: int, x_NecM: torch.Tensor) -> torch.Tensor:
        """Call ``body(start, stop, rows)``."""
        y_NecM = body(*self._cuts[chunk], x_NecM)
        if self._result_RM is None and not self._is_whole:
            # Not before: under autocast the experts' type is not that of their input.
            self._result_RM = y_NecM.new_empty(self._shape)
        return y_NecM

    def whole(self, x_NecM: torch.Tensor) -> torch.Tensor:
        """Return the rows at the experts as experts are called as one module."""
        return x_NecM

    def parted(self, y_NecM: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`whole` for the results."""
        return y_NecM

    def reduce(self, y_NecM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Sum the rows over the ranks that share the experts."""
        return self._wires.reduce(y_NecM)

    def leaving(self, y_NecM: torch.Tensor) -> torch.Tensor:
        """Return the results as :meth:`combine` takes them, [E, c, M]."""
        return y_NecM.reshape(self._num_experts, *y_NecM.shape[2:])

    def combine(self, y_EcM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks that have the tokens."""
        return self._wires.to_experts(y_EcM)

    def write(self, y_EcM: torch.Tensor, chunk: int) -> None:
        """Write the result where its tokens are.

        Raises:
            ValueError: it has another shape than the rows that were sent.
        """
        start, stop = self._cuts[chunk]
        if y_EcM.shape != (self._num_experts, stop - start, self._shape[-1]):
            raise ValueError(
                f"{tuple(y_EcM.shape)} came back for {self._num_experts} experts of {stop - start} slots of width "
                f"{self._shape[-1]}: a hook or an expert has changed the shape"
            )
        if self._is_whole:
            self._result_RM = y_EcM.reshape(self._shape)
        else:
            self._chunked(self._result_RM).write(start, stop, y_EcM)

    def weight_gradients(self) -> None:
        """Return nothing: results are weighted where the tokens are."""

    def result(self) -> torch.Tensor:
        """Return [E * C, M]."""
        assert self._result_RM is not None
        return self._result_RM

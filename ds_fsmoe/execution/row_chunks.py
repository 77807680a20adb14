# SPDX-License-Identifier: Apache-2.0
"""Chunks of rows: as many as tokens have chosen each expert, none without a token.

The rows that this rank sends lie chunk by chunk of the forward, expert by expert, segment by segment of the tokens. At
the experts they arrive source by source, and are put expert by expert.

Letters: R rows, M width, G ranks of an EP group, P of an ESP group, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.phase import Direction
from ds_fsmoe.execution.row_sizes import PhaseSizes, RowSizes
from ds_fsmoe.execution.wires import carry, narrowed, widened
from ds_fsmoe.planning.schedule import A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE


@dataclass(frozen=True)
class RowLayout:
    """The chunks of one call on rows."""

    sizes: RowSizes
    num_experts: int
    """The number of experts of all ranks, E."""
    num_tokens: int
    """The number of tokens that are cut into chunks, S."""
    num_choices: int = 0
    """The number of choices of a token, K; 0 where that is not known."""

    @property
    def same_cuts(self) -> bool:
        """Whether the backward has the chunks of the forward."""
        return self.sizes.forward is self.sizes.backward

    def slots_per_expert(self, num_ranks: int, num_local: int) -> int:
        """Return how many rows an expert here gets from a rank, as a mean, rounded up."""
        return -(-self.sizes.num_arriving // (num_ranks * num_local))

    def chunks(self, collectives: Collectives, direction: Direction, rows_RM: torch.Tensor) -> RowChunks:
        """Return the chunks of a phase that starts with these rows, those that are sent first."""
        sizes = self.sizes
        order = sizes.source_order if direction == "backward" else None
        return RowChunks(collectives, getattr(sizes, direction), sizes.num_rows, order, rows_RM, direction)


class RowChunks:
    """The chunks of a phase; see :class:`~ds_fsmoe.execution.phase.Chunks`.

    Args:
        collectives: the collectives to the other ranks.
        sizes: the sizes of the phase.
        num_rows: how many of the rows are sent.
        order: for each row as the phase sends it, its place among those given; ``None``: they lie as they are sent.
        rows_RM: the rows that the phase starts with. Those behind the ones that are sent come back as zeros.
        direction: the phase.
    """

    def __init__(
        self,
        collectives: Collectives,
        sizes: PhaseSizes,
        num_rows: int,
        order: torch.Tensor | None,
        rows_RM: torch.Tensor,
        direction: Direction,
    ) -> None:
        self._collectives = collectives
        self._wire_in, self._wire_out = collectives.wires.of(direction)
        # Of the chunks that are between the two parts of an all-to-all: as they were before the first.
        self._between: dict[int, torch.Tensor] = {}
        self._sizes = sizes
        self._num_rows = num_rows
        self._order = order
        self.count = len(sizes.chunks)
        self._shape = rows_RM.shape
        self._rows_RM = rows_RM.contiguous() if order is None else rows_RM.index_select(0, order)
        self._result_RM: torch.Tensor | None = None

    def read(self, chunk: int) -> torch.Tensor:
        """Return the rows that are sent, those for the first expert first."""
        return self._rows_RM[self._sizes.starts[chunk] : self._sizes.starts[chunk + 1]]

    def check_hooked(self, point: str, before: torch.Tensor, after: torch.Tensor) -> None:
        """Refuse another number of rows.

        Raises:
            ValueError: a hook returned more or fewer.
        """
        if after.dim() < 1 or len(after) != len(before):
            raise ValueError(
                f"{point} returned {tuple(after.shape)} for {tuple(before.shape)}: must have as many rows, because the "
                "other ranks know how many come"
            )

    def dispatch(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks that have the experts."""
        return carry(self._wire_in, x_RM, lambda x: self._collectives.send_rows(x, self._sizes.chunks[chunk]))

    def leg(self, kind: str, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Do one of the two parts of :meth:`dispatch` or :meth:`combine`."""
        sizes, leaves = self._sizes.chunks[chunk], kind in (A2A_OUT, A2A_OUT_NODE)
        leg = self._collectives.row_legs[kind]
        sizes_now = sizes.back if leaves else sizes
        if (self._wire_out if leaves else self._wire_in) == "model":
            return leg(x_RM, sizes_now)
        # Narrow over both parts.
        if kind in (A2A_IN_NODE, A2A_OUT):
            self._between[chunk] = x_RM[:0]
            return leg(narrowed(x_RM), sizes_now)
        return widened(leg(x_RM, sizes_now), self._between.pop(chunk))

    def dispatched(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Return what :meth:`dispatch` returns."""
        return x_RM

    def gather(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Gather the rows of the ranks that share the experts."""
        return self._collectives.gather_rows(x_RM, self._sizes.chunks[chunk])

    def compute(self, body: Callable[..., torch.Tensor], chunk: int, x_RM: torch.Tensor) -> torch.Tensor:
        """Call ``body(chunk, rows)`` with the rows expert by expert."""
        return self._as_they_came(chunk, body(chunk, self._by_expert(chunk, x_RM)))

    def whole(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Return the rows at the experts as experts are called as one module, [1, e, c, M]: the shorter ones with
        zeros behind their rows. Only where there is one chunk."""
        return self._padded(self._by_expert(0, x_RM))

    def parted(self, y_1ecM: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`whole` for the results."""
        return self._as_they_came(0, self._unpadded(y_1ecM))

    def _padded(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Return rows that lie expert by expert as [1, e, c, M]."""
        sizes = self._sizes.chunks[0].of_experts
        padded_RM = x_RM.new_zeros(len(sizes) * max(sizes), *x_RM.shape[1:])
        padded_RM.index_copy_(0, self._padded_places(), x_RM)
        return padded_RM.view(1, len(sizes), max(sizes), *x_RM.shape[1:])

    def _unpadded(self, y_1ecM: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`_padded`."""
        return y_1ecM.flatten(0, 2).index_select(0, self._padded_places())

    def _padded_places(self) -> torch.Tensor:
        sizes = self._sizes.chunks[0].of_experts
        num_rows = sum(sizes)
        ends_e = self._sizes.ends[0].long()
        sizes_e = ends_e.diff(prepend=ends_e.new_zeros(1))
        before_e = torch.arange(len(sizes), device=ends_e.device) * max(sizes) - (ends_e - sizes_e)
        places = torch.repeat_interleave(before_e, sizes_e, output_size=num_rows)
        return places.add_(torch.arange(num_rows, device=places.device))

    def _by_expert(self, chunk: int, x_RM: torch.Tensor) -> torch.Tensor:
        order = self._sizes.order_of(chunk)
        return x_RM if order is None else x_RM.index_select(0, order)

    def _as_they_came(self, chunk: int, y_RM: torch.Tensor) -> torch.Tensor:
        order = self._sizes.order_of(chunk)
        return y_RM if order is None else torch.empty_like(y_RM).index_copy_(0, order, y_RM)

    def reduce(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Sum the rows over the ranks that share the experts."""
        return self._collectives.reduce_rows(y_RM, self._sizes.chunks[chunk])

    def leaving(self, y_RM: torch.Tensor) -> torch.Tensor:
        """Return the results as :meth:`combine` takes them."""
        return y_RM

    def combine(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks that have the tokens."""
        return carry(self._wire_out, y_RM, lambda y: self._collectives.send_rows(y, self._sizes.chunks[chunk].back))

    def write(self, y_RM: torch.Tensor, chunk: int) -> None:
        """Write the result where its tokens are.

        Raises:
            ValueError: it has another shape than the rows that were sent.
        """
        start, stop = self._sizes.starts[chunk], self._sizes.starts[chunk + 1]
        if y_RM.shape != (stop - start, *self._shape[1:]):
            raise ValueError(
                f"{tuple(y_RM.shape)} came back for {stop - start} rows of width {self._shape[-1]}: a hook or an "
                "expert has changed the shape"
            )
        if self._order is None and start == 0 and stop == self._shape[0]:
            self._result_RM = y_RM
            return
        if self._result_RM is None:
            self._result_RM = y_RM.new_empty(self._shape)
            if self._num_rows < self._shape[0]:
                self._result_RM[self._num_rows :] = 0
        if self._order is None:
            self._result_RM[start:stop] = y_RM
        else:
            self._result_RM.index_copy_(0, self._order[start:stop], y_RM)

    def weight_gradients(self) -> None:
        """Return nothing: results are weighted where the tokens are."""

    def result(self) -> torch.Tensor:
        """Return as many rows as were given."""
        assert self._result_RM is not None
        return self._result_RM

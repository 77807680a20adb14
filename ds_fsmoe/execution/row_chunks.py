# SPDX-License-Identifier: Apache-2.0
"""Chunks of rows, for unpadded dispatch: as many rows as tokens chose each expert.

``call`` uses these classes for layers that send rows; ``slot_chunks`` is the counterpart for slots. The rows that this
rank sends are ordered by chunk of the forward, then by expert, then by segment of the tokens. At the experts they
arrive source by source, and are sorted by expert.

Letters: R rows, M width, G ranks of an EP group, P of an ESP group, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_fsmoe.execution.collectives import Collectives, dequantized_rows, quantized_rows
from ds_fsmoe.execution.counts_exchange import NodeCall
from ds_fsmoe.execution.phase import Chunks, Direction
from ds_fsmoe.execution.row_sizes import NodePhase, PhaseSizes, RowSizes
from ds_fsmoe.planning.schedule import A2A_OUT, A2A_OUT_NODE

AddUp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Adds up rows: ``(y_RM, copies_JN, weights_JN) -> [N, M]``, see :attr:`ds_fsmoe.ops.Ops.restore`."""


@dataclass(frozen=True)
class RowLayout:
    """Describes the chunks of one call on rows."""

    sizes: RowSizes
    num_experts: int
    """The number of experts of all ranks, E."""
    num_tokens: int
    """The number of tokens that are split into chunks, S."""
    num_choices: int = 0
    """The number of choices of a token, K; 0 if it is unknown."""
    node_call: NodeCall | None = None
    """The data of the call, for node-deduplicated dispatch."""
    add_up: AddUp | None = None
    """Adds up the results of such a call."""

    @property
    def same_chunks(self) -> bool:
        """Return True if the backward has the chunks of the forward."""
        return self.sizes.forward is self.sizes.backward

    def slots_per_expert(self, num_ranks: int, num_local: int) -> int:
        """Return the mean number of rows that an expert here receives from a rank, rounded up."""
        return -(-self.sizes.num_arriving // (num_ranks * num_local))

    def chunks(self, collectives: Collectives, direction: Direction, rows_RM: torch.Tensor) -> RowChunks:
        """Return the chunks of a phase that starts with these rows, in the order in which they are sent."""
        if self.node_call is None:
            return RowChunks(collectives, self.sizes, direction, rows_RM)
        return NodeChunks(collectives, self.node_call, self.add_up, direction, rows_RM)


class RowChunks(Chunks):
    """Represents the chunks of a phase; see :class:`~ds_fsmoe.execution.phase.Chunks`.

    Args:
        collectives: the collectives to the other ranks.
        sizes: the sizes of the call.
        direction: the phase.
        rows_RM: the rows that the phase starts with. Rows behind the sent ones have results of zero.
    """

    def __init__(self, collectives: Collectives, sizes: RowSizes, direction: Direction, rows_RM: torch.Tensor) -> None:
        phase: PhaseSizes = getattr(sizes, direction)
        super().__init__(collectives, len(phase.chunks), rows_RM.shape)
        self._comm_dtypes = collectives.comm_dtypes.of(direction)
        # For chunks that are sent as 8-bit numbers: the dtype and the shape of a row before that.
        self._wide: dict[int, tuple[torch.dtype, torch.Size]] = {}
        self._sizes = phase
        self._num_rows = sizes.num_rows
        # For each row in the order of sending, its place in ``rows_RM``; ``None``: the order is the same.
        self._order = order = sizes.source_order if direction == "backward" else None
        self._rows_RM = rows_RM.contiguous() if order is None else rows_RM.index_select(0, order)

    def read(self, chunk: int) -> torch.Tensor:
        """Return the rows to send, those for the first expert first."""
        return self._rows_RM[self._sizes.starts[chunk] : self._sizes.starts[chunk + 1]]

    def check_hooked(self, point: str, before: torch.Tensor, after: torch.Tensor) -> None:
        """Refuse another number of rows.

        Raises:
            ValueError: a hook returned more or fewer rows.
        """
        if after.dim() < 1 or len(after) != len(before):
            raise ValueError(
                f"{point} returned {tuple(after.shape)} for {tuple(before.shape)}: must keep the number of rows, "
                "which other ranks expect"
            )

    def dispatch(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks that have the experts."""
        return self._collectives.send_rows(x_RM, self._sizes.chunks[chunk])

    def quantised(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return the rows as bytes, in the communication dtype."""
        self._wide[chunk] = x_RM.dtype, x_RM.shape[1:]
        return quantized_rows(x_RM)

    def dequantised(self, bytes_RB: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return received bytes as rows, the inverse of :meth:`quantised`."""
        return dequantized_rows(bytes_RB, *self._wide.pop(chunk))

    def stayed(self, x_RM: torch.Tensor, index: int) -> torch.Tensor:
        """Return rows that no task has sent, rounded as if they had been sent."""
        if self._comm_dtypes[index] == "model":
            return x_RM
        return dequantized_rows(quantized_rows(x_RM), x_RM.dtype, x_RM.shape[1:])

    def leg(self, kind: str, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Run one of the two parts of :meth:`dispatch` or :meth:`combine`."""
        sizes = self._sizes.chunks[chunk]
        return self._collectives.row_legs[kind](x_RM, sizes.back if kind in (A2A_OUT, A2A_OUT_NODE) else sizes)

    def gather(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Gather the rows of the ranks that share the experts."""
        return self._collectives.gather_rows(x_RM, self._sizes.chunks[chunk])

    def compute(self, body: Callable[..., torch.Tensor], chunk: int, x_RM: torch.Tensor) -> torch.Tensor:
        """Call ``body(start, stop, rows)`` with the rows sorted by expert, and return the results in the order of
        arrival."""
        return self._as_they_came(chunk, body(*self._sizes.places[chunk : chunk + 2], self._by_expert(chunk, x_RM)))

    def whole(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Return the rows at the experts in the layout of experts in one module, [1, e, c, M].

        Experts with fewer rows are padded with zeros. Only for one chunk.
        """
        return self._padded(self._by_expert(0, x_RM))

    def parted(self, y_1ecM: torch.Tensor) -> torch.Tensor:
        """Return results in the layout of the chunk, the inverse of :meth:`whole`."""
        return self._as_they_came(0, self._unpadded(y_1ecM))

    def _padded(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Return rows that are sorted by expert as [1, e, c, M]."""
        sizes = self._sizes.chunks[0].of_experts
        padded_RM = x_RM.new_zeros(len(sizes) * max(sizes), *x_RM.shape[1:])
        padded_RM.index_copy_(0, self._padded_places(), x_RM)
        return padded_RM.view(1, len(sizes), max(sizes), *x_RM.shape[1:])

    def _unpadded(self, y_1ecM: torch.Tensor) -> torch.Tensor:
        """Return rows sorted by expert, the inverse of :meth:`_padded`."""
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

    def combine(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks that have the tokens."""
        return self._collectives.send_rows(y_RM, self._sizes.chunks[chunk].back)

    def write(self, y_RM: torch.Tensor, chunk: int) -> None:
        """Write the results to the places of their tokens.

        Raises:
            ValueError: the result has another shape than the sent rows.
        """
        start, stop = self._sizes.starts[chunk], self._sizes.starts[chunk + 1]
        if y_RM.shape != (stop - start, *self._shape[1:]):
            raise ValueError(
                f"{tuple(y_RM.shape)} returned for {stop - start} rows of width {self._shape[-1]}: a hook or an "
                "expert changed the shape"
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


# ---- Chunks of node-deduplicated dispatch: a token is sent once to each node that has one of its experts
#
# Between nodes one row per token and node is sent, inside a node one per token and rank, in each direction. Results
# are weighted and added up by the rank of the experts, then by the token's forwarding rank in the node, and last by
# the token's own rank.
# Letters: R rows or copies, M width, J the largest number of copies of a row.


class NodeChunks(RowChunks):
    """Represents the chunks of a phase of node-deduplicated dispatch; see :class:`~ds_fsmoe.execution.phase.Chunks`.

    Args:
        collectives: those of the layer.
        call: the data of the call.
        add_up: adds up the results of a row.
        direction: the phase.
        rows_RM: see :class:`RowChunks`.
    """

    _sizes: NodePhase

    def __init__(
        self,
        collectives: Collectives,
        call: NodeCall,
        add_up: AddUp,
        direction: Direction,
        rows_RM: torch.Tensor,
    ) -> None:
        super().__init__(collectives, call.sizes, direction, rows_RM)
        self._links = collectives.nodes
        self._call = call
        self._add_up = add_up
        fan = self._sizes.to_experts
        self._gradients_R: torch.Tensor | None = None
        self._weights_JN = None
        if direction == "forward":
            self._weights_JN = fan.by_copy(self._call.weights_R[fan.record_of_copy])
        else:
            self._weights_R = self._call.weights_R[fan.record_of_copy]
            self._gradients_R = torch.zeros_like(self._weights_R)

    def dispatch(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the forwarding ranks of its nodes."""
        sizes = self._sizes.chunks[chunk]
        return self._links.exchange_between(x_RM, sizes.sends, sizes.receives)

    def copied(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return a copy of the received rows for each rank of this node.

        Rows that were quantised between nodes lose nothing more inside the node: the scale is the same, or nearly.
        """
        return x_RM.index_select(0, self._sizes.to_ranks.rows(chunk))

    def gather(self, copies_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the copies to the ranks of this node."""
        sizes = self._sizes.chunks[chunk]
        return self._links.exchange_inside(copies_RM, sizes.spreads, sizes.gathered)

    def compute(self, body: Callable[..., torch.Tensor], chunk: int, x_RM: torch.Tensor) -> torch.Tensor:
        """Call ``body(start, stop, rows)`` with a copy for each expert, sorted by expert, and add up the results of
        each row.

        In the backward call ``body(start, stop, rows, weights, gradients)``, with the memory for the weights'
        gradients.
        """
        fan, (start, stop) = self._sizes.to_experts, self._sizes.places[chunk : chunk + 2]
        copies_RM, copies_JN = x_RM.index_select(0, fan.rows(chunk)), fan.copies(chunk)
        if self._gradients_R is not None:
            own = fan.copies_of(chunk)
            y_RM = body(start, stop, copies_RM, self._weights_R[own], self._gradients_R[own])
            return self._add_up(y_RM, copies_JN, None)
        first, last = fan.first_row[chunk : chunk + 2]
        return self._add_up(body(start, stop, copies_RM), copies_JN, self._weights_JN[:, first:last])

    def whole(self, x_RM: torch.Tensor) -> torch.Tensor:
        """Return the rows at the experts as for one module; see :meth:`RowChunks.whole`."""
        copies_RM = x_RM.index_select(0, self._sizes.to_experts.rows(0))
        if self._gradients_R is not None:
            y_RM = self._call.results[-1]
            dtype = self._gradients_R.dtype
            self._gradients_R.add_(torch.linalg.vecdot(copies_RM.to(dtype), y_RM.to(dtype)))
            copies_RM = (copies_RM * self._weights_R.unsqueeze(1)).to(copies_RM.dtype)
        return self._padded(copies_RM)

    def parted(self, y_1ecM: torch.Tensor) -> torch.Tensor:
        """Return the sums of a module's results; see :meth:`RowChunks.parted`."""
        y_RM = self._unpadded(y_1ecM)
        if self._weights_JN is not None:
            # The weights' gradients need the results, which a module call does not provide again.
            self._call.results.append(y_RM)
        return self._add_up(y_RM, self._sizes.to_experts.copies(0), self._weights_JN)

    def reduce(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the sums back to the forwarding ranks of their rows."""
        sizes = self._sizes.chunks[chunk]
        return self._links.exchange_inside(y_RM, sizes.gathered, sizes.spreads)

    def added(self, back_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Add up the received sums."""
        return self._add_up(back_RM, self._sizes.to_ranks.copies(chunk), None)

    def combine(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send each node's sums of expert results back to the ranks of their tokens, between nodes."""
        sizes = self._sizes.chunks[chunk]
        return self._links.exchange_between(y_RM, sizes.receives, sizes.sends)

    def weight_gradients(self) -> torch.Tensor:
        """Return the gradients of the weights of this rank's choices, after all tasks of a backward. Collective."""
        in_order = torch.empty_like(self._gradients_R)
        in_order[self._sizes.to_experts.record_of_copy] = self._gradients_R
        return self._call.back(in_order)

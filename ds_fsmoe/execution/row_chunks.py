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

from ds_fsmoe.execution.collectives import Collectives, dequantized_rows, quantized_rows
from ds_fsmoe.execution.counts_exchange import NodeCall
from ds_fsmoe.execution.phase import Chunks, Direction
from ds_fsmoe.execution.row_sizes import NodePhase, PhaseSizes, RowSizes
from ds_fsmoe.planning.schedule import A2A_OUT, A2A_OUT_NODE

AddUp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Adds up rows: ``(y_RM, copies_JN, weights_JN) -> [N, M]``, see :attr:`ds_fsmoe.ops.Ops.restore`."""


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
    node_call: NodeCall | None = None
    """The call, where each token crosses to a node once."""
    add_up: AddUp | None = None
    """What adds up the results of such a call."""

    @property
    def same_chunks(self) -> bool:
        """Whether the backward has the chunks of the forward."""
        return self.sizes.forward is self.sizes.backward

    def slots_per_expert(self, num_ranks: int, num_local: int) -> int:
        """Return how many rows an expert here gets from a rank, as a mean, rounded up."""
        return -(-self.sizes.num_arriving // (num_ranks * num_local))

    def chunks(self, collectives: Collectives, direction: Direction, rows_RM: torch.Tensor) -> RowChunks:
        """Return the chunks of a phase that starts with these rows, those that are sent first."""
        if self.node_call is None:
            return RowChunks(collectives, self.sizes, direction, rows_RM)
        return NodeChunks(collectives, self.node_call, self.add_up, direction, rows_RM)


class RowChunks(Chunks):
    """The chunks of a phase; see :class:`~ds_fsmoe.execution.phase.Chunks`.

    Args:
        collectives: the collectives to the other ranks.
        sizes: the sizes of the call.
        direction: the phase.
        rows_RM: the rows that the phase starts with. Those behind the ones that are sent come back as zeros.
    """

    def __init__(self, collectives: Collectives, sizes: RowSizes, direction: Direction, rows_RM: torch.Tensor) -> None:
        phase: PhaseSizes = getattr(sizes, direction)
        super().__init__(collectives, len(phase.chunks), rows_RM.shape)
        self._wires = collectives.comm_dtypes.of(direction)
        # Of the chunks that travel as 8-bit numbers: the type and the shape of a row as they were before.
        self._wide: dict[int, tuple[torch.dtype, torch.Size]] = {}
        self._sizes = phase
        self._num_rows = sizes.num_rows
        # For each row as the phase sends it, its place among those given; ``None``: they lie as they are sent.
        self._order = order = sizes.source_order if direction == "backward" else None
        self._rows_RM = rows_RM.contiguous() if order is None else rows_RM.index_select(0, order)

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
                f"{point} returned {tuple(after.shape)} for {tuple(before.shape)}: must keep the number of rows, "
                "which other ranks expect"
            )

    def dispatch(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks that have the experts."""
        return self._collectives.send_rows(x_RM, self._sizes.chunks[chunk])

    def quantised(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return the rows as bytes, as they travel."""
        self._wide[chunk] = x_RM.dtype, x_RM.shape[1:]
        return quantized_rows(x_RM)

    def dequantised(self, bytes_RB: torch.Tensor, chunk: int) -> torch.Tensor:
        """Undo :meth:`quantised` for the bytes that came."""
        return dequantized_rows(bytes_RB, *self._wide.pop(chunk))

    def stayed(self, x_RM: torch.Tensor, way: int) -> torch.Tensor:
        """Return rows that no task has sent, with the numbers that they would have come with."""
        return (
            x_RM if self._wires[way] == "model" else dequantized_rows(quantized_rows(x_RM), x_RM.dtype, x_RM.shape[1:])
        )

    def leg(self, kind: str, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Do one of the two parts of :meth:`dispatch` or :meth:`combine`."""
        sizes = self._sizes.chunks[chunk]
        return self._collectives.row_legs[kind](x_RM, sizes.back if kind in (A2A_OUT, A2A_OUT_NODE) else sizes)

    def gather(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Gather the rows of the ranks that share the experts."""
        return self._collectives.gather_rows(x_RM, self._sizes.chunks[chunk])

    def compute(self, body: Callable[..., torch.Tensor], chunk: int, x_RM: torch.Tensor) -> torch.Tensor:
        """Call ``body(start, stop, rows)`` with the rows expert by expert."""
        return self._as_they_came(chunk, body(*self._sizes.places[chunk : chunk + 2], self._by_expert(chunk, x_RM)))

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

    def combine(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the ranks that have the tokens."""
        return self._collectives.send_rows(y_RM, self._sizes.chunks[chunk].back)

    def write(self, y_RM: torch.Tensor, chunk: int) -> None:
        """Write the result where its tokens are.

        Raises:
            ValueError: it has another shape than the rows that were sent.
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


# ---- Chunks of rows of which each token sends one to each node that has one of its experts
#
# Between nodes goes one row of a token and node, inside the node one of a token and rank, each way. Results are
# weighted and added up by the rank of the experts, then by the relay of the token in the node, and last where the
# token is.
#
# Letters: R rows or copies, M width, J the most copies of a row.


class NodeChunks(RowChunks):
    """The chunks of a phase; see :class:`~ds_fsmoe.execution.phase.Chunks`.

    Args:
        collectives: those of the layer.
        call: the call.
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
        """Send the chunk to the relays of its nodes."""
        sizes = self._sizes.chunks[chunk]
        return self._links.exchange_between(x_RM, sizes.sends, sizes.receives)

    def copied(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return a copy of the rows that came for each rank of this node. What was narrow between nodes loses nothing
        more where it is narrow inside: its scale is the same, or nearly."""
        return x_RM.index_select(0, self._sizes.to_ranks.rows(chunk))

    def gather(self, copies_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the copies to the ranks of this node."""
        sizes = self._sizes.chunks[chunk]
        return self._links.exchange_inside(copies_RM, sizes.spreads, sizes.gathered)

    def compute(self, body: Callable[..., torch.Tensor], chunk: int, x_RM: torch.Tensor) -> torch.Tensor:
        """Call ``body(start, stop, rows)`` with a copy for each expert, expert by expert, and add up the results of a
        row; in the backward ``body(start, stop, rows, weights, gradients)`` with the memory for the weights'
        gradients."""
        fan, (start, stop) = self._sizes.to_experts, self._sizes.places[chunk : chunk + 2]
        copies_RM, copies_JN = x_RM.index_select(0, fan.rows(chunk)), fan.copies(chunk)
        if self._gradients_R is not None:
            own = fan.copies_of(chunk)
            y_RM = body(start, stop, copies_RM, self._weights_R[own], self._gradients_R[own])
            return self._add_up(y_RM, copies_JN, None)
        first, last = fan.first_row[chunk : chunk + 2]
        return self._add_up(body(start, stop, copies_RM), copies_JN, self._weights_JN[:, first:last])

    def whole(self, x_RM: torch.Tensor) -> torch.Tensor:
        """See :meth:`RowChunks.whole`."""
        copies_RM = x_RM.index_select(0, self._sizes.to_experts.rows(0))
        if self._gradients_R is not None:
            y_RM = self._call.results[-1]
            dtype = self._gradients_R.dtype
            self._gradients_R.add_(torch.linalg.vecdot(copies_RM.to(dtype), y_RM.to(dtype)))
            copies_RM = (copies_RM * self._weights_R.unsqueeze(1)).to(copies_RM.dtype)
        return self._padded(copies_RM)

    def parted(self, y_1ecM: torch.Tensor) -> torch.Tensor:
        """See :meth:`RowChunks.parted`."""
        y_RM = self._unpadded(y_1ecM)
        if self._weights_JN is not None:
            # A module that is called as a whole tells no more of a result than itself.
            self._call.results.append(y_RM)
        return self._add_up(y_RM, self._sizes.to_experts.copies(0), self._weights_JN)

    def reduce(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the sums back to the relays of their rows."""
        sizes = self._sizes.chunks[chunk]
        return self._links.exchange_inside(y_RM, sizes.gathered, sizes.spreads)

    def added(self, back_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Add up the sums that came back."""
        return self._add_up(back_RM, self._sizes.to_ranks.copies(chunk), None)

    def combine(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the sums to the ranks that have the tokens."""
        sizes = self._sizes.chunks[chunk]
        return self._links.exchange_between(y_RM, sizes.receives, sizes.sends)

    def weight_gradients(self) -> torch.Tensor:
        """Return the gradients of the weights of this rank's choices, after all tasks of a backward. Collective."""
        in_order = torch.empty_like(self._gradients_R)
        in_order[self._sizes.to_experts.record_of_copy] = self._gradients_R
        return self._call.back(in_order)

# SPDX-License-Identifier: Apache-2.0
"""Chunks of rows of which each token sends one to each node that has one of its experts.

Between nodes goes one row of a token and node, inside the node one of a token and rank, each way. Results are weighted
and added up by the rank of the experts, then by the relay of the token in the node, and last where the token is.

Letters: R rows or copies, M width, J the most copies of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.node_exchange import NodeCall
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.execution.node_sizes import NodePhase
from ds_fsmoe.execution.phase import Direction
from ds_fsmoe.execution.row_chunks import RowChunks
from ds_fsmoe.execution.row_sizes import RowSizes
from ds_fsmoe.execution.wires import carry


class AddUp(Protocol):
    """Adds up rows: ``(y_RM, copies_JN, weights_JN) -> [N, M]``, see :attr:`ds_fsmoe.ops.Ops.restore`."""

    def __call__(
        self, y_RM: torch.Tensor, copies_JN: torch.Tensor, weights_JN: torch.Tensor | None
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class NodeLayout:
    """The chunks of one call; as :class:`~ds_fsmoe.execution.row_chunks.RowLayout`."""

    call: NodeCall
    num_experts: int
    """The number of experts of all ranks, E."""
    num_tokens: int
    """The number of tokens that are cut into chunks, S."""
    num_choices: int
    """The number of choices of a token, K."""
    add_up: AddUp

    @property
    def sizes(self) -> RowSizes[NodePhase]:
        """The sizes of the call."""
        return self.call.sizes

    @property
    def same_cuts(self) -> bool:
        """Say whether the backward has the chunks of the forward."""
        return self.sizes.forward is self.sizes.backward

    def slots_per_expert(self, num_ranks: int, num_local: int) -> int:
        """Return how many rows an expert here gets from a rank, as a mean, rounded up."""
        return -(-self.sizes.num_arriving // (num_ranks * num_local))

    def chunks(self, collectives: Collectives, direction: Direction, rows_RM: torch.Tensor) -> NodeChunks:
        """Return the chunks of a phase that starts with these rows, those that are sent first."""
        assert collectives.nodes is not None
        return NodeChunks(collectives, collectives.nodes, self, direction, rows_RM)


class NodeChunks(RowChunks):
    """The chunks of a phase; see :class:`~ds_fsmoe.execution.phase.Chunks`.

    Args:
        collectives: those of the layer.
        links: the two levels of its EP group.
        layout: the call.
        direction: the phase.
        rows_RM: see :class:`RowChunks`.
    """

    def __init__(
        self,
        collectives: Collectives,
        links: NodeLinks,
        layout: NodeLayout,
        direction: Direction,
        rows_RM: torch.Tensor,
    ) -> None:
        sizes = layout.sizes
        self._phase: NodePhase = getattr(sizes, direction)
        order = sizes.source_order if direction == "backward" else None
        super().__init__(collectives, self._phase, sizes.num_rows, order, rows_RM, direction)
        self._links = links
        self._call = layout.call
        self._add_up = layout.add_up
        fan = self._phase.to_experts
        self._gradients_R: torch.Tensor | None = None
        self._weights_JN = None
        if direction == "forward":
            self._weights_JN = fan.beside(self._call.weights_R[fan.record_of_copy])
        else:
            self._weights_R = self._call.weights_R[fan.record_of_copy]
            self._gradients_R = torch.zeros_like(self._weights_R)

    def dispatch(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the chunk to the relays of its nodes."""
        sizes = self._phase.chunks[chunk]
        return carry(self._wire_in, x_RM, lambda x: self._links.exchange_between(x, sizes.sends, sizes.receives))

    def gather(self, x_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send copies of the rows that came to the ranks of this node."""
        sizes = self._phase.chunks[chunk]
        copies_RM = x_RM.index_select(0, self._phase.to_ranks.rows(chunk))
        # What was narrow between nodes loses nothing more: its scale is the same, or nearly.
        return carry(self._wire_in, copies_RM, lambda x: self._links.exchange_inside(x, sizes.spreads, sizes.arrives))

    def compute(self, body: Callable[..., torch.Tensor], chunk: int, x_RM: torch.Tensor) -> torch.Tensor:
        """Call ``body(chunk, rows)`` with a copy for each expert, expert by expert, and add up the results of a row; in
        the backward ``body(chunk, rows, weights, gradients)`` with the memory for the weights' gradients."""
        fan = self._phase.to_experts
        copies_RM, copies_JN = x_RM.index_select(0, fan.rows(chunk)), fan.copies(chunk)
        if self._gradients_R is not None:
            own = fan.copies_of(chunk)
            y_RM = body(chunk, copies_RM, self._weights_R[own], self._gradients_R[own])
            return self._add_up(y_RM, copies_JN, None)
        assert self._weights_JN is not None
        first, stop = fan.first_row[chunk : chunk + 2]
        return self._add_up(body(chunk, copies_RM), copies_JN, self._weights_JN[:, first:stop])

    def whole(self, x_RM: torch.Tensor) -> torch.Tensor:
        """See :meth:`RowChunks.whole`."""
        copies_RM = x_RM.index_select(0, self._phase.to_experts.rows(0))
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
        return self._add_up(y_RM, self._phase.to_experts.copies(0), self._weights_JN)

    def reduce(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the sums back to the relays of their rows, and add those up."""
        sizes = self._phase.chunks[chunk]
        back_RM = carry(self._wire_out, y_RM, lambda y: self._links.exchange_inside(y, sizes.arrives, sizes.spreads))
        return self._add_up(back_RM, self._phase.to_ranks.copies(chunk), None)

    def combine(self, y_RM: torch.Tensor, chunk: int) -> torch.Tensor:
        """Send the sums to the ranks that have the tokens."""
        sizes = self._phase.chunks[chunk]
        return carry(self._wire_out, y_RM, lambda y: self._links.exchange_between(y, sizes.receives, sizes.sends))

    def weight_gradients(self) -> torch.Tensor:
        """Return the gradients of the weights of this rank's choices, after all tasks of a backward. Collective."""
        assert self._gradients_R is not None
        in_order = torch.empty_like(self._gradients_R)
        in_order[self._phase.to_experts.record_of_copy] = self._gradients_R
        return self._call.back(in_order)

# SPDX-License-Identifier: Apache-2.0
"""Tells every rank of an EP group what comes to it, where each token crosses to a node once.

Ahead of the first chunk each rank tells each other one, in one exchange, how many rows, copies and choices come from it
in each segment of the tokens: all sizes of both phases follow, and the host waits once. Then records travel: to relays
which row is copied to which rank, to the ranks of experts which copy is for which expert and with which weight. When
the backward is over the gradients of these weights travel back, a number for each choice.

Letters: S tokens on this rank, K choices of a token, G ranks of the EP group, n nodes, p ranks in a node, E experts of
all ranks, e on this rank, T segments of the tokens, R choices that were not dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.counts_exchange import raise_fault
from ds_fsmoe.execution.host_copies import HostCopy
from ds_fsmoe.execution.node_links import NodeLinks, exchange_sized
from ds_fsmoe.execution.node_sizes import NodeCounts, NodePhase
from ds_fsmoe.execution.row_sizes import Block, RowSizes
from ds_fsmoe.execution.same_forward import Forward, headed
from ds_fsmoe.execution.token_cuts import TokenCuts


@dataclass(frozen=True)
class NodeRows:
    """The rows of a decision, on the device. They lie expert by expert, and of each token by token."""

    counts_ET: torch.Tensor
    """[E, T] int64: the choices of each expert in each segment."""
    counts_GT: torch.Tensor
    """[G, T] int64: the tokens with an expert on each rank."""
    counts_nT: torch.Tensor
    """[n, T] int64: the tokens with an expert in each node."""
    row_of_choice_KS: torch.Tensor
    """[K, S] int64: the number of each choice's row, K * S where it was dropped."""
    rank_KS: torch.Tensor
    """[K, S] int64: the rank of each choice's expert; any where it was dropped."""
    is_on_GS: torch.Tensor
    """[G, S] bool: whether a token has an expert on a rank."""
    is_in_nS: torch.Tensor
    """[n, S] bool: whether it has one in a node."""
    fault: torch.Tensor
    """Scalar int64: what is wrong with the decision, see :data:`~ds_fsmoe.execution.counts_exchange.FAULTS`."""


@dataclass
class NodeExchange:
    """An exchange of counts, while it travels. Made by :meth:`begin`."""

    rows: NodeRows
    block: Block
    links: NodeLinks
    cuts: TokenCuts
    received_GX: torch.Tensor
    """[G, 1 + e * T + (1 + p) * T] int64: of each rank its header, its choices of each expert here, its tokens with an
    expert in this node and with one on each of its ranks."""
    work: Any
    name: str
    _counts: NodeCounts | None = field(default=None, init=False)

    @classmethod
    def begin(
        cls,
        rows: NodeRows,
        block: Block,
        links: NodeLinks,
        cuts: TokenCuts,
        name: str = "",
        forward: Forward | None = None,
    ) -> NodeExchange:
        """Begin the exchange. Collective over the block.

        Args:
            rows: of this rank.
            block: the ranks that share the experts; in the order of the EP group.
            links: the levels of the EP group.
            cuts: the cuts of the tokens.
            name: the layer's name, for messages.
            forward: the forward, which has to be that of all ranks; ``None``: not known.
        """
        ranks, num_segments = len(rows.counts_GT), cuts.num_segments
        node_G = links.node_of_each(rows.counts_GT)
        of_ranks = rows.counts_GT[links.rank_of_each(rows.counts_GT)].view(links.num_nodes, -1)
        header = headed(rows.fault, forward)
        parts = header.expand(ranks, 1), rows.counts_ET.reshape(ranks, -1), rows.counts_nT[node_G], of_ranks[node_G]
        sent_GX = torch.cat(parts, dim=1)
        received_GX = torch.empty_like(sent_GX)
        assert sent_GX.shape[1] == 1 + (len(rows.counts_ET) // ranks + 1 + links.per_node) * num_segments
        work = dist.all_to_all_single(received_GX, sent_GX, group=block.group, async_op=True)
        return cls(rows, block, links, cuts, received_GX, work, name)

    def wait(self) -> int:
        """Return the number of choices of this rank's tokens, R. The host waits here for the device.

        Raises:
            RoutingError: the decision of a rank contradicts itself.
            DisagreementError: ranks are in different forwards.
        """
        rows, links, segments = self.rows, self.links, self.cuts.num_segments
        own = rows.counts_ET, rows.counts_GT, rows.counts_nT
        with waiting("the exchange of counts of", self.name):
            self.work.wait()
            of_all = torch.cat([*(each.reshape(-1) for each in own), self.received_GX.reshape(-1)])
            host = HostCopy(of_all).wait().numpy()
        parts = []
        for each in (*own, self.received_GX):
            parts.append(host[: each.numel()].reshape(each.shape))
            host = host[each.numel() :]
        own_ET, own_GT, own_nT, received_GX = parts
        raise_fault(received_GX[:, 0], self.block, self.name)
        ranks, here = len(own_GT), 1 + own_ET.size // len(own_GT)
        rows_GT = received_GX[:, here : here + segments]
        copies_GpT = received_GX[:, here + segments :].reshape(ranks, links.per_node, segments)
        mates = [of_node[links.place] for of_node in links.ranks]
        self._counts = NodeCounts(
            links,
            self.cuts,
            own_ET.reshape(ranks, -1, segments),
            own_GT,
            own_nT,
            received_GX[:, 1:here].reshape(ranks, -1, segments),
            rows_GT[mates],
            copies_GpT[mates],
            copies_GpT[:, links.place],
        )
        return int(own_ET.sum())

    def records(self, choice_of_row_R: torch.Tensor, weights_R: torch.Tensor) -> NodeCall:
        """Send the records, after :meth:`wait`. Collective over the block; nothing waits for the device.

        Args:
            choice_of_row_R: [R] int64, ``choice * S + token`` of each row.
            weights_R: [R] float32 or float64, their weights.
        """
        counts, rows = self._counts, self.rows
        assert counts is not None
        num_choices, num_tokens = rows.rank_KS.shape
        choice_R = torch.div(choice_of_row_R, max(1, num_tokens), rounding_mode="floor")
        token_R = choice_of_row_R % max(1, num_tokens)
        # Of each token its number among those with an expert on a rank, or in a node.
        on_rank_GS = rows.is_on_GS.cumsum(1) - 1
        in_node_nS = rows.is_in_nS.cumsum(1) - 1
        row_R = on_rank_GS[rows.rank_KS.reshape(-1)[choice_of_row_R], token_R]
        words_R1 = (row_R * num_choices + choice_R).to(torch.int32).unsqueeze(1)
        packed_RW = torch.cat([words_R1, _as_words(weights_R)], dim=1)
        with waiting("the exchange of records of", self.name):
            received_RW = exchange_sized(packed_RW, *counts.choice_sizes, self.block.group)
        weights = received_RW[:, 1:].flatten().clone().view(weights_R.dtype)
        # To the relay in a node go the copies for its ranks: the tokens with an expert on each, rank by rank.
        is_on_GS = rows.is_on_GS[self.links.rank_of_each(rows.is_on_GS)]
        numbers_GS = in_node_nS.repeat_interleave(self.links.per_node, dim=0)
        copies_sent, copies_received = counts.relay_sizes
        place_GS = torch.where(is_on_GS, is_on_GS.view(-1).cumsum(0).view_as(numbers_GS) - 1, sum(copies_sent))
        copies = numbers_GS.new_empty(sum(copies_sent) + 1)
        copies = copies.scatter_(0, place_GS.reshape(-1), numbers_GS.reshape(-1))[:-1]
        with waiting("the exchange of records of", self.name):
            relay_records = exchange_sized(copies.to(torch.int32), copies_sent, copies_received, self.block.group)
        shape = counts.choices_GeT.shape
        choices_GeT = self.received_GX[:, 1 : 1 + shape[1] * shape[2]].reshape(shape)
        sizes = counts.sizes(rows.counts_nT, choices_GeT, relay_records.long(), received_RW[:, 0].long(), num_choices)
        return NodeCall(sizes, weights, self.block, *counts.choice_sizes)


def _as_words(weights_R: torch.Tensor) -> torch.Tensor:
    """Return the memory of numbers as int32, [R, 1] or [R, 2]."""
    return weights_R.contiguous().view(torch.int32).view(len(weights_R), weights_R.itemsize // 4)


@dataclass(frozen=True)
class NodeCall:
    """Holds what a rank knows of one call."""

    sizes: RowSizes[NodePhase]
    weights_R: torch.Tensor
    """The weights of the choices of experts here, in the order of records."""
    block: Block
    choices_sent: list[int]
    """The records to each of G ranks."""
    choices_received: list[int]
    """The records from each."""
    results: list[torch.Tensor] = field(default_factory=list)
    """The results of experts that are called as a whole, from the forward to the backward."""

    def back(self, gradients_R: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the weights of this rank's choices. Collective over the block.

        Args:
            gradients_R: those of the choices of experts here, in the order of records.
        """
        with waiting("the gradients of the weights of choices"):
            return exchange_sized(gradients_R, self.choices_received, self.choices_sent, self.block.group)

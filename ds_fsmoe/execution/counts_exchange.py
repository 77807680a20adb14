# SPDX-License-Identifier: Apache-2.0
"""Exchanges the numbers of rows between the ranks that share the experts of a layer, ahead of the first chunk.

In one exchange, each rank sends every other the number of its rows for that rank's experts. These are counts per
segment of the tokens (:mod:`~ds_fsmoe.execution.row_sizes`). All sizes of both phases follow from these counts. The
host waits for them once per call, since the memory of received rows depends on them. A layer with unpadded dispatch
calls it in each forward.

Letters: E experts of all ranks, e experts on this rank, T segments, r chunks, G ranks of an EP group, P of an ESP
group, N = P * G the ranks that rows come from, B the same ranks in the order of their group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.distributed import waits
from ds_fsmoe.distributed.agreement import DisagreementError, in_words
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.device_tables import TABLES, HostCopy
from ds_fsmoe.execution.node_links import NodeLinks, exchange_sized
from ds_fsmoe.execution.row_sizes import (
    ChunkSizes,
    ForwardedRows,
    NodeCounts,
    PhaseSizes,
    RowBlock,
    RowSizes,
    TokenChunks,
    expert_ends,
    moves,
    sizes_of_phases,
)

# ---- Detects that ranks which share experts are in different forwards, before they compute with each other's rows
#
# If one rank runs the model alone, its exchange of counts pairs with the next forward of the others, whatever that is.
# So the kind and the number of a forward are sent with the counts.


_FAULT_BITS, _KIND_BITS, _NUMBER_BITS, _NAME_BITS = 2, 2, 26, 32
_KINDS = ("evaluation", "training", "evaluation, computed again", "training, computed again")
_names: dict[int, str] = {}


@dataclass(frozen=True)
class Forward:
    """Identifies one forward of a layer."""

    name: int
    """The checksum of the layer's name, which is the same on every rank."""
    number: int
    """The number of the layer's forwards so far, this one included."""
    kind: int
    """The index in :data:`_KINDS`."""

    @property
    def header(self) -> int:
        """Return the forward as one number, to which a fault of 0 to 3 is added."""
        number = self.number % (1 << _NUMBER_BITS)
        return ((self.name << _NUMBER_BITS | number) << _KIND_BITS | self.kind) << _FAULT_BITS

    @classmethod
    def of(cls, header: int) -> Forward:
        """Return the forward of a header."""
        rest, kind = divmod(header >> _FAULT_BITS, 1 << _KIND_BITS)
        name, number = divmod(rest, 1 << _NUMBER_BITS)
        return cls(name, number, kind)

    def __str__(self) -> str:
        return f"forward {self.number} ({_KINDS[self.kind]}) of {_names.get(self.name, 'another layer')}"


def headed(fault: torch.Tensor, forward: Forward | None) -> torch.Tensor:
    """Return the header that is sent: a fault and the forward in one number."""
    return fault if forward is None else fault + forward.header


class Forwards:
    """Counts the forwards of one layer.

    Args:
        name: the name of the layer, the same on every rank.
    """

    def __init__(self, name: str) -> None:
        self._name, self._number = crc32(name.encode()), 0
        _names[self._name] = name

    def begin(self, is_training: bool, is_again: bool) -> Forward:
        """Count and return the next forward.

        Args:
            is_training: the mode of the layer.
            is_again: whether it is recomputed within the backward, and so has the number of the last one.
        """
        self._number += not is_again
        forward = Forward(self._name, self._number, is_training + 2 * is_again)
        waits.forward_begins(forward)
        return forward


def faults_of(headers_N: np.ndarray, block: RowBlock) -> np.ndarray:
    """Return the fault of each source, after a check that all are in the same forward.

    Args:
        headers_N: the header of each source.
        block: the ranks that share the experts.

    Raises:
        DisagreementError: ranks are in different forwards; on every one of them, with the same message.
    """
    forwards_N = headers_N >> _FAULT_BITS
    if (forwards_N != forwards_N[0]).any():
        ranks_of: dict[str, list[int]] = {}
        for source, header in enumerate(headers_N.tolist()):
            index = block.sources[source]
            rank = index if block.group is None else dist.get_global_rank(block.group, index)
            ranks_of.setdefault(str(Forward.of(header)), []).append(rank)
        parts = sorted(f"{in_words(sorted(ranks))}: {forward}" for forward, ranks in ranks_of.items())
        raise DisagreementError(
            f"ds_fsmoe: ranks that share experts are in different forwards: {'; '.join(parts)}. Every forward of a "
            "model with experts on several ranks (an evaluation, generate, one more batch) has to run on all of them: "
            "run it on every rank, or call engine.fsmoe_dummy_forward() on those without a batch"
        )
    return headers_N & ((1 << _FAULT_BITS) - 1)


# ---- The exchange of counts


FAULTS = {
    1: "slots_KS must be in 0..num_experts * capacity, and is not everywhere",
    2: "counts_E must be at least the number of slots taken of each expert, and is less",
    3: "slots_KS must be in 0..num_experts * capacity, and counts_E at least the number of slots taken of each expert; "
    "neither holds",
}
"""Number of a fault -> what is wrong with a decision."""


class RoutingError(ValueError):
    """Reports a gate's decision that contradicts itself. It is raised on every rank that shares the experts."""


def raise_fault(headers_N: np.ndarray, block: RowBlock, name: str) -> None:
    """Raise the fault of a rank's decision, if there is one.

    Args:
        headers_N: the header of each source: its fault and its forward.
        block: the ranks that share the experts.
        name: the layer's name.

    Raises:
        RoutingError: a decision contradicts itself.
        DisagreementError: ranks are in different forwards.
    """
    faults_N = faults_of(headers_N, block)
    if not faults_N.any():
        return
    source = int(np.flatnonzero(faults_N)[0])
    index = block.sources[source]
    rank = index if block.group is None else dist.get_global_rank(block.group, index)
    raise RoutingError(f"{name or 'an MoE layer'}: the gate's result on rank {rank}: {FAULTS[int(faults_N[source])]}")


@dataclass
class CountsExchange:
    """Represents an exchange of counts in flight. Made by :meth:`begin`."""

    block: RowBlock
    token_chunks: TokenChunks
    own_ET: torch.Tensor
    received: torch.Tensor
    """int64: for each rank of the block its header, its rows for each expert here in each segment, and the numbers of
    its rows that this rank forwards, for each destination in each segment."""
    forwarded: ForwardedRows | None
    work: Any
    name: str

    @classmethod
    def begin(
        cls,
        counts_ET: torch.Tensor,
        fault: torch.Tensor,
        block: RowBlock,
        token_chunks: TokenChunks,
        forwarded: ForwardedRows | None = None,
        name: str = "",
        forward: Forward | None = None,
    ) -> CountsExchange:
        """Start the exchange. Collective over the block.

        Args:
            counts_ET: [E, T] int64, the rows of this rank for each expert in each segment.
            fault: scalar int64: 0, or the fault of the decision, see :data:`FAULTS`.
            block: the ranks that share the experts.
            token_chunks: the chunks of the tokens.
            forwarded: the rows that the all-to-all sends over other ranks, which then need their sizes.
            name: the layer's name, for messages.
            forward: the forward, which must be the same on all ranks; ``None``: unknown.
        """
        ranks = block.num_exchanging
        own_GX = counts_ET.reshape(ranks, -1)
        header = headed(fault, forward)
        splits: list[list[int]] = []
        if forwarded is None:
            sent = torch.cat([header.expand(ranks, 1), own_GX], dim=1)
            if (eps := [ep for ep, _ in block.places]) != list(range(ranks)):
                sent = torch.stack([sent[ep] for ep in eps])
        else:
            here, num_segments = 1 + own_GX.shape[1], token_chunks.num_segments
            totals_GT = own_GX.view(ranks, -1, num_segments).sum(1)
            order = _table(_sent, counts_ET, block, here, num_segments, forwarded)
            sent = torch.cat([header.reshape(1), own_GX.reshape(-1), totals_GT.reshape(-1)])[order]
            splits = [
                [here + num_segments * count for count in _counts_to_forward(block, each)]
                for each in (forwarded.resting_here, forwarded.resting_there)
            ]
        if block.group is None:
            return cls(block, token_chunks, counts_ET, sent, forwarded, None, name)
        received = sent.new_empty(sum(splits[0])) if splits else torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, *splits, group=block.group, async_op=True)
        return cls(block, token_chunks, counts_ET, received, forwarded, work, name)

    def wait(self) -> RowSizes:
        """Return the sizes of the call. The host waits for the device.

        Raises:
            RoutingError: the decision of a rank contradicts itself.
            DisagreementError: ranks are in different forwards.
        """
        block, num_segments = self.block, self.token_chunks.num_segments
        num_local = self.own_ET.shape[0] // block.num_exchanging
        here = 1 + num_local * num_segments
        with waiting("the exchange of counts of", self.name):
            if self.work is not None:
                self.work.wait()
            received = self.received
            if self.forwarded is not None:
                received = received[_table(_received, received, block, here, num_segments, self.forwarded)]
            elif block.sources != tuple(range(len(block.sources))):
                received = torch.stack([received[source] for source in block.sources])
            received = received.reshape(-1)
            host = HostCopy(torch.cat([self.own_ET.reshape(-1), received])).wait().numpy()
        shape = len(block.places), num_local, num_segments
        num_own, num_here = self.own_ET.numel(), len(block.places) * here
        host_NX = host[num_own : num_own + num_here].reshape(-1, here)
        raise_fault(host_NX[:, 0], block, self.name)
        arrived_NeT = received[:num_here].view(-1, here)[:, 1:].reshape(shape)
        passed_XT = host[num_own + num_here :].reshape(-1, num_segments)
        own_ET = host[:num_own].reshape(self.own_ET.shape)
        return self.sizes(own_ET, host_NX[:, 1:].reshape(shape), passed_XT, arrived_NeT)

    def sizes(
        self, own_ET: np.ndarray, host_NeT: np.ndarray, passed_XT: np.ndarray, arrived_NeT: torch.Tensor
    ) -> RowSizes:
        """Return the sizes of the call.

        Args:
            own_ET: the rows of this rank, on the host.
            host_NeT: the rows from each source for the experts here, on the host.
            passed_XT: the rows that this rank forwards, of each pair in each segment, on the host.
            arrived_NeT: the rows from each source for the experts here, on the device.
        """
        phase = partial(self._phase, own_ET, host_NeT, passed_XT, arrived_NeT)
        return sizes_of_phases(self.token_chunks, int(own_ET.sum()), phase, self.own_ET, arrived_NeT)

    def _phase(
        self,
        own_ET: np.ndarray,
        host_NeT: np.ndarray,
        passed_XT: np.ndarray,
        arrived_NeT: torch.Tensor,
        degree: int,
    ) -> PhaseSizes:
        ranks, sharing, token_chunks = self.block.num_exchanging, self.block.num_sharing, self.token_chunks
        of_chunks = token_chunks.adder(degree)
        to_Gr = of_chunks(own_ET.reshape(ranks, -1, token_chunks.num_segments).sum(1))
        arrived_Ner = of_chunks(host_NeT)
        from_Nr = arrived_Ner.sum(1)
        own = slice(self.block.esp_index * ranks, (self.block.esp_index + 1) * ranks)
        gathered_Pr = from_Nr.reshape(sharing, ranks, degree).sum(1)
        between_r: list[Any] = [None] * degree
        if self.forwarded is not None:
            me = self.block.ep_index
            pairs = [
                *_pairs(self.forwarded),
                *((me, each) for each in range(ranks)),
                *((each, me) for each in range(ranks)),
            ]
            rows_Xr = np.concatenate([of_chunks(passed_XT), to_Gr, from_Nr[own]])
            between_r = [dict(zip(pairs, rows, strict=True)) for rows in rows_Xr.T.tolist()]
        parts = (to_Gr, from_Nr[own], gathered_Pr, arrived_Ner.sum(0))
        chunks = zip(*(each.T.tolist() for each in parts), between_r, strict=True)
        starts = (0, *np.cumsum(to_Gr.sum(0)).tolist())
        order = None
        if len(arrived_Ner) > 1 and (arrived_Ner.shape[1] > 1 or degree < token_chunks.num_segments):
            num_rows = int(from_Nr.sum())
            places = (degree, "by_source"), (degree, "by_expert")
            order = moves(arrived_NeT, token_chunks, *places, num_rows, of_chunk=True)
        ends = expert_ends(token_chunks, degree, arrived_NeT)
        return PhaseSizes(tuple(ChunkSizes(*each) for each in chunks), starts, order, ends)


def _table(make: Callable[..., np.ndarray], like: torch.Tensor, block: RowBlock, *others: Any) -> torch.Tensor:
    # A table must not keep a process group alive.
    return TABLES.from_host(like, make, replace(block, group=None), *others)


def _counts_to_forward(block: RowBlock, of_ranks: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of destinations in the counts of each rank of the block; 0 outside its EP group."""
    return [len(of_ranks[ep]) if esp == block.esp_index else 0 for ep, esp in block.places]


def _sent(block: RowBlock, here: int, num_segments: int, forwarded: ForwardedRows) -> np.ndarray:
    """Return, for each number of the sent message, its index in this rank's flat table.

    The message has, for each destination, the header, the counts, and then the totals that it forwards.
    """
    first = 1 + block.num_exchanging * (here - 1)
    found = []
    for ep, esp in block.places:
        found += [np.zeros(1, dtype=np.int64), 1 + ep * (here - 1) + np.arange(here - 1)]
        if esp == block.esp_index:
            found += [first + num_segments * each + np.arange(num_segments) for each in forwarded.resting_there[ep]]
    return np.concatenate(found)


def _received(block: RowBlock, here: int, num_segments: int, forwarded: ForwardedRows) -> np.ndarray:
    """Return the positions of headers and counts in the received message, source by source, then of forwarded rows."""
    counts = _counts_to_forward(block, forwarded.resting_here)
    starts = np.cumsum([0, *(here + num_segments * each for each in counts)])
    found = [starts[source] + np.arange(here) for source in block.sources]
    found += [starts[source] + here + np.arange(num_segments * counts[source]) for source in block.sources]
    return np.concatenate(found)


def _pairs(forwarded: ForwardedRows) -> tuple[tuple[int, int], ...]:
    """Return (source, destination) of the rows that this rank forwards, in the order of their counts."""
    return tuple((source, each) for source, those in enumerate(forwarded.resting_here) for each in those)


# ---- The exchange of counts and records of node-deduplicated dispatch
#
# Ahead of the first chunk each rank sends every other, in one exchange, the numbers of its rows, copies and choices in
# each segment of the tokens. All sizes of both phases follow, and the host waits once. Then records are sent: to
# forwarding ranks, which row is copied to which rank; to the ranks of experts, which copy is for which expert and with
# which weight. After the backward the gradients of these weights are returned, a number for each choice.
#
# Letters: S tokens on this rank, K choices of a token, G ranks of the EP group, n nodes, p ranks in a node, E experts
# of all ranks, e on this rank, T segments of the tokens, R choices that were not dropped.


@dataclass(frozen=True)
class NodeRows:
    """Describes the rows of a decision, on the device, sorted by expert, and for each expert by token."""

    counts_ET: torch.Tensor
    """[E, T] int64: the choices of each expert in each segment."""
    counts_GT: torch.Tensor
    """[G, T] int64: the tokens with an expert on each rank."""
    counts_nT: torch.Tensor
    """[n, T] int64: the tokens with an expert in each node."""
    row_of_choice_KS: torch.Tensor
    """[K, S] int64: the number of each choice's row, K * S where it was dropped."""
    rank_KS: torch.Tensor
    """[K, S] int64: the rank of each choice's expert; any rank for a dropped choice."""
    is_on_GS: torch.Tensor
    """[G, S] bool: whether a token has an expert on a rank."""
    is_in_nS: torch.Tensor
    """[n, S] bool: whether a token has an expert in a node."""
    fault: torch.Tensor
    """Scalar int64: the fault of the decision, see :data:`~ds_fsmoe.execution.counts_exchange.FAULTS`."""


@dataclass
class NodeExchange:
    """Represents an exchange of counts in flight, for node-deduplicated dispatch. Made by :meth:`begin`."""

    rows: NodeRows
    block: RowBlock
    links: NodeLinks
    token_chunks: TokenChunks
    received_GX: torch.Tensor
    """[G, 1 + e * T + (1 + p) * T] int64: for each rank its header, its choices of each expert here, its tokens with an
    expert in this node, and those with an expert on each rank of it."""
    work: Any
    name: str
    _counts: NodeCounts | None = field(default=None, init=False)

    @classmethod
    def begin(
        cls,
        rows: NodeRows,
        block: RowBlock,
        links: NodeLinks,
        token_chunks: TokenChunks,
        name: str = "",
        forward: Forward | None = None,
    ) -> NodeExchange:
        """Start the exchange. Collective over the block.

        Args:
            rows: the rows of this rank.
            block: the ranks that share the experts, in the order of the EP group.
            links: the levels of the EP group.
            token_chunks: the chunks of the tokens.
            name: the layer's name, for messages.
            forward: the forward, which must be the same on all ranks; ``None``: unknown.
        """
        ranks = len(rows.counts_GT)
        node_G = links.node_of_each(rows.counts_GT)
        of_ranks = rows.counts_GT[links.rank_of_each(rows.counts_GT)].view(links.num_nodes, -1)
        header = headed(rows.fault, forward)
        parts = header.expand(ranks, 1), rows.counts_ET.reshape(ranks, -1), rows.counts_nT[node_G], of_ranks[node_G]
        sent_GX = torch.cat(parts, dim=1)
        received_GX = torch.empty_like(sent_GX)
        work = dist.all_to_all_single(received_GX, sent_GX, group=block.group, async_op=True)
        return cls(rows, block, links, token_chunks, received_GX, work, name)

    def wait(self) -> torch.Tensor:
        """Return ``choice * S + token`` of each choice of this rank's tokens that was not dropped, [R] int64.

        The host waits for the device.

        Raises:
            RoutingError: the decision of a rank contradicts itself.
            DisagreementError: ranks are in different forwards.
        """
        rows, links, segments = self.rows, self.links, self.token_chunks.num_segments
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
            self.token_chunks,
            own_ET.reshape(ranks, -1, segments),
            own_GT,
            own_nT,
            received_GX[:, 1:here].reshape(ranks, -1, segments),
            rows_GT[mates],
            copies_GpT[mates],
            copies_GpT[:, links.place],
        )
        places = rows.row_of_choice_KS.reshape(-1)
        found = places.new_empty(len(places) + 1)
        return found.scatter_(0, places, torch.arange(len(places), device=places.device))[: int(own_ET.sum())]

    def records(self, choice_of_row_R: torch.Tensor, weights_R: torch.Tensor) -> NodeCall:
        """Send the records, after :meth:`wait`. Collective over the block, without a wait for the device.

        Args:
            choice_of_row_R: the result of :meth:`wait`.
            weights_R: [R] float32 or float64, the weights of these choices.
        """
        counts, rows = self._counts, self.rows
        num_choices, num_tokens = rows.rank_KS.shape
        choice_R = torch.div(choice_of_row_R, max(1, num_tokens), rounding_mode="floor")
        token_R = choice_of_row_R % max(1, num_tokens)
        # For each token, its number among the tokens with an expert on a rank, or in a node.
        on_rank_GS = rows.is_on_GS.cumsum(1) - 1
        in_node_nS = rows.is_in_nS.cumsum(1) - 1
        row_R = on_rank_GS[rows.rank_KS.reshape(-1)[choice_of_row_R], token_R]
        words_R1 = (row_R * num_choices + choice_R).to(torch.int32).unsqueeze(1)
        # The memory of weights as int32, one or two per weight.
        weights_RW = weights_R.contiguous().view(torch.int32).view(len(weights_R), weights_R.itemsize // 4)
        packed_RW = torch.cat([words_R1, weights_RW], dim=1)
        with waiting("the exchange of records of", self.name):
            received_RW = exchange_sized(packed_RW, *counts.choice_sizes, self.block.group)
        weights = received_RW[:, 1:].flatten().clone().view(weights_R.dtype)
        # The forwarding rank of a node gets the copies for its ranks: the tokens with an expert on each, rank by rank.
        is_on_GS = rows.is_on_GS[self.links.rank_of_each(rows.is_on_GS)]
        numbers_GS = in_node_nS.repeat_interleave(self.links.per_node, dim=0)
        copies_sent, copies_received = counts.forwarded_sizes
        place_GS = torch.where(is_on_GS, is_on_GS.view(-1).cumsum(0).view_as(numbers_GS) - 1, sum(copies_sent))
        copies = numbers_GS.new_empty(sum(copies_sent) + 1)
        copies = copies.scatter_(0, place_GS.reshape(-1), numbers_GS.reshape(-1))[:-1]
        with waiting("the exchange of records of", self.name):
            forwarded_records = exchange_sized(copies.to(torch.int32), copies_sent, copies_received, self.block.group)
        shape = counts.choices_GeT.shape
        choices_GeT = self.received_GX[:, 1 : 1 + shape[1] * shape[2]].reshape(shape)
        sizes = counts.sizes(
            rows.counts_nT, choices_GeT, forwarded_records.long(), received_RW[:, 0].long(), num_choices
        )
        return NodeCall(sizes, weights, self.block, *counts.choice_sizes)


@dataclass(frozen=True)
class NodeCall:
    """Holds one call's row sizes, choice weights and record counts on one rank, in node-deduplicated dispatch."""

    sizes: RowSizes
    weights_R: torch.Tensor
    """The weights of the choices of this rank's experts, in the order of records."""
    block: RowBlock
    choices_sent: list[int]
    """The records to each of G ranks."""
    choices_received: list[int]
    """The records from each of G ranks."""
    results: list[torch.Tensor] = field(default_factory=list)
    """The results of experts that are called as one module, kept from the forward to the backward."""

    def back(self, gradients_R: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the weights of this rank's choices. Collective over the block.

        Args:
            gradients_R: those of the choices of this rank's experts, in the order of records.
        """
        with waiting("the gradients of the weights of choices"):
            return exchange_sized(gradients_R, self.choices_received, self.choices_sent, self.block.group)

# SPDX-License-Identifier: Apache-2.0
"""The sizes and orders of rows in one call of a layer with unpadded dispatch.

``counts_exchange`` computes them from the exchanged counts, and ``row_chunks`` reads them for each chunk.
``slot_chunks`` needs none, as its sizes follow from the capacity.

Letters: e experts on this rank, G ranks of an EP group, P of an ESP group, N = P * G the ranks that rows come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.execution.node_links import NodeLinks

# ---- The chunks of a rank's tokens, for the forward and the backward together
# Chunk i of r contains the tokens ``[floor(i * S / r), floor((i + 1) * S / r))`` of every rank, with all choices of
# each. The bounds of both phases together split the tokens into *segments*, so a chunk of either phase is a run of
# segments. The number of segments depends on the two degrees alone, their sizes also on each rank's S.
#
# Letters: S tokens on this rank, E experts of all ranks, T segments.


@dataclass(frozen=True)
class TokenChunks:
    """Holds the number of chunks in each phase, and the segments that follow from them."""

    forward: int
    backward: int

    @cached_property
    def _fractions(self) -> tuple[Fraction, ...]:
        """Return the bounds of both phases as shares of the tokens, ascending from 0 to 1."""
        found = {Fraction(i, degree) for degree in (self.forward, self.backward) for i in range(degree + 1)}
        return tuple(sorted(found))

    @cached_property
    def num_segments(self) -> int:
        """Return the number of segments, T."""
        return len(self._fractions) - 1

    @property
    def is_same(self) -> bool:
        """Return True if both phases have the same chunks."""
        return self.forward == self.backward

    def chunks(self, degree: int) -> tuple[tuple[int, int], ...]:
        """Return [first, last) of the segments of every chunk, for one of the two degrees."""
        return self._chunks[degree]

    @cached_property
    def _chunks(self) -> dict[int, tuple[tuple[int, int], ...]]:
        found = {}
        for degree in (self.forward, self.backward):
            places = [self._fractions.index(Fraction(i, degree)) for i in range(degree + 1)]
            found[degree] = tuple(itertools.pairwise(places))
        return found

    def adder(self, degree: int) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that sums counts of segments, any shape with T last, into counts of chunks."""
        return partial(np.add.reduceat, indices=[first for first, _ in self.chunks(degree)], axis=-1)

    def lengths(self, num_tokens: int) -> list[int]:
        """Return the number of tokens in each segment of a rank with S tokens."""
        bounds = [num_tokens * each.numerator // each.denominator for each in self._fractions]
        return [stop - start for start, stop in itertools.pairwise(bounds)]

    def chunk_of_segment(self, degree: int) -> np.ndarray:
        """Return the chunk of each segment, [T] int64, for one of the two degrees."""
        return np.repeat(np.arange(degree), [last - first for first, last in self.chunks(degree)])


@lru_cache(maxsize=256)
def token_chunks_of(forward: int, backward: int) -> TokenChunks:
    """Return the chunks for these degrees, computed once."""
    return TokenChunks(forward, backward)


# ---- The orders of rows at each stage, and the permutations between them
#
# Rows form blocks: the rows from one source to one expert in one segment of its tokens. Only the sizes of blocks
# depend on the tokens. The order of blocks at each stage follows from the plan, so it is computed once.
#
# Letters: E experts of all ranks, e experts on this rank, N ranks that rows come from, T segments, X blocks.


Order = Literal["by_source", "by_expert", "by_receiver"]
"""The order of a chunk's rows. ``"by_source"``: as they arrive at the experts, by source, then by expert.
``"by_expert"``: by expert, then by segment, so that any run of segments is one run of an expert's rows.
``"by_receiver"``: as a forwarding rank sends them, by receiver, then by source."""


@lru_cache(maxsize=256)
def block_order(shape: tuple[int, int, int], token_chunks: TokenChunks, degree: int, order: Order) -> np.ndarray:
    """Return the blocks in their order, chunk by chunk, as indices into an array [N, e, T].

    Args:
        shape: (N, e, T).
        token_chunks: the chunks of the tokens.
        degree: the number of chunks.
        order: the order within a chunk.
    """
    source, expert, segment = (each.reshape(-1) for each in np.indices(shape))
    chunk = token_chunks.chunk_of_segment(degree)[segment]
    # The last key counts first.
    keys = {
        "by_source": (segment, expert, source, chunk),
        "by_expert": (source, segment, expert, chunk),
        "by_receiver": (segment, source, expert, chunk),
    }
    return np.lexsort(keys[order])


@lru_cache(maxsize=256)
def _table(
    shape: tuple[int, int, int],
    token_chunks: TokenChunks,
    before: tuple[int, Order],
    after: tuple[int, Order],
    of_chunk: bool,
) -> np.ndarray:
    """Return [4, X]: the blocks in the order before and after, the positions of the latter in the former, and chunk
    starts.

    The last row has the position of the first block of each block's chunk, or 0.
    """
    blocks_before, blocks_after = (block_order(shape, token_chunks, *each) for each in (before, after))
    position = np.empty_like(blocks_before)
    position[blocks_before] = np.arange(len(blocks_before))
    chunk = token_chunks.chunk_of_segment(after[0])[blocks_after % shape[2]]
    first = np.searchsorted(chunk, chunk) if of_chunk else np.zeros_like(chunk)
    return np.stack([blocks_before, blocks_after, position[blocks_after], first])


def moves(
    sizes_NeT: torch.Tensor,
    token_chunks: TokenChunks,
    before: tuple[int, Order],
    after: tuple[int, Order],
    num_rows: int,
    *,
    of_chunk: bool = False,
) -> torch.Tensor:
    """Return the place in the order before for each row of the order after, [rows] int64.

    The host does not wait for the device.

    Args:
        sizes_NeT: [N, e, T] int64, the rows of each block.
        token_chunks: the chunks of the tokens.
        before, after: (number of chunks, order within them).
        num_rows: the number of rows.
        of_chunk: whether places count from the first row of the chunk; then both orders have the same chunks.
    """
    table = TABLES.from_host(sizes_NeT, _table, tuple(sizes_NeT.shape), token_chunks, before, after, of_chunk)
    blocks_before, blocks_after, position, first = table.unbind()
    sizes_X = sizes_NeT.reshape(-1)
    ends_before, ends_after = sizes_X[blocks_before].cumsum(0), sizes_X[blocks_after].cumsum(0)
    sizes_after = sizes_X[blocks_after]
    starts_after = ends_after - sizes_after
    offsets = (ends_before[position] - sizes_after) - starts_after
    if of_chunk:
        offsets = offsets - starts_after[first]
    places = torch.repeat_interleave(offsets, sizes_after, output_size=num_rows)
    return places.add_(torch.arange(num_rows, device=places.device))


# ---- The sizes of one call


@dataclass(frozen=True)
class RowBlock:
    """Holds the ranks that share the experts of a layer, with this rank's place among them."""

    group: dist.ProcessGroup | None
    """Their group; ``None`` for a rank that has all experts. Never used on a lane of links."""
    places: tuple[tuple[int, int], ...] = ((0, 0),)
    """For every rank of the group, its index in its EP group and in its ESP group."""
    rank: int = 0
    """This rank's index in the group."""

    @cached_property
    def num_exchanging(self) -> int:
        """Return the number of ranks of an EP group, G."""
        return 1 + max(ep for ep, _ in self.places)

    @cached_property
    def num_sharing(self) -> int:
        """Return the number of ranks of an ESP group, P."""
        return len(self.places) // self.num_exchanging

    @property
    def ep_index(self) -> int:
        """Return this rank's index in its EP group."""
        return self.places[self.rank][0]

    @property
    def esp_index(self) -> int:
        """Return this rank's index in its ESP group."""
        return self.places[self.rank][1]

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Return the ranks of the group in the order of their rows at the experts: by ESP rank, then by EP rank."""
        return tuple(sorted(range(len(self.places)), key=lambda each: self.places[each][::-1]))


ALONE = RowBlock(None)


@dataclass(frozen=True)
class ForwardedRows:
    """Describes the rows that a rank of an EP group forwards, and those of its own that others forward."""

    resting_here: tuple[tuple[int, ...], ...]
    """For each rank, the destinations of its rows that this rank forwards."""
    resting_there: tuple[tuple[int, ...], ...]
    """For each rank, the destinations of this rank's rows that it forwards."""


@dataclass(frozen=True)
class ChunkSizes:
    """Holds the numbers of rows of one chunk that this rank sends and receives."""

    sends: list[int]
    """The rows to each of G ranks; in node-deduplicated dispatch, to each of n nodes."""
    receives: list[int]
    """The rows from each of these."""
    gathered: list[int]
    """The rows from each of P ranks for the experts; in node-deduplicated dispatch, the copies from each of p ranks of
    the node."""
    of_experts: list[int]
    """The rows of each of e experts."""
    between: dict[tuple[int, int], int] | None = None
    """The rows of each (source, destination) that this rank sends, receives or forwards, for an all-to-all that
    forwards rows; else ``None``."""
    spreads: Sequence[int] = ()
    """The copies to each of p ranks of the node, in node-deduplicated dispatch."""

    @cached_property
    def back(self) -> ChunkSizes:
        """Return the sizes of combine."""
        between = None if self.between is None else {pair[::-1]: rows for pair, rows in self.between.items()}
        return replace(self, sends=self.receives, receives=self.sends, between=between)


@dataclass(frozen=True)
class PhaseSizes:
    """Describes the chunks of one phase, and the places of their rows."""

    chunks: tuple[ChunkSizes, ...]
    starts: tuple[int, ...]
    """The first row of each chunk among those that this rank sends, and last the number of rows."""
    order: torch.Tensor | None
    """[rows at the experts] int64: for each row in the order of the experts (by expert, then by segment, then by
    source), its place in its chunk on arrival (by source). ``None`` where the orders are the same."""
    ends: torch.Tensor
    """[chunks, e] int32: the end of the rows of each expert in a chunk."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Return the first row of each chunk among those at the experts, and last the number of rows."""
        return (0, *itertools.accumulate(map(sum, self.of_experts)))

    @property
    def of_experts(self) -> list[list[int]]:
        """Return the number of rows of each of e experts, chunk by chunk."""
        return [each.of_experts for each in self.chunks]

    def order_of(self, chunk: int) -> torch.Tensor | None:
        """Return the part of :attr:`order` for a chunk."""
        return None if self.order is None else self.order[self.places[chunk] : self.places[chunk + 1]]


@dataclass(frozen=True)
class RowSizes:
    """Holds all sizes of a call."""

    num_rows: int
    """The number of rows that this rank sends."""
    forward: PhaseSizes
    backward: PhaseSizes
    source_order: torch.Tensor | None
    """[rows sent] int64: for each row in the order of the backward, its place in the order of the forward; ``None``
    where these are the same."""
    expert_order: torch.Tensor | None
    """[rows at the experts] int64: the same for rows at the experts."""

    @property
    def num_arriving(self) -> int:
        """Return the number of rows that the experts of this rank receive."""
        return self.forward.places[-1]


def sizes_of_phases(
    token_chunks: TokenChunks,
    num_rows: int,
    phase: Callable[[int], PhaseSizes],
    own_XT: torch.Tensor,
    arrived_NeT: torch.Tensor,
) -> RowSizes:
    """Return all sizes of a call.

    Args:
        token_chunks: the chunks of the tokens.
        num_rows: the number of rows that this rank sends.
        phase: returns the sizes of the phase with a degree.
        own_XT: the rows of this rank to each place in each segment, on the device.
        arrived_NeT: the rows from each source for each expert in each segment, on the device.
    """
    forward = phase(token_chunks.forward)
    if token_chunks.is_same:
        return RowSizes(num_rows, forward, forward, None, None)
    between = partial(
        moves,
        token_chunks=token_chunks,
        before=(token_chunks.forward, "by_expert"),
        after=(token_chunks.backward, "by_expert"),
    )
    return RowSizes(
        num_rows,
        forward,
        phase(token_chunks.backward),
        between(own_XT.unsqueeze(0), num_rows=num_rows),
        between(arrived_NeT.sum(0, keepdim=True), num_rows=forward.places[-1]),
    )


def expert_ends(token_chunks: TokenChunks, degree: int, arrived_NeT: torch.Tensor) -> torch.Tensor:
    """Return the end of the rows of each expert in each chunk, [chunks, e] int32.

    Args:
        token_chunks: the chunks of the tokens.
        degree: the number of chunks.
        arrived_NeT: the rows from each source for each expert in each segment, on the device.
    """
    of_experts_Te = arrived_NeT.sum(0).t()
    if degree == token_chunks.num_segments:
        return of_experts_Te.cumsum(1).to(torch.int32)
    chunk_of_T = TABLES.from_host(of_experts_Te, TokenChunks.chunk_of_segment, token_chunks, degree)
    of_chunks_re = of_experts_Te.new_zeros(degree, of_experts_Te.shape[1]).index_add_(0, chunk_of_T, of_experts_Te)
    return of_chunks_re.cumsum(1).to(torch.int32)


# ---- The sizes of one call of node-deduplicated dispatch, and the copies of a row inside the node
#
# A token's row is sent to each node that has one of its experts, to the rank of the same place (its *forwarding rank*).
# That rank copies it to the ranks of its node that have one of its experts, and such a rank copies it to each of those
# experts. In combine, results are added up at the same three stages. A :class:`RowCopies` maps rows to copies.
#
# Letters: G ranks of an EP group, n nodes, p ranks in a node, e experts on this rank, T segments of the tokens, r
# chunks, J the largest number of copies of a row, R copies of all rows.


@dataclass(frozen=True)
class RowCopies:
    """Maps rows to their copies, chunk by chunk."""

    row_of_copy: torch.Tensor
    """[R] int64: the row of each copy, counted from the first of its chunk."""
    copies_JN: torch.Tensor
    """[J, rows] int64: the copies of each row, counted from the first of its chunk; beyond the last for missing
    copies."""
    record_of_copy: torch.Tensor
    """[R] int64: the number of the record that requests the copy."""
    place_of_copy: torch.Tensor
    """[R] int64: the place of each copy in :attr:`copies_JN`, flattened."""
    first_row: tuple[int, ...]
    """The first row of each chunk, and last the number of rows."""
    first_copy: tuple[int, ...]
    """The first copy of each chunk, and last the number of copies."""

    def rows(self, chunk: int) -> torch.Tensor:
        """Return the row of each copy of a chunk."""
        return self.row_of_copy[self.copies_of(chunk)]

    def copies(self, chunk: int) -> torch.Tensor:
        """Return the copies of each row of a chunk."""
        return self.copies_JN[:, self.first_row[chunk] : self.first_row[chunk + 1]]

    def copies_of(self, chunk: int) -> slice:
        """Return the range of the copies of a chunk."""
        return slice(self.first_copy[chunk], self.first_copy[chunk + 1])

    def by_copy(self, values_R: torch.Tensor) -> torch.Tensor:
        """Return values of copies in the layout of :attr:`copies_JN`; zero for missing copies."""
        whole = values_R.new_zeros(self.copies_JN.numel())
        return whole.scatter_(0, self.place_of_copy, values_R).view(self.copies_JN.shape)


@dataclass(frozen=True)
class NodePhase(PhaseSizes):
    """Describes the chunks of one phase of node-deduplicated dispatch, and their copies."""

    to_ranks: RowCopies
    """The copies that this rank makes as a forwarding rank."""
    to_experts: RowCopies
    """The copies that it makes for its experts, sorted by expert."""


@dataclass(frozen=True)
class NodeCounts:
    """Holds the counts of a call on the host, from which all sizes follow."""

    links: NodeLinks
    token_chunks: TokenChunks
    own_GeT: np.ndarray
    """The choices of this rank's tokens."""
    own_GT: np.ndarray
    """This rank's tokens with an expert on a rank."""
    own_nT: np.ndarray
    """This rank's tokens with an expert in a node."""
    choices_GeT: np.ndarray
    """Each rank's choices of this rank's experts."""
    forwarded_nT: np.ndarray
    """The rows that this rank receives as a forwarding rank from each node."""
    forwarded_npT: np.ndarray
    """The copies of these for each rank of the node."""
    arriving_GT: np.ndarray
    """Each rank's tokens with an expert on this rank."""

    @property
    def choice_sizes(self) -> tuple[list[int], list[int]]:
        """Return the numbers of choice records to each of G ranks, and from each."""
        return self.own_GeT.sum((1, 2)).tolist(), self.choices_GeT.sum((1, 2)).tolist()

    @property
    def forwarded_sizes(self) -> tuple[list[int], list[int]]:
        """Return the numbers of forwarding records to each of G ranks, and from each; 0 for ranks of another place."""
        of_nodes = self.own_GT[np.array(self.links.ranks)].sum((1, 2))
        sends, receives = [0] * len(self.own_GT), [0] * len(self.own_GT)
        for node, ranks in enumerate(self.links.ranks):
            sends[ranks[self.links.place]] = int(of_nodes[node])
            receives[ranks[self.links.place]] = int(self.forwarded_npT[node].sum())
        return sends, receives

    def sizes(
        self,
        own_nT: torch.Tensor,
        choices_GeT: torch.Tensor,
        forwarded_records: torch.Tensor,
        choice_records: torch.Tensor,
        num_choices: int,
    ) -> RowSizes:
        """Return all sizes. The host does not wait for the device.

        Args:
            own_nT, choices_GeT: the counts on the device.
            forwarded_records: int64, for each copy of a forwarding rank the number of its row among those of its
                source: by source, then by rank, then by token.
            choice_records: int64, for each choice of an expert here ``row * K + choice``, with the number of its row
                among those of its source: by source, then by expert, then by token.
            num_choices: K.
        """
        phase = partial(self._phase, choices_GeT, forwarded_records, choice_records, num_choices)
        return sizes_of_phases(self.token_chunks, int(self.own_nT.sum()), phase, own_nT, choices_GeT)

    def _phase(
        self,
        choices_GeT: torch.Tensor,
        forwarded_records: torch.Tensor,
        choice_records: torch.Tensor,
        num_choices: int,
        degree: int,
    ) -> NodePhase:
        token_chunks, links = self.token_chunks, self.links
        of_chunks = token_chunks.adder(degree)
        to_nr, from_nr = of_chunks(self.own_nT), of_chunks(self.forwarded_nT)
        spreads_pr = of_chunks(self.forwarded_npT).sum(0)
        # In the order of arrival: by forwarding rank, then by node.
        by_relay = np.array(links.ranks).T.reshape(-1)
        arriving_Gr = of_chunks(self.arriving_GT)
        arrives_pr = arriving_Gr[by_relay].reshape(links.per_node, links.num_nodes, degree).sum(1)
        of_experts_er = of_chunks(self.choices_GeT.sum(0))
        parts = [each.T.tolist() for each in (to_nr, from_nr, arrives_pr, of_experts_er, spreads_pr)]
        chunks = [ChunkSizes(*sizes, spreads=spreads) for *sizes, spreads in zip(*parts, strict=True)]
        by_node = np.arange(links.num_nodes)
        to_ranks = _row_copies(
            self.forwarded_npT,
            token_chunks,
            degree,
            "by_receiver",
            from_nr,
            by_node,
            forwarded_records,
            None,
            links.per_node,
        )
        row_records = torch.div(choice_records, num_choices, rounding_mode="floor")
        copies = choice_records % num_choices
        to_experts = _row_copies(
            self.choices_GeT, token_chunks, degree, "by_expert", arriving_Gr, by_relay, row_records, copies, num_choices
        )
        starts = (0, *np.cumsum(to_nr.sum(0)).tolist())
        ends = expert_ends(token_chunks, degree, choices_GeT)
        return NodePhase(tuple(chunks), starts, None, ends, to_ranks, to_experts)


def _row_copies(
    sizes_NXT: np.ndarray,
    token_chunks: TokenChunks,
    degree: int,
    order: Order,
    rows_Nr: np.ndarray,
    source_order: np.ndarray,
    record_rows: torch.Tensor,
    record_copies: torch.Tensor | None,
    most_copies: int,
) -> RowCopies:
    """Return the copies of the rows of all chunks.

    Args:
        sizes_NXT: the copies of each source for each receiver in each segment; records have this order.
        token_chunks: the chunks of the tokens.
        degree: the number of chunks.
        order: the order of the copies of a chunk.
        rows_Nr: the rows of each source in each chunk.
        source_order: the sources in the order of their rows in a chunk.
        record_rows: for each record, the number of its row among those of its source.
        record_copies: for each record, the index of the copy of its row; ``None``: the index of its receiver.
        most_copies: J.
    """
    blocks = block_order(sizes_NXT.shape, token_chunks, degree, order)
    source_X, receiver_X, segment_X = np.unravel_index(blocks, sizes_NXT.shape)
    chunk_X = token_chunks.chunk_of_segment(degree)[segment_X]
    flat = sizes_NXT.reshape(-1)
    sizes_X = flat[blocks]
    first_copy = (0, *np.cumsum(np.bincount(chunk_X, sizes_X, degree).astype(np.int64)).tolist())
    first_row = (0, *np.cumsum(rows_Nr.sum(0)).tolist())
    # The first row of each source in each chunk: among its own rows, and in the chunk.
    before_own_Nr = np.cumsum(rows_Nr, 1) - rows_Nr
    in_order_Nr = rows_Nr[source_order]
    in_chunk_Nr = np.empty_like(rows_Nr)
    in_chunk_Nr[source_order] = np.cumsum(in_order_Nr, 0) - in_order_Nr
    starts_X = np.cumsum(sizes_X) - sizes_X
    to_record_X = (np.cumsum(flat) - flat)[blocks] - starts_X
    to_row_X = (in_chunk_Nr - before_own_Nr)[source_X, chunk_X]
    to_column_X = np.array(first_row)[chunk_X]
    if record_copies is None:
        to_column_X = to_column_X + receiver_X * first_row[-1]
    from_chunk_X = np.array(first_copy)[chunk_X]
    table = np.stack([sizes_X, to_record_X, to_row_X, to_column_X, from_chunk_X])
    # A copy from pageable memory is staged at once, without a wait for the device.
    on_device = torch.from_numpy(table.astype(np.int64)).to(record_rows.device, non_blocking=True)
    num_copies = first_copy[-1]
    # [R, 4]: the offsets of each copy's number, and of the numbers that follow from it.
    spread = torch.repeat_interleave(on_device[1:].t(), on_device[0], dim=0, output_size=num_copies)
    numbers = torch.arange(num_copies, device=record_rows.device)
    record_of_copy = numbers + spread[:, 0]
    row_of_copy = record_rows[record_of_copy] + spread[:, 1]
    place_of_copy = row_of_copy + spread[:, 2]
    if record_copies is not None:
        place_of_copy = place_of_copy + record_copies[record_of_copy] * first_row[-1]
    copies = torch.full((most_copies * first_row[-1],), num_copies, dtype=torch.int64, device=record_rows.device)
    copies.scatter_(0, place_of_copy, numbers - spread[:, 3])
    copies_JN = copies.view(most_copies, first_row[-1])
    return RowCopies(row_of_copy, copies_JN, record_of_copy, place_of_copy, first_row, first_copy)

# SPDX-License-Identifier: Apache-2.0
"""The sizes of one call of a layer whose chunks hold rows, as many as were chosen, instead of slots.

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

# ---- The cuts of a rank's tokens into chunks, for the forward and the backward together
#
# Chunk i of r holds the tokens ``[floor(i * S / r), floor((i + 1) * S / r))`` of every rank, with all choices of each.
# The cuts of both phases together part the tokens into *segments*, so a chunk of either phase is a run of segments. How
# many segments there are follows from the two degrees alone; how many tokens are in one follows from each rank's S.
#
# Letters: S tokens on this rank, E experts of all ranks, T segments.


@dataclass(frozen=True)
class TokenChunks:
    """The number of chunks in each phase, and the segments that follow from them."""

    forward: int
    backward: int

    @cached_property
    def _fractions(self) -> tuple[Fraction, ...]:
        """The cut positions of both phases as shares of the tokens, rising from 0 to 1."""
        found = {Fraction(i, degree) for degree in (self.forward, self.backward) for i in range(degree + 1)}
        return tuple(sorted(found))

    @cached_property
    def num_segments(self) -> int:
        """The number of segments, T."""
        return len(self._fractions) - 1

    @property
    def is_same(self) -> bool:
        """Whether both phases have the same chunks."""
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
        """Return a function that turns counts of segments, any shape with T last, into those of chunks."""
        return partial(np.add.reduceat, indices=[first for first, _ in self.chunks(degree)], axis=-1)

    def lengths(self, num_tokens: int) -> list[int]:
        """Return how many tokens of a rank with S tokens are in each segment."""
        bounds = [num_tokens * each.numerator // each.denominator for each in self._fractions]
        return [stop - start for start, stop in itertools.pairwise(bounds)]

    def chunk_of_segment(self, degree: int) -> np.ndarray:
        """Return the chunk of each segment, [T] int64, for one of the two degrees."""
        return np.repeat(np.arange(degree), [last - first for first, last in self.chunks(degree)])


@lru_cache(maxsize=256)
def token_chunks_of(forward: int, backward: int) -> TokenChunks:
    """Return the cuts for these degrees, which are worked out once."""
    return TokenChunks(forward, backward)


# ---- The orders in which rows lie on their way, and how to get from one to another
#
# Rows come in blocks: those that one source sends to one expert in one segment of its tokens. Only the sizes of
# blocks depend on the tokens; the order of blocks at each place follows from the plan, so it is worked out once.
#
# Letters: E experts of all ranks, e experts on this rank, N ranks that rows come from, T segments, X blocks.


Order = Literal["by_source", "by_expert", "by_receiver"]
"""How the rows of a chunk lie at the experts: as they arrive, source by source, and for each expert by expert; or
expert by expert, and for each segment by segment, so that any run of segments is one run of rows of an expert. By
receiver they lie as a relay sends them: for each receiver, in the place of an expert, source by source."""


@lru_cache(maxsize=256)
def block_order(shape: tuple[int, int, int], token_chunks: TokenChunks, degree: int, order: Order) -> np.ndarray:
    """Return the blocks in the order in which they lie, chunk by chunk, as indices into an array [N, e, T].

    Args:
        shape: (N, e, T).
        cuts: the cuts of the tokens.
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
    """Return [4, X]: the blocks in the order before, those in the order after, for each of the latter its position in
    the former, and the position of the first block of its chunk."""
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
    """Return for each row of the order after where it lies in the order before, [rows] int64.

    Nothing here waits for the device.

    Args:
        sizes_NeT: [N, e, T] int64, the rows of each block.
        cuts: the cuts of the tokens.
        before, after: (number of chunks, order within them).
        num_rows: their number.
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


# ---- The sizes of one call of a layer whose chunks hold rows, as many as were chosen, instead of slots


@dataclass(frozen=True)
class RowBlock:
    """The ranks that share the experts of a layer, as one of them sees them."""

    group: dist.ProcessGroup | None
    """All of them; ``None`` for a rank that has all experts. Never used on a lane of links."""
    places: tuple[tuple[int, int], ...] = ((0, 0),)
    """Of every rank of the group its index in its EP group and in its ESP group."""
    rank: int = 0
    """This rank's index in the group."""

    @cached_property
    def num_exchanging(self) -> int:
        """The number of ranks of an EP group, G."""
        return 1 + max(ep for ep, _ in self.places)

    @cached_property
    def num_sharing(self) -> int:
        """The number of ranks of an ESP group, P."""
        return len(self.places) // self.num_exchanging

    @property
    def ep_index(self) -> int:
        """This rank's index in its EP group."""
        return self.places[self.rank][0]

    @property
    def esp_index(self) -> int:
        """This rank's index in its ESP group."""
        return self.places[self.rank][1]

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The indices in the group in the order in which rows lie at the experts: ESP rank by ESP rank, and for each
        its EP group."""
        return tuple(sorted(range(len(self.places)), key=lambda each: self.places[each][::-1]))


ALONE = RowBlock(None)


@dataclass(frozen=True)
class ForwardedRows:
    """The rows that rest on a rank of an EP group on their way, as that rank sees them."""

    resting_here: tuple[tuple[int, ...], ...]
    """Of each rank, the destinations of those of its rows that rest here."""
    resting_there: tuple[tuple[int, ...], ...]
    """Of each rank, the destinations of those of our rows that rest there."""


@dataclass(frozen=True)
class ChunkSizes:
    """The rows of one chunk that this rank moves."""

    sends: list[int]
    """The rows to each of G ranks; where tokens cross to a node once, to each of n nodes."""
    receives: list[int]
    """The rows from each of these."""
    gathered: list[int]
    """The rows that each of P ranks brings to the experts; where tokens cross to a node once, the copies from each of p
    ranks of the node."""
    of_experts: list[int]
    """The rows of each of e experts."""
    between: dict[tuple[int, int], int] | None = None
    """The rows from one rank to another, of those that come by here, where an all-to-all passes rows on; else
    ``None``."""
    spreads: Sequence[int] = ()
    """The copies to each of p ranks of the node, where tokens cross to a node once."""

    @cached_property
    def back(self) -> ChunkSizes:
        """The sizes of the way back."""
        between = None if self.between is None else {pair[::-1]: rows for pair, rows in self.between.items()}
        return replace(self, sends=self.receives, receives=self.sends, between=between)


@dataclass(frozen=True)
class PhaseSizes:
    """The chunks of one phase, and where their rows lie."""

    chunks: tuple[ChunkSizes, ...]
    starts: tuple[int, ...]
    """The first row of each chunk among those that this rank sends, and last their number."""
    order: torch.Tensor | None
    """[rows at the experts] int64: for each row in the order of the experts (expert by expert, segment by segment,
    source by source) where it lies in its chunk as it arrives (source by source). ``None`` where that is the same."""
    ends: torch.Tensor
    """[chunks, e] int32: where the rows of each expert end in a chunk."""

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The first row of each chunk among those at the experts, and last their number."""
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
    """All sizes of a call."""

    num_rows: int
    """The number of rows that this rank sends."""
    forward: PhaseSizes
    backward: PhaseSizes
    source_order: torch.Tensor | None
    """[rows sent] int64: for each row in the order in which the backward sends it, its place in that of the forward;
    ``None`` where these are the same."""
    expert_order: torch.Tensor | None
    """[rows at the experts] int64: the same at the experts."""

    @property
    def num_arriving(self) -> int:
        """The number of rows that come to the experts of this rank."""
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
        cuts: the cuts of the tokens.
        num_rows: the number of rows that this rank sends.
        phase: makes the sizes of the phase of a degree.
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
    """Return [chunks, e] int32: where the rows of each expert end in a chunk.

    Args:
        cuts: the cuts of the tokens.
        degree: the number of chunks.
        arrived_NeT: the rows from each source for each expert in each segment, on the device.
    """
    of_experts_Te = arrived_NeT.sum(0).t()
    if degree == token_chunks.num_segments:
        return of_experts_Te.cumsum(1).to(torch.int32)
    chunk_of_T = TABLES.from_host(of_experts_Te, TokenChunks.chunk_of_segment, token_chunks, degree)
    of_chunks_re = of_experts_Te.new_zeros(degree, of_experts_Te.shape[1]).index_add_(0, chunk_of_T, of_experts_Te)
    return of_chunks_re.cumsum(1).to(torch.int32)


# ---- The sizes of one call whose tokens cross to each node once, and where copies of a row go inside the node
#
# A token's row goes to each node that has one of its experts, to the rank of the same place (its *relay*). The relay
# copies it to the ranks of its node that have one of its experts, and such a rank copies it to each of those. On the
# way back results are added up at the same three points. Where copies go is a :class:`RowCopies`.
#
# Letters: G ranks of an EP group, n nodes, p ranks in a node, e experts on this rank, T segments of the tokens, r
# chunks, J the most copies of a row, R copies of all rows.


@dataclass(frozen=True)
class RowCopies:
    """Copies of rows, chunk by chunk."""

    row_of_copy: torch.Tensor
    """[R] int64: the row of each copy, counted from the first of its chunk."""
    copies_JN: torch.Tensor
    """[J, rows] int64: the copies of each row, counted from the first of its chunk; beyond the last where it has
    fewer."""
    record_of_copy: torch.Tensor
    """[R] int64: the number of the record that asks for the copy."""
    place_of_copy: torch.Tensor
    """[R] int64: the place of each copy in :attr:`copies_JN`, flattened."""
    first_row: tuple[int, ...]
    """The first row of each chunk, and last their number."""
    first_copy: tuple[int, ...]
    """The first copy of each chunk, and last their number."""

    def rows(self, chunk: int) -> torch.Tensor:
        """Return the row of each copy of a chunk."""
        return self.row_of_copy[self.copies_of(chunk)]

    def copies(self, chunk: int) -> torch.Tensor:
        """Return the copies of each row of a chunk."""
        return self.copies_JN[:, self.first_row[chunk] : self.first_row[chunk + 1]]

    def copies_of(self, chunk: int) -> slice:
        """Return where the copies of a chunk lie."""
        return slice(self.first_copy[chunk], self.first_copy[chunk + 1])

    def by_copy(self, values_R: torch.Tensor) -> torch.Tensor:
        """Return values of copies where :attr:`copies_JN` names the copies; zero where it names none."""
        whole = values_R.new_zeros(self.copies_JN.numel())
        return whole.scatter_(0, self.place_of_copy, values_R).view(self.copies_JN.shape)


@dataclass(frozen=True)
class NodePhase(PhaseSizes):
    """The chunks of one phase, and where copies go."""

    to_ranks: RowCopies
    """The copies that this rank makes as a relay."""
    to_experts: RowCopies
    """The copies that it makes for its experts, which lie expert by expert."""


@dataclass(frozen=True)
class NodeCounts:
    """The counts of a call on the host, from which all sizes follow."""

    links: NodeLinks
    token_chunks: TokenChunks
    own_GeT: np.ndarray
    """The choices of this rank's tokens."""
    own_GT: np.ndarray
    """This rank's tokens with an expert on a rank."""
    own_nT: np.ndarray
    """This rank's tokens with an expert in a node."""
    choices_GeT: np.ndarray
    """Each rank's choices of the experts here."""
    forwarded_nT: np.ndarray
    """The rows that come to this rank as a relay from each node."""
    forwarded_npT: np.ndarray
    """The copies of these for each rank of the node."""
    arriving_GT: np.ndarray
    """Each rank's tokens with an expert here."""

    @property
    def choice_sizes(self) -> tuple[list[int], list[int]]:
        """The records of choices to each of G ranks, and from each."""
        return self.own_GeT.sum((1, 2)).tolist(), self.choices_GeT.sum((1, 2)).tolist()

    @property
    def forwarded_sizes(self) -> tuple[list[int], list[int]]:
        """The records for relays to each of G ranks, and from each: only those of this rank's place have any."""
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
        """Return all sizes. Nothing here waits for the device.

        Args:
            own_nT, choices_GeT: the counts on the device.
            relay_records: int64, for each copy that a relay is to make the number of its row among those of its source:
                source by source, rank by rank, token by token.
            choice_records: int64, for each choice of an expert here ``row * K + choice``, with the number of its row
                among those of its source: source by source, expert by expert, token by token.
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
        # As they arrive: relay by relay, and of each node by node.
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
    """Return where copies go.

    Args:
        sizes_NXT: the copies of each source for each receiver in each segment; records lie in this order.
        cuts: the cuts of the tokens.
        degree: the number of chunks.
        order: the order in which the copies of a chunk lie.
        rows_Nr: the rows of each source in each chunk.
        source_order: the sources in the order in which their rows lie in a chunk.
        record_rows: of each record the number of its row among those of its source.
        record_copies: of each record which copy of its row it is; ``None``: that of its receiver.
        most_copies: J.
    """
    blocks = block_order(sizes_NXT.shape, token_chunks, degree, order)
    source_X, receiver_X, segment_X = np.unravel_index(blocks, sizes_NXT.shape)
    chunk_X = token_chunks.chunk_of_segment(degree)[segment_X]
    flat = sizes_NXT.reshape(-1)
    sizes_X = flat[blocks]
    first_copy = (0, *np.cumsum(np.bincount(chunk_X, sizes_X, degree).astype(np.int64)).tolist())
    first_row = (0, *np.cumsum(rows_Nr.sum(0)).tolist())
    # The first row of each source in each chunk: among its own, and in the chunk.
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
    # From pageable memory a copy is staged at once, and waits for nothing on the device.
    on_device = torch.from_numpy(table.astype(np.int64)).to(record_rows.device, non_blocking=True)
    num_copies = first_copy[-1]
    # [R, 4]: what is to be added to each copy's number, and to what follows from it.
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

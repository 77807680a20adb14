# SPDX-License-Identifier: Apache-2.0
"""Numbers the rows of a gate's decision in the order in which they are sent, and maps experts to their places.

``state`` calls it in each forward with unpadded dispatch, ahead of the exchange of counts.

Letters: S tokens on this rank, E experts of all ranks, K choices per token, T segments of the tokens, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ds_fsmoe.components.routing import BareRouting, Routing, kind_of
from ds_fsmoe.execution.counts_exchange import NodeRows
from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.execution.row_sizes import TokenChunks
from ds_fsmoe.ops import Ops
from ds_fsmoe.planning.expert_placement import ExpertPlacement


def takes_rows(dispatch: str, gate: Any) -> bool:
    """Return True if a gate and a configured dispatch allow unpadded dispatch.

    Args:
        dispatch: the configured dispatch, see :attr:`~ds_fsmoe.config.blocks.FSMoEBlock.dispatch`.
        gate: the gate of the layer.
    """
    if dispatch == "padded" or not issubclass(kind_of(gate), Routing):
        return False
    # Whether the gate drops no choice by its present settings; a custom gate declares that by ``drop_tokens``.
    return dispatch == "unpadded" or getattr(getattr(gate, "settings", gate), "drop_tokens", True) is False


@dataclass(frozen=True)
class RowRouting:
    """Holds a decision as numbered rows."""

    routing: Routing
    """The decision, with all rows as the slots of one expert, for an order."""
    counts_ET: torch.Tensor
    """[E, T] int64: the rows for each expert in each segment."""
    fault: torch.Tensor
    """Scalar int64: the fault of the decision, see :data:`~ds_fsmoe.execution.counts_exchange.FAULTS`."""


def number_rows_of_layer(
    routing: Routing, token_chunks: TokenChunks, ops: Ops, *, is_trusted: bool = False
) -> RowRouting:
    """Number the rows of a decision. The host does not wait for the device.

    Args:
        routing: the decision. Dropped choices have no row.
        token_chunks: the chunks of the tokens.
        ops: the operators to use.
        is_trusted: whether the decision need not be checked.
    """
    slots_KS, num_experts = routing.slots_KS, routing.num_experts
    num_choices, num_tokens = slots_KS.shape
    segments = None
    if token_chunks.num_segments > 1:
        segments = TABLES.from_host(slots_KS, segments_with_queues, token_chunks, num_experts, num_tokens)
    limits_E = None if is_trusted else routing.limits_E
    found = ops.number_rows(slots_KS, num_experts, routing.capacity, segments, limits_E)
    if segments is None:
        counts_ET = found.counts_V.view(num_experts, 1)
    else:
        counts_ET = found.counts_V[TABLES.from_host(slots_KS, _places, token_chunks, num_experts)]
    as_one = BareRouting.of(found.rows_KS, routing.weights_KS, 1, num_choices * num_tokens)
    return RowRouting(as_one, counts_ET, found.fault)


def segments_with_queues(token_chunks: TokenChunks, num_experts: int, num_tokens: int) -> np.ndarray:
    """Return for each segment its end, its queue of expert 0, and the step from one expert's queue to the next: [3,
    T]."""
    return np.stack([np.cumsum(token_chunks.lengths(num_tokens)), *_queues(token_chunks, num_experts)])


def _places(token_chunks: TokenChunks, num_experts: int) -> np.ndarray:
    """Return the queue of each expert in each segment, [E, T]."""
    first_T, step_T = _queues(token_chunks, num_experts)
    return np.arange(num_experts)[:, None] * step_T + first_T


def _queues(token_chunks: TokenChunks, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each segment the queue of expert 0, and the step from one expert to the next.

    Queues are numbered in the order of sending: by chunk of the forward, then by expert, then by segment.
    """
    chunks = token_chunks.chunks(token_chunks.forward)
    lengths = [last - first for first, last in chunks]
    first_of_chunk = np.repeat([first for first, _ in chunks], lengths)
    return num_experts * first_of_chunk + np.arange(token_chunks.num_segments) - first_of_chunk, np.repeat(
        lengths, lengths
    )


# ---- The rows of node-deduplicated dispatch: a token sends one row to each node that has one of its experts
#
# Letters: S tokens on this rank, E experts of all ranks, K choices per token, G ranks of the EP group, n nodes, T
# segments of the tokens.


def number_by_node(
    routing: Routing, token_chunks: TokenChunks, links: NodeLinks, ops: Ops
) -> tuple[Routing, NodeRows, torch.Tensor]:
    """Number the rows of a decision for node-deduplicated dispatch. The host does not wait for the device.

    Args:
        routing: the decision. Dropped choices have no row.
        token_chunks: the chunks of the tokens.
        links: the levels of the EP group.
        ops: the operators to use.

    Returns:
        The rows to nodes, as the slots of one expert, for an order; the counts and places that other ranks need; and
        the weights of choices, [K, S] float32 or float64.
    """
    slots_KS, num_experts = routing.slots_KS, routing.num_experts
    num_tokens = slots_KS.shape[1]
    segments, ranks = token_chunks.num_segments, links.num_nodes * links.per_node
    table_3T = TABLES.from_host(slots_KS, _queues_by_expert, token_chunks, num_tokens)
    of_choices = ops.number_rows(slots_KS, num_experts, routing.capacity, table_3T, routing.limits_E)
    counts_ET = of_choices.counts_V.view(num_experts, segments)
    segment_S = TABLES.from_host(slots_KS, _segments, token_chunks, num_tokens)
    is_row_KS = (slots_KS >= 0) & (slots_KS < routing.num_slots)
    per_rank = num_experts // ranks * max(1, routing.capacity)
    rank_KS = torch.where(is_row_KS, slots_KS.div(per_rank, rounding_mode="floor"), ranks)
    is_on = torch.zeros(ranks + 1, num_tokens, dtype=torch.bool, device=slots_KS.device)
    is_on_GS = is_on.scatter_(0, rank_KS, True)[:ranks]
    is_in_nS = is_on_GS[links.rank_of_each(slots_KS)].view(links.num_nodes, links.per_node, num_tokens).any(1)

    def in_segments(is_there_XS: torch.Tensor) -> torch.Tensor:
        counts_XT = counts_ET.new_zeros(len(is_there_XS), segments)
        return counts_XT.index_add_(1, segment_S, is_there_XS.long())

    nodes_n1 = torch.arange(links.num_nodes, device=slots_KS.device).unsqueeze(1)
    dtype = torch.promote_types(routing.weights_KS.dtype, torch.float32)
    ones_nS = torch.ones(is_in_nS.shape, dtype=dtype, device=slots_KS.device)
    to_nodes = BareRouting.of(torch.where(is_in_nS, nodes_n1, links.num_nodes), ones_nS, links.num_nodes)
    numbered = number_rows_of_layer(to_nodes, token_chunks, ops, is_trusted=True)
    counts = counts_ET, in_segments(is_on_GS), numbered.counts_ET
    rows = NodeRows(*counts, of_choices.rows_KS, rank_KS, is_on_GS, is_in_nS, of_choices.fault)
    return numbered.routing, rows, routing.weights_KS.to(dtype)


def _queues_by_expert(token_chunks: TokenChunks, num_tokens: int) -> np.ndarray:
    """Return for each segment its end, its queue of expert 0, and the step from one expert's queue to the next: [3, T].

    Queues are numbered by expert, then by segment.
    """
    numbers_T = np.arange(token_chunks.num_segments)
    steps_T = np.full(token_chunks.num_segments, token_chunks.num_segments)
    return np.stack([np.cumsum(token_chunks.lengths(num_tokens)), numbers_T, steps_T])


def _segments(token_chunks: TokenChunks, num_tokens: int) -> np.ndarray:
    """Return the segment of each token, [S]."""
    return np.repeat(np.arange(token_chunks.num_segments), token_chunks.lengths(num_tokens))


# ---- Expert placement: a router's decision about experts becomes one about places
#
# Gates, losses, counts, hooks and recordings use the numbers of experts. Only the code between order and experts uses
# places, see :class:`~ds_fsmoe.planning.expert_placement.ExpertPlacement`.
#
# Letters: E experts, K choices, S tokens.


@dataclass(frozen=True)
class Placed:
    """Routes the calls of a layer by a placement. It never changes: a layer gets a new one instead.

    Args:
        placement: the same on every rank.
    """

    placement: ExpertPlacement

    def place_of(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the places of these experts, E for E or more; without a wait for the device.

        Args:
            experts: any shape, integers in 0..E.
        """
        return self._table(experts)[experts.long()]

    def routing(self, routing: Routing) -> Routing:
        """Return the decision with places for experts: C slots of each place.

        Args:
            routing: a decision about E experts.
        """
        slots_KS, capacity = routing.slots_KS, max(1, routing.capacity)
        # A number out of range stays out of range, so that it is still detected as a fault.
        expert_KS = slots_KS.div(capacity, rounding_mode="floor")
        place_KS = self.place_of(expert_KS.clamp(0, self.placement.num_experts))
        placed_KS = place_KS * capacity + (slots_KS - expert_KS * capacity)
        is_one_KS = (slots_KS >= 0) & (slots_KS < routing.num_slots)
        counts = torch.zeros_like(routing.counts_E).scatter_(0, self._table(routing.counts_E)[:-1], routing.counts_E)
        return replace(routing, slots_KS=torch.where(is_one_KS, placed_KS, slots_KS), counts_E=counts)

    def _table(self, like: torch.Tensor) -> torch.Tensor:
        """Return the place of each expert, and last E for a choice that is not made: [E + 1], on the device of a
        tensor."""
        return TABLES.from_host(like, _places_of_experts, self.placement)


def _places_of_experts(placement: ExpertPlacement) -> np.ndarray:
    return np.array((*placement.place_of_expert, placement.num_experts))

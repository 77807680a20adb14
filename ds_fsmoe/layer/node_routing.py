# SPDX-License-Identifier: Apache-2.0
"""Numbers the rows of a gate's decision where a token sends one row to each node that has one of its experts.

Letters: S tokens on this rank, E experts of all ranks, K choices per token, G ranks of the EP group, n nodes, T
segments of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ds_fsmoe.components.routing import BareRouting, Routing
from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.execution.node_exchange import NodeRows
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.execution.token_cuts import TokenCuts
from ds_fsmoe.layer.row_routing import number_rows
from ds_fsmoe.ops import Ops


@dataclass(frozen=True)
class NodeRouting:
    """A decision as rows to nodes."""

    routing: Routing
    """The rows to nodes, as the slots of one expert: what an order needs to put them in order."""
    rows: NodeRows
    """These are the counts and places that the other ranks are told of."""
    weights_KS: torch.Tensor
    """[K, S] float32 or float64."""

    def choice_of_row(self, num_rows: int) -> torch.Tensor:
        """Return [R] int64: ``choice * S + token`` of each choice that was not dropped."""
        places = self.rows.row_of_choice_KS.reshape(-1)
        found = places.new_empty(len(places) + 1)
        return found.scatter_(0, places, torch.arange(len(places), device=places.device))[:num_rows]

    def weights_of(self, choice_of_row_R: torch.Tensor) -> torch.Tensor:
        """Return [R]: the weights of these choices, differentiable."""
        return self.weights_KS.reshape(-1).index_select(0, choice_of_row_R)


def number_by_node(routing: Routing, cuts: TokenCuts, links: NodeLinks, ops: Ops) -> NodeRouting:
    """Number the rows of a decision; nothing waits for the device.

    Args:
        routing: the decision. What it drops is no row.
        cuts: the cuts of the tokens.
        links: the levels of the EP group.
        ops: the operators to use.
    """
    slots_KS, num_experts = routing.slots_KS, routing.num_experts
    num_tokens = slots_KS.shape[1]
    segments, ranks = cuts.num_segments, links.num_nodes * links.per_node
    table_3T = _queues(cuts, num_tokens, slots_KS)
    of_choices = ops.number_rows(slots_KS, num_experts, routing.capacity, table_3T, routing.limits_E)
    counts_ET = of_choices.counts_V.view(num_experts, segments)
    segment_S = _segments(cuts, num_tokens, slots_KS)
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
    numbered = number_rows(to_nodes, cuts, ops, is_trusted=True)
    counts = counts_ET, in_segments(is_on_GS), numbered.counts_ET
    rows = NodeRows(*counts, of_choices.rows_KS, rank_KS, is_on_GS, is_in_nS, of_choices.fault)
    return NodeRouting(numbered.routing, rows, routing.weights_KS.to(dtype))


def _queues(cuts: TokenCuts, num_tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Return [3, T]: where each segment ends, its queue of expert 0, and the step from one expert's to the next. Queues
    are numbered expert by expert, segment by segment."""

    def make(device: torch.device) -> torch.Tensor:
        numbers_T = np.arange(cuts.num_segments)
        steps_T = np.full(cuts.num_segments, cuts.num_segments)
        return torch.from_numpy(np.stack([np.cumsum(cuts.lengths(num_tokens)), numbers_T, steps_T])).to(device)

    return TABLES.get(("segments of tokens and their queues by expert", cuts, num_tokens), like, make)


def _segments(cuts: TokenCuts, num_tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Return [S]: the segment of each token."""

    def make(device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.arange(cuts.num_segments), cuts.lengths(num_tokens))).to(device)

    return TABLES.get(("segments of tokens", cuts, num_tokens), like, make)

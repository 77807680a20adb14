# SPDX-License-Identifier: Apache-2.0
"""The pressure of a placement where tokens cross to each node once: it depends on which experts a token has together.

Rows do not tell: two experts of a token in one node take one crossing, and on one rank one copy. So it is counted with
tokens that were seen, sent as they would be with the placement.

Letters: E experts, G ranks that share them, n nodes, p ranks of a node, K choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_fsmoe.planning.crossings import Crossings
from ds_fsmoe.planning.expert_placement import ExpertPlacement, fullest_over_mean


def once_per_node_factors(
    placement: ExpertPlacement,
    rows_GE: np.ndarray,
    tokens: Sequence[np.ndarray],
    node_of_rank: Sequence[int],
    planned: Crossings,
) -> tuple[float, float, float]:
    """Return by how much the most that anybody has to do lies above what is planned: (experts, between nodes, inside).

    Args:
        placement: where experts are.
        rows_GE: the rows of each rank for each expert.
        tokens: for each rank the experts of some of its tokens, [tokens, K] integers; outside 0..E-1 there is none.
        node_of_rank: the node of each rank, equally many ranks in each.
        planned: the crossings of a choice that the sizes of tasks were made with, own node and rank included.
    """
    routes_GE = placement.routes(node_of_rank)
    node_G = np.unique(np.asarray(node_of_rank), return_inverse=True)[1]
    num_nodes, num_ranks = int(node_G.max()) + 1, placement.num_ranks
    place_G = np.array([int((node_G[:rank] == node_G[rank]).sum()) for rank in range(num_ranks)])
    to_nodes_Gn, to_ranks_GG = np.zeros((num_ranks, num_nodes)), np.zeros((num_ranks, num_ranks))
    for rank, experts_SK in enumerate(tokens):
        is_choice = (experts_SK >= 0) & (experts_SK < placement.num_experts)
        num_choices = int(is_choice.sum())
        if not num_choices:
            continue
        ranks = routes_GE[rank][np.where(is_choice, experts_SK, 0)] // placement.per_rank
        is_on = np.zeros((len(experts_SK), num_ranks + 1), dtype=bool)
        np.put_along_axis(is_on, np.where(is_choice, ranks, num_ranks), True, axis=1)
        is_on = is_on[:, :num_ranks]
        # What was seen stands for all rows of the rank.
        share = rows_GE[rank].sum() / num_choices
        to_ranks_GG[rank] = share * is_on.sum(0)
        for node in range(num_nodes):
            to_nodes_Gn[rank, node] = share * is_on[:, node_G == node].any(1).sum()
    total = rows_GE.sum()
    if not total:
        return 1.0, 1.0, 1.0
    compute = fullest_over_mean(placement.rows_between(rows_GE, node_of_rank).sum(0))
    leaves = [to_nodes_Gn[node_G == node][:, np.arange(num_nodes) != node].sum() for node in range(num_nodes)]
    enters = [to_nodes_Gn[node_G != node, node].sum() for node in range(num_nodes)]
    even = total * planned.nodes * (num_nodes - 1) / num_nodes**2
    inter = max(*leaves, *enters) / even
    # A token comes to its relay in a node, the rank of its own place, which copies it to the others there.
    is_passed_GG = place_G[:, None] != place_G[None, :]
    arrives = (to_ranks_GG * is_passed_GG).sum(0)
    passes_on = [
        to_ranks_GG[place_G == place][:, (node_G == node) & (place_G != place)].sum()
        for node in range(num_nodes)
        for place in range(int(place_G.max()) + 1)
    ]
    per_node = num_ranks // num_nodes
    even = total * planned.ranks * (per_node - 1) / per_node / num_ranks
    intra = max(*arrives, *passes_on) / even if even else 1.0
    return compute, inter, intra

# SPDX-License-Identifier: Apache-2.0
"""Node-deduplicated dispatch: a token is sent to each node once, and is copied to its experts there.

The class only marks the algorithm. ``execution.row_chunks`` and ``execution.counts_exchange`` run it.
"""

from __future__ import annotations

from ds_fsmoe.components.alltoall import NodeDeduplicated
from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.registry import register_alltoall


@register_alltoall("node_deduplicated")
class NodeDeduplicatedAllToAll(FlatAllToAll, NodeDeduplicated):
    """Sends one row of a token to each node that has one of its experts, and forwards it to their ranks.

    Of k choices on n nodes, n rows are sent between nodes instead of k. Results are weighted and added up inside a
    node, and one row returns. It is the flat all-to-all for slots, one node, one rank per node, nodes of unequal size,
    and sharded experts.
    """

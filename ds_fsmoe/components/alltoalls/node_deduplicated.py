# SPDX-License-Identifier: Apache-2.0
"""Node-deduplicated dispatch: a token is sent to each node once, and copied to its experts there."""

from __future__ import annotations

from ds_fsmoe.components.alltoall import NodeDeduplicated
from ds_fsmoe.components.alltoalls.flat import FlatAllToAll
from ds_fsmoe.registry import register_alltoall


@register_alltoall("node_deduplicated")
class NodeDeduplicatedAllToAll(FlatAllToAll, NodeDeduplicated):
    """One row of a token goes to each node that has one of its experts, and on to the ranks of these.

    With k choices spread over n nodes, a row crosses to a node once instead of once for each choice there; results are
    weighted and added up in the node, and one row comes back. Where that cannot be (slots, one node, one rank in each,
    unequal nodes, sharded experts), this is the flat all-to-all.
    """

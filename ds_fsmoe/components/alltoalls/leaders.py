# SPDX-License-Identifier: Apache-2.0
"""The 1DH all-to-all: one rank of each node sends and receives for the whole node (HetuMoE: Nie et al., 2022).

Messages between nodes are fewer and larger than in ``two_steps``, but only one rank per node sends them.
``hierarchical`` runs its steps.
"""

from __future__ import annotations

from typing import ClassVar

from ds_fsmoe.components.hierarchical import HierarchicalAllToAll, Link, Nodes
from ds_fsmoe.registry import register_alltoall


@register_alltoall("1dh")
class LeadersAllToAll(HierarchicalAllToAll):
    """Gathers a node's blocks at its first rank, exchanges them between these ranks, and scatters them inside the
    nodes.

    Messages between nodes are few and large: one from each node to each other node. In return, all rows of a node pass
    one rank, and use the links inside the node twice.
    """

    links: ClassVar[tuple[Link, ...]] = ("intra", "inter", "intra")

    def forwarding_ranks(self, source: int, destination: int, nodes: Nodes) -> tuple[int, ...]:
        """Return the first rank of either node; see :meth:`HierarchicalAllToAll.forwarding_ranks`."""
        return nodes.neighbours(source)[0], nodes.neighbours(destination)[0]

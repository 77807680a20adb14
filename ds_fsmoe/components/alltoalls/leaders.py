# SPDX-License-Identifier: Apache-2.0
"""1DH: one rank of each node speaks for it (HetuMoE: Nie et al., 2022)."""

from __future__ import annotations

from typing import ClassVar

from ds_fsmoe.components.hierarchical import HierarchicalAllToAll, Link, Nodes
from ds_fsmoe.registry import register_alltoall


@register_alltoall("1dh")
class LeadersAllToAll(HierarchicalAllToAll):
    """Gathered at the first rank of the node, exchanged among these, handed out from there.

    Few and large messages between nodes: one from each node to each other one. But all that a node sends goes through
    one rank, twice over the links inside.
    """

    links: ClassVar[tuple[Link, ...]] = ("intra", "inter", "intra")

    def forwarding_ranks(self, source: int, destination: int, nodes: Nodes) -> tuple[int, ...]:
        """See :meth:`HierarchicalAllToAll.forwarding_ranks`."""
        return nodes.neighbours(source)[0], nodes.neighbours(destination)[0]

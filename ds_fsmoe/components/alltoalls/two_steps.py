# SPDX-License-Identifier: Apache-2.0
"""2DH: inside the nodes first, then among equals of all nodes (Tutel: Hwang et al., 2023)."""

from __future__ import annotations

from typing import ClassVar

from ds_fsmoe.components.hierarchical import HierarchicalAllToAll, Link, Nodes
from ds_fsmoe.registry import register_alltoall


@register_alltoall("2dh")
class TwoStepAllToAll(HierarchicalAllToAll):
    """Each rank collects from its neighbours what goes to its equals, the ranks with its number on other nodes.

    As many bytes between nodes as the flat way sends, in messages larger by the number of ranks per node, and all ranks
    of a node at work. Nodes may have unequal numbers of ranks: those of a smaller one stand in for the equals it lacks.
    """

    links: ClassVar[tuple[Link, ...]] = ("intra", "inter")

    def forwarding_ranks(self, source: int, destination: int, nodes: Nodes) -> tuple[int, ...]:
        """See :meth:`HierarchicalAllToAll.forwarding_ranks`."""
        neighbours = nodes.neighbours(source)
        return (neighbours[nodes.local_rank(destination) % len(neighbours)],)

# SPDX-License-Identifier: Apache-2.0
"""The 2DH all-to-all: first inside the nodes, then between ranks of the same local number (Tutel: Hwang et al., 2023).

All ranks of a node send between nodes, unlike in ``leaders``. ``hierarchical`` runs its steps, in two lanes.
"""

from __future__ import annotations

from typing import ClassVar

from ds_fsmoe.components.hierarchical import HierarchicalAllToAll, Link, Nodes
from ds_fsmoe.registry import register_alltoall


@register_alltoall("2dh")
class TwoStepAllToAll(HierarchicalAllToAll):
    """Collects rows inside a node by the local rank of their destination, then sends them between nodes.

    It sends as many bytes between nodes as the flat all-to-all. Its messages are larger by the number of ranks per
    node, and all ranks of a node send. Nodes may differ in size: ranks of a smaller node send for the local ranks that
    it lacks.
    """

    links: ClassVar[tuple[Link, ...]] = ("intra", "inter")

    def forwarding_ranks(self, source: int, destination: int, nodes: Nodes) -> tuple[int, ...]:
        """Return the source's neighbour with the destination's local rank; see
        :meth:`HierarchicalAllToAll.forwarding_ranks`."""
        neighbours = nodes.neighbours(source)
        return (neighbours[nodes.local_rank(destination) % len(neighbours)],)

# SPDX-License-Identifier: Apache-2.0
"""Makes the communicators of groups whose ranks are addressed in two levels: inside a node, and between nodes."""

from __future__ import annotations

from ds_fsmoe.distributed.groups import FSMoEGroups, make
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.planning.groups import in_levels, levels_of


def node_links(groups: FSMoEGroups, kind: str, purpose: str) -> NodeLinks | None:
    """Return the two levels of this rank's group of a kind. Collective: it may make communicators.

    Args:
        groups: the groups of a layer.
        kind: "ep", "dp" or "edp".
        purpose: "a2a" or "gradients"; the two have separate communicators.

    Returns:
        ``None`` where the ranks of any group of that kind, on whichever rank, are not equally many in several nodes.
    """
    ranks, node_of = getattr(groups.layout, kind), groups.topology.node_of_rank
    levels = levels_of(ranks, node_of)
    if not levels:
        return None
    of_links = [make(each, groups.max_ctas) for each in in_levels(purpose, ranks, node_of)]
    return NodeLinks(levels[groups.ranks_of(kind)], groups.index_in(kind), *of_links)

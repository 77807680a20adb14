# SPDX-License-Identifier: Apache-2.0
"""Makes the communicators of groups whose ranks are addressed in two levels: inside a node, and between nodes."""

from __future__ import annotations

from ds_fsmoe.distributed.groups import FSMoEGroups, make_parts
from ds_fsmoe.execution.node_links import NodeLinks, regular


def node_links(groups: FSMoEGroups, kind: str, purpose: str) -> NodeLinks | None:
    """Return the two levels of this rank's group of a kind. Collective: it may make communicators.

    Args:
        groups: the groups of a layer.
        kind: "ep", "dp" or "edp".
        purpose: two purposes have separate communicators.

    Returns:
        ``None`` where the ranks of any group of that kind, on whichever rank, are not equally many in several nodes.
    """
    node_of = groups.topology.node_of_rank
    levels = {ranks: regular([node_of[rank] for rank in ranks]) for ranks in getattr(groups.layout, kind)}
    if any(each is None for each in levels.values()):
        return None
    inside, between = [], []
    for ranks, nodes in levels.items():
        inside += [tuple(ranks[each] for each in part) for part in nodes or ()]
        between += [tuple(ranks[each] for each in part) for part in zip(*(nodes or ()), strict=True)]
    of_purpose = [
        make_parts(f"{purpose}_{link}", tuple(parts), groups.max_ctas)
        for link, parts in (("inter", between), ("intra", inside))
    ]
    own = levels[groups.ranks_of(kind)]
    assert own is not None
    return NodeLinks(own, groups.index_in(kind), *of_purpose)

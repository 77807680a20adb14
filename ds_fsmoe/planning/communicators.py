# SPDX-License-Identifier: Apache-2.0
"""Lists the communicators of a job: for which traffic, among which ranks. The engine makes its groups from these lists,
and the planner counts them.

A communicator is for one lane and one purpose. Gradients and updated parameters are one purpose, for the ones have
ended before the others begin. Two kinds of groups with the same ranks share a communicator of one purpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_fsmoe.planning.groups import Groups

Ranks = tuple[int, ...]
Kinds = Mapping[str, tuple[Ranks, ...]]
"""The groups of each kind: "ep", "esp", "mp", "dp", "edp", "blocks", which DeepSpeed takes for expert-parallel, and
where a model has stages, "stages": the ranks of one replica, one of each stage."""
Nodes = tuple[tuple[int, ...], ...]
"""Of each node the ranks of a group, as indices in the group."""


class Communicators(NamedTuple):
    """The communicators of one purpose for the groups of one kind; no rank is in two of them."""

    purpose: str
    ranks: tuple[Ranks, ...]
    """The ranks of each. A rank that is alone has none."""
    is_on_lane: bool = True
    """Whether their collectives run beside others, and have a limit of thread blocks."""


def of_deepspeed(kinds: Kinds) -> list[Communicators]:
    """Return those that DeepSpeed makes for its own reduction, broadcast and checkpoints, and for its pipelines."""
    found = [Communicators(kind, kinds[kind], False) for kind in ("blocks", "edp", "dp")]
    stages = kinds.get("stages", ())
    return found + [Communicators(purpose, stages, False) for purpose in ("model", "pipe") if stages]


def of_layers(kinds: Kinds, agreeing: tuple[Ranks, ...] | None = None) -> list[Communicators]:
    """Return those that an MoE layer has besides.

    Args:
        kinds: the groups.
        agreeing: the ranks that have to agree on a capacity, where DeepSpeed's blocks are too few; or ``None``.
    """
    found = [Communicators(kind, kinds[kind], kind != "mp") for kind in ("ep", "esp", "mp")]
    return found if agreeing is None else [*found, Communicators("capacity", agreeing, False)]


def of_gradients(ranks: tuple[Ranks, ...]) -> Communicators:
    """Return those for gradients and updated parameters of the groups of one kind."""
    return Communicators("gradients", ranks)


def in_levels(purpose: str, ranks: tuple[Ranks, ...], node_of_rank: Sequence[int]) -> list[Communicators]:
    """Return those between nodes and those inside them, for the groups of one kind; none where not all groups can be
    addressed in two levels.

    Args:
        purpose: "gradients", or "a2a" for tokens.
        ranks: the groups.
        node_of_rank: the node of each rank.
    """
    levels = levels_of(ranks, node_of_rank)
    between, inside = [], []
    for group, nodes in levels.items():
        inside += [tuple(group[each] for each in node) for node in nodes]
        between += [tuple(group[each] for each in place) for place in zip(*nodes, strict=True)]
    of_links = (("inter", between), ("intra", inside)) if levels else ()
    return [Communicators(f"{purpose}_{link}", tuple(sorted(parts))) for link, parts in of_links]


def levels_of(ranks: tuple[Ranks, ...], node_of_rank: Sequence[int]) -> dict[Ranks, Nodes]:
    """Return each group's ranks node by node; nothing, where any group cannot be addressed in two levels."""
    found: dict[Ranks, Nodes] = {}
    for group in ranks:
        nodes = regular([node_of_rank[rank] for rank in group])
        if nodes is None:
            return {}
        found[group] = nodes
    return found


def regular(nodes: Sequence[int]) -> Nodes | None:
    """Return the ranks of a group node by node, or ``None`` where they cannot be addressed in two levels.

    They can where several nodes have as many ranks each, more than one, and the ranks of a place come in the order of
    the nodes, as a communicator has them.

    Args:
        nodes: of each rank its node.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    ranks = tuple(map(tuple, ranks_of.values()))
    per_node = {len(each) for each in ranks}
    if len(ranks) < 2 or len(per_node) > 1 or per_node == {1}:
        return None
    in_order = all(list(each) == sorted(each) for each in zip(*ranks, strict=True))
    return ranks if in_order else None


def communicators(
    kinds: Kinds, node_of_rank: Sequence[int], *, sends_gradients: bool = True, alltoall: str = "flat"
) -> list[Communicators]:
    """Return all that a job has beside the default group, each once.

    Args:
        kinds: the groups.
        node_of_rank: the node of each rank.
        sends_gradients: whether gradients are ours to reduce.
        alltoall: the name of the all-to-all; "auto" tries those in two levels as well.
    """
    found = of_deepspeed(kinds) + of_layers(kinds)
    if alltoall != "flat":
        found += in_levels("a2a", kinds["ep"], node_of_rank)
    for kind in ("edp", "dp") if sends_gradients and len(kinds["dp"][0]) > 1 else ():
        found += [of_gradients(kinds[kind]), *in_levels("gradients", kinds[kind], node_of_rank)]
    return [each for each in dict.fromkeys(found) if any(len(ranks) > 1 for ranks in each.ranks)]


@lru_cache(maxsize=64)
def num_held(groups: Groups, sends_gradients: bool, alltoall: str = "flat") -> int:
    """Return how many communicators a rank holds beside the default group; see :func:`communicators`.

    Args:
        groups: the groups, whose ranks are neighbours on nodes.
        sends_gradients, alltoall: see :func:`communicators`.
    """
    node_of_rank = [rank // groups.gpus_per_node for rank in range(groups.world)]
    return len(communicators(kinds_of(groups), node_of_rank, sends_gradients=sends_gradients, alltoall=alltoall))


def kinds_of(groups: Groups) -> dict[str, tuple[Ranks, ...]]:
    """Return the ranks of all groups of each kind."""
    found = {kind: _strided(groups.world, *at) for kind, at in groups.strides.items()}
    found["blocks"] = _strided(groups.world, groups.ep * groups.esp, 1)
    return found | ({"stages": _strided(groups.world, groups.pp, groups.stage)} if groups.pp > 1 else {})


def _strided(world: int, size: int, stride: int) -> tuple[Ranks, ...]:
    ranks = np.arange(world).reshape(-1, size, stride).transpose(0, 2, 1).reshape(-1, size)
    return tuple(map(tuple, ranks.tolist()))

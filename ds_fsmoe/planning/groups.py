# SPDX-License-Identifier: Apache-2.0
"""Defines the process groups: which ranks communicate with each other, and over which links. The engine makes them,
and the planner prices them.

Per pipeline stage, world = mp x dp = esp x ep x edp. MP and ESP groups are neighbours, EP strides over ESP groups, DP
and EDP over the remaining ranks. No size has to equal another, or the number of GPUs per node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import comb
from typing import Any, NamedTuple

import numpy as np

from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.untrusted import MOST_RANKS


@dataclass(frozen=True, slots=True)
class Placement:
    """Describes how a kind of group is placed on nodes."""

    size: int
    per_node: int
    """The largest number of ranks that a group has in one node."""
    lanes: tuple[Lane, ...]
    """The links that a group crosses: none (one rank), the intra-node one, the inter-node one (at most one rank of a
    group per node), or both, the inter-node one first."""
    nodes: int = 1
    """The largest number of nodes over which a group spreads."""

    @classmethod
    def over(cls, size: int, per_node: int, nodes: int) -> Placement:
        """Return the placement whose links follow from how many ranks of a group share a node."""
        return cls(size, per_node, (Lane.INTER,) * (nodes > 1) + (Lane.INTRA,) * (per_node > 1), nodes)


@dataclass(frozen=True)
class Groups:
    """Holds the sizes of the process groups.

    Raises:
        ValueError: a size is below 1, or the sizes do not multiply to the world.
    """

    world: int
    gpus_per_node: int
    mp: int = 1
    """The model-parallel size: attention is split over this many ranks."""
    esp: int = 1
    """The expert-sharding size: each expert is split over this many ranks."""
    ep: int = 1
    """The expert-parallel size: the experts are spread over this many ranks."""
    dp: int | None = None
    """The data-parallel size; ``None``: the rest of the world."""
    pp: int = 1
    """The number of pipeline stages."""

    def __post_init__(self) -> None:
        for name in ("world", "gpus_per_node", "mp", "esp", "ep", "pp", *(() if self.dp is None else ("dp",))):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value}: must be a whole number of at least 1")
            if value > MOST_RANKS:
                raise ValueError(f"{name} = {value}: must be at most {MOST_RANKS}")
        if self.world % self.pp:
            raise ValueError(f"pp = {self.pp}: must divide the world size {self.world}")
        if self.stage % self.mp or (self.dp is not None and self.mp * self.dp != self.stage):
            dp = "any dp" if self.dp is None else f"dp = {self.dp}"
            raise ValueError(
                f"mp = {self.mp} and {dp} do not multiply to the {self.stage} ranks "
                f"{'of a pipeline stage' if self.pp > 1 else 'of the world'}"
            )
        if self.stage % (self.ep * self.esp):
            fits = [each for each in range(1, self.stage + 1) if self.stage % (each * self.esp) == 0]
            raise ValueError(
                f"ep_size = {self.ep} times expert_tensor_parallel_size = {self.esp} = {self.ep * self.esp}: must "
                f"divide the {self.stage} ranks {'of a pipeline stage' if self.pp > 1 else 'of the world'}"
                + (f"; ep_size can be {', '.join(map(str, fits))}" if fits else "")
            )

    @property
    def stage(self) -> int:
        """Return the number of ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def edp(self) -> int:
        """Return the expert-data-parallel size: the number of ranks with the same experts."""
        return self.stage // (self.ep * self.esp)

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Return group kind (``mp``, ``dp``, ``esp``, ``ep``, ``edp``) -> its links and its ranks per node."""
        return {name: self._place(size, stride) for name, (size, stride) in self.strides.items()}

    @property
    def strides(self) -> dict[str, tuple[int, int]]:
        """Return the (size, stride between ranks) of the groups of each kind."""
        return {
            "mp": (self.mp, 1),
            "dp": (self.stage // self.mp, self.mp),
            "esp": (self.esp, 1),
            "ep": (self.ep, self.esp),
            "edp": (self.edp, self.ep * self.esp),
        }

    def _place(self, size: int, stride: int) -> Placement:
        if size == 1:
            return Placement(1, 1, ())
        # Looked up rank by rank: where nodes and groups do not line up, the worst group counts.
        ranks = np.arange(self.world).reshape(-1, size, stride).transpose(0, 2, 1).reshape(-1, size)
        nodes = ranks // self.gpus_per_node
        begins = np.ones(nodes.shape, dtype=bool)
        begins[:, 1:] = nodes[:, 1:] != nodes[:, :-1]
        per_node = int(np.diff(np.append(np.flatnonzero(begins), self.world)).max())
        return Placement.over(size, per_node, int(begins.sum(axis=1).max()))


@dataclass(frozen=True)
class PlacedGroups(Groups):
    """Holds groups with explicit placements, from the hosts of ranks or from a recorded run."""

    placed: tuple[tuple[str, Placement], ...] = ()

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Return group kind (``mp``, ``dp``, ``esp``, ``ep``, ``edp``) -> its links and its ranks per node."""
        return dict(self.placed)


# ---- communicators: for which traffic, among which ranks
#
# The engine makes its groups from these lists, and the planner counts them. A communicator is for one lane and one
# purpose. Gradients and updated parameters are one purpose, for the ones have ended before the others begin. Two kinds
# of groups with the same ranks share a communicator of one purpose.

Ranks = tuple[int, ...]
Kinds = Mapping[str, tuple[Ranks, ...]]
"""The groups of each kind: "ep", "esp", "mp", "dp", "edp", "blocks", which DeepSpeed takes for expert-parallel, and
where a model has stages, "stages": the ranks of one replica, one of each stage."""
Nodes = tuple[tuple[int, ...], ...]
"""Of each node the ranks of a group, as indices in the group."""


class Communicators(NamedTuple):
    """Describes the communicators of one purpose for the groups of one kind; no rank is in two of them."""

    purpose: str
    ranks: tuple[Ranks, ...]
    """The ranks of each. A rank that is alone has none."""
    is_on_lane: bool = True
    """Whether their collectives run beside others, and have a limit of thread blocks."""


def of_deepspeed(kinds: Kinds) -> list[Communicators]:
    """Return the communicators that DeepSpeed makes for its own reduction, broadcast and checkpoints, and for its
    pipelines.
    """
    found = [Communicators(kind, kinds[kind], False) for kind in ("blocks", "edp", "dp")]
    stages = kinds.get("stages", ())
    return found + [Communicators(purpose, stages, False) for purpose in ("model", "pipe") if stages]


def of_layers(kinds: Kinds, agreeing: tuple[Ranks, ...] | None = None) -> list[Communicators]:
    """Return the communicators that an MoE layer adds.

    Args:
        kinds: the groups.
        agreeing: the ranks that agree on a capacity; ``None``: DeepSpeed's blocks suffice.
    """
    found = [Communicators(kind, kinds[kind], kind != "mp") for kind in ("ep", "esp", "mp")]
    return found if agreeing is None else [*found, Communicators("capacity", agreeing, False)]


def of_gradients(ranks: tuple[Ranks, ...]) -> Communicators:
    """Return the communicators for gradients and updated parameters of the groups of one kind."""
    return Communicators("gradients", ranks)


def in_levels(purpose: str, ranks: tuple[Ranks, ...], node_of_rank: Sequence[int]) -> list[Communicators]:
    """Return the communicators between nodes and inside them, for the groups of one kind. The list is empty if a
    group cannot be addressed in two levels.

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
    """Return each group's ranks by node; empty if a group cannot be addressed in two levels."""
    found: dict[Ranks, Nodes] = {}
    for group in ranks:
        nodes = regular([node_of_rank[rank] for rank in group])
        if nodes is None:
            return {}
        found[group] = nodes
    return found


def regular(nodes: Sequence[int]) -> Nodes | None:
    """Return the ranks of a group by node, or None if they cannot be addressed in two levels.

    They can if several nodes have the same number of ranks, more than one. The i-th ranks of the nodes also have to be
    in the order of the nodes, as a communicator needs.

    Args:
        nodes: the node of each rank.
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
    """Return all communicators of a job besides the default group, each once.

    Args:
        kinds: the groups.
        node_of_rank: the node of each rank.
        sends_gradients: whether ds_fsmoe reduces the gradients.
        alltoall: the name of the all-to-all; "auto" tries those in two levels as well.
    """
    found = of_deepspeed(kinds) + of_layers(kinds)
    if alltoall != "flat":
        found += in_levels("a2a", kinds["ep"], node_of_rank)
    for kind in ("edp", "dp") if sends_gradients and len(kinds["dp"][0]) > 1 else ():
        found += [of_gradients(kinds[kind]), *in_levels("gradients", kinds[kind], node_of_rank)]
    return [each for each in dict.fromkeys(found) if any(len(ranks) > 1 for ranks in each.ranks)]


@lru_cache(maxsize=64)
def num_communicators(groups: Groups, sends_gradients: bool, alltoall: str = "flat") -> int:
    """Return the number of communicators of a rank besides the default group; see :func:`communicators`.

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


# ---- the fan-out of a token to other ranks and nodes: one row per choice, or one per rank or node with some choices
#
# Letters: E experts, K choices of a token, n nodes, p ranks of an EP group in a node.


@dataclass(frozen=True, slots=True)
class Fanout:
    """Holds the average number of nodes and ranks with experts of a token. Its own node and rank count too."""

    nodes: float
    ranks: float


def can_deduplicate(groups: Groups) -> bool:
    """Return True if node-deduplicated dispatch is possible: whole experts, on several ranks in each of several
    nodes.
    """
    at = groups.placements["ep"]
    return groups.esp == 1 and at.nodes > 1 and at.per_node > 1 and at.size == at.nodes * at.per_node


def expected_fanout(num_experts: int, k: int, nodes: int, per_node: int, groups: int = 1, of_groups: int = 1) -> Fanout:
    """Return the fan-out if all choices of k experts are equally likely.

    Args:
        num_experts: E, placed on the ranks in their order.
        k: K.
        nodes: the number of nodes, n.
        per_node: the ranks per node, p.
        groups: the number of groups of experts, of which a token first chooses some.
        of_groups: the number of groups that a token chooses.

    Raises:
        ValueError: groups or places do not divide the experts, or a group spans places.
    """
    return Fanout(
        *(_expected(num_experts, k, places, groups, of_groups) for places in (nodes, nodes * per_node)),
    )


def _expected(num_experts: int, k: int, places: int, groups: int, of_groups: int) -> float:
    """Return the expected number of places that have one of the choices."""
    if num_experts % places or num_experts % groups:
        raise ValueError(f"E = {num_experts}: must be divisible by {places} places and by {groups} groups")
    if max(places, groups) % min(places, groups):
        raise ValueError(f"groups = {groups}: must divide {places} places, or be a multiple of them")
    size, group = num_experts // places, num_experts // groups
    chosen = of_groups * group
    if not 1 <= of_groups <= groups or k > chosen:
        raise ValueError(f"of_groups = {of_groups}: must be in 1..{groups}, with K = {k} experts or more in them")
    if size <= group:
        # The place is inside one group.
        missed = comb(chosen - size, k) / comb(chosen, k)
        return places * of_groups / groups * (1 - missed)
    own = size // group
    missed = sum(
        comb(own, taken) * comb(groups - own, of_groups - taken) * comb(chosen - taken * group, k)
        for taken in range(min(own, of_groups) + 1)
    )
    return places * (1 - missed / (comb(groups, of_groups) * comb(chosen, k)))


def counted_fanout(experts_SK: Any, num_experts: int, nodes: int, per_node: int) -> Fanout:
    """Return the fan-out of recorded or synthetic routing.

    Args:
        experts_SK: the experts of each token, [S, K] integers; values outside 0..E-1 mean no expert.
        num_experts: E, placed on the ranks in their order.
        nodes: the number of nodes, n.
        per_node: the ranks per node, p.
    """
    experts = np.asarray(experts_SK)
    found = []
    for places in (nodes, nodes * per_node):
        is_there = np.zeros((len(experts), places + 1), dtype=bool)
        is_choice = (experts >= 0) & (experts < num_experts)
        place = np.where(is_choice, experts * places // num_experts, places)
        np.put_along_axis(is_there, place.astype(np.int64), True, axis=1)
        found.append(float(is_there[:, :-1].sum(1).mean()) if len(experts) else 0.0)
    return Fanout(*found)

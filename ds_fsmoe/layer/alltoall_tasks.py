# SPDX-License-Identifier: Apache-2.0
"""Runs an all-to-all in the groups of a layer: in one task or in two, and on which communicators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from ds_fsmoe.components.alltoall import AllToAllBase, CrossesOnce
from ds_fsmoe.components.hierarchical import HierarchicalAllToAll, Nodes, Relays, Route
from ds_fsmoe.distributed.groups import FSMoEGroups, make
from ds_fsmoe.execution.collectives import Leg, RowExchange, RowLeg
from ds_fsmoe.execution.node_links import NodeLinks
from ds_fsmoe.execution.row_sizes import PassedOn
from ds_fsmoe.layer.node_levels import node_links
from ds_fsmoe.planning.communicators import Communicators, Ranks
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE
from ds_fsmoe.planning.workload import ONCE_PER_NODE, AllToAll


@dataclass(frozen=True)
class Exchange:
    """Holds an all-to-all that is ready to be run."""

    whole: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
    """The whole all-to-all at once: see :meth:`AllToAllBase.exchange`."""
    legs: Mapping[str, Leg] = field(default_factory=dict)
    """The steps of the all-to-all, see :attr:`Collectives.legs`."""
    rows: RowExchange | None = None
    """The whole all-to-all for rows: see :meth:`AllToAllBase.exchange_rows`; ``None``: it is for slots only."""
    row_legs: Mapping[str, RowLeg] = field(default_factory=dict)
    """The steps of the all-to-all for rows."""
    passes_on: PassedOn | None = None
    """Of which rows that rest on other ranks on their way those have to know how many they are."""
    nodes: NodeLinks | None = None
    """The two levels of the EP group, where each token crosses to a node once."""
    why_flat: str = ""
    """Why it is the flat all-to-all where something else was asked for."""

    @property
    def planned(self) -> AllToAll:
        """The planner's name for what is run."""
        if self.nodes is not None:
            return ONCE_PER_NODE
        return "2dh" if self.legs else "flat"


def exchange_in(groups: FSMoEGroups, alltoall: AllToAllBase) -> Exchange:
    """Prepare an all-to-all in the EP groups of a layer. Collective: it may make communicators.

    Whether it is in steps follows from the nodes of all EP groups, not of this rank's, because the schedule has to be
    the same on every rank. On one kind of link steps gain nothing, and the flat way is used.

    Raises:
        ValueError: a hierarchical all-to-all contradicts itself, on every rank.
    """
    if isinstance(alltoall, CrossesOnce):
        return _crossing_once(groups, alltoall)
    if not isinstance(alltoall, HierarchicalAllToAll) or len(groups.planned.placements["ep"].lanes) < 2:
        return Exchange(alltoall.exchange, rows=alltoall.exchange_rows if alltoall.takes_rows else None)
    all_ranks = groups.layout.ep
    nodes_of = {ranks: Nodes.of(groups.topology.node_of_rank[rank] for rank in ranks) for ranks in all_ranks}
    relays_of = {nodes: Relays(alltoall, nodes) for nodes in dict.fromkeys(nodes_of.values())}
    # Steps along one kind of link share communicators where they have the same parts, and those along another do not:
    # each is on one lane.
    communicators = tuple(
        make(Communicators(f"a2a_{link}", _parts(all_ranks, relays_of, nodes_of, step)), groups.max_ctas)
        for step, link in enumerate(alltoall.links)
    )
    own_ranks = groups.ranks_of("ep")
    own, me = nodes_of[own_ranks], groups.index_in("ep")

    def route(relays: Relays, groups_of_steps: tuple[dist.ProcessGroup | None, ...]) -> Route:
        return Route(tuple(relays.hop(step, me) for step in range(len(relays.links))), groups_of_steps)

    way_in = route(relays_of[own], communicators)
    passes_on = PassedOn(*relays_of[own].told(me))
    if alltoall.links != ("intra", "inter"):
        return Exchange(way_in.exchange, rows=way_in.exchange_rows, passes_on=passes_on)
    way_out = route(Relays(alltoall, own, back=True), communicators[::-1])
    legs = {
        A2A_IN_NODE: lambda blocks: way_in.step(0, blocks),
        A2A_IN: lambda blocks: way_in.step(1, blocks),
        A2A_OUT: lambda blocks: way_out.step(0, blocks),
        A2A_OUT_NODE: lambda blocks: way_out.step(1, blocks),
    }
    row_legs = {
        A2A_IN_NODE: lambda x_RM, sizes: way_in.step_sized(0, x_RM, sizes.between),
        A2A_IN: lambda x_RM, sizes: way_in.step_sized(1, x_RM, sizes.between),
        A2A_OUT: lambda y_RM, sizes: way_out.step_sized(0, y_RM, sizes.between),
        A2A_OUT_NODE: lambda y_RM, sizes: way_out.step_sized(1, y_RM, sizes.between),
    }
    return Exchange(way_in.exchange, legs, way_in.exchange_rows, row_legs, passes_on=passes_on)


def _parts(
    all_ranks: tuple[Ranks, ...], relays_of: Mapping[Nodes, Relays], nodes_of: Mapping[Ranks, Nodes], step: int
) -> tuple[Ranks, ...]:
    """Return the ranks that talk to each other in a step, of all groups."""
    parts = [
        tuple(ranks[each] for each in part) for ranks in all_ranks for part in relays_of[nodes_of[ranks]].parts(step)
    ]
    return tuple(sorted(parts))


def _crossing_once(groups: FSMoEGroups, alltoall: AllToAllBase) -> Exchange:
    """Prepare the two levels, or say why it is the flat way. Collective."""
    flat = Exchange(alltoall.exchange, rows=alltoall.exchange_rows)
    if groups.planned.esp > 1 or groups.layout.tensor_parallel_experts:
        return replace(flat, why_flat="each expert is split over several ranks")
    nodes = node_links(groups, "ep", "a2a")
    if nodes is None:
        return replace(flat, why_flat="the ranks that share experts are not equally many, at least 2, in several nodes")
    return replace(flat, nodes=nodes)

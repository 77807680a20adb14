# SPDX-License-Identifier: Apache-2.0
"""Predicts the cost of a placement of experts: a layer's time under its skew, and the time to move experts there.
Placement policies and the engine's placement watch call it.

A layer waits for the busiest: the rank with most rows at its experts, and on each kind of link the port with most
traffic in one direction. Costs are known for balanced routing. So skew is a factor on the sizes of tasks, a
:class:`Pressure`. Moves of experts are priced as the all-to-all that sends as many bytes through the fullest port.

Letters: E experts, G ranks that share them, n nodes, K choices of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_fsmoe.planning.block import LayerPlan
from ds_fsmoe.planning.call_shape import CallShape, sized, sized_timeline
from ds_fsmoe.planning.cost import LayerCosts
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.groups import Fanout, Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_IN_NODE,
    A2A_OUT,
    A2A_OUT_NODE,
    COLLECT,
    EXPERT,
    GATHER,
    REDUCE,
    SPREAD,
    Lane,
    Schedule,
)
from ds_fsmoe.planning.timeline import IDEAL, Contention
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED, AllToAll


@dataclass(frozen=True, eq=False)
class ObservedRouting:
    """Holds the measured routing of one layer.

    Raises:
        ValueError: rows are not finite numbers of at least 0 in G rows, or ``node_of_rank`` has another length.
    """

    rows_GE: np.ndarray
    """[G, E]: the mean rows per step that each rank of the EP group sends to each expert; with several EP groups, the
    mean of the ranks at the same index."""
    node_of_rank: tuple[int, ...]
    """The node of each of G ranks."""
    tokens: tuple[np.ndarray, ...] = ()
    """For each of G ranks the experts of some of its tokens, [tokens, K]; none where that was not seen."""

    def __post_init__(self) -> None:
        rows = np.asarray(self.rows_GE, dtype=float)
        if rows.ndim != 2 or len(rows) != len(self.node_of_rank):
            raise ValueError(
                f"rows {list(rows.shape)}: must be [G, E], of the {len(self.node_of_rank)} ranks whose nodes are given"
            )
        if not (np.isfinite(rows) & (rows >= 0)).all():
            raise ValueError("rows: must be finite numbers of at least 0")
        object.__setattr__(self, "rows_GE", rows)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Holds the ratios of the largest load to that of balanced routing, per lane."""

    compute: float = 1.0
    """The rows at the experts of the fullest rank over the mean."""
    inter: float = 1.0
    """The rows that leave or enter the node with most of them; below 1 where tokens are near their experts."""
    intra: float = 1.0
    """The rows that the rank with most of them sends to others of its node, or gets from them."""


BALANCED = Pressure()
_COMPUTE = (EXPERT, GATHER, REDUCE)
_BETWEEN = (A2A_IN, A2A_OUT)
_INSIDE = (A2A_IN_NODE, A2A_OUT_NODE, SPREAD, COLLECT)
_Traffic = tuple[np.ndarray, np.ndarray]
"""([n, n] what each node sends to each, [G, G] what each rank sends to each of its node)."""


def pressure_of(placement: ExpertPlacement, observed: ObservedRouting) -> Pressure:
    """Return the pressure of a layer with this placement and these rows.

    A factor is 1 where balanced routing has no such rows either, as between nodes of a single node, or without any
    rows.
    """
    rows_GG, is_in_nG = placement.rows_between(observed.rows_GE), _ranks_of_nodes(observed.node_of_rank)
    ours, even = (
        (is_in_nG @ each_GG @ is_in_nG.T, each_GG * (is_in_nG.T @ is_in_nG))
        for each_GG in (rows_GG, np.full_like(rows_GG, rows_GG.mean()))
    )
    return _pressure(placement, observed, ours, even)


def node_deduplicated_pressure(placement: ExpertPlacement, observed: ObservedRouting, planned: Fanout) -> Pressure:
    """Return the pressure with node-deduplicated dispatch, counted with the observed tokens.

    Counts of rows do not suffice: two experts of a token in one node need one copy there, and so do two on one rank.

    Args:
        placement: the placement of the experts.
        observed: the measured routing, with tokens; nodes have equally many ranks.
        planned: the fan-out of a choice behind the sizes of tasks, own node and rank included.
    """
    is_in_nG = _ranks_of_nodes(observed.node_of_rank)
    num_nodes, num_ranks = is_in_nG.shape
    place_G = (is_in_nG.cumsum(axis=1) * is_in_nG).sum(axis=0)
    to_nodes_Gn, to_ranks_GG = np.zeros((num_ranks, num_nodes)), np.zeros((num_ranks, num_ranks))
    for rank, experts_SK in enumerate(observed.tokens):
        is_choice = (experts_SK >= 0) & (experts_SK < placement.num_experts)
        if not is_choice.any():
            continue
        ranks = placement.rank_of_expert[np.where(is_choice, experts_SK, 0)]
        is_on = np.zeros((len(experts_SK), num_ranks + 1))
        np.put_along_axis(is_on, np.where(is_choice, ranks, num_ranks), 1.0, axis=1)
        is_on = is_on[:, :num_ranks]
        # What was seen stands for all rows of the rank.
        share = observed.rows_GE[rank].sum() / is_choice.sum()
        to_ranks_GG[rank] = share * is_on.sum(axis=0)
        to_nodes_Gn[rank] = share * (is_on @ is_in_nG.T > 0).sum(axis=0)
    # A token comes to its relay in a node, the rank of its own place, which copies it to the others there.
    by_relay_GG, is_near_GG = (place_G[:, None] == place_G) @ to_ranks_GG, is_in_nG.T @ is_in_nG
    ours = is_in_nG @ to_nodes_Gn, by_relay_GG * is_near_GG
    total = observed.rows_GE.sum()
    even_nn = np.full((num_nodes, num_nodes), total * planned.nodes / num_nodes**2)
    even_GG = is_near_GG * (total * planned.ranks * num_nodes / num_ranks**2)
    return _pressure(placement, observed, ours, (even_nn, even_GG))


def _ranks_of_nodes(node_of_rank: Sequence[int]) -> np.ndarray:
    """Return a matrix with 1 where a rank is in a node and 0 elsewhere, [n, G]."""
    return (np.unique(node_of_rank)[:, None] == np.asarray(node_of_rank)).astype(float)


def _fullest_port(sent_XX: np.ndarray) -> float:
    """Return the largest amount that one rank or node sends to the others, or receives from them."""
    to_others_XX = np.where(np.eye(len(sent_XX), dtype=bool), 0.0, sent_XX)
    return float(max(to_others_XX.sum(axis=axis).max() for axis in (0, 1)))


def _pressure(placement: ExpertPlacement, observed: ObservedRouting, ours: _Traffic, even: _Traffic) -> Pressure:
    """Return, per lane, the largest load under the observed routing over that under balanced routing; 1 is even."""
    inter, intra = (
        _fullest_port(own) / fullest if (fullest := _fullest_port(other)) > 0 else 1.0
        for own, other in zip(ours, even, strict=True)
    )
    return Pressure(placement.over_mean(observed.rows_GE), inter, intra)


def under(run: Schedule, pressure: Pressure, groups: Groups) -> Schedule:
    """Return the schedule of a layer with the sizes of its tasks under a pressure.

    Experts, and the gathers and reduces over their shards, grow with the rows of the fullest rank. The all-to-all grows
    with the fullest port of a node, or inside the node if the EP group is in one. Its part inside the node grows with
    the fullest port there. That part also forwards rows of other nodes, which are assumed to have the same skew.

    Args:
        run: the tasks with their sizes in balanced routing.
        pressure: the pressure.
        groups: the process groups that run the layer.
    """
    is_spread = Lane.INTER in groups.placements["ep"].lanes
    factors = dict.fromkeys(_COMPUTE, pressure.compute) | dict.fromkeys(_INSIDE, pressure.intra)
    factors |= dict.fromkeys(_BETWEEN, pressure.inter if is_spread else pressure.intra)
    return Schedule(tuple(replace(task, size=task.size * factors.get(task.kind, 1.0)) for task in run.tasks))


def as_alltoall_bytes(sent_GG: np.ndarray, node_of_rank: Sequence[int]) -> float:
    """Return the bytes per rank of the even all-to-all that loads the fullest port as much as this exchange.

    A rank keeps 1/G of its buffer. Rows for other nodes use the port of its node, which the node's ranks share. Only
    the fullest of all ports counts, of a rank or node, in or out.

    Args:
        sent_GG: the bytes that each rank sends to each, [G, G].
        node_of_rank: the node of each rank.
    """
    num_ranks, is_in_nG = len(node_of_rank), _ranks_of_nodes(node_of_rank)
    sent_GG, even_GG = np.asarray(sent_GG, dtype=float), np.full((num_ranks, num_ranks), 1 / num_ranks)
    ours, even = (
        [_fullest_port(each) for each in (of_ranks_GG, is_in_nG @ of_ranks_GG @ is_in_nG.T)]
        for of_ranks_GG in (sent_GG, even_GG)
    )
    return max(own / other if other > 0 else 0.0 for own, other in zip(ours, even, strict=True))


@dataclass(frozen=True, eq=False)
class Prices:
    """Holds everything needed to price placements of one layer."""

    shape: CallShape
    """The sizes of a call in balanced routing."""
    groups: Groups
    plan: LayerPlan
    costs: LayerCosts
    moved_bytes: float
    """The bytes that move with one expert: its weights and its optimizer states."""
    alltoall: AllToAll = "flat"
    """The all-to-all as the planner knows it."""
    contention: Contention = IDEAL
    is_serial: bool = False
    micro_batches: int = 1
    """The calls of the layer in an optimizer step."""
    recompute: bool = False

    def layer_ms(self, pressure: Pressure) -> float:
        """Return the ms of forward and backward of one call of the layer's experts' part, without gradient slices.

        Raises:
            ValueError: a cost is missing.
        """
        same_chunks = self.plan.forward.degree == self.plan.backward.degree
        times_ms = []
        for backward, block in enumerate((self.plan.forward, self.plan.backward)):
            phase = PhasePlan(block, self.groups, bool(backward), self.alltoall, narrow=self.shape.narrow)
            run = under(sized(phase.schedule, phase, self.shape), pressure, self.groups)
            how = self.costs, same_chunks, self.contention, self.is_serial
            times_ms.append(sized_timeline(run, bool(backward), *how).makespan_ms)
        return (1 + self.recompute) * times_ms[0] + times_ms[1]

    def step_ms(self, placement: ExpertPlacement, observed: ObservedRouting) -> float:
        """Return the ms of the layer's experts' part in one step."""
        if self.alltoall == NODE_DEDUPLICATED and observed.tokens and self.shape.crossings is not None:
            pressure = node_deduplicated_pressure(placement, observed, self.shape.crossings)
        else:
            pressure = pressure_of(placement, observed)
        return self.micro_batches * self.layer_ms(pressure)

    def moves_ms(self, now: ExpertPlacement, wanted: ExpertPlacement, node_of_rank: Sequence[int]) -> float:
        """Return the ms to move all experts to another placement in one exchange: each goes to its rank directly."""
        moved_GG = np.zeros((now.num_ranks, now.num_ranks))
        np.add.at(moved_GG, (now.rank_of_expert, wanted.rank_of_expert), self.moved_bytes)
        size_bytes = as_alltoall_bytes(moved_GG, node_of_rank)
        return self.costs.forward[A2A_IN].ms(size_bytes) if size_bytes else 0.0

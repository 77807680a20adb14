# SPDX-License-Identifier: Apache-2.0
"""What a placement of experts costs: a layer under the skew that it leaves, its replicas, and the way to it.

A layer waits for whoever has most to do: the rank with most rows at its experts, and on each kind of link the port with
most traffic in one direction. The costs of tasks were measured, or published, for routing in which every rank has as
many rows for each rank, so that skew is a factor on the sizes of tasks, a :class:`Pressure`. What else is exchanged,
replicas and experts that move, is priced as the all-to-all that gives the fullest port as many bytes.

Letters: E experts, G ranks that share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_fsmoe.planning.call_shape import CallShape, sized, sized_timeline
from ds_fsmoe.planning.cost import Cost
from ds_fsmoe.planning.expert_placement import ExpertPlacement, fullest_over_mean
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.layer_costs import LayerCosts
from ds_fsmoe.planning.layer_plan import LayerPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.placement_crossings import once_per_node_factors
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
from ds_fsmoe.planning.workload import ONCE_PER_NODE, AllToAll


@dataclass(frozen=True, eq=False)
class Seen:
    """What was measured of one layer.

    Raises:
        ValueError: rows that are no finite numbers of at least 0 in G rows, or nodes of another number of ranks.
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
    """The factors by which the most that anybody has to do lies above what balanced routing gives to everybody."""

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


def pressure_of(placement: ExpertPlacement, seen: Seen) -> Pressure:
    """Return the pressure under which a layer would run with this placement and these rows.

    A factor is 1 where balanced routing has no such rows either, as between nodes where there is one, or where there
    are no rows at all.
    """
    rows_GG = placement.rows_between(seen.rows_GE, seen.node_of_rank)
    even_GG = np.full_like(rows_GG, rows_GG.sum() / rows_GG.size)
    ours, even = (_fullest_ports(each, seen.node_of_rank) for each in (rows_GG, even_GG))
    inter, intra = (ours[name] / even[name] if even[name] > 0 else 1.0 for name in ("node", "inside"))
    return Pressure(fullest_over_mean(rows_GG.sum(axis=0)), inter, intra)


def _fullest_ports(sent_GG: np.ndarray, node_of_rank: Sequence[int]) -> dict[str, float]:
    """Return the most that one port has to carry in one direction: of a rank, of a rank inside its node, of a node."""
    node_G = np.asarray(node_of_rank)
    is_near_GG = node_G[:, None] == node_G
    to_others_GG = np.where(np.eye(len(node_G), dtype=bool), 0.0, sent_GG)
    inside_GG, between_GG = np.where(is_near_GG, to_others_GG, 0.0), np.where(is_near_GG, 0.0, to_others_GG)
    of_rank, of_inside = (max(each.sum(axis=1).max(), each.sum(axis=0).max()) for each in (to_others_GG, inside_GG))
    number_G = np.unique(node_G, return_inverse=True)[1]
    of_node = max(np.bincount(number_G, weights=between_GG.sum(axis=axis)).max() for axis in (0, 1))
    return {"rank": float(of_rank), "inside": float(of_inside), "node": float(of_node)}


def under(run: Schedule, pressure: Pressure, groups: Groups) -> Schedule:
    """Return a schedule of a layer with the sizes that its tasks have under a pressure.

    Experts, and what is gathered and reduced over shards of them, grow with the rows of the fullest rank, the
    all-to-all with those of the fullest port of a node, or inside the node where the EP group lies in one, and its part
    inside the node with the fullest port there. That part also hands on rows of other nodes, which are taken to be
    skewed alike.

    Args:
        run: the tasks with their sizes in balanced routing.
        pressure: the pressure.
        groups: the process groups that run the layer.
    """
    is_spread = Lane.INTER in groups.placements["ep"].lanes
    factors = dict.fromkeys(_COMPUTE, pressure.compute) | dict.fromkeys(_INSIDE, pressure.intra)
    factors |= dict.fromkeys(_BETWEEN, pressure.inter if is_spread else pressure.intra)
    return Schedule(tuple(replace(task, size=task.size * factors.get(task.kind, 1.0)) for task in run.tasks))


def layer_ms(
    pressure: Pressure,
    shape: CallShape,
    groups: Groups,
    plan: LayerPlan,
    costs: LayerCosts,
    alltoall: AllToAll = "flat",
    contention: Contention = IDEAL,
    is_serial: bool = False,
    recompute: bool = False,
) -> float:
    """Return the time of forward and backward of one call of a layer's experts' part, without slices of gradients.

    Args:
        pressure: how far the fullest lie above balanced routing.
        shape: the sizes of a call in balanced routing.
        groups: the process groups that run it.
        plan: how it is run; its all-to-all is the next but one argument.
        costs: the costs of its tasks.
        alltoall: the all-to-all as the planner knows it.
        contention: how lanes slow each other down.
        is_serial: whether all tasks run one after another.
        recompute: whether the forward runs again ahead of the backward.

    Raises:
        ValueError: a cost is missing.
    """
    same_chunks = plan.forward.degree == plan.backward.degree
    times_ms = []
    for backward, block in enumerate((plan.forward, plan.backward)):
        phase = PhasePlan(block, groups, bool(backward), alltoall)
        run = under(sized(phase.schedule, phase, shape), pressure, groups)
        line = sized_timeline(run, bool(backward), costs, same_chunks, contention, is_serial)
        times_ms.append(line.makespan_ms)
    return (1 + recompute) * times_ms[0] + times_ms[1]


def as_alltoall_bytes(sent_GG: np.ndarray, node_of_rank: Sequence[int]) -> float:
    """Return the bytes of a rank's buffer in the even all-to-all that gives the fullest port as much as this exchange.

    Of a buffer a rank keeps its G-th part, and sends what is for the ranks of other nodes over the port of its node,
    which it shares with the others there. Only the fullest of all ports, rank or node, in or out, counts.

    Args:
        sent_GG: [G, G], the bytes that each rank sends to each.
        node_of_rank: the node of each rank.
    """
    num_ranks = len(node_of_rank)
    ours = _fullest_ports(np.asarray(sent_GG, dtype=float), node_of_rank)
    even = _fullest_ports(np.full((num_ranks, num_ranks), 1 / num_ranks), node_of_rank)
    return max(ours[name] / even[name] if even[name] > 0 else 0.0 for name in ("rank", "node"))


def exchange_ms(sent_GG: np.ndarray, cost: Cost, node_of_rank: Sequence[int]) -> float:
    """Return the time of one exchange by the cost of an all-to-all; none where nobody sends anything to another.

    Args:
        sent_GG: [G, G], the bytes that each rank sends to each.
        cost: the cost of an all-to-all among these ranks, per byte of a rank's buffer.
        node_of_rank: the node of each rank.
    """
    size_bytes = as_alltoall_bytes(sent_GG, node_of_rank)
    return cost.ms(size_bytes) if size_bytes else 0.0


def replica_ms(
    placement: ExpertPlacement,
    weight_bytes: float,
    gradient_bytes: float,
    cost: Cost,
    node_of_rank: Sequence[int],
    micro_batches: int = 1,
) -> float:
    """Return what replicas add to a step: weights from home after the optimizer, gradients home in every backward.

    All replicas of a layer travel in one exchange, and nothing is hidden behind other work: in windows that would
    otherwise be idle they cost less.

    Args:
        placement: where the replicas are.
        weight_bytes: the bytes of the weights of one expert on a rank.
        gradient_bytes: the bytes of their gradients.
        cost: the cost of an all-to-all among these ranks, per byte of a rank's buffer.
        node_of_rank: the node of each rank.
        micro_batches: the backward passes of a step.
    """
    copies_GG = np.zeros((placement.num_ranks, placement.num_ranks))
    for home, *others in placement.places_of_expert:
        for each in others:
            copies_GG[placement.rank_of_place(home), placement.rank_of_place(each)] += 1
    out_ms = exchange_ms(copies_GG * weight_bytes, cost, node_of_rank)
    return out_ms + micro_batches * exchange_ms(copies_GG.T * gradient_bytes, cost, node_of_rank)


def moves_ms(
    now: ExpertPlacement,
    swaps: Sequence[tuple[int, int]],
    bytes_per_expert: float,
    cost: Cost,
    node_of_rank: Sequence[int],
) -> float:
    """Return the time of swaps that are made in one step, as one exchange: each expert goes to its last rank directly.

    Args:
        now: the placement before.
        swaps: pairs of homes whose experts change places, one after another.
        bytes_per_expert: what moves of one expert: its weights and its optimizer states.
        cost: the cost of an all-to-all among these ranks, per byte of a rank's buffer.
        node_of_rank: the node of each rank.
    """
    after = now
    for first, second in swaps:
        after = after.swapped(first, second)
    moved_GG = np.zeros((now.num_ranks, now.num_ranks))
    for old, new in zip(now.home_of_expert, after.home_of_expert, strict=True):
        moved_GG[now.rank_of_place(old), now.rank_of_place(new)] += bytes_per_expert
    return exchange_ms(moved_GG, cost, node_of_rank)


@dataclass(frozen=True, eq=False)
class Prices:
    """All that it takes to price placements of one layer."""

    shape: CallShape
    """The sizes of a call in balanced routing."""
    groups: Groups
    plan: LayerPlan
    costs: LayerCosts
    weight_bytes: float
    """The bytes of the weights of one expert on a rank."""
    gradient_bytes: float
    """The bytes of their gradients."""
    moved_bytes: float
    """The bytes that move with one expert: its weights and its optimizer states."""
    alltoall: AllToAll = "flat"
    """The all-to-all as the planner knows it."""
    contention: Contention = IDEAL
    is_serial: bool = False
    micro_batches: int = 1
    """The calls of the layer in an optimizer step."""
    recompute: bool = False

    def step_ms(self, placement: ExpertPlacement, seen: Seen) -> float:
        """Return the time of the layer's experts' part in one step, with what its replicas cost."""
        how = self.alltoall, self.contention, self.is_serial, self.recompute
        pressure = pressure_of(placement, seen)
        if self.alltoall == ONCE_PER_NODE and seen.tokens and self.shape.crossings is not None:
            of_tokens = seen.rows_GE, seen.tokens, seen.node_of_rank, self.shape.crossings
            pressure = Pressure(*once_per_node_factors(placement, *of_tokens))
        calls_ms = layer_ms(pressure, self.shape, self.groups, self.plan, self.costs, *how)
        sizes = self.weight_bytes, self.gradient_bytes
        added_ms = 0.0
        if placement.num_replicas:
            added_ms = replica_ms(placement, *sizes, self._sending, seen.node_of_rank, self.micro_batches)
        return self.micro_batches * calls_ms + added_ms

    def moves_ms(self, now: ExpertPlacement, wanted: ExpertPlacement, seen: Seen) -> float:
        """Return the time that it takes to bring all experts home where another placement has them."""
        swaps = now.swaps_to(wanted)
        return moves_ms(now, swaps, self.moved_bytes, self._sending, seen.node_of_rank) if swaps else 0.0

    @property
    def _sending(self) -> Cost:
        return self.costs.forward[A2A_IN]

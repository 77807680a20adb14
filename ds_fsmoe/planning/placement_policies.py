# SPDX-License-Identifier: Apache-2.0
"""Proposes where experts should be, from measured rows, and decides whether moving them breaks even. The engine's
placement watch calls it; :mod:`~ds_fsmoe.planning.placement_costs` computes the prices.

A policy proposes a placement, and :func:`decide` compares its gain with the cost of the moves. Both give the same on
every rank, so no agreement is needed: they use no random numbers, and ties go to the first.

Letters: E experts, G ranks that share them, N exchanges of two experts.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import ObservedRouting, Prices
from ds_fsmoe.untrusted import suggested

AS_GOOD, NODES_AS_GOOD = 100, 50
"""The fullest rank may have more than the least that was found by one part in so many, if fewer experts move for it. So
may the node that gets most rows of others."""
LEAST_BY_ROWS = 0.1
"""Of the mean, how much the rows of the fullest rank must fall by where nothing is known of times."""
_WHOLE = 2**30
_EVEN = 200
"""Of the mean load, the part in which two fullest ranks count as equally full."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Lists what a policy may change."""

    num_replicas: int = 0
    """No replica may be made. Policies that were written when some might be ask for it."""
    homes: bool = True
    """Whether experts may move."""


Policy = Callable[[ExpertPlacement, ObservedRouting, Allowed], ExpertPlacement]
"""(the placement now, what was measured, what may change) -> a placement of the same sizes, the same on every rank."""


def off(now: ExpertPlacement, observed: ObservedRouting, allowed: Allowed) -> ExpertPlacement:
    """Return the current placement."""
    return now


class _Rows:
    """Counts rows in whole numbers, so that sums are the same in any order, on every machine."""

    def __init__(self, observed: ObservedRouting) -> None:
        total = math.fsum(observed.rows_GE.reshape(-1).tolist())
        rows_GE = np.rint(observed.rows_GE * (_WHOLE / total if total > 0 else 0.0)).astype(np.int64)
        self.node_G = node_G = np.unique(observed.node_of_rank, return_inverse=True)[1]
        self.of_expert_E = rows_GE.sum(axis=0)
        self.inter_node_rows_EG = rows_GE.T @ (node_G[:, None] != node_G)
        """[E, G]: the rows of each expert that cross nodes, were it on this rank."""
        self.num_ranks, self.total = len(node_G), int(self.of_expert_E.sum())

    def of_ranks(self, rank_E: np.ndarray) -> np.ndarray:
        """Return the rows of each rank if experts are on these ranks, [G]."""
        found = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(found, rank_E, self.of_expert_E)
        return found

    def into_nodes(self, rank_E: np.ndarray) -> np.ndarray:
        """Return the rows that each node receives from others if experts are on these ranks, [n]."""
        found = np.zeros(self.node_G.max() + 1, dtype=np.int64)
        np.add.at(found, self.node_G[rank_E], self.inter_node_rows_EG[np.arange(len(rank_E)), rank_E])
        return found

    def evened(self, rank_E: np.ndarray) -> np.ndarray | None:
        """Return the ranks after one exchange of an expert of the fullest rank, or None if no exchange lowers its
        load.

        The best exchange leaves least on the fuller of the two ranks. Ties go to the one after which nodes receive
        fewest rows from others, the fullest node above all, then to the first.

        Args:
            rank_E: the rank of each expert.
        """
        load_G, into_n = self.of_ranks(rank_E), self.into_nodes(rank_E)
        fullest = int(load_G.argmax())
        here, there = np.flatnonzero(rank_E == fullest), np.flatnonzero(rank_E != fullest)
        if not len(there):
            return None
        first_N, second_N = np.repeat(here, len(there)), np.tile(there, len(here))
        to_N, leaves_N = rank_E[second_N], self.of_expert_E[first_N] - self.of_expert_E[second_N]
        fuller_N = np.maximum(load_G[fullest] - leaves_N, load_G[to_N] + leaves_N)
        node, node_N = self.node_G[fullest], self.node_G[to_N]
        here_N = into_n[node] + self.inter_node_rows_EG[second_N, fullest] - self.inter_node_rows_EG[first_N, fullest]
        there_N = into_n[node_N] + self.inter_node_rows_EG[first_N, to_N] - self.inter_node_rows_EG[second_N, to_N]
        # Squares of so many units fit into 64 bits. Within a node nothing changes.
        more_N = here_N**2 + there_N**2 - into_n[node] ** 2 - into_n[node_N] ** 2
        is_near_N = fuller_N <= fuller_N.min() + self.total // (self.num_ranks * _EVEN)
        best = np.lexsort((fuller_N, np.where(node_N == node, 0, more_N), ~is_near_N))[0]
        if fuller_N[best] >= load_G[fullest]:
            return None
        found = rank_E.copy()
        found[[first_N[best], second_N[best]]] = to_N[best], fullest
        return found


def _nearly_least(ways: list[np.ndarray], of: Callable[[np.ndarray], np.ndarray], as_good: int) -> list[np.ndarray]:
    """Return the exchanges whose maximum is within one part in ``as_good`` of the lowest maximum."""
    most = [int(of(each).max()) for each in ways]
    return [each for each, own in zip(ways, most, strict=True) if own <= min(most) + min(most) // as_good]


def balanced(now: ExpertPlacement, observed: ObservedRouting, allowed: Allowed) -> ExpertPlacement:
    """Return a placement with as few rows on the fullest rank as found, and few moves.

    Like an expert-parallel load balancer, it keeps the number of experts per rank and starts with the fullest rank. But
    it begins with the current placement. Experts of the fullest rank are exchanged as long as one exchange lowers its
    load. Moves stop where the fullest rank, or the node that receives most rows from others, is near that optimum.

    Args:
        now: the current placement.
        observed: the rows of each rank for each expert.
        allowed: what may change.

    Raises:
        ValueError: the rows are of another number of experts or ranks.
    """
    if observed.rows_GE.shape != (now.num_ranks, now.num_experts):
        raise ValueError(
            f"rows {list(observed.rows_GE.shape)}: must be of {now.num_ranks} rank(s) and {now.num_experts} experts"
        )
    rows = _Rows(observed)
    if not rows.total or not allowed.homes:
        return now
    way = [now.rank_of_expert]
    while (following := rows.evened(way[-1])) is not None:
        way.append(following)
    way = _nearly_least(way, rows.of_ranks, AS_GOOD)
    rank_E = _nearly_least(way, rows.into_nodes, NODES_AS_GOOD)[0]
    wanted = ExpertPlacement(tuple(np.argsort(rank_E, kind="stable")), now.num_experts, now.num_ranks)
    for first, second in now.swaps_to(wanted):
        now = now.swapped(first, second)
    return now


POLICIES: dict[str, Policy] = {"balanced": balanced, "off": off}
"""The policies that come with the package."""


def policy(name: str) -> Policy:
    """Return a policy by name, or a function of your own by its dotted name, ``package.module.function``.

    Raises:
        ValueError: the policy does not exist or cannot be imported; the message names the choices.
    """
    if name in POLICIES:
        return POLICIES[name]
    module, _, function = name.rpartition(".")
    listed = "the choices are balanced, off, lina (sets ep_size at the start), or your function as package.module.name"
    reason = f"no such policy; {suggested(name, (*POLICIES, 'lina'), listed)}"
    if module:
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            is_wrong_name = isinstance(error, AttributeError) or module.startswith(getattr(error, "name", None) or " ")
            reason = f"cannot be imported: {error}{'; write it as package.module.name' if is_wrong_name else ''}"
        else:
            if callable(found):
                return found
            reason = "is not a function; write it as package.module.name"
    raise ValueError(reason)


@dataclass(frozen=True)
class Decision:
    """Holds the decision for one layer. Without moves, gain and cost are 0."""

    placement: ExpertPlacement
    gain_ms_per_step: float | None
    """How much shorter a step gets; ``None``: nothing is known of times."""
    moves_ms: float | None
    """How long the experts are on their way, once."""
    breaks_even_after: int | None
    """The steps after which the gain is more than that; ``None``: not known, or nothing changes."""
    before: float
    """The rows of the fullest rank over the mean."""
    after: float
    why: str
    """The reason in one line, for the log."""

    def without_moves(self, now: ExpertPlacement, why: str) -> Decision:
        """Return this decision without moves, for this reason."""
        none_ms = None if self.gain_ms_per_step is None else 0.0
        return Decision(now, none_ms, none_ms, None, self.before, self.before, why)


def decide(
    now: ExpertPlacement,
    observed: ObservedRouting,
    policy: Policy,
    prices: Prices | None,
    break_even_within: int,
    layer: str = "",
) -> Decision:
    """Decide whether a layer gets the placement that a policy proposes: only if the moves break even in time.

    A gain below the uncertainty of the costs counts as zero.

    Args:
        now: the current placement.
        observed: the measured routing of the layer.
        policy: proposes a placement.
        prices: the costs of the layer and of moves; ``None``: unmeasured, or decisions must not depend on measured
            times. Then rows decide alone: the fullest rank's must fall by a tenth of the mean.
        break_even_within: the number of steps within which moves have to break even.
        layer: the name of the layer, for the log.

    Raises:
        ValueError: the policy returns no placement of the same sizes.
    """
    wanted = policy(now, observed, Allowed())
    if not isinstance(wanted, ExpertPlacement):
        raise ValueError(f"the policy returned {wanted!r}: must be an ExpertPlacement")
    if (wanted.num_experts, wanted.num_ranks) != (now.num_experts, now.num_ranks):
        raise ValueError(
            f"the policy returned a placement of {wanted.num_experts} experts on {wanted.num_ranks} rank(s): must "
            f"be of {now.num_experts} on {now.num_ranks}"
        )
    name = f"{layer}: " if layer else ""
    before, after, num_moved = (
        now.over_mean(observed.rows_GE),
        wanted.over_mean(observed.rows_GE),
        now.num_moved(wanted),
    )
    what = (
        f"{num_moved} expert{'s' * (num_moved != 1)} move{'s' * (num_moved == 1)}: the fullest rank {before:.2f} -> "
        f"{after:.2f} times the mean"
    )
    if prices is None:
        found = Decision(wanted, None, None, None, before, after, f"{name}{what}: decided by rows alone, without times")
        why_not = f"by rows alone it has to fall by {LEAST_BY_ROWS:g}" if before - after < LEAST_BY_ROWS else ""
    else:
        now_ms, step_ms = prices.step_ms(now, observed), prices.step_ms(wanted, observed)
        gain_ms, moves_ms = now_ms - step_ms, prices.moves_ms(now, wanted, observed.node_of_rank)
        is_worth = gain_ms > prices.costs.relative_residual * now_ms
        steps = max(1, math.ceil(moves_ms / gain_ms)) if is_worth else 0
        what = f"{what}, {_ms(now_ms)} -> {_ms(step_ms)} ms a step, {_ms(moves_ms, 10)} ms to move"
        why = f"{name}{what}: breaks even after {steps} step{'s' * (steps != 1)}"
        found = Decision(wanted, gain_ms, moves_ms, steps, before, after, why)
        why_not = "" if is_worth else "the gain is below the error of these costs"
        if steps > break_even_within:
            why_not = f"would break even after {steps} steps, not within {break_even_within}"
    if not num_moved:
        return found.without_moves(
            now, f"{name}stays: the fullest rank has {before:.2f} times the mean, and nothing better was found"
        )
    return found.without_moves(now, f"{name}stays: {what}: {why_not}") if why_not else found


def _ms(time_ms: float, whole_from: float = 1e3) -> str:
    """Return a time as text: whole from ``whole_from`` on, one decimal from 1 ms on, two significant digits below."""
    if time_ms >= whole_from or time_ms == 0:
        return f"{time_ms:.0f}"
    return f"{time_ms:.1f}" if time_ms >= 1 else f"{time_ms:.2g}"

# SPDX-License-Identifier: Apache-2.0
"""Where experts should be by the rows that were measured, and whether it pays to move them there.

A policy says what would be best, :func:`decide` whether the way there pays. Both give the same on every rank, so that
nothing has to be agreed on: no random numbers, and ties go to what comes first.

Letters: E experts, G ranks that share them, N exchanges of two experts.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import Prices, Seen

AS_GOOD = 100
"""The fullest rank may have more than the best that was found by one part in so many, if fewer experts move for it."""
LEAST_BY_ROWS = 0.1
"""Of the mean, how much the rows of the fullest rank must fall by where nothing is known of times."""
_WHOLE = 2**30
_EVEN = 1000
"""Of the mean load, the part in which two fullest ranks count as equally full."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a policy may change."""

    num_replicas: int = 0
    """No replica may be made. Policies that were written when some might be ask for it."""
    homes: bool = True
    """Whether experts may move."""


Policy = Callable[[ExpertPlacement, Seen, Allowed], ExpertPlacement]
"""(the placement now, what was measured, what may change) -> a placement of the same sizes, the same on every rank."""


def off(now: ExpertPlacement, seen: Seen, allowed: Allowed) -> ExpertPlacement:
    """Return the placement as it is."""
    return now


class _Rows:
    """Counts rows in whole numbers, so that sums are the same in any order, on every machine."""

    def __init__(self, seen: Seen) -> None:
        total = math.fsum(seen.rows_GE.reshape(-1).tolist())
        rows_GE = np.rint(seen.rows_GE * (_WHOLE / total if total > 0 else 0.0)).astype(np.int64)
        node_G = np.asarray(seen.node_of_rank)
        self.of_expert_E = rows_GE.sum(axis=0)
        self.crossing_EG = rows_GE.T @ (node_G[:, None] != node_G)
        """[E, G]: the rows of each expert that cross nodes, were it on this rank."""
        self.num_ranks, self.total = len(node_G), int(self.of_expert_E.sum())

    def of_ranks(self, rank_E: np.ndarray) -> np.ndarray:
        """Return [G]: the rows of each rank, where experts are on these."""
        found = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(found, rank_E, self.of_expert_E)
        return found

    def greedy(self) -> np.ndarray:
        """Return [E]: each expert's rank, the hottest first on the least loaded rank that has a place left."""
        num_experts = len(self.of_expert_E)
        rank_E, load_G = np.zeros(num_experts, dtype=np.int64), np.zeros(self.num_ranks, dtype=np.int64)
        left_G = np.full(self.num_ranks, num_experts // self.num_ranks)
        for expert in np.argsort(-self.of_expert_E, kind="stable").tolist():
            rank = rank_E[expert] = int(np.where(left_G > 0, load_G, np.iinfo(np.int64).max).argmin())
            load_G[rank] += self.of_expert_E[expert]
            left_G[rank] -= 1
        return rank_E

    def named(self, rank_E: np.ndarray, now_E: np.ndarray) -> np.ndarray:
        """Return the ranks of experts under other names, by which most stay, and of these ways fewest rows cross."""
        from scipy.optimize import linear_sum_assignment  # loading it takes a second

        stay_GG, crossing_GG = np.zeros((2, self.num_ranks, self.num_ranks))
        np.add.at(stay_GG, (rank_E, now_E), 1)
        np.add.at(crossing_GG, rank_E, self.crossing_EG)
        # All rows that could cross are less than one expert that stays; both are whole numbers that a float holds.
        return linear_sum_assignment(stay_GG * (self.total + 1) - crossing_GG, maximize=True)[1][rank_E]

    def exchanged(self, rank_E: np.ndarray, first_N: np.ndarray, second_N: np.ndarray) -> np.ndarray:
        """Return the ranks after the exchange of two experts that leaves least on the fuller one of their two ranks.

        Of those that are as good it is the one with which fewer rows cross nodes, then the first.

        Args:
            rank_E: the rank of each expert.
            first_N: experts; each may be exchanged with the one at the same index of ``second_N``.
            second_N: experts on other ranks.
        """
        load_G, a_N, b_N = self.of_ranks(rank_E), rank_E[first_N], rank_E[second_N]
        leaves_N = self.of_expert_E[first_N] - self.of_expert_E[second_N]
        fuller_N = np.maximum(load_G[a_N] - leaves_N, load_G[b_N] + leaves_N)
        crossing = self.crossing_EG
        crossing_N = crossing[first_N, b_N] - crossing[first_N, a_N] + crossing[second_N, a_N] - crossing[second_N, b_N]
        is_near_N = fuller_N <= fuller_N.min() + self.total // (self.num_ranks * _EVEN)
        best = np.lexsort((fuller_N, crossing_N, ~is_near_N))[0]
        found = rank_E.copy()
        found[[first_N[best], second_N[best]]] = b_N[best], a_N[best]
        return found

    def lowered(self, rank_E: np.ndarray) -> np.ndarray:
        """Return the ranks after exchanges of an expert of the fullest rank, as long as that gets less by one."""
        while True:
            load_G = self.of_ranks(rank_E)
            here, there = (np.flatnonzero(each) for each in (rank_E == load_G.argmax(), rank_E != load_G.argmax()))
            if not len(there):
                return rank_E
            found = self.exchanged(rank_E, np.repeat(here, len(there)), np.tile(there, len(here)))
            # Squares of so many units fit into 64 bits.
            if (self.of_ranks(found) ** 2).sum() >= (load_G**2).sum():
                return rank_E
            rank_E = found

    def towards(self, rank_E: np.ndarray, wanted_E: np.ndarray, most: int) -> np.ndarray:
        """Return the ranks on the way to others, as soon as no rank has more than so many rows.

        Each exchange brings an expert to the rank where it is wanted.
        """
        while (load_G := self.of_ranks(rank_E)).max() > most and (wrong := np.flatnonzero(rank_E != wanted_E)).size:
            pairs = wrong[np.argwhere(wanted_E[wrong][:, None] == rank_E[wrong])]
            touches = (rank_E[pairs] == load_G.argmax()).any(axis=1)
            rank_E = self.exchanged(rank_E, *(pairs[touches] if touches.any() else pairs).T)
        return rank_E


def balanced(now: ExpertPlacement, seen: Seen, allowed: Allowed) -> ExpertPlacement:
    """Return a placement in which the fullest rank has as few rows as was found, and to which few experts move.

    Two ways are gone. One exchanges experts of the fullest rank as long as it gets less. The other places all experts
    anew, the hottest first on the least loaded rank with a free place, and does the same from there. Of both, each only
    as far as the fullest rank is still too full, the one is taken with which fewer experts move.

    Args:
        now: the placement now.
        seen: the rows of each rank for each expert.
        allowed: what may change.

    Raises:
        ValueError: the rows are of another number of experts or ranks.
    """
    if seen.rows_GE.shape != (now.num_ranks, now.num_experts):
        raise ValueError(
            f"rows {list(seen.rows_GE.shape)}: must be of {now.num_ranks} rank(s) and {now.num_experts} experts"
        )
    rows, now_E = _Rows(seen), now.rank_of_expert
    if not rows.total or not allowed.homes:
        return now
    found = [rows.lowered(now_E), rows.lowered(rows.named(rows.greedy(), now_E))]
    peaks = [int(rows.of_ranks(each).max()) for each in found]
    most = min(peaks) + min(peaks) // AS_GOOD
    ways = [rows.towards(now_E, each, most) for each, peak in zip(found, peaks, strict=True) if peak <= most]
    best_E = min(ways, key=lambda each: int((each != now_E).sum()))
    wanted = ExpertPlacement(tuple(np.argsort(best_E, kind="stable")), now.num_experts, now.num_ranks)
    for first, second in now.swaps_to(wanted):
        now = now.swapped(first, second)
    return now


POLICIES: dict[str, Policy] = {"balanced": balanced, "off": off}
"""The policies that come with the package."""


def policy(name: str) -> Policy:
    """Return a policy by name, or a function of the user's own by its dotted name, ``package.module.function``.

    Raises:
        ValueError: there is none, or it cannot be imported; names the choices.
    """
    if name in POLICIES:
        return POLICIES[name]
    module, _, function = name.rpartition(".")
    reason = ""
    if module:
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            reason = f": {error}"
        else:
            if callable(found):
                return found
            reason = ": that is no function"
    choices = ", ".join(POLICIES)
    raise ValueError(
        f"policy {name!r}{reason}: the choices are {choices}, or a function of your own as package.module.function"
    )


@dataclass(frozen=True)
class Decision:
    """What was decided for one layer. Where it stays as it is, there is no gain and nothing to pay."""

    placement: ExpertPlacement
    gain_ms_per_step: float | None
    """How much shorter a step gets; ``None``: nothing is known of times."""
    moves_ms: float | None
    """How long the experts are on their way, once."""
    pays_after_steps: int | None
    """The steps after which the gain is more than that; ``None``: not known, or nothing changes."""
    before: float
    """The rows of the fullest rank over the mean."""
    after: float
    why: str
    """The reason in one line, for the log."""

    def stays(self, now: ExpertPlacement, why: str) -> Decision:
        """Return the decision that nothing moves after all, for this reason."""
        none_ms = None if self.gain_ms_per_step is None else 0.0
        return Decision(now, none_ms, none_ms, None, self.before, self.before, why)


def decide(
    now: ExpertPlacement, seen: Seen, policy: Policy, prices: Prices | None, pays_within_steps: int, layer: str = ""
) -> Decision:
    """Decide whether a layer gets the placement that a policy proposes: only if that pays in so many steps.

    A gain below what the costs are uncertain by counts as none.

    Args:
        now: the placement now.
        seen: what was measured of the layer.
        policy: says what would be best.
        prices: what the layer and moves cost; ``None``: nothing was measured, or what runs must not depend on measured
            times. Then rows decide alone: they must fall by a tenth of the mean at the fullest rank.
        pays_within_steps: the steps within which what is moved has to pay.
        layer: the name of the layer, for the line.

    Raises:
        ValueError: the policy gives no placement of the same sizes.
    """
    wanted = policy(now, seen, Allowed())
    if not isinstance(wanted, ExpertPlacement):
        raise ValueError(f"the policy gives {wanted!r}: must be an ExpertPlacement")
    if (wanted.num_experts, wanted.num_ranks) != (now.num_experts, now.num_ranks):
        raise ValueError(
            f"the policy gives a placement of {wanted.num_experts} experts on {wanted.num_ranks} rank(s): must be of "
            f"{now.num_experts} on {now.num_ranks}"
        )
    name = f"{layer}: " if layer else ""
    before, after, num_moved = now.over_mean(seen.rows_GE), wanted.over_mean(seen.rows_GE), now.num_moved(wanted)
    what = (
        f"{num_moved} expert{'s' * (num_moved != 1)} move{'s' * (num_moved == 1)}: the fullest rank {before:.2f} -> "
        f"{after:.2f} times the mean"
    )
    if prices is None:
        found = Decision(wanted, None, None, None, before, after, f"{name}{what}: decided by rows alone, without times")
        why_not = f"by rows alone it has to fall by {LEAST_BY_ROWS:g}" if before - after < LEAST_BY_ROWS else ""
    else:
        now_ms, step_ms = prices.step_ms(now, seen), prices.step_ms(wanted, seen)
        gain_ms, moves_ms = now_ms - step_ms, prices.moves_ms(now, wanted, seen.node_of_rank)
        is_worth = gain_ms > prices.costs.relative_residual * now_ms
        steps = max(1, math.ceil(moves_ms / gain_ms)) if is_worth else 0
        what = f"{what}, {_ms(now_ms)} -> {_ms(step_ms)} ms a step, {_ms(moves_ms, 10)} ms to move"
        why = f"{name}{what}: pays after {steps} step{'s' * (steps != 1)}"
        found = Decision(wanted, gain_ms, moves_ms, steps, before, after, why)
        why_not = "" if is_worth else "gains nothing that these costs could tell"
        if steps > pays_within_steps:
            why_not = f"would pay after {steps} steps, not within {pays_within_steps}"
    if not num_moved:
        return found.stays(
            now, f"{name}stays: the fullest rank has {before:.2f} times the mean, and nothing better was found"
        )
    return found.stays(now, f"{name}stays: {what}: {why_not}") if why_not else found


def _ms(time_ms: float, whole_from: float = 1e3) -> str:
    """Return a time with one digit behind the point, none from so much on, and two that count where it is small."""
    if time_ms >= whole_from or time_ms == 0:
        return f"{time_ms:.0f}"
    return f"{time_ms:.1f}" if time_ms >= 1 else f"{time_ms:.2g}"

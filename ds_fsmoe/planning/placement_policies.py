# SPDX-License-Identifier: Apache-2.0
"""Policies by name: from the rows that were measured to where experts should be.

A policy says what would be best, not whether the way there pays; see
:mod:`~ds_fsmoe.planning.placement_decision`. It gets and gives the same on every rank, so that nothing has to be agreed
on: no random numbers, and ties go to what comes first.

Letters: E experts, G ranks that share them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import Seen
from ds_fsmoe.planning.placement_search import CountedRows, Layout

AS_GOOD = 100
"""The fullest rank may have more than the best that was found by one part in so many, if fewer experts move for it."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a policy may change."""

    num_replicas: int = 0
    """The spare places of all ranks that may be filled."""
    homes: bool = True
    """Whether experts may move."""


Policy = Callable[[ExpertPlacement, Seen, Allowed], ExpertPlacement]
"""(the placement now, what was measured, what may change) -> a placement of the same sizes, the same on every rank."""


def off(now: ExpertPlacement, seen: Seen, allowed: Allowed) -> ExpertPlacement:
    """Return the placement as it is."""
    return now


def balanced(now: ExpertPlacement, seen: Seen, allowed: Allowed) -> ExpertPlacement:
    """Return a placement in which the fullest rank has as few rows as was found, and to which few experts move.

    For some numbers of replicas two ways are gone. One begins with what is there, fills spare places, and exchanges
    homes as long as the fullest rank gets less. The other packs all experts anew, the heaviest first on the least
    loaded rank with room, which is Graham's LPT rule (1969) with as many on each rank, and does the same from there.
    More replicas are only tried while they could make the fullest rank less full. Of all that come near the best the
    one is taken with which fewest experts move, each only as far as the fullest rank is still too full, then the one
    with fewest replicas.

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
    rows = CountedRows(seen)
    if not rows.total:
        return now
    start = Layout.of(rows, now)
    found: list[Layout] = []
    for num_replicas in _numbers(min(allowed.num_replicas, now.num_ranks * now.num_spare)):
        filled = replicated(start, num_replicas, now.num_spare)
        found.append(filled.improved(start.home_E, now.num_spare, allowed.homes))
        if allowed.homes:
            found.append(
                relabelled(packed(rows, num_replicas, now.num_spare), start).improved(start.home_E, now.num_spare)
            )
        if min(each.peak for each in found) * now.num_ranks * AS_GOOD <= rows.total * (AS_GOOD + 1):
            break  # no replica could make that better
    most = min(each.peak for each in found)
    most += most // AS_GOOD
    near = [start.towards(each, most) for each in found if each.peak <= most]
    best = min(near, key=lambda each: (each.num_moved(start.home_E), each.num_replicas, each.fullness))
    return without_idle(best, most).placement(now)


def _numbers(most: int) -> list[int]:
    """Return the numbers of replicas that are tried: none, each power of two, and as many as there may be."""
    return sorted({0, most, *(2**each for each in range(most.bit_length()))})


def replicated(layout: Layout, num_replicas: int, num_spare: int) -> Layout:
    """Return the layout with replicas, one after another, of the expert that brings most rows to one rank.

    It goes to a rank that does not hold the expert and has a spare place: to a node that has no replica of it, and
    there to the rank from which on the expert's fullest replica has least, then to the least loaded one.

    Args:
        layout: a layout.
        num_replicas: how many may be added.
        num_spare: the spare places of a rank.
    """
    node_of_rank = layout.rows.node_of_rank
    for _ in range(num_replicas):
        free = [rank for rank in range(layout.rows.num_ranks) if len(layout.held(rank)) < num_spare]
        for expert in np.argsort(-layout.load_EG.max(axis=1), kind="stable").tolist():
            holding = (int(layout.home_E[expert]), *layout.replicas[expert])
            open_ranks = [rank for rank in free if rank not in holding]
            if open_ranks and layout.rows.of_expert_E[expert]:
                nodes = {node_of_rank[rank] for rank in holding}
                order = {
                    rank: (
                        node_of_rank[rank] in nodes,
                        int(layout.rows.of(expert, (*holding, rank))[0].max()),
                        int(layout.load_G[rank]),
                        rank,
                    )
                    for rank in open_ranks
                }
                layout = layout.with_replica(expert, min(open_ranks, key=order.__getitem__))
                break
        else:
            return layout
    return layout


def packed(rows: CountedRows, num_replicas: int, num_spare: int) -> Layout:
    """Return a layout with all experts packed anew, so that ranks are about equally full; which rank is which is open.

    An expert with replicas is as many equal pieces, of which the first is its home; one replica after another goes to
    the expert with the largest. The heaviest piece is packed first, on the rank that has least and a place of its kind.

    Args:
        rows: what experts get.
        num_replicas: how many there are at the most.
        num_spare: the spare places of a rank.
    """
    num_ranks, num_experts = rows.num_ranks, len(rows.of_expert_E)
    num_local = num_experts // num_ranks
    each_E, pieces_E = rows.of_expert_E, np.ones(num_experts, dtype=np.int64)
    for _ in range(num_replicas):
        largest = int(np.where(pieces_E < num_ranks, each_E, -1).argmax())
        pieces_E[largest] += pieces_E[largest] < num_ranks
        each_E = rows.of_expert_E // pieces_E
    load_G = np.zeros(num_ranks, dtype=np.int64)
    homes_G, spare_G = np.full(num_ranks, num_local), np.full(num_ranks, num_spare)
    holding: dict[int, list[int]] = {}
    for expert in np.argsort(-each_E, kind="stable").tolist():
        taken = holding[expert] = []
        for left_G in (homes_G, *[spare_G] * (int(pieces_E[expert]) - 1)):
            is_open_G = (left_G > 0) & ~np.isin(np.arange(num_ranks), taken)
            if is_open_G.any():
                rank = int(np.where(is_open_G, load_G, np.iinfo(np.int64).max).argmin())
                taken.append(rank)
                left_G[rank] -= 1
                load_G[rank] += each_E[expert]
    found = [holding[expert] for expert in range(num_experts)]
    return Layout(rows, np.array([home for home, *_ in found]), tuple(tuple(sorted(others)) for _, *others in found))


def relabelled(layout: Layout, now: Layout) -> Layout:
    """Return the layout with other names for its ranks, so that most experts are at home where they are now.

    Of ways in which as many stay, it is the one with which fewest rows cross nodes, replicas left aside.

    Args:
        layout: the experts of each rank.
        now: the layout now.
    """
    from scipy.optimize import linear_sum_assignment  # loading it takes a second

    num_ranks = now.rows.num_ranks
    stay, crossing = np.zeros((num_ranks, num_ranks)), np.zeros((num_ranks, num_ranks))
    np.add.at(stay, (layout.home_E, now.home_E), 1)
    np.add.at(crossing, layout.home_E, now.rows.crossing_EG)
    # All rows that could cross are less than one expert that stays; both are whole numbers that a float holds.
    name_G = linear_sum_assignment(stay * (now.rows.total + 1) - crossing, maximize=True)[1]
    replicas = tuple(tuple(sorted(name_G[list(each)].tolist())) if each else () for each in layout.replicas)
    return Layout(now.rows, name_G[layout.home_E], replicas)


def without_idle(layout: Layout, most: int) -> Layout:
    """Return the layout without replicas that gain nothing, neither for the fullest rank nor between nodes.

    Args:
        layout: a layout.
        most: the rows of the fullest rank that are low enough.
    """
    crossing = layout.crossing + layout.rows.total // AS_GOOD
    held = [(expert, rank) for expert, ranks in enumerate(layout.replicas) for rank in ranks]
    for expert, rank in sorted(held, key=lambda each: (int(layout.load_EG[each]), each)):
        without = layout.without_replica(expert, rank)
        if without.peak <= max(most, layout.peak) and without.crossing <= crossing:
            layout = without
    return layout


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

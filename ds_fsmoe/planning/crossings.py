# SPDX-License-Identifier: Apache-2.0
"""How often a token crosses to other ranks and nodes: once for each choice, or once for each place that has some.

Letters: E experts, K choices of a token, n nodes, p ranks of an EP group in a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from ds_fsmoe.planning.groups import Groups


@dataclass(frozen=True, slots=True)
class Crossings:
    """The places that have experts of a token, on average; its own node and rank count like any other."""

    nodes: float
    ranks: float


def crosses_once(groups: Groups) -> bool:
    """Whether a token can cross to each node once: whole experts on several ranks in each of several nodes."""
    at = groups.placements["ep"]
    return groups.esp == 1 and at.nodes > 1 and at.per_node > 1 and at.size == at.nodes * at.per_node


def expected_crossings(
    num_experts: int, k: int, nodes: int, per_node: int, groups: int = 1, of_groups: int = 1
) -> Crossings:
    """Return the crossings where each choice of k experts is as likely as any other.

    Args:
        num_experts: E, placed on the ranks in their order.
        k: K.
        nodes: n.
        per_node: p.
        groups: the number of groups of experts, of which a token takes some first.
        of_groups: how many it takes.

    Raises:
        ValueError: groups or places that do not divide the experts, or groups that lie across places.
    """
    return Crossings(
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
        # The place lies in one group.
        missed = comb(chosen - size, k) / comb(chosen, k)
        return places * of_groups / groups * (1 - missed)
    own = size // group
    missed = sum(
        comb(own, taken) * comb(groups - own, of_groups - taken) * comb(chosen - taken * group, k)
        for taken in range(min(own, of_groups) + 1)
    )
    return places * (1 - missed / (comb(groups, of_groups) * comb(chosen, k)))


def counted_crossings(experts_SK: Any, num_experts: int, nodes: int, per_node: int) -> Crossings:
    """Return the crossings of a recorded or made-up routing.

    Args:
        experts_SK: [S, K] integers, the experts of each token; outside 0..E-1 there is none.
        num_experts: E, placed on the ranks in their order.
        nodes: n.
        per_node: p.
    """
    experts = np.asarray(experts_SK)
    found = []
    for places in (nodes, nodes * per_node):
        is_there = np.zeros((len(experts), places + 1), dtype=bool)
        is_choice = (experts >= 0) & (experts < num_experts)
        place = np.where(is_choice, experts * places // num_experts, places)
        np.put_along_axis(is_there, place.astype(np.int64), True, axis=1)
        found.append(float(is_there[:, :-1].sum(1).mean()) if len(experts) else 0.0)
    return Crossings(*found)

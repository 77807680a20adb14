# SPDX-License-Identifier: Apache-2.0
"""Gives popular experts more ranks and packs unpopular ones on few, as Lina does in inference (ATC'23, section 5.2).
Inference calls it with estimates of :mod:`~ds_fsmoe.planning.lina.popularity`.

Letters: E experts of a layer, G ranks that share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

_FIRST_LOAD, _NEXT_LOAD = 1.02, 1.03
"""The highest load that a rank may have at first, as a multiple of the mean, and the factor to the next one tried."""
_VARIANTS = ((1, True), (1, False), (2, True), (2, False))
"""The ways to pack, in order: how many times the fewest parts, and whether by first fit or on the least loaded rank."""


def ranks_of_experts(
    popularity_E: np.ndarray,
    num_ranks: int,
    most_per_rank: int = 4,
    now: Sequence[Sequence[int]] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each of G ranks, ascending: popular ones on several ranks, unpopular ones packed on few.

    Rows of an expert are split evenly over its ranks. The paper gives an expert as many ranks of its own as its share
    of all tokens times G, rounded. It packs experts with less than one rank's share by first fit, the most popular
    first.

    Here the copies of an expert are its share over the highest load of a rank, in multiples of the mean, rounded up.
    All parts are packed by first fit, so a rank with a part of a popular expert may have others too. The highest load
    is the lowest step of a ladder from 1.02 at which all parts fit. Packing tries first fit, then the least loaded rank
    in turn, then parts of half the size.

    Args:
        popularity_E: [E] at least 0, in any unit; only proportions count.
        num_ranks: G.
        most_per_rank: the largest number of experts on a rank. The paper's 4 is for as many ranks as experts, so it is
            raised to twice E / G where that is more, to leave memory for second copies.
        now: the experts that each rank already has. Among ranks of equal load, each takes the set of which it has most.
            Default: E / G each, in the order of their numbers.

    Raises:
        ValueError: there is no expert or rank, or a popularity is negative or not a number.
    """
    popularity_E = np.asarray(popularity_E, dtype=np.float64)
    if popularity_E.ndim != 1 or not len(popularity_E) or num_ranks < 1 or most_per_rank < 1:
        raise ValueError(
            f"popularity of shape {popularity_E.shape} on {num_ranks} rank(s), at most {most_per_rank} on each: all "
            "must be at least one"
        )
    if not np.isfinite(popularity_E).all() or (popularity_E < 0).any():
        raise ValueError("popularity must be a finite number of at least 0")
    num_experts = len(popularity_E)
    if now is None:
        now = [each.tolist() for each in np.array_split(np.arange(num_experts), num_ranks)]
    largest = popularity_E.max()
    if not largest:
        return tuple(tuple(sorted(each)) for each in now)
    relative = (popularity_E / largest).tolist()
    # Added up exactly, so that all ranks get the same.
    total = math.fsum(relative)
    loads = [each * num_ranks / total for each in relative]
    most = max(most_per_rank, 2 * -(-num_experts // num_ranks))
    highest = _FIRST_LOAD
    while True:
        for more, first_fits in _VARIANTS:
            copies = [min(num_ranks, max(1, math.ceil(more * each / highest))) for each in loads]
            packed = _packed(loads, copies, num_ranks, most, highest, first_fits)
            if packed is not None:
                return _on_nearest_ranks(packed, now)
        highest *= _NEXT_LOAD


def _packed(
    loads: list[float], copies: list[int], num_ranks: int, most: int, highest: float, first_fits: bool
) -> list[list[int]] | None:
    """Pack experts, the largest copies first; return None if they do not fit below this load."""
    parts = [load / n for load, n in zip(loads, copies, strict=True)]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    load_of_rank = [0.0] * num_ranks
    for expert in sorted(range(len(parts)), key=lambda each: -parts[each]):
        part, missing = parts[expert], copies[expert]
        order: Iterable[int] = range(num_ranks)
        if not part:  # where the fewest are, as nothing is known of it
            order = sorted(order, key=lambda rank: len(ranks[rank]))
        elif not first_fits:
            order = sorted(order, key=load_of_rank.__getitem__)
        for rank in order:
            if len(ranks[rank]) < most and load_of_rank[rank] + part <= highest:
                ranks[rank].append(expert)
                load_of_rank[rank] += part
                missing -= 1
                if not missing:
                    break
        if missing:
            return None
    return ranks


def _on_nearest_ranks(packed: list[list[int]], now: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Assign sets of experts to the ranks that have most of them already."""
    have = [set(each) for each in now]
    pairs = ((at, rank) for at in range(len(packed)) for rank in range(len(have)))
    common = [(-len(have[rank].intersection(packed[at])), at, rank) for at, rank in pairs]
    taken: dict[int, int] = {}
    used = set()
    for _, at, rank in sorted(common):
        if rank not in taken and at not in used:
            taken[rank] = at
            used.add(at)
    return tuple(tuple(sorted(packed[taken[rank]])) for rank in range(len(packed)))


def top_experts(popularity_E: np.ndarray, top: int) -> tuple[int, ...]:
    """Return the most popular experts, the first one first; ties go to the lower number.

    Args:
        popularity_E: [E].
        top: the number of experts to return.
    """
    return tuple(np.argsort(-np.asarray(popularity_E, dtype=np.float64), kind="stable")[:top].tolist())


def num_top(k: int, num_experts: int) -> int:
    """Return the number of top experts to compare: 2 k as in the paper, but at most half of all experts.

    Args:
        k: the number of choices of a token.
        num_experts: E.
    """
    return max(1, min(2 * k, num_experts // 2))


def differs(estimated_E: np.ndarray, actual_E: np.ndarray, top: int) -> bool:
    """Return True if the most popular experts differ from the estimate; their order does not count.

    Args:
        estimated_E, actual_E: [E].
        top: the number of experts to compare, see :func:`num_top`.
    """
    return set(top_experts(estimated_E, top)) != set(top_experts(actual_E, top))

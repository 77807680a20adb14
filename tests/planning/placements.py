# SPDX-License-Identifier: Apache-2.0
"""Placements and loads for the tests of what decides where experts are: drawn, and made by hand."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import strategies as st

from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import ObservedRouting
from ds_fsmoe.routes.made import choices

LOADS = ("zipf_1.0", "zipf_1.5", "hot_expert", "hot_rank", "equal", "none")


def drawn_placement(rng: random.Random, num_ranks: int, num_local: int) -> ExpertPlacement:
    """Experts in any order."""
    num_experts = num_ranks * num_local
    return ExpertPlacement(tuple(rng.sample(range(num_experts), num_experts)), num_experts, num_ranks)


def drawn_nodes(rng: random.Random, num_ranks: int) -> tuple[int, ...]:
    """Nodes in any order, with any number of ranks, even none."""
    return tuple(rng.randrange(1 + num_ranks // 2) for _ in range(num_ranks))


@st.composite
def placements(draw, most_ranks: int = 5) -> tuple[ExpertPlacement, tuple[int, ...], np.ndarray]:
    """(a placement, the nodes of its ranks, [G, E] rows of each rank for each expert)."""
    rng = draw(st.randoms(use_true_random=False))
    num_ranks, num_local = rng.randint(1, most_ranks), rng.randint(1, 4)
    placement = drawn_placement(rng, num_ranks, num_local)
    rows_GE = np.array([[rng.choice([0, 1, 7, 100]) for _ in range(placement.num_experts)] for _ in range(num_ranks)])
    return placement, drawn_nodes(rng, num_ranks), rows_GE


def load(name: str, num_experts: int, num_ranks: int, per_node: int = 2, k: int = 2, seed: int = 0) -> ObservedRouting:
    """Rows as a router of this kind gives them, with nodes of so many ranks."""
    nodes = tuple(rank // per_node for rank in range(num_ranks))
    if name in ("equal", "none"):
        return ObservedRouting(np.full((num_ranks, num_experts), 12.0 * (name == "equal")), nodes)
    sizes = {"num_tokens": 400, "num_experts": num_experts, "k": min(k, num_experts), "ep_size": num_ranks}
    counts = [
        np.bincount(choices(name, rank=rank, seed=seed, **sizes).reshape(-1), minlength=num_experts)
        for rank in range(num_ranks)
    ]
    return ObservedRouting(np.array(counts), nodes)


def fullest(placement: ExpertPlacement, seen: ObservedRouting) -> float:
    """The rows of the fullest rank, by a loop over what each rank sends."""
    found = [0.0] * placement.num_ranks
    for place, expert in enumerate(placement.expert_of_place):
        for rank in range(placement.num_ranks):
            found[place // placement.num_local] += float(seen.rows_GE[rank, expert])
    return max(found)


def num_moved(now: ExpertPlacement, after: ExpertPlacement) -> int:
    """The experts that are at home on another rank."""
    return sum(
        old // now.num_local != new // after.num_local
        for old, new in zip(now.place_of_expert, after.place_of_expert, strict=True)
    )


def greedy(load_E: list[float], num_ranks: int) -> list[list[int]]:
    """The reference: the experts of each rank, heaviest first to the least loaded rank that has room."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in sorted(range(len(load_E)), key=lambda each: -load_E[each]):
        with_room = [each for each in ranks if len(each) < len(load_E) // num_ranks]
        min(with_room, key=lambda each: sum(load_E[held] for held in each)).append(expert)
    return ranks

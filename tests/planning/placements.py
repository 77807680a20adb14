# SPDX-License-Identifier: Apache-2.0
"""Placements and loads for the tests of what decides where experts are: drawn, and made by hand."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import strategies as st

from ds_fsmoe.planning.expert_placement import EMPTY, ExpertPlacement
from ds_fsmoe.planning.placement_costs import Seen
from ds_fsmoe.routes.made import choices

LOADS = ("zipf_1.0", "zipf_1.5", "hot_expert", "hot_rank", "equal", "none")


def drawn_placement(rng: random.Random, num_ranks: int, num_local: int, num_spare: int) -> ExpertPlacement:
    """Homes in any order, and in spare places nothing or any expert that the rank does not hold."""
    num_experts = num_ranks * num_local
    homes = rng.sample(range(num_experts), num_experts)
    places: list[int] = []
    for rank in range(num_ranks):
        own = homes[rank * num_local : (rank + 1) * num_local]
        others = [each for each in range(num_experts) if each not in own] + [EMPTY] * (num_spare + 1)
        rng.shuffle(others)
        held: list[int] = []
        for each in others:
            if len(held) < num_spare and (each == EMPTY or each not in held):
                held.append(each)
        places += own + held
    return ExpertPlacement(tuple(places), num_experts, num_ranks)


def drawn_nodes(rng: random.Random, num_ranks: int) -> tuple[int, ...]:
    """Nodes in any order, with any number of ranks, even none."""
    return tuple(rng.randrange(1 + num_ranks // 2) for _ in range(num_ranks))


@st.composite
def placements(draw, most_ranks: int = 5) -> tuple[ExpertPlacement, tuple[int, ...], np.ndarray]:
    """(a placement, the nodes of its ranks, [G, E] rows of each rank for each expert)."""
    rng = draw(st.randoms(use_true_random=False))
    num_ranks, num_local, num_spare = rng.randint(1, most_ranks), rng.randint(1, 4), rng.randint(0, 2)
    placement = drawn_placement(rng, num_ranks, num_local, num_spare)
    rows_GE = np.array([[rng.choice([0, 1, 7, 100]) for _ in range(placement.num_experts)] for _ in range(num_ranks)])
    return placement, drawn_nodes(rng, num_ranks), rows_GE


def load(name: str, num_experts: int, num_ranks: int, per_node: int = 2, k: int = 2, seed: int = 0) -> Seen:
    """Rows as a router of this kind gives them, with nodes of so many ranks."""
    nodes = tuple(rank // per_node for rank in range(num_ranks))
    if name in ("equal", "none"):
        return Seen(np.full((num_ranks, num_experts), 12.0 * (name == "equal")), nodes)
    sizes = {"num_tokens": 400, "num_experts": num_experts, "k": min(k, num_experts), "ep_size": num_ranks}
    counts = [
        np.bincount(choices(name, rank=rank, seed=seed, **sizes).reshape(-1), minlength=num_experts)
        for rank in range(num_ranks)
    ]
    return Seen(np.array(counts), nodes)


def fullest(placement: ExpertPlacement, seen: Seen) -> float:
    """The rows of the fullest rank, by a loop over what each rank sends."""
    found = [0.0] * placement.num_ranks
    to_GE = placement.routes(seen.node_of_rank)
    for rank in range(placement.num_ranks):
        for expert in range(placement.num_experts):
            found[int(to_GE[rank, expert]) // placement.per_rank] += float(seen.rows_GE[rank, expert])
    return max(found)


def num_moved(now: ExpertPlacement, after: ExpertPlacement) -> int:
    """The experts that are at home on another rank."""
    return sum(
        old // now.per_rank != new // after.per_rank
        for old, new in zip(now.home_of_expert, after.home_of_expert, strict=True)
    )


def greedy(load_E: list[float], num_ranks: int) -> list[list[int]]:
    """The reference: the experts of each rank, heaviest first to the least loaded rank that has room."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in sorted(range(len(load_E)), key=lambda each: -load_E[each]):
        with_room = [each for each in ranks if len(each) < len(load_E) // num_ranks]
        min(with_room, key=lambda each: sum(load_E[held] for held in each)).append(expert)
    return ranks


def greedy_with_replicas(load_E: list[float], num_ranks: int, num_spare: int) -> ExpertPlacement:
    """The reference with replicas: one more of the expert with most rows for each of its replicas until spare places
    are full, then all of them packed as in :func:`greedy`."""
    copies = [1] * len(load_E)
    for _ in range(num_ranks * num_spare):
        can = [each for each in range(len(load_E)) if copies[each] < num_ranks]
        if can:
            copies[max(can, key=lambda each: load_E[each] / copies[each])] += 1
    num_local, filled = len(load_E) // num_ranks, [0.0] * num_ranks
    homes: list[list[int]] = [[] for _ in range(num_ranks)]
    spare: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in sorted(range(len(load_E)), key=lambda each: -load_E[each] / copies[each]):
        for copy in range(copies[expert]):
            kind, room = (spare, num_spare) if copy else (homes, num_local)
            can = [
                each
                for each in range(num_ranks)
                if len(kind[each]) < room and expert not in homes[each] and expert not in spare[each]
            ]
            if can:
                rank = min(can, key=lambda each: filled[each])
                kind[rank].append(expert)
                filled[rank] += load_E[expert] / copies[expert]
    places = [[*own, *more, *[EMPTY] * (num_spare - len(more))] for own, more in zip(homes, spare, strict=True)]
    return ExpertPlacement(tuple(each for rank in places for each in rank), len(load_E), num_ranks)

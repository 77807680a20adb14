# SPDX-License-Identifier: Apache-2.0
"""How full the fullest are where tokens cross to each node once: against a loop over tokens and ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ds_fsmoe.planning.crossings import Crossings, expected_crossings
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_crossings import once_per_node_factors


def by_loop(
    placement: ExpertPlacement, tokens: list[np.ndarray], node_of_rank: tuple[int, ...], planned: Crossings
) -> tuple[float, float, float]:
    """The same, token by token; all rows were seen."""
    routes = placement.routes(node_of_rank)
    num_ranks, nodes = placement.num_ranks, sorted(set(node_of_rank))
    place = {
        rank: [each for each in range(num_ranks) if node_of_rank[each] == node_of_rank[rank]].index(rank)
        for rank in range(num_ranks)
    }
    at_experts, leaves, enters, arrives, passes = Counter(), Counter(), Counter(), Counter(), Counter()
    total = 0
    for source, experts_SK in enumerate(tokens):
        for experts in experts_SK:
            chosen = [each for each in experts if 0 <= each < placement.num_experts]
            total += len(chosen)
            ranks = [routes[source, each] // placement.per_rank for each in chosen]
            at_experts.update(ranks)
            for node in {node_of_rank[each] for each in ranks}:
                if node != node_of_rank[source]:
                    leaves[node_of_rank[source]] += 1
                    enters[node] += 1
            for rank in set(ranks):
                (relay,) = (
                    each for each in place if node_of_rank[each] == node_of_rank[rank] and place[each] == place[source]
                )
                if relay != rank:
                    passes[relay] += 1
                    arrives[rank] += 1
    n, p = len(nodes), num_ranks // len(nodes)
    between = total / n * planned.nodes * (n - 1) / n
    inside = total / num_ranks * planned.ranks * (p - 1) / p
    return (
        max(at_experts.values()) * num_ranks / total,
        max(*leaves.values(), *enters.values()) / between,
        max(*arrives.values(), *passes.values()) / inside,
    )


CASES = [
    (8, 4, 0, (0, 0, 1, 1), 2),
    (12, 4, 1, (0, 1, 0, 1), 3),
    (12, 6, 2, (0, 0, 1, 1, 2, 2), 4),
    (6, 6, 1, (0, 0, 0, 1, 1, 1), 1),
]


@pytest.mark.parametrize(("num_experts", "ranks", "spare", "nodes", "k"), CASES)
def test_the_factors_are_those_of_a_loop(
    num_experts: int, ranks: int, spare: int, nodes: tuple[int, ...], k: int
) -> None:
    draw = np.random.default_rng(num_experts + k)
    placement = ExpertPlacement.at_start(num_experts, ranks, spare)
    for _ in range(2 * num_experts):
        first, second = draw.integers(ranks, size=2) * placement.per_rank + draw.integers(placement.num_local, size=2)
        placement = placement.swapped(int(first), int(second))
    if spare:
        at = placement.per_rank - 1
        other = next(each for each in range(num_experts) if each not in placement.by_rank[0].tolist())
        placement = placement.with_replicas({at: other})
    tokens = [np.argsort(draw.random((37 + rank, num_experts)) ** 2, axis=1)[:, :k] for rank in range(ranks)]
    tokens[1] = np.where(draw.random(tokens[1].shape) < 0.2, -1, tokens[1])
    rows_GE = np.array([np.bincount(each[each >= 0], minlength=num_experts) for each in tokens], dtype=float)
    planned = Crossings(0.7, 0.9)
    found = once_per_node_factors(placement, rows_GE, tokens, nodes, planned)
    assert found == pytest.approx(by_loop(placement, tokens, nodes, planned))


def test_balanced_routing_is_what_was_planned() -> None:
    draw = np.random.default_rng(0)
    tokens = [np.argsort(draw.random((4000, 16)), axis=1)[:, :4] for _ in range(4)]
    rows_GE = np.array([np.bincount(each.reshape(-1), minlength=16) for each in tokens], dtype=float)
    each = expected_crossings(16, 4, 2, 2)
    planned = Crossings(each.nodes / 4, each.ranks / 4)
    found = once_per_node_factors(ExpertPlacement.at_start(16, 4), rows_GE, tokens, (0, 0, 1, 1), planned)
    assert found == pytest.approx((1, 1, 1), rel=0.02)


def test_experts_that_tokens_have_together_cross_once_and_few_tokens_stand_for_all() -> None:
    tokens = [np.array([[0, 1]] * 10)] * 4
    rows_GE = np.zeros((4, 4))
    rows_GE[:, :2] = 1000.0
    planned = Crossings(0.5, 0.5)
    together = once_per_node_factors(ExpertPlacement((0, 2, 1, 3), 4, 4), rows_GE, tokens, (0, 1, 0, 1), planned)
    apart = once_per_node_factors(ExpertPlacement((0, 1, 2, 3), 4, 4), rows_GE, tokens, (0, 1, 0, 1), planned)
    assert together[0] == apart[0] == 2
    # Both experts in one node: half of the tokens cross, all in one direction; apart, all cross, half in either.
    assert together[1] == pytest.approx(2000 / (8000 * 0.5 / 4))
    assert apart[1] == pytest.approx(2000 / (8000 * 0.5 / 4))


def test_nothing_is_full_without_rows() -> None:
    nothing = once_per_node_factors(
        ExpertPlacement.at_start(4, 4), np.zeros((4, 4)), [np.zeros((0, 2), int)] * 4, (0, 0, 1, 1), Crossings(0.5, 0.5)
    )
    assert nothing == (1, 1, 1)

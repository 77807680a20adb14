# SPDX-License-Identifier: Apache-2.0
"""How often tokens cross: against counts of drawn routing, and against every choice that there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ds_fsmoe.planning.groups import Groups, can_deduplicate, counted_fanout, expected_fanout
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, COLLECT, SPREAD, Lane
from ds_fsmoe.planning.workload import Shape, layer_work


def every_choice(num_experts: int, k: int, groups: int = 1, of_groups: int = 1) -> np.ndarray:
    """All that a router may choose, each as often as any other."""
    size = num_experts // groups
    kept = itertools.combinations(range(groups), of_groups)
    return np.array(
        [
            chosen
            for each in kept
            for chosen in itertools.combinations([g * size + e for g in each for e in range(size)], k)
        ]
    )


@pytest.mark.parametrize(
    ("num_experts", "k", "nodes", "per_node", "groups", "of_groups"),
    [(8, 3, 2, 2, 1, 1), (12, 4, 2, 3, 1, 1), (8, 1, 4, 2, 1, 1), (12, 3, 2, 2, 4, 2), (16, 4, 2, 2, 8, 3)],
)
def test_expected_crossings_are_the_mean_over_every_choice(
    num_experts: int, k: int, nodes: int, per_node: int, groups: int, of_groups: int
) -> None:
    found = expected_fanout(num_experts, k, nodes, per_node, groups, of_groups)
    counted = counted_fanout(every_choice(num_experts, k, groups, of_groups), num_experts, nodes, per_node)
    assert found.nodes == pytest.approx(counted.nodes)
    assert found.ranks == pytest.approx(counted.ranks)


def test_routing_by_groups_crosses_no_more_than_its_groups() -> None:
    assert expected_fanout(256, 8, 8, 8, 8, 4).nodes <= 4


def test_dropped_choices_cross_nowhere() -> None:
    found = counted_fanout(np.array([[0, 8], [-1, 8], [0, 7]]), 8, 2, 2)
    assert (found.nodes, found.ranks) == (1.0, 1.0)
    assert counted_fanout(np.empty((0, 2), dtype=int), 8, 2, 2).nodes == 0.0


@pytest.mark.parametrize(("num_experts", "k", "groups", "of_groups"), [(9, 2, 1, 1), (8, 5, 2, 1), (8, 2, 2, 3)])
def test_what_does_not_fit_is_refused(num_experts: int, k: int, groups: int, of_groups: int) -> None:
    with pytest.raises(ValueError, match="must"):
        expected_fanout(num_experts, k, 2, 2, groups, of_groups)


def test_a_layer_sends_each_token_once_to_a_node_and_copies_it_inside() -> None:
    shape = Shape(B=1, L=64, M=32, H=16, E=16, K=8, capacity_factor=None, heads=1, dtype_bytes=2)
    groups = Groups(8, 4, ep=8)
    assert can_deduplicate(groups)
    moe = layer_work(shape, groups, "node_deduplicated").forward.moe
    expected = expected_fanout(16, 8, 2, 4)
    sizes = {each.kind: (each.lanes, each.size) for each in moe.collectives}
    row_bytes = 64 * 32 * 2
    assert sizes[A2A_IN] == sizes[A2A_OUT] == ((Lane.INTER,), pytest.approx(row_bytes * expected.nodes))
    assert sizes[SPREAD] == sizes[COLLECT] == ((Lane.INTRA,), pytest.approx(row_bytes * expected.ranks))


@pytest.mark.parametrize("groups", [Groups(8, 8, ep=8), Groups(4, 1, ep=4), Groups(8, 4, ep=2, esp=4)])
def test_elsewhere_a_layer_is_the_flat_one(groups: Groups) -> None:
    shape = Shape(B=1, L=64, M=32, H=16, E=16, K=8, capacity_factor=None, heads=1)
    assert not can_deduplicate(groups)
    assert layer_work(shape, groups, "node_deduplicated") == layer_work(shape, groups, "flat")

# SPDX-License-Identifier: Apache-2.0
"""Rows that are dealt out over the ranks of their experts, against a plain loop over tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from ds_fsmoe.components.routing import Routing
from ds_fsmoe.execution.row_sizes import TokenChunks
from ds_fsmoe.layer.expert_cache import ExpertCacheTable, route_to_copies, rows_of_experts
from ds_fsmoe.layer.row_routing import number_rows_of_layer
from ds_fsmoe.ops import REFERENCE

TABLE = ExpertCacheTable(((4, 0, 2), (0, 1), (3, 0, 1)), 5)
"""Expert 0 on all of three ranks, 1 on two."""


def drawn(num_tokens: int, k: int) -> Routing:
    """A decision in which some choices are dropped."""
    generator = torch.Generator().manual_seed(num_tokens)
    expert_KS = torch.rand(num_tokens, 5, generator=generator).topk(k).indices.t().contiguous()
    expert_KS[torch.rand(k, num_tokens, generator=generator) < 0.2] = 5
    counts = torch.bincount(expert_KS.reshape(-1), minlength=6)[:5]
    return Routing(expert_KS, torch.rand(k, num_tokens, generator=generator), torch.zeros(()), counts, 1, 5)


@pytest.mark.parametrize(("num_tokens", "k"), [(0, 2), (1, 1), (40, 3), (600, 2)])
def test_rows_of_an_expert_go_to_its_ranks_in_turn_as_many_as_the_table_says(num_tokens: int, k: int) -> None:
    routing = drawn(num_tokens, k)
    places: dict[int, list[int]] = {expert: [] for expert in range(5)}
    for at, experts in enumerate(TABLE.experts_of_rank):
        for index, expert in enumerate(experts):
            places[expert].append(3 * at + index)
    load_of_ranks = TABLE.load_of_ranks(rows_of_experts(routing).numpy())
    for rank in range(3):
        found = route_to_copies(routing, rows_of_experts(routing), TABLE, rank, REFERENCE)
        seen: Counter[int] = Counter()
        for token, choice in itertools.product(range(num_tokens), range(k)):
            expert = int(routing.slots_KS[choice, token])
            its_places = places.get(expert, [9])
            assert found.slots_KS[choice, token] == its_places[(seen[expert] + rank) % len(its_places)]
            seen[expert] += 1
        counts = torch.bincount(found.slots_KS.reshape(-1), minlength=10)[:9]
        assert torch.equal(found.counts_E, counts)
        assert np.abs(counts.view(3, 3).sum(1).numpy() - load_of_ranks).max() <= 2
        assert (found.num_experts, found.capacity) == (9, 1)
        assert found.weights_KS is routing.weights_KS


@pytest.mark.parametrize(("slot", "more", "fault"), [(-1, 1, 1), (6, 1, 1), (5, 1, 0), (4, 1, 0), (None, -1, 2)])
def test_a_slot_out_of_range_or_counts_that_are_too_small_are_still_found(
    slot: int | None, more: int, fault: int
) -> None:
    routing = drawn(9, 2)
    if slot is not None:
        routing.slots_KS[1, 4] = slot
    routing = replace(routing, counts_E=routing.counts_E + more)
    found = route_to_copies(routing, rows_of_experts(routing), TABLE, 0, REFERENCE)
    assert int(number_rows_of_layer(found, TokenChunks(1, 1), REFERENCE).fault) == fault


@pytest.mark.parametrize("experts_of_rank", [((0, 1), ()), ((0, 0), (1,)), ((0,), (0,)), ((0, 2), (1,))])
def test_a_table_without_an_expert_or_with_one_twice_is_refused(experts_of_rank: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="experts"):
        ExpertCacheTable(experts_of_rank, 2)


def test_experts_stay_in_their_places_where_they_may() -> None:
    before = ExpertCacheTable(((3, 1, 0), (2, 4)), 5)
    now = ExpertCacheTable(((0, 1), (1, 2, 3, 4)), 5).in_same_places(before)
    assert now.experts_of_rank == ((0, 1), (2, 4, 1, 3))

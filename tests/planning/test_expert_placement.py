# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which expert: what is refused, where rows go, and how one placement becomes another."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.expert_placement import ExpertPlacement
from tests.planning.placements import drawn_placement, placements


def test_it_begins_in_the_models_order() -> None:
    placement = ExpertPlacement.at_start(6, 3)
    assert placement.expert_of_place == placement.place_of_expert == (0, 1, 2, 3, 4, 5)
    assert placement.num_local == 2
    assert placement.is_at_start
    assert not placement.swapped(0, 4).is_at_start


@pytest.mark.parametrize(
    ("places", "num_experts", "num_ranks", "message"),
    [
        ((0, 1, 2), 3, 2, "3 experts: must be a multiple of 2"),
        ((), 0, 1, "0 experts: must be a multiple of 1 rank"),
        ((0, 1), 2, 0, "must be a multiple of 0"),
        ((0, 1, 2), 2, 2, "must be each of 0..1 once"),
        ((0, 1), 4, 2, "must be each of 0..3 once"),
        ((0, 0), 2, 2, r"experts in places \[0, 0\]: must be each of 0..1 once"),
        ((0, 2), 2, 2, "must be each of 0..1 once"),
        ((0, -1, 1, -1), 2, 2, "must be each of 0..1 once"),
    ],
)
def test_what_is_no_placement_is_refused(places, num_experts: int, num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(places, num_experts, num_ranks)
    with pytest.raises(ValueError, match="7 experts: must be a multiple of 2"):
        ExpertPlacement.at_start(7, 2)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(placements())
def test_rows_go_to_where_their_expert_is(drawn) -> None:
    placement, nodes, rows_GE = drawn
    sent = [[0.0] * placement.num_ranks for _ in nodes]
    for place, expert in enumerate(placement.expert_of_place):
        assert placement.place_of_expert[expert] == place
        for rank in range(placement.num_ranks):
            sent[rank][place // placement.num_local] += rows_GE[rank, expert]
    assert placement.rows_between(rows_GE, nodes).tolist() == sent
    full = np.array(sent).sum(axis=0)
    assert placement.over_mean(rows_GE) == pytest.approx(full.max() / full.mean() if full.any() else 1.0)


def test_what_policies_of_before_ask_of_a_placement_is_answered() -> None:
    placement = ExpertPlacement.at_start(4, 2)
    assert (placement.num_spare, placement.num_replicas, placement.per_rank) == (0, 0, 2)
    assert placement.with_replicas({}) is placement
    with pytest.raises(ValueError, match=r"no replicas in training since version 0\.2\.0"):
        placement.with_replicas({2: 0})


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_exchanges_lead_to_the_wanted_homes_and_no_longer_than_needed(rng: random.Random) -> None:
    num_ranks, num_local = rng.randint(1, 6), rng.randint(1, 5)
    now, wanted = (drawn_placement(rng, num_ranks, num_local) for _ in range(2))

    def rank_of_expert(each: ExpertPlacement) -> list[int]:
        return [each.rank_of_place(home) for home in each.place_of_expert]

    swaps, reached, right = now.swaps_to(wanted), now, []
    for first, second in swaps:
        assert reached.rank_of_place(first) != reached.rank_of_place(second)
        reached = reached.swapped(first, second)
        right.append(sum(a == b for a, b in zip(rank_of_expert(reached), rank_of_expert(wanted), strict=True)))
    assert rank_of_expert(reached) == rank_of_expert(wanted)
    # Each exchange puts one more right, and what was right from the beginning has not moved.
    assert right == sorted(set(right))
    for expert, (old, new) in enumerate(zip(rank_of_expert(now), rank_of_expert(wanted), strict=True)):
        if old == new:
            assert reached.place_of_expert[expert] == now.place_of_expert[expert]
    # Halfway the same exchanges are left; exact ones lead to the very places.
    for exactly in (False, True):
        reached, swaps = now, now.swaps_to(wanted, exactly)
        for at, swap in enumerate(swaps):
            assert reached.swaps_to(wanted, exactly) == swaps[at:]
            reached = reached.swapped(*swap)
    assert reached == wanted


def test_exchanges_to_a_placement_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="a placement of 4 experts on 2 ranks: must be of 4 on 4"):
        ExpertPlacement.at_start(4, 4).swaps_to(ExpertPlacement.at_start(4, 2))


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {"expert_of_place": [0], "num_experts": 1},
        {"expert_of_place": [0], "num_experts": 1, "num_ranks": 1, "more": 1},
        {"expert_of_place": 0, "num_experts": 1, "num_ranks": 1},
        {"expert_of_place": [True], "num_experts": 1, "num_ranks": 1},
        {"expert_of_place": [0.0], "num_experts": 1, "num_ranks": 1},
        {"expert_of_place": [0], "num_experts": 1, "num_ranks": "1"},
        {"expert_of_place": [1], "num_experts": 1, "num_ranks": 1},
        {"expert_of_place": [], "num_experts": 0, "num_ranks": 0},
    ],
)
def test_what_was_no_placement_is_not_read_as_one(found) -> None:
    with pytest.raises(ValueError, match=r"a placement|experts"):
        ExpertPlacement.from_dict(found)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(placements(), st.integers(1, 3))
def test_it_survives_a_file_and_spare_places_of_before_are_left_out(drawn, num_spare: int) -> None:
    placement = drawn[0]
    assert ExpertPlacement.from_dict(json.loads(json.dumps(placement.as_dict()))) == placement
    spare = [-1] * (num_spare - 1) + [placement.expert_of_place[0]]
    places = [each for of_rank in placement.by_rank.tolist() for each in of_rank + spare]
    assert ExpertPlacement.from_dict(placement.as_dict() | {"expert_of_place": places}) == placement

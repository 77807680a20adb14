# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which expert: what is refused, where rows go, and how one placement becomes another."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.expert_placement import EMPTY, ExpertPlacement, fullest_over_mean
from tests.planning.placements import drawn_placement, placements

_ = EMPTY


def test_it_begins_in_the_models_order_with_empty_spare_places() -> None:
    placement = ExpertPlacement.at_start(6, 3, 2)
    assert placement.expert_of_place == (0, 1, _, _, 2, 3, _, _, 4, 5, _, _)
    assert (placement.num_local, placement.num_spare, placement.per_rank, placement.num_places) == (2, 2, 4, 12)
    assert placement.home_of_expert == (0, 1, 4, 5, 8, 9)
    assert placement.is_at_start
    assert placement.num_replicas == 0
    assert not placement.with_replicas({2: 5}).is_at_start
    assert not placement.swapped(0, 4).is_at_start


@pytest.mark.parametrize(
    ("places", "num_experts", "num_ranks", "message"),
    [
        ((0, 1, 2), 3, 2, "3 experts: must be a multiple of 2"),
        ((), 0, 1, "0 experts: must be a multiple of 1 rank"),
        ((0, 1), 2, 0, "must be a multiple of 0"),
        ((0, 1, _), 2, 2, "3 places: must be as many on each of 2 rank"),
        ((0, 1), 4, 2, "2 places: must be as many"),
        ((0, 0), 2, 2, "at home .*: must be each of 0..1 once"),
        ((0, 2), 2, 2, "must be each of 0..1 once"),
        ((0, _, _, 1), 2, 2, "must be each of 0..1 once"),
        ((0, 0, 1, _), 2, 2, "rank 0 holds experts .*: must be different ones"),
        ((0, 1, 1, 2), 2, 2, "rank 1 holds experts .*: must be in 0..1"),
        ((0, -3, 1, _), 2, 2, "rank 0 holds experts .*: must be in 0..1"),
    ],
)
def test_what_is_no_placement_is_refused(places, num_experts: int, num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(places, num_experts, num_ranks)


def test_sizes_that_do_not_divide_have_no_start() -> None:
    with pytest.raises(ValueError, match="7 experts: must be a multiple of 2"):
        ExpertPlacement.at_start(7, 2)


def by_loop(placement: ExpertPlacement, nodes: tuple[int, ...]) -> list[list[int]]:
    """Where rows go, rank by rank as the rule says it."""
    found = []
    for rank in range(placement.num_ranks):
        row = []
        for expert in range(placement.num_experts):
            held = [place for place, each in enumerate(placement.expert_of_place) if each == expert]

            def near(of: int, held: list[int] = held) -> list[int]:
                own = [place for place in held if place // placement.per_rank == of]
                return own or [place for place in held if nodes[place // placement.per_rank] == nodes[of]] or held

            before = [
                each
                for each in range(rank)
                if near(each) == near(rank) and each not in [place // placement.per_rank for place in held]
            ]
            row.append(near(rank)[len(before) % len(near(rank))])
        found.append(row)
    return found


@settings(deadline=None, max_examples=150, derandomize=True)
@given(placements())
def test_rows_go_to_the_nearest_replica_in_turn(drawn) -> None:
    placement, nodes, rows_GE = drawn
    to_GE = placement.routes(nodes)
    assert to_GE.tolist() == by_loop(placement, nodes)
    assert (
        np.array(placement.expert_of_place)[to_GE].tolist() == [[*range(placement.num_experts)]] * placement.num_ranks
    )
    sent_GG = placement.rows_between(rows_GE, nodes)
    assert sent_GG.sum(axis=1).tolist() == rows_GE.sum(axis=1).tolist()
    for rank in range(placement.num_ranks):
        here = (to_GE // placement.per_rank == rank) * rows_GE
        assert sent_GG[:, rank].tolist() == here.sum(axis=1).tolist()


def test_equally_near_replicas_get_equally_many_ranks() -> None:
    # Ranks 0 to 3 in one node, 4 to 7 in another; expert 0 in places of ranks 4 and 5 as well.
    placement = ExpertPlacement.at_start(8, 8, 1).with_replicas({9: 0, 11: 0})
    assert (placement.routes((0,) * 4 + (1,) * 4)[:, 0] // 2).tolist() == [0, 0, 0, 0, 4, 5, 4, 5]
    # None near: of three places two ranks take the first two, in their order.
    assert (placement.routes((0, 1, 1, 1, 0, 0, 1, 1))[:, 0] // 2).tolist() == [0, 0, 4, 5, 4, 5, 0, 4]


def test_nodes_of_other_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes of 3 ranks: must be of 2"):
        ExpertPlacement.at_start(2, 2).routes((0, 0, 1))


def test_an_exchange_leaves_replicas_but_not_beside_their_home() -> None:
    placement = ExpertPlacement((0, 1, 3, 2, 3, 0), 4, 2)
    # Expert 0 comes to rank 1, which had a replica of it, and 3 to rank 0, which had one.
    assert placement.swapped(0, 4).expert_of_place == (3, 1, _, 2, 0, _)
    assert placement.swapped(1, 3).expert_of_place == (0, 2, 3, 1, 3, 0)
    assert placement.swapped(0, 1).expert_of_place == (1, 0, 3, 2, 3, 0)


def test_replicas_are_only_in_spare_places() -> None:
    placement = ExpertPlacement.at_start(4, 2, 1)
    assert placement.with_replicas({5: 1, 2: 3}).expert_of_place == (0, 1, 3, 2, 3, 1)
    assert placement.with_replicas({5: 1}).with_replicas({2: 3}).num_replicas == 1
    assert placement.with_replicas({5: 1}).places_of_expert == ((0,), (1, 5), (3,), (4,))
    for place in (0, 4, 6, -1):
        with pytest.raises(ValueError, match=f"place {place}: is not a spare one"):
            placement.with_replicas({place: 1})
    with pytest.raises(ValueError, match="must be different ones"):
        placement.with_replicas({5: 2})


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_exchanges_lead_to_the_wanted_homes_and_no_longer_than_needed(rng: random.Random) -> None:
    num_ranks, num_local = rng.randint(1, 6), rng.randint(1, 5)
    now, wanted = (drawn_placement(rng, num_ranks, num_local, rng.randint(0, 2)) for _ in range(2))

    def rank_of_expert(each: ExpertPlacement) -> list[int]:
        return [each.rank_of_place(home) for home in each.home_of_expert]

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
            assert reached.home_of_expert[expert] == now.home_of_expert[expert]


def test_exchanges_to_a_placement_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="a placement of 4 experts on 2 ranks: must be of 4 on 4"):
        ExpertPlacement.at_start(4, 4).swaps_to(ExpertPlacement.at_start(4, 2))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(placements())
def test_it_survives_a_file(drawn) -> None:
    assert ExpertPlacement.from_dict(json.loads(json.dumps(drawn[0].as_dict()))) == drawn[0]


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


def test_the_fullest_rank_over_the_mean() -> None:
    assert fullest_over_mean(np.array([1, 2, 6])) == 2.0
    assert fullest_over_mean(np.array([5.0])) == 1.0
    assert fullest_over_mean(np.zeros(3)) == 1.0


@given(st.integers(0, 10_000))
def test_exact_exchanges_lead_to_the_very_places(seed: int) -> None:
    draw = random.Random(seed)
    ranks, local = draw.randint(1, 5), draw.randint(1, 5)

    def homes(num_spare: int) -> ExpertPlacement:
        experts = list(range(ranks * local))
        draw.shuffle(experts)
        taken = iter(experts)
        places = [
            next(taken) if at % (local + num_spare) < local else EMPTY for at in range(ranks * (local + num_spare))
        ]
        return ExpertPlacement(tuple(places), ranks * local, ranks)

    now, wanted = homes(draw.randint(0, 2)), homes(draw.randint(0, 2))
    for first, second in now.swaps_to(wanted, exactly=True):
        now = now.swapped(first, second)
    assert now.by_rank[:, :local].tolist() == wanted.by_rank[:, :local].tolist()

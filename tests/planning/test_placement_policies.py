# SPDX-License-Identifier: Apache-2.0
"""Where experts should be: as balanced as packing from scratch, with fewer moves, the same wherever it is asked."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.expert_placement import EMPTY, ExpertPlacement
from ds_fsmoe.planning.placement_costs import Seen
from ds_fsmoe.planning.placement_policies import (
    POLICIES,
    Allowed,
    balanced,
    off,
    packed,
    policy,
    relabelled,
    replicated,
    without_idle,
)
from ds_fsmoe.planning.placement_search import CountedRows, Layout
from tests.planning.placements import (
    LOADS,
    drawn_nodes,
    drawn_placement,
    fullest,
    greedy,
    greedy_with_replicas,
    load,
    num_moved,
)

SIZES = [(8, 1), (8, 2), (8, 8), (12, 4), (15, 5), (21, 7), (32, 4), (64, 8)]


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize(("num_experts", "num_ranks"), SIZES)
@pytest.mark.parametrize("num_spare", [0, 1, 2])
def test_it_is_as_balanced_as_greedy_packing(name: str, num_experts: int, num_ranks: int, num_spare: int) -> None:
    seen = load(name, num_experts, num_ranks)
    now = ExpertPlacement.at_start(num_experts, num_ranks, num_spare)
    found = balanced(now, seen, Allowed(num_spare * num_ranks))
    reference = greedy_with_replicas(seen.rows_GE.sum(axis=0).tolist(), num_ranks, num_spare)
    assert fullest(found, seen) <= 1.03 * fullest(reference, seen)
    assert fullest(found, seen) <= fullest(now, seen)
    assert found.num_spare == num_spare
    if not num_spare:
        by_rank = greedy(seen.rows_GE.sum(axis=0).tolist(), num_ranks)
        assert fullest(found, seen) <= 1.03 * max(seen.rows_GE[:, experts].sum() for experts in by_rank)


@pytest.mark.parametrize("name", [each for each in LOADS if each != "none"])
def test_fewer_experts_move_than_packed_from_scratch(name: str) -> None:
    ours = scratch = 0
    for num_experts, num_ranks in SIZES:
        for seed in range(3):
            seen = load(name, num_experts, num_ranks, seed=seed)
            now = ExpertPlacement.at_start(num_experts, num_ranks)
            ours += num_moved(now, balanced(now, seen, Allowed()))
            reference = greedy(seen.rows_GE.sum(axis=0).tolist(), num_ranks)
            anew = ExpertPlacement(tuple(each for rank in reference for each in rank), num_experts, num_ranks)
            scratch += num_moved(now, anew)
    assert ours < 0.7 * scratch


@st.composite
def asked(draw) -> tuple[ExpertPlacement, Seen, Allowed]:
    """Any placement, rows and permission."""
    rng = draw(st.randoms(use_true_random=False))
    num_ranks, num_local, num_spare = rng.randint(1, 6), rng.randint(1, 4), rng.randint(0, 2)
    now = drawn_placement(rng, num_ranks, num_local, num_spare)
    largest = rng.choice([1, 5, 1000])
    rows = [[rng.random() ** 3 * largest * rng.randint(0, 1) for _ in range(now.num_experts)] for _ in range(num_ranks)]
    allowed = Allowed(rng.randint(0, num_ranks * num_spare + 1), rng.random() < 0.7)
    return now, Seen(np.array(rows), drawn_nodes(rng, num_ranks)), allowed


@settings(deadline=None, max_examples=200, derandomize=True)
@given(asked())
def test_whatever_is_asked_a_placement_of_the_same_sizes_comes_that_is_allowed_and_no_fuller(drawn) -> None:
    now, seen, allowed = drawn
    found = balanced(now, seen, allowed)
    assert (found.num_experts, found.num_ranks, found.num_spare) == (now.num_experts, now.num_ranks, now.num_spare)
    if not seen.rows_GE.any():
        assert found == now
        return
    assert found.num_replicas <= allowed.num_replicas
    assert allowed.homes or num_moved(now, found) == 0
    # Rows are counted in whole units.
    assert fullest(found, seen) <= fullest(now.with_replicas({}), seen) * (1.01 + 1e-6)
    # What stays on its rank stays in its place, and so does a replica.
    for expert in range(now.num_experts):
        places = now.home_of_expert[expert], found.home_of_expert[expert]
        assert places[0] == places[1] or places[0] // now.per_rank != places[1] // now.per_rank
    for place, (old, new) in enumerate(zip(now.expert_of_place, found.expert_of_place, strict=True)):
        if place % now.per_rank >= now.num_local and EMPTY not in (old, new) and old != new:
            here = range(place - place % now.per_rank + now.num_local, place - place % now.per_rank + now.per_rank)
            assert old not in [found.expert_of_place[each] for each in here]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(asked())
def test_what_it_has_placed_it_leaves_alone(drawn) -> None:
    now, seen, allowed = drawn
    found = balanced(now, seen, Allowed(0, allowed.homes))
    again = balanced(found, seen, Allowed(0, allowed.homes))
    assert fullest(again, seen) <= fullest(found, seen)
    assert num_moved(found, again) == 0 or fullest(again, seen) < fullest(found, seen)


def test_a_little_drift_moves_little() -> None:
    seen = load("hot_rank", 64, 8)
    now = balanced(ExpertPlacement.at_start(64, 8), seen, Allowed())
    more = seen.rows_GE.copy()
    hot = int(more.sum(axis=0).argmax())
    more[:, hot] *= 1.5
    drifted = Seen(more, seen.node_of_rank)
    after = balanced(now, drifted, Allowed())
    assert 0 < num_moved(now, after) <= 12
    reference = max(more[:, experts].sum() for experts in greedy(more.sum(axis=0).tolist(), 8))
    assert fullest(after, drifted) <= 1.01 * reference < fullest(now, drifted)


def test_of_equally_good_exchanges_fewer_rows_cross_nodes() -> None:
    # Any of experts 0 and 1 may go, for any of 2 and 3; the tokens of 1 are on rank 1, those of 2 on rank 0.
    rows = np.array([[30, 0, 10, 0], [0, 30, 0, 10]])
    found = balanced(ExpertPlacement.at_start(4, 2), Seen(rows, (0, 1)), Allowed())
    assert found.expert_of_place == (0, 2, 1, 3)


def test_of_equally_good_exchanges_experts_come_back_to_where_they_are_now() -> None:
    rows = CountedRows(Seen(np.full((1, 6), 7.0).repeat(3, axis=0), (0, 0, 0)))
    layout = Layout(rows, np.array([1, 0, 0, 1, 2, 2]), ((),) * 6)
    first, second = np.array([1, 0, 0, 4]), np.array([3, 1, 2, 3])
    assert layout.best_exchange(first, second, np.array([0, 0, 1, 1, 2, 2])) == (0, 2)


def test_names_of_ranks_are_chosen_so_that_most_experts_stay() -> None:
    rng = random.Random(3)
    for per_node in (1, 2):
        for num_ranks, num_local in ((3, 2), (4, 3), (5, 1)):
            num_experts = num_ranks * num_local
            seen = load("zipf_1.0", num_experts, num_ranks, per_node)
            rows, now = CountedRows(seen), drawn_placement(rng, num_ranks, num_local, 0)
            start = Layout.of(rows, now)
            wanted = Layout.of(rows, drawn_placement(rng, num_ranks, num_local, 0))
            found = relabelled(wanted, start)
            every = [
                Layout(rows, np.array(names)[wanted.home_E], wanted.replicas)
                for names in permutations(range(num_ranks))
            ]
            assert any((each.home_E == found.home_E).all() for each in every)
            best = min((each.num_moved(start.home_E), each.crossing) for each in every)
            assert (found.num_moved(start.home_E), found.crossing) == best


def test_replicas_keep_with_the_homes_when_ranks_get_other_names() -> None:
    seen = load("hot_expert", 8, 4)
    rows = CountedRows(seen)
    wanted = packed(rows, 4, 1)
    found = relabelled(wanted, Layout.of(rows, ExpertPlacement.at_start(8, 4)))
    name = dict(zip(wanted.home_E.tolist(), found.home_E.tolist(), strict=True))
    assert found.replicas == tuple(tuple(sorted(name[each] for each in ranks)) for ranks in wanted.replicas)
    assert wanted.num_replicas == 4


def test_a_hot_expert_gets_a_replica_in_each_node_first() -> None:
    rows = np.ones((6, 6))
    rows[:, 1] = 50
    nodes = (0, 0, 1, 1, 2, 2)
    start = Layout.of(CountedRows(Seen(rows, nodes)), ExpertPlacement.at_start(6, 6, 1))
    for num_replicas, expected in ((1, (0, 1)), (2, (0, 1, 2))):
        filled = replicated(start, num_replicas, 1)
        assert filled.num_replicas == num_replicas
        assert tuple(sorted({nodes[each] for each in (1, *filled.replicas[1])})) == expected
    # Then where most rows meet one replica; and no more than there are ranks.
    assert replicated(start, 5, 1).replicas[1] == (0, 2, 3, 4, 5)
    assert replicated(start, 99, 2).num_replicas == 12


def test_replicas_share_the_rows_of_an_expert_hotter_than_a_rank_may_be() -> None:
    seen, now = load("hot_expert", 16, 4), ExpertPlacement.at_start(16, 4, 1)
    mean = seen.rows_GE.sum() / 4
    assert fullest(balanced(now, seen, Allowed()), seen) > 1.5 * mean
    assert fullest(balanced(now, seen, Allowed(4)), seen) < 1.05 * mean
    alone = balanced(now, seen, Allowed(4, homes=False))
    assert num_moved(now, alone) == 0
    assert fullest(alone, seen) < 1.25 * mean
    assert balanced(alone, seen, Allowed(0, homes=False)) == now


def test_replicas_that_gain_nothing_are_left_out() -> None:
    even = load("equal", 8, 4)
    now = ExpertPlacement.at_start(8, 4, 1)
    assert balanced(now.with_replicas({2: 7}), even, Allowed(4)) == now
    layout = replicated(Layout.of(CountedRows(load("hot_expert", 8, 4)), now), 4, 1)
    assert without_idle(layout, layout.rows.total).num_replicas < 4
    assert without_idle(layout, 0).peak <= layout.peak


def test_nothing_moves_without_rows() -> None:
    now = ExpertPlacement.at_start(8, 4, 1).swapped(0, 3).with_replicas({2: 7})
    assert balanced(now, load("none", 8, 4), Allowed(4)) == now


def test_rows_in_other_units_place_experts_alike() -> None:
    for num_spare in (0, 1):
        now, seen = ExpertPlacement.at_start(32, 4, num_spare), load("zipf_1.5", 32, 4)
        found = balanced(now, seen, Allowed(4 * num_spare))
        for factor in (2.0**-7, 1024.0):
            scaled = Seen(seen.rows_GE * factor, seen.node_of_rank)
            assert balanced(now, scaled, Allowed(4 * num_spare)) == found


def test_another_process_places_experts_alike() -> None:
    code = (
        "from ds_fsmoe.planning.expert_placement import ExpertPlacement; "
        "from ds_fsmoe.planning.placement_policies import Allowed, balanced; "
        "from tests.planning.placements import load; "
        "print(balanced(ExpertPlacement.at_start(32, 8, 1), load('zipf_1.5', 32, 8), Allowed(8)).expert_of_place)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        ).stdout
        for seed in ("1", "2")
    }
    here = balanced(ExpertPlacement.at_start(32, 8, 1), load("zipf_1.5", 32, 8), Allowed(8))
    assert said == {f"{here.expert_of_place}\n"}


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \[4, 16\]: must be of 4 rank\(s\) and 8 experts"):
        balanced(ExpertPlacement.at_start(8, 4), load("equal", 16, 4), Allowed())


def test_off_leaves_all_as_it_is() -> None:
    now = ExpertPlacement.at_start(8, 4, 1).swapped(0, 3).with_replicas({2: 7})
    assert off(now, load("zipf_1.5", 8, 4), Allowed(4)) is now


def test_policies_are_found_by_name() -> None:
    assert policy("balanced") is balanced
    assert policy("off") is off
    assert set(POLICIES) == {"balanced", "off"}
    assert policy("ds_fsmoe.planning.placement_policies.off") is off


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("even", "policy 'even': the choices are balanced, off, or"),
        ("", "policy '': the choices are"),
        ("no_such_package.place", "No module named 'no_such_package'"),
        ("ds_fsmoe.planning.placement_policies.evenly", "has no attribute 'evenly'"),
        (
            "ds_fsmoe.planning.placement_policies.AS_GOOD",
            "that is no function: the choices are balanced, off, or a func",
        ),
        (".place", "the choices are balanced"),
    ],
)
def test_a_policy_that_is_not_there_names_the_choices(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match="the choices are balanced, off, or a function of your own") as raised:
        policy(name)
    assert reason in str(raised.value)

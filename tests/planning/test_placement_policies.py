# SPDX-License-Identifier: Apache-2.0
"""Where experts should be: as balanced as packing from scratch, with fewer moves, the same wherever it is asked."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import ObservedRouting
from ds_fsmoe.planning.placement_policies import POLICIES, Allowed, balanced, off, policy
from tests.planning.placements import (
    LOADS,
    drawn_nodes,
    drawn_placement,
    fullest,
    greedy,
    load,
    num_moved,
)

SIZES = [(8, 1), (8, 2), (8, 8), (12, 4), (15, 5), (21, 7), (32, 4), (64, 8)]


@pytest.mark.parametrize("name", LOADS)
def test_it_is_as_balanced_as_greedy_packing(name: str) -> None:
    for num_experts, num_ranks in SIZES:
        seen, now = load(name, num_experts, num_ranks), ExpertPlacement.at_start(num_experts, num_ranks)
        found = balanced(now, seen, Allowed())
        by_rank = greedy(seen.rows_GE.sum(axis=0).tolist(), num_ranks)
        assert fullest(found, seen) <= 1.011 * max(seen.rows_GE[:, experts].sum() for experts in by_rank)
        assert fullest(found, seen) <= fullest(now, seen)


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
def asked(draw) -> tuple[ExpertPlacement, ObservedRouting, Allowed]:
    """Any placement, rows and permission."""
    rng = draw(st.randoms(use_true_random=False))
    num_ranks, num_local = rng.randint(1, 6), rng.randint(1, 4)
    now = drawn_placement(rng, num_ranks, num_local)
    largest = rng.choice([1, 5, 1000])
    rows = [[rng.random() ** 3 * largest * rng.randint(0, 1) for _ in range(now.num_experts)] for _ in range(num_ranks)]
    allowed = Allowed(homes=rng.random() < 0.9)
    return now, ObservedRouting(np.array(rows), drawn_nodes(rng, num_ranks)), allowed


@settings(deadline=None, max_examples=150, derandomize=True)
@given(asked())
def test_whatever_is_asked_a_placement_of_the_same_sizes_comes_that_is_allowed_and_no_fuller(drawn) -> None:
    now, seen, allowed = drawn
    found = balanced(now, seen, allowed)
    assert (found.num_experts, found.num_ranks) == (now.num_experts, now.num_ranks)
    assert found == now or (allowed.homes and seen.rows_GE.any())
    # Rows are counted in whole units.
    assert fullest(found, seen) <= fullest(now, seen) * (1.01 + 1e-6)
    # What stays on its rank stays in its place.
    for place, other in zip(now.place_of_expert, found.place_of_expert, strict=True):
        assert place == other or now.rank_of_place(place) != now.rank_of_place(other)
    # What it has placed it leaves alone.
    again = balanced(found, seen, allowed)
    assert fullest(again, seen) <= fullest(found, seen)
    assert num_moved(found, again) == 0 or fullest(again, seen) < fullest(found, seen)
    assert off(now, seen, allowed) is now


def test_a_little_drift_moves_little() -> None:
    seen = load("hot_rank", 64, 8)
    now = balanced(ExpertPlacement.at_start(64, 8), seen, Allowed())
    more = seen.rows_GE.copy()
    hot = int(more.sum(axis=0).argmax())
    more[:, hot] *= 1.5
    drifted = ObservedRouting(more, seen.node_of_rank)
    after = balanced(now, drifted, Allowed())
    assert 0 < num_moved(now, after) <= 12
    reference = max(more[:, experts].sum() for experts in greedy(more.sum(axis=0).tolist(), 8))
    assert fullest(after, drifted) <= 1.01 * reference < fullest(now, drifted)


def test_of_equally_good_exchanges_fewer_rows_cross_nodes() -> None:
    # Any of experts 0 and 1 may go, for any of 2 and 3; the tokens of 1 are on rank 1, those of 2 on rank 0.
    rows = np.array([[30, 0, 10, 0], [0, 30, 0, 10]])
    found = balanced(ExpertPlacement.at_start(4, 2), ObservedRouting(rows, (0, 1)), Allowed())
    assert found.expert_of_place == (0, 2, 1, 3)


def test_of_equally_good_exchanges_nodes_get_more_even_rows() -> None:
    # Either hot expert of the first rank may go to any other rank, of its node or of the other one.
    seen = ObservedRouting(np.tile([30, 30, 10, 10, 10, 10, 10, 10], (4, 1)), (0, 0, 1, 1))
    found = balanced(ExpertPlacement.at_start(8, 4), seen, Allowed())
    assert sorted(seen.node_of_rank[rank] for rank in found.rank_of_expert[:2]) == [0, 1]


def test_what_is_even_already_stays_and_what_is_off_by_two_goes_back() -> None:
    rows_E = np.array([90, 10, 80, 20, 70, 30, 60, 40])
    seen = ObservedRouting(np.tile(rows_E, (4, 1)), (0, 0, 1, 1))
    for order in ((3, 2, 1, 0), (1, 0, 3, 2)):
        packed = np.arange(8).reshape(4, 2)[list(order)]
        now = ExpertPlacement(tuple(packed.reshape(-1)), 8, 4)
        assert balanced(now, seen, Allowed()) == now
        off_by_two = now.swapped(0, 7)
        assert num_moved(off_by_two, balanced(off_by_two, seen, Allowed())) == 2


def test_rows_in_other_units_place_experts_alike() -> None:
    now, seen = ExpertPlacement.at_start(32, 4), load("zipf_1.5", 32, 4)
    found = balanced(now, seen, Allowed())
    for factor in (2.0**-7, 1024.0):
        assert balanced(now, ObservedRouting(seen.rows_GE * factor, seen.node_of_rank), Allowed()) == found


def test_another_process_places_experts_alike() -> None:
    code = (
        "from ds_fsmoe.planning.expert_placement import ExpertPlacement; "
        "from ds_fsmoe.planning.placement_policies import Allowed, balanced; "
        "from tests.planning.placements import load; "
        "print(balanced(ExpertPlacement.at_start(32, 8), load('zipf_1.5', 32, 8), Allowed()).expert_of_place)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    here = balanced(ExpertPlacement.at_start(32, 8), load("zipf_1.5", 32, 8), Allowed())
    assert done.stdout == f"{here.expert_of_place}\n"


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \[4, 16\]: must be of 4 rank\(s\) and 8 experts"):
        balanced(ExpertPlacement.at_start(8, 4), load("equal", 16, 4), Allowed())


def test_policies_are_found_by_name() -> None:
    assert policy("balanced") is balanced
    assert policy("off") is off
    assert set(POLICIES) == {"balanced", "off"}
    assert policy("ds_fsmoe.planning.placement_policies.off") is off


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("even", "no such policy; the choices are balanced, off, lina"),
        ("", "no such policy; the choices are"),
        ("no_such_package.place", "No module named 'no_such_package'"),
        ("ds_fsmoe.planning.placement_policies.evenly", "has no attribute 'evenly'"),
        (
            "ds_fsmoe.planning.placement_policies.AS_GOOD",
            "is not a function; write it as package.module.name",
        ),
        (".place", "the choices are balanced"),
    ],
)
def test_a_policy_that_is_not_there_names_the_choices(name: str, reason: str) -> None:
    with pytest.raises(
        ValueError, match=r"your function as package\.module\.name|write it as package\.module\.name"
    ) as raised:
        policy(name)
    assert reason in str(raised.value)

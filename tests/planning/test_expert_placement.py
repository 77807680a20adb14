# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold which expert: what is refused, where rows go, how one placement becomes another; where experts
should be, the same wherever it is asked; and that they move only where that pays in time, as the log says."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.block import BlockPlan, LayerPlan
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.cost import LayerCosts, LinearCost
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.placement_costs import ObservedRouting, Prices
from ds_fsmoe.planning.placement_policies import POLICIES, Allowed, balanced, decide, off, policy
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, HOLD
from tests.planning.placements import LOADS, drawn_nodes, drawn_placement, fullest, greedy, load, num_moved, placements


def test_it_begins_in_the_models_order_and_answers_what_policies_of_before_ask() -> None:
    placement = ExpertPlacement.at_start(6, 3)
    assert placement.expert_of_place == placement.place_of_expert == (0, 1, 2, 3, 4, 5)
    assert placement.is_at_start
    assert not placement.swapped(0, 4).is_at_start
    assert (placement.num_spare, placement.num_replicas, placement.per_rank, placement.num_local) == (0, 0, 2, 2)
    assert placement.with_replicas({}) is placement
    with pytest.raises(ValueError, match=r"no replicas in training since version 0\.2\.0"):
        placement.with_replicas({2: 0})


@pytest.mark.parametrize(
    ("places", "num_experts", "num_ranks", "message"),
    [
        ((0, 1, 2), 3, 2, "3 experts: must be a multiple of 2"),
        ((), 0, 1, "0 experts: must be a multiple of 1 rank"),
        ((0, 1), 2, 0, "must be a multiple of 0"),
        ((0, 1), 4, 2, "must be each of 0..3 once"),
        ((0, 0), 2, 2, r"experts in places \[0, 0\]: must be each of 0..1 once"),
        ((0, -1, 1, -1), 2, 2, "must be each of 0..1 once"),
    ],
)
def test_what_is_no_placement_is_refused(places, num_experts: int, num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(places, num_experts, num_ranks)
    with pytest.raises(ValueError, match="a placement of 4 experts on 2 ranks: must be of 4 on 4"):
        ExpertPlacement.at_start(4, 4).swaps_to(ExpertPlacement.at_start(4, 2))


@settings(max_examples=150)
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


@settings(max_examples=150)
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


@pytest.mark.parametrize(
    "change",
    [{"more": 1}, {"expert_of_place": 0}, {"expert_of_place": [True]}, {"expert_of_place": [1]}, {"num_ranks": "1"}],
    ids=str,
)
def test_what_was_no_placement_is_not_read_as_one(change: dict) -> None:
    for found in ({"expert_of_place": [0], "num_experts": 1, "num_ranks": 1} | change, None, {"num_experts": 1}):
        with pytest.raises(ValueError, match=r"a placement|experts"):
            ExpertPlacement.from_dict(found)


@settings(max_examples=50)
@given(placements(), st.integers(1, 3))
def test_it_survives_a_file_and_spare_places_of_before_are_left_out(drawn, num_spare: int) -> None:
    placement = drawn[0]
    assert ExpertPlacement.from_dict(json.loads(json.dumps(placement.as_dict()))) == placement
    spare = [-1] * (num_spare - 1) + [placement.expert_of_place[0]]
    places = [each for of_rank in placement.by_rank.tolist() for each in of_rank + spare]
    assert ExpertPlacement.from_dict(placement.as_dict() | {"expert_of_place": places}) == placement


# ---- where experts should be


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


@settings(max_examples=150)
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


def test_of_equally_good_exchanges_fewer_rows_cross_nodes_and_nodes_get_more_even_rows() -> None:
    # Any of experts 0 and 1 may go, for any of 2 and 3; the tokens of 1 are on rank 1, those of 2 on rank 0.
    rows = np.array([[30, 0, 10, 0], [0, 30, 0, 10]])
    found = balanced(ExpertPlacement.at_start(4, 2), ObservedRouting(rows, (0, 1)), Allowed())
    assert found.expert_of_place == (0, 2, 1, 3)
    # Either hot expert of the first rank may go to any other rank, of its node or of the other one.
    seen = ObservedRouting(np.tile([30, 30, 10, 10, 10, 10, 10, 10], (4, 1)), (0, 0, 1, 1))
    found = balanced(ExpertPlacement.at_start(8, 4), seen, Allowed())
    assert sorted(seen.node_of_rank[rank] for rank in found.rank_of_expert[:2]) == [0, 1]


def test_rows_in_other_units_and_another_process_place_experts_alike() -> None:
    now, seen = ExpertPlacement.at_start(32, 8), load("zipf_1.5", 32, 8)
    found = balanced(now, seen, Allowed())
    for factor in (2.0**-7, 1024.0):
        assert balanced(now, ObservedRouting(seen.rows_GE * factor, seen.node_of_rank), Allowed()) == found
    code = (
        "from tests.planning.test_expert_placement import *; "
        "print(balanced(ExpertPlacement.at_start(32, 8), load('zipf_1.5', 32, 8), Allowed()).expert_of_place)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout == f"{found.expert_of_place}\n", done.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("even", "no such policy; the choices are balanced, off, lina"),
        ("no_such_package.place", "No module named 'no_such_package'"),
        ("ds_fsmoe.planning.placement_policies.evenly", "has no attribute 'evenly'"),
        ("ds_fsmoe.planning.placement_policies.AS_GOOD", "is not a function; write it as package.module.name"),
        (".place", "the choices are balanced"),
    ],
)
def test_policies_are_found_by_name_and_one_that_is_not_there_names_the_choices(name: str, reason: str) -> None:
    assert {each: policy(each) for each in POLICIES} == {"balanced": balanced, "off": off}
    assert policy("ds_fsmoe.planning.placement_policies.off") is off
    with pytest.raises(ValueError, match=r"as package\.module\.name") as raised:
        policy(name)
    assert reason in str(raised.value)


# ---- whether that pays


COSTS = LayerCosts.written(
    dict.fromkeys((A2A_IN, A2A_OUT), LinearCost(0.5, 1e-3))
    | {EXPERT: LinearCost(0.1, 1e-3), HOLD: LinearCost(0.0, 0.0)}
)
PRICES = Prices(
    CallShape(num_experts=16, capacity=50, width=2, dtype_bytes=4, num_products=1, num_weights=8),
    Groups(4, 2, ep=4),
    LayerPlan(BlockPlan(), BlockPlan(), "flat"),
    COSTS,
    moved_bytes=3e4,
)
NOW = ExpertPlacement.at_start(16, 4)
HOT_RANK = load("hot_rank", 16, 4)


def giving(placement: ExpertPlacement):
    """A policy of one placement."""
    return lambda now, seen, allowed: placement


def test_a_move_that_pays_is_made_and_says_after_how_many_steps_and_one_that_pays_too_late_is_not_made() -> None:
    found = decide(NOW, HOT_RANK, balanced, PRICES, 1000, layer="L03")
    assert found.placement == balanced(NOW, HOT_RANK, Allowed())
    mean = HOT_RANK.rows_GE.sum() / 4
    assert found.before == pytest.approx(fullest(NOW, HOT_RANK) / mean)
    assert found.after == pytest.approx(fullest(found.placement, HOT_RANK) / mean)
    now_ms, after_ms = (PRICES.step_ms(each, HOT_RANK) for each in (NOW, found.placement))
    moves_ms = PRICES.moves_ms(NOW, found.placement, HOT_RANK.node_of_rank)
    assert (found.gain_ms_per_step, found.moves_ms) == pytest.approx((now_ms - after_ms, moves_ms))
    steps = found.breaks_even_after
    assert steps == math.ceil(moves_ms / (now_ms - after_ms)) > 1
    assert found.why == (
        f"L03: {num_moved(NOW, found.placement)} experts move: the fullest rank {found.before:.2f} -> "
        f"{found.after:.2f} times the mean, {now_ms:.1f} -> {after_ms:.1f} ms a step, {moves_ms:.0f} ms to move: "
        f"breaks even after {steps} steps"
    )
    assert decide(NOW, HOT_RANK, balanced, PRICES, steps).placement != NOW
    late = decide(NOW, HOT_RANK, balanced, PRICES, steps - 1)
    assert late.placement is NOW
    assert (late.gain_ms_per_step, late.moves_ms, late.breaks_even_after) == (0.0, 0.0, None)
    assert late.before == late.after > 2
    assert late.why.startswith("stays: ")
    assert late.why.endswith(f": would break even after {steps} steps, not within {steps - 1}")


def test_a_policy_is_asked_once_with_what_was_measured_and_balanced_routing_moves_nothing() -> None:
    asked = []

    def own(*of: object) -> ExpertPlacement:
        asked.append(of)
        return NOW.swapped(0, 15)

    assert decide(NOW, HOT_RANK, own, None, 1000).before > 1
    assert asked == [(NOW, HOT_RANK, Allowed())]
    for each in (balanced, off):
        found = decide(NOW, load("equal", 16, 4), each, PRICES, 1000, layer="L00")
        assert found.placement is NOW
        assert found.why == "L00: stays: the fullest rank has 1.00 times the mean, and nothing better was found"


def test_a_gain_below_what_costs_are_uncertain_by_counts_as_none() -> None:
    found = decide(NOW, HOT_RANK, balanced, PRICES, 1000)
    share = found.gain_ms_per_step / PRICES.step_ms(NOW, HOT_RANK)
    for factor, moves in ((0.9, True), (1.1, False)):
        unsure = replace(PRICES, costs=replace(COSTS, relative_residual=factor * share))
        again = decide(NOW, HOT_RANK, balanced, unsure, 1000)
        assert (again.placement != NOW) is moves
        assert ("the gain is below the error of these costs" in again.why) is not moves


@pytest.mark.parametrize(("more", "moves"), [(9, False), (11, True)])
def test_without_times_rows_decide_alone_if_the_fullest_rank_falls_by_a_tenth_of_the_mean(
    more: int, moves: bool
) -> None:
    # 100 rows on each of two ranks in the mean, and so many more on the first, all of which an exchange evens out.
    rows_E = [50 + more / 2, 50 + more / 2, 50 - more / 2, 50 - more / 2]
    now, seen = ExpertPlacement.at_start(4, 2), ObservedRouting(np.array([rows_E, [0.0] * 4]), (0, 0))
    found = decide(now, seen, giving(now.swapped(0, 2)), None, 1000)
    assert (found.placement != now) is moves
    if moves:
        assert (found.gain_ms_per_step, found.moves_ms, found.breaks_even_after) == (None, None, None)
        assert found.why.endswith(" -> 1.00 times the mean: decided by rows alone, without times")
    else:
        assert "stays" in found.why
        assert "by rows alone it has to fall by 0.1" in found.why


@pytest.mark.parametrize(
    ("given_placement", "message"),
    [
        (None, "the policy returned None: must be an ExpertPlacement"),
        (ExpertPlacement.at_start(8, 4), "of 8 experts on 4 rank.s.: must be of 16 on 4"),
        (ExpertPlacement.at_start(16, 2), "of 16 experts on 2 rank"),
    ],
)
def test_a_policy_that_gives_something_else_or_rows_of_another_model_are_refused(given_placement, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decide(NOW, HOT_RANK, giving(given_placement), PRICES, 1000)
    with pytest.raises(ValueError, match=r"rows \[4, 16\]: must be of 4 rank\(s\) and 8 experts"):
        balanced(ExpertPlacement.at_start(8, 4), load("equal", 16, 4), Allowed())


@settings(max_examples=60)
@given(st.integers(0, 5), st.sampled_from(LOADS), st.booleans(), st.integers(1, 2000))
def test_what_is_decided_is_never_slower(seed: int, name: str, has_times: bool, within: int) -> None:
    now, seen = ExpertPlacement.at_start(16, 4), load(name, 16, 4, seed=seed)
    found = decide(now, seen, balanced, PRICES if has_times else None, within)
    assert found.after <= found.before
    assert "\n" not in found.why
    if has_times and found.placement != now:
        assert found.gain_ms_per_step > 0
        assert found.gain_ms_per_step * within >= found.moves_ms
        assert PRICES.step_ms(found.placement, seen) < PRICES.step_ms(now, seen)

# SPDX-License-Identifier: Apache-2.0
"""Experts move only where that pays in time, and the line in the log says why they do or do not."""

from __future__ import annotations

import math
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
from ds_fsmoe.planning.placement_policies import Allowed, balanced, decide, off
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, HOLD
from tests.planning.placements import fullest, load, num_moved

COSTS = LayerCosts.written(
    {
        A2A_IN: LinearCost(0.5, 1e-3),
        A2A_OUT: LinearCost(0.5, 1e-3),
        EXPERT: LinearCost(0.1, 1e-3),
        HOLD: LinearCost(0.0, 0.0),
    }
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


def test_a_move_that_pays_is_made_and_says_after_how_many_steps() -> None:
    found = decide(NOW, HOT_RANK, balanced, PRICES, 1000, layer="L03")
    assert found.placement == balanced(NOW, HOT_RANK, Allowed())
    mean = HOT_RANK.rows_GE.sum() / 4
    assert found.before == pytest.approx(fullest(NOW, HOT_RANK) / mean)
    assert found.after == pytest.approx(fullest(found.placement, HOT_RANK) / mean)
    now_ms, after_ms = (PRICES.step_ms(each, HOT_RANK) for each in (NOW, found.placement))
    moves_ms = PRICES.moves_ms(NOW, found.placement, HOT_RANK.node_of_rank)
    assert found.gain_ms_per_step == pytest.approx(now_ms - after_ms)
    assert found.moves_ms == pytest.approx(moves_ms)
    assert found.breaks_even_after == math.ceil(moves_ms / (now_ms - after_ms)) > 1
    assert found.why == (
        f"L03: {num_moved(NOW, found.placement)} experts move: the fullest rank {found.before:.2f} -> "
        f"{found.after:.2f} times the mean, {now_ms:.1f} -> {after_ms:.1f} ms a step, {moves_ms:.0f} ms to move: "
        f"breaks even after {found.breaks_even_after} steps"
    )


def test_a_move_that_pays_too_late_is_not_made() -> None:
    steps = decide(NOW, HOT_RANK, balanced, PRICES, 1000).breaks_even_after
    assert decide(NOW, HOT_RANK, balanced, PRICES, steps).placement != NOW
    found = decide(NOW, HOT_RANK, balanced, PRICES, steps - 1)
    assert found.placement is NOW
    assert (found.gain_ms_per_step, found.moves_ms, found.breaks_even_after) == (0.0, 0.0, None)
    assert found.before == found.after > 2
    assert found.why.startswith("stays: ")
    assert found.why.endswith(f": would break even after {steps} steps, not within {steps - 1}")


@pytest.mark.parametrize("policy", [balanced, off])
def test_balanced_routing_moves_nothing(policy) -> None:
    found = decide(NOW, load("equal", 16, 4), policy, PRICES, 1000, layer="L00")
    assert found.placement is NOW
    assert found.why == "L00: stays: the fullest rank has 1.00 times the mean, and nothing better was found"


def test_a_policy_of_the_users_own_is_asked_once_with_what_was_measured() -> None:
    asked = []

    def own(*of: object) -> ExpertPlacement:
        asked.append(of)
        return NOW.swapped(0, 15)

    assert decide(NOW, HOT_RANK, own, None, 1000).before > 1
    assert asked == [(NOW, HOT_RANK, Allowed())]


def test_a_gain_below_what_costs_are_uncertain_by_counts_as_none() -> None:
    found = decide(NOW, HOT_RANK, balanced, PRICES, 1000)
    share = found.gain_ms_per_step / PRICES.step_ms(NOW, HOT_RANK)
    for factor, moves in ((0.9, True), (1.1, False)):
        unsure = replace(PRICES, costs=replace(COSTS, relative_residual=factor * share))
        again = decide(NOW, HOT_RANK, balanced, unsure, 1000)
        assert (again.placement != NOW) is moves
        assert ("the gain is below the error of these costs" in again.why) is not moves


def test_what_is_slower_is_not_taken_though_ranks_are_more_even() -> None:
    # Tokens are where their experts are, but more of them on rank 0; an exchange would even that out across nodes.
    now, seen = ExpertPlacement.at_start(4, 2), ObservedRouting(np.array([[8, 4, 0, 0], [0, 0, 2, 2]]), (0, 1))
    wanted = now.swapped(1, 2)
    assert fullest(wanted, seen) < fullest(now, seen)
    for is_dear, byte_ms in ((True, 1.0), (False, 1e-6)):
        costs = COSTS.forward | dict.fromkeys((A2A_IN, A2A_OUT), LinearCost(0.5, byte_ms))
        shape, groups = replace(PRICES.shape, num_experts=4), Groups(2, 1, ep=2)
        prices = replace(PRICES, shape=shape, groups=groups, costs=LayerCosts.written(costs))
        assert (decide(now, seen, giving(wanted), prices, 1000).placement == now) is is_dear


def test_without_times_rows_decide_alone() -> None:
    found = decide(NOW, HOT_RANK, balanced, None, 1, layer="L01")
    assert found.placement == balanced(NOW, HOT_RANK, Allowed())
    assert (found.gain_ms_per_step, found.moves_ms, found.breaks_even_after) == (None, None, None)
    assert found.why == (
        f"L01: {num_moved(NOW, found.placement)} experts move: the fullest rank {found.before:.2f} -> "
        f"{found.after:.2f} times the mean: decided by rows alone, without times"
    )


@pytest.mark.parametrize(("more", "moves"), [(9, False), (11, True)])
def test_without_times_the_fullest_rank_has_to_fall_by_a_tenth_of_the_mean(more: int, moves: bool) -> None:
    # 100 rows on each of two ranks in the mean, and so many more on the first, all of which an exchange evens out.
    rows_E = [50 + more / 2, 50 + more / 2, 50 - more / 2, 50 - more / 2]
    now, seen = ExpertPlacement.at_start(4, 2), ObservedRouting(np.array([rows_E, [0.0] * 4]), (0, 0))
    found = decide(now, seen, giving(now.swapped(0, 2)), None, 1000)
    assert (found.placement != now) is moves
    assert ("stays" in found.why) is not moves
    assert ("by rows alone it has to fall by 0.1" in found.why) is not moves


@pytest.mark.parametrize(
    ("given_placement", "message"),
    [
        (None, "the policy returned None: must be an ExpertPlacement"),
        ([0, 1], "must be an ExpertPlacement"),
        (ExpertPlacement.at_start(8, 4), "of 8 experts on 4 rank.s.: must be of 16 on 4"),
        (ExpertPlacement.at_start(16, 2), "of 16 experts on 2 rank"),
    ],
)
def test_a_policy_that_gives_something_else_is_refused(given_placement, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decide(NOW, HOT_RANK, giving(given_placement), PRICES, 1000)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.integers(0, 5),
    st.sampled_from(["zipf_1.0", "zipf_1.5", "hot_expert", "hot_rank", "equal", "none"]),
    st.booleans(),
    st.integers(1, 2000),
)
def test_what_is_decided_is_never_slower(seed: int, name: str, has_times: bool, within: int) -> None:
    now, seen = ExpertPlacement.at_start(16, 4), load(name, 16, 4, seed=seed)
    found = decide(now, seen, balanced, PRICES if has_times else None, within)
    assert found.after <= found.before
    assert "\n" not in found.why
    if has_times and found.placement != now:
        assert found.gain_ms_per_step > 0
        assert found.gain_ms_per_step * within >= found.moves_ms
        assert PRICES.step_ms(found.placement, seen) < PRICES.step_ms(now, seen)

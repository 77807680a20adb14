# SPDX-License-Identifier: Apache-2.0
"""Chunks of different sizes gain by simulation, or are not proposed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fsmoe.measured_costs import Machine
from ds_fsmoe.planning.block import ORDERS, BlockPlan, Links, equal_shares
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.runtime.pipeline import PhasePlan
from ds_fsmoe.uneven_chunks import best_sizes
from tests.measured_layers import GROUPS, SIZES, made_up

SLOWED = Contention(links=0.2, compute=0.3)


def plan(degree: int, links: Links, backward: bool = False, late_dw: int = 0) -> PhasePlan:
    return PhasePlan(BlockPlan(equal_shares(degree), links, late_dw), GROUPS, backward)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("links", ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_they_are_faster_than_equal_ones_and_the_order_stays(links: Links, backward: bool, seed: int) -> None:
    profile, proposed = made_up(seed, task_ms=0.02), 0
    for degree in (2, 3, 4):
        for machine in (Machine(), Machine(issues_ahead=True), Machine(contention=SLOWED)):
            equal = plan(degree, links, backward, late_dw=degree if backward else 0)
            found = best_sizes(equal, SIZES, profile, machine)
            if found is None:
                continue
            proposed += 1
            assert found == replace(equal.block, shares=found.shares)
            assert len(found.shares) == degree
            even_ms, uneven_ms = (
                machine.predict_ms(replace(equal, block=block), SIZES, profile) for block in (equal.block, found)
            )
            assert uneven_ms < even_ms
    # With all traffic in one stream there is little that could wait for anything else.
    assert proposed or links == "shared"


def test_without_anything_that_slows_down_no_other_sizes_are_faster() -> None:
    profile = made_up(1)
    found = best_sizes(plan(2, "paper"), SIZES, profile, Machine())
    assert found is not None
    found_ms = Machine().predict_ms(replace(plan(2, "paper"), block=found), SIZES, profile)
    others_ms = [
        Machine().predict_ms(PhasePlan(BlockPlan((share, 1 - share), "paper"), GROUPS, False), SIZES, profile)
        for share in (each / 50 for each in range(1, 50))
    ]
    # Whole slots: half of one, of 840, is how far sizes can be from what was found.
    assert found_ms <= min(others_ms) * 1.002


def test_nothing_is_proposed_where_nothing_can_be_cut_otherwise() -> None:
    profile = made_up()
    assert best_sizes(plan(1, "paper"), SIZES, profile, Machine()) is None
    assert best_sizes(plan(3, "paper"), SIZES, profile, Machine(is_serial=True)) is None

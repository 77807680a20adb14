# SPDX-License-Identifier: Apache-2.0
"""What is said to be the least that a step can take is that, and follows from what lanes have to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fsmoe.measured_costs import Machine
from ds_fsmoe.planning.block import ORDERS, BlockPlan, Links, equal_shares
from ds_fsmoe.runtime.pipeline import PhasePlan
from ds_fsmoe.runtime.profiler import LayerProfile
from ds_fsmoe.step_prediction import bounds_of
from tests.measured_layers import GROUPS, SIZES, made_up


def plans(block: BlockPlan) -> list[PhasePlan]:
    return [PhasePlan(block, GROUPS, backward) for backward in (False, True)]


def alone_ms(profile: LayerProfile, block: BlockPlan) -> float:
    return sum(Machine().predict_ms(plan, SIZES, profile) for plan in plans(block))


@pytest.mark.parametrize("links", ORDERS)
@pytest.mark.parametrize("seed", range(6))
def test_no_order_and_no_degree_is_faster_than_the_bound(links: Links, seed: int) -> None:
    profile = made_up(seed)
    bound_ms = bounds_of(Machine(), plans(BlockPlan()), SIZES, profile).bound_ms
    for degree in (1, 2, 3, 8):
        assert alone_ms(profile, BlockPlan(equal_shares(degree), links)) >= bound_ms * (1 - 1e-9)


def test_many_chunks_that_cost_nothing_by_themselves_come_near_the_bound() -> None:
    profile = made_up()
    through_zero = {
        name: replace(each, times_ms=tuple(8.0 * size / each.sizes[-1] for size in each.sizes))
        for name, each in profile.operations.items()
    }
    profile = replace(profile, operations=through_zero)
    bound_ms = bounds_of(Machine(), plans(BlockPlan()), SIZES, profile).bound_ms
    many_ms = min(alone_ms(profile, BlockPlan(equal_shares(60), links)) for links in ORDERS)
    assert bound_ms * (1 - 1e-9) <= many_ms <= 1.1 * bound_ms

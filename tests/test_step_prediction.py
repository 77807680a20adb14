# SPDX-License-Identifier: Apache-2.0
"""What is said to be the least that a step can take is that, and follows from what lanes have to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ds_fsmoe.measured_costs import Machine
from ds_fsmoe.planning.block import ORDERS, BlockPlan, Links, equal_shares
from ds_fsmoe.planning.cost import Cost, LinearCost, SwitchedCost
from ds_fsmoe.predicted import moe_work
from ds_fsmoe.runtime.pipeline import PhasePlan
from ds_fsmoe.runtime.profiler import LayerProfile
from ds_fsmoe.step_prediction import LayerTimes, bounds_of, idle_ms, predict_step
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


@dataclass(frozen=True)
class SwitchedLayer:
    """A layer whose collectives go another way from some size on, and a worse one."""

    measured: LayerProfile
    splits: bool = True
    draws: bool = False
    costs_more_cut_anew: bool = False
    doubt: float = 0.0
    task_ms: float = 0.02

    def costs(self, backward: bool, same_cuts: bool = True) -> dict[str, Cost]:
        def switched(cost: Cost, size: float) -> Cost:
            return SwitchedCost(cost, LinearCost(3 * cost.alpha_ms + 2.0, 1.5 * cost.beta_ms), size)

        costs = self.measured.costs(backward, same_cuts)
        moe = moe_work(GROUPS, backward, SIZES)
        sizes = {each.kind: each.size for each in (*moe.enter, *moe.gather, *moe.reduce, *moe.leave)}
        return {kind: switched(cost, sizes[kind] / 2) if kind in sizes else cost for kind, cost in costs.items()}


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_where_pieces_cost_less_than_their_share(seed: int) -> None:
    layer = SwitchedLayer(made_up(seed))
    # A whole step of two layers, gradients that fit into what is idle, and some that do not.
    bounds = bounds_of(Machine(), plans(BlockPlan()), SIZES, layer)
    fell = 0
    for degree in (1, 2, 3, 8):
        for links in ORDERS:
            forward, backward = plans(BlockPlan(equal_shares(degree), links))
            phases_ms = [Machine().predict_ms(each, SIZES, layer) for each in (forward, backward)]
            room_ms = idle_ms(Machine(), backward, SIZES, layer)
            times = LayerTimes(2, sum(phases_ms), sum(phases_ms), 0.0, room_ms, bounds.bound_ms, bounds.sent_ms)
            for gradients_ms in (0.0, 1.0, 50.0):
                step = predict_step([times], (5.0, 9.0 + gradients_ms), gradients_ms, True)
                assert step.chosen_ms >= step.bound_ms * (1 - 1e-9), (degree, links, gradients_ms)
                fell += step.chosen_ms < 1.5 * step.bound_ms
    assert fell, "the bound is far below everything, so nothing was tried"


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

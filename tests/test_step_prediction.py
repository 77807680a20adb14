# SPDX-License-Identifier: Apache-2.0
"""What a step is said to take, and the least that it could: from the numbers of its parts, and as it is simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ds_fsmoe.measured_costs import Machine
from ds_fsmoe.planning.block import ORDERS, BlockPlan, Links, equal_shares
from ds_fsmoe.planning.cluster import UNITS, Cluster, Operation
from ds_fsmoe.planning.cost import Cost, LinearCost, SwitchedCost
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.predicted import moe_work
from ds_fsmoe.runtime.link_times import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from ds_fsmoe.runtime.pipeline import PhasePlan
from ds_fsmoe.runtime.profiler import DW, DX, FORWARD, LayerProfile
from ds_fsmoe.step_prediction import LayerTimes, bounds_of, idle_ms, predict_step, sharded_ms
from ds_fsmoe.tuned_degrees import Ways
from tests.measured_layers import GROUPS, SIZES, made_up

UNCUT = Ways.of("deepspeed", 4)


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


# ---- with numbers

LAYERS = (
    LayerTimes(num_layers=2, chosen_ms=10.0, isolated_ms=8.0, uncut_ms=16.0, room_ms=3.0, bound_ms=5.0, sent_ms=4.0),
    LayerTimes(num_layers=1, chosen_ms=20.0, isolated_ms=18.0, uncut_ms=30.0, room_ms=6.0, bound_ms=12.0, sent_ms=9.0),
)


def test_a_step_is_its_layers_the_rest_of_the_model_and_the_gradients_that_find_no_room() -> None:
    # Of the 43 ms of the rest's backward 30 are gradients, which were not hidden when it was measured.
    found = predict_step(LAYERS, (7.0, 43.0), 30.0, in_windows=True)
    assert found.dense_ms == pytest.approx(7.0 + 13.0)
    # Idle are 2 x 3 + 6 in the layers and 13 beside them; ahead of the first of three layers there is nothing to send.
    assert found.exposed_ms == pytest.approx(30.0 - 25.0 * 2 / 3)
    assert found.chosen_ms == pytest.approx(20.0 + found.exposed_ms + 2 * 10.0 + 20.0)
    assert found.isolated_ms == pytest.approx(20.0 + found.exposed_ms + 2 * 8.0 + 18.0)
    # Stock sends all of them when the backward is over.
    assert found.deepspeed_ms == pytest.approx(20.0 + 30.0 + 2 * 16.0 + 30.0)
    assert found.speedup == pytest.approx(found.deepspeed_ms / found.chosen_ms)
    # The busiest lane of each layer and the rest, or all that is sent with all gradients.
    assert found.bound_ms == pytest.approx(max(20.0 + 2 * 5.0 + 12.0, 2 * 4.0 + 9.0 + 30.0)) == 47.0
    assert predict_step(LAYERS, (7.0, 43.0), 2.0, in_windows=True).bound_ms == pytest.approx(48.0 + 2 * 5.0 + 12.0)


def test_gradients_that_may_not_travel_in_windows_come_on_top_and_those_with_room_cost_nothing() -> None:
    after = predict_step(LAYERS, (7.0, 43.0), 30.0, in_windows=False)
    assert after.exposed_ms == after.gradients_ms == 30.0
    assert after.chosen_ms == pytest.approx(20.0 + 30.0 + 40.0)
    assert predict_step(LAYERS, (7.0, 43.0), 15.0, in_windows=True).exposed_ms == 0.0


def test_of_a_model_whose_rest_was_not_seen_only_layers_and_gradients_are_told() -> None:
    found = predict_step(LAYERS, None, 30.0, in_windows=True)
    assert found.dense_ms is None
    assert found.exposed_ms == pytest.approx(30.0 - 12.0 * 2 / 3)
    assert found.chosen_ms == pytest.approx(40.0 + found.exposed_ms)
    assert predict_step((), None, 0.0, in_windows=True).speedup == 1.0


def cost_ms(profile: LayerProfile, *names: str) -> float:
    """Of whole operations, one after the other."""
    return sum(profile.operations[name].times_ms[-1] for name in names)


@pytest.mark.parametrize(
    ("wholes", "busiest"),
    [
        ({"all-to-all": 40.0}, ((ALL_TO_ALL,) * 2, (ALL_TO_ALL,) * 2)),
        ({"all-gather": 40.0}, ((ALL_GATHER, REDUCE_SCATTER), (ALL_GATHER, REDUCE_SCATTER))),
        ({"experts_forward": 40.0, "experts_dX": 40.0, "experts_dW": 40.0}, ((FORWARD,), (DX, DW))),
    ],
)
def test_the_bound_of_a_layer_is_what_its_busiest_lanes_have_to_do(wholes: dict, busiest: tuple) -> None:
    profile = made_up(1, **wholes)
    bounds = bounds_of(Machine(contention=Contention(0.5, 0.5, 0.5)), plans(BlockPlan()), SIZES, profile)
    forward_ms, backward_ms = (cost_ms(profile, *names) for names in busiest)
    assert bounds.bound_ms == pytest.approx(forward_ms + backward_ms)
    # Gradients go between nodes, as the all-to-alls do.
    assert bounds.sent_ms == pytest.approx(forward_ms + cost_ms(profile, ALL_TO_ALL, ALL_TO_ALL))


def test_the_lane_of_gradients_is_idle_while_the_others_work_and_never_where_there_is_but_one() -> None:
    profile, (_, backward) = made_up(2), plans(BlockPlan(links="paper"))
    expected_ms = cost_ms(profile, ALL_GATHER, REDUCE_SCATTER, DX, DW)
    assert idle_ms(Machine(), backward, SIZES, profile) == pytest.approx(expected_ms)
    assert idle_ms(Machine(is_serial=True), backward, SIZES, profile) == 0.0


def test_experts_that_are_sharded_otherwise_multiply_as_much_and_send_by_the_numbers_of_the_cluster() -> None:
    profile = made_up(3)
    free = {name: Operation(LinearCost(0.0, 0.0)) for name in UNITS}
    computed_ms = cost_ms(profile, FORWARD, DX, DW)

    def of(esp_size: int, **costs: float) -> float | None:
        operations = free | {name: Operation(LinearCost(ms, 0.0), ranks=2) for name, ms in costs.items()}
        cluster = Cluster("here", 2, 2, operations)
        return sharded_ms(cluster, GROUPS, SIZES, profile, Machine(), UNCUT, esp_size)

    # With half of the weights of an expert come the rows of twice as many ranks.
    assert of(1) == pytest.approx(computed_ms)
    assert of(2) == pytest.approx(computed_ms)
    gathers = {"intra.all_gather": 3.0, "intra.reduce_scatter": 2.0}
    assert of(1, **gathers) == pytest.approx(computed_ms)
    assert of(2, **gathers) == pytest.approx(computed_ms + 2 * 5.0)
    assert of(3) is None
    # Where one thread issues for all lanes, a collective that was not measured takes it as long as those that were.
    ahead = sharded_ms(
        Cluster("here", 2, 2, free), GROUPS, SIZES, made_up(3, task_ms=7.0), Machine(issues_ahead=True), UNCUT, 2
    )
    assert ahead is not None
    # Five tasks in the forward, five in the backward; the results of the last one are there when it has been issued.
    assert ahead >= 2 * 5 * 7.0

# SPDX-License-Identifier: Apache-2.0
"""What a step is said to take, and the least that it could: from the numbers of its parts, and as it is simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cluster_schema import UNITS
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.decide.step_time import StepTimes, other_esp_sizes, predict_step, sharded_ms
from ds_fsmoe.planning.job.measured import BACKWARD, FORWARD, GRADIENTS, LayerProfile, Timing
from ds_fsmoe.planning.schedule import GRAD, Lane
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import Gradient, Layer
from tests.planning.measured_layers import GROUPS, SIZES, Machine, layer_of, made_up

UNCUT = SearchSpace.of("deepspeed", 4)


def step_of(
    profile: LayerProfile, num_layers: int, rest_ms: tuple[float, float], total_bytes: int, name: str = "fsmoe"
) -> tuple[StepTimes, list[dict[str, Layer]]]:
    gradients = (Gradient(GRAD, (Lane.INTER,), total_bytes // num_layers),) if total_bytes else ()
    shares_ms = rest_ms[0] / num_layers, rest_ms[1] / num_layers
    layer = layer_of(profile, rest_ms=shares_ms, gradients=gradients)
    options, planner = [{"flat": layer}] * num_layers, Machine().planner()
    plan = planner.plan(PlanRequest(options, planner.settings.space(name), "adaptive"))
    gradients_ms = profile.costs().backward[GRAD].ms(total_bytes) if total_bytes else 0.0
    return predict_step(planner, plan, options, sum(rest_ms), gradients_ms), options


def with_gradients(profile: LayerProfile) -> LayerProfile:
    """Half a millisecond, and one for each thousand bytes."""
    reduced = Timing("byte", (1e3, 2e3, 4e3), (1.5, 2.5, 4.5))
    return replace(profile, operations=profile.operations | {GRADIENTS: reduced})


def test_a_step_is_its_layers_the_rest_of_the_model_and_the_gradients_that_find_no_room() -> None:
    profile = with_gradients(made_up(3))
    plain, options = step_of(profile, 3, (6.0, 12.0), 0)
    planner = Machine().planner()
    chosen = planner.choose(options[0]["flat"], SearchSpace.of("fsmoe", 16))
    assert plain.chosen_ms == pytest.approx(18.0 + 3 * sum(each.time_ms for each in chosen))
    stock = planner.choose(options[0]["flat"], SearchSpace.fixed(*[Order(1, "shared")] * 2))
    assert plain.deepspeed_ms == pytest.approx(18.0 + 3 * sum(each.time_ms for each in stock))
    assert plain.isolated_ms == pytest.approx(plain.chosen_ms)
    assert (plain.exposed_ms, plain.gradients_ms, plain.dense_ms) == (0.0, 0.0, 18.0)
    assert plain.speedup == pytest.approx(plain.deepspeed_ms / plain.chosen_ms)
    assert plain.bound_ms <= plain.chosen_ms
    # A few gradients find idle links, but for those of the last layer of the backward, which nothing follows.
    few, _ = step_of(profile, 3, (6.0, 12.0), 3_000)
    assert few.deepspeed_ms == pytest.approx(plain.deepspeed_ms + 3.5)
    assert few.chosen_ms == pytest.approx(plain.chosen_ms + few.exposed_ms)
    assert 1.0 <= few.exposed_ms < 3.5
    # Many do not: the links between nodes are what the step waits for.
    many, _ = step_of(profile, 3, (6.0, 12.0), 300_000)
    assert many.exposed_ms > 250.0
    assert many.bound_ms > 300.0
    assert many.chosen_ms >= many.bound_ms


def test_a_step_of_several_micro_batches_takes_each_of_them_and_sends_gradients_once() -> None:
    profile = with_gradients(made_up(3))
    gradients = (Gradient(GRAD, (Lane.INTER,), 1_000),)
    options = [{"flat": layer_of(profile, rest_ms=(2.0, 4.0), gradients=gradients)}] * 3
    planner = Machine().planner()
    plan = planner.plan(PlanRequest(options, planner.settings.space("fsmoe"), "adaptive"))
    one, three = (predict_step(planner, plan, options, 18.0, 3.5, count) for count in (1, 3))
    without_ms = plan.without_gradients().step_ms({})
    assert one.chosen_ms > without_ms
    assert three.chosen_ms == pytest.approx(one.chosen_ms + 2 * without_ms)
    assert three.isolated_ms == pytest.approx(three.chosen_ms)
    assert three.deepspeed_ms == pytest.approx(3 * (one.deepspeed_ms - 3.5) + 3.5)
    assert (three.exposed_ms, three.gradients_ms, three.dense_ms) == (one.exposed_ms, 3.5, 54.0)
    assert 2 * one.bound_ms < three.bound_ms <= three.chosen_ms


def test_of_a_model_whose_rest_was_not_seen_only_layers_and_gradients_are_told() -> None:
    # Lanes that slow each other down are told beside those that do not.
    for machine in (Machine(), Machine(contention=Contention(0.3, 0.4, 0.2))):
        options, planner = [{"flat": layer_of(with_gradients(made_up(4)), machine)}] * 2, machine.planner()
        plan = planner.plan(PlanRequest(options, planner.settings.space("fsmoe"), "off"))
        found = predict_step(planner, plan, options, None, 0.0)
        assert found.dense_ms is None
        assert found.chosen_ms == pytest.approx(2 * sum(each.time_ms for each in plan.choices(0)))
        assert found.isolated_ms == pytest.approx(2 * sum(each.isolated_ms for each in plan.choices(0)))
        assert found.isolated_ms <= found.chosen_ms <= found.deepspeed_ms
    assert found.isolated_ms < found.chosen_ms
    nothing = planner.plan(PlanRequest([], planner.settings.space("fsmoe"), "off"))
    assert predict_step(planner, nothing, [], None, 0.0).speedup == 1.0
    # A stage of a pipeline may have no such layer, and takes what it takes.
    alone = predict_step(planner, nothing, [], 3.0, 0.5)
    assert (alone.chosen_ms, alone.deepspeed_ms, alone.bound_ms) == (3.5, 3.5, 3.5)


def test_experts_that_are_sharded_otherwise_multiply_as_much_and_send_by_the_numbers_of_the_cluster() -> None:
    # The numbers of a cluster have a product for weight gradients; what was measured of some experts has none.
    free = {name: Operation(LinearCost(0.0, 0.0)) for name in UNITS}
    gathers = {"intra.all_gather": 3.0, "intra.reduce_scatter": 2.0}
    for profile in (made_up(3), made_up(3, is_written=False)):
        computed_ms = sum(profile.operations[name].times_ms[-1] for name in (FORWARD, BACKWARD))
        for esp_size, costs, sent_ms in ((1, {}, 0.0), (2, {}, 0.0), (1, gathers, 0.0), (2, gathers, 2 * 5.0)):
            operations = free | {name: Operation(LinearCost(ms, 0.0), ranks=2) for name, ms in costs.items()}
            how = Cluster("here", 2, 2, operations), GROUPS, SIZES, profile.costs()
            # With half of the weights of an expert come the rows of twice as many ranks.
            found_ms = sharded_ms(Machine().planner(), UNCUT, *how, esp_size)
            assert found_ms == pytest.approx(computed_ms + sent_ms)
        assert sharded_ms(Machine().planner(), UNCUT, *how, 3) is None
    # Where one thread issues for all lanes, a collective that was not measured takes it as long as those that were.
    slow, planner = made_up(3, task_ms=7.0).costs(issues_ahead=True), Machine(issues_ahead=True).planner()
    ahead_ms = sharded_ms(planner, UNCUT, Cluster("here", 2, 2, free), GROUPS, SIZES, slow, 2)
    # Five tasks in the forward, five in the backward; the results of the last one are there when it has been issued.
    assert ahead_ms is not None
    assert ahead_ms >= 2 * 5 * 7.0


def test_other_esp_sizes_are_priced_for_all_layers_of_every_kind() -> None:
    profile = made_up(4)
    cluster = Cluster("here", 2, 2, {name: Operation(LinearCost(0.25, 0.0), ranks=2) for name in UNITS})
    kinds = [(3, GROUPS, SIZES, profile.costs()), (1, GROUPS, replace(SIZES, width=26), profile.costs())]

    def priced(kinds: list) -> dict[int, float]:
        return other_esp_sizes(Machine().planner(), UNCUT, cluster, kinds, 2)

    of_all, of_each = priced(kinds), [priced([(1, *each[1:])]) for each in kinds]
    assert set(of_all) == {1, 2}
    for size, time_ms in of_all.items():
        assert time_ms == pytest.approx(3 * of_each[0][size] + of_each[1][size])
    # Gathering and reducing cost a launch each, in both phases.
    assert of_each[0][2] == pytest.approx(of_each[0][1] + 4 * 0.25)
    assert priced([]) == {}


def test_the_bound_is_what_tasks_take_at_their_fastest() -> None:
    """Medians of what was measured are not the least: a step whose tasks were all fast beats a bound made of them."""
    profile, planner, found = made_up(), Machine().planner(), []
    for share in (1.0, 0.8):
        timings = {
            name: replace(each, least_ms=tuple(share * ms for ms in each.times_ms))
            for name, each in profile.operations.items()
        }
        options = [{"flat": layer_of(replace(profile, operations=timings))}] * 2
        plan = planner.plan(PlanRequest(options, planner.settings.space("best"), "off"))
        found.append(predict_step(planner, plan, options, None, 0.0))
    medians, fastest = found
    assert fastest.chosen_ms == pytest.approx(medians.chosen_ms)
    assert fastest.bound_ms < 0.85 * min(medians.bound_ms, fastest.chosen_ms)

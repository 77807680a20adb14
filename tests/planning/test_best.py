# SPDX-License-Identifier: Apache-2.0
"""The preset ``best``: as fast as any other to a hundredth, within its limits and above every lower bound."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.simulations.paper import table_4
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order
from ds_fsmoe.planning.decide.bounds import lower_bound_ms, step_bounds_ms
from ds_fsmoe.planning.decide.plan import Planner, Settings, plan_by_name
from ds_fsmoe.planning.decide.plan_requests import PlanRequest
from ds_fsmoe.planning.decide.presets import PRESETS, Switches
from ds_fsmoe.planning.decide.search import LANE_NAMES
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT, GRAD, Lane
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import BlockWork, Gradient, Layer, MoEWork, Shape, Stage, Work, kind_costs, layer_work
from tests.planning.layers import LAYOUTS, SHAPE, choice_of, layer_of, plan_by_switches, random_costs

TESTBEDS = {"a": Groups(48, 8, mp=8, esp=8, ep=6), "b": Groups(32, 4, mp=4, esp=4, ep=8)}
KAPPAS = (0.0, 0.3, 0.6, 0.9, 1.2)


def steps_ms(planner: Planner, layers: list[Layer], carried: tuple = ()) -> dict[str, float]:
    settings = planner.settings
    return {
        name: plan_by_name(planner, name, layers, carried).step_ms(planner.costs, settings.contention, settings.host_ms)
        for name in (*PRESETS, "best")
    }


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("testbed", ["a", "b"])
def test_best_is_as_fast_as_any_preset_to_a_hundredth_on_the_papers_grid(testbed: str, kappa: float) -> None:
    groups = TESTBEDS[testbed]
    costs = kind_costs(load_cluster(f"testbed_{testbed}"), groups)
    for shape in random.Random(kappa).sample(list(table_4(testbed, groups.ep)), 1):
        layer = layer_work(shape, groups)
        ms = steps_ms(
            Planner(costs, Settings(Contention(kappa), max_degree=4, min_gain=0.0)), [layer] * 2, layer.gradients
        )
        assert ms["best"] <= min(ms[name] for name in PRESETS) * 1.01, (shape, ms)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_best_is_as_fast_as_any_preset_to_a_hundredth_on_random_clusters(layout: str, recompute: bool) -> None:
    rng = random.Random(f"{layout}{recompute}")
    layers = [
        layer_of(layout, recompute=recompute),
        layer_of(layout, Shape(1, 8, 8, 16, 8, 1, None, heads=2), recompute),
    ]
    contention = Contention(rng.choice(KAPPAS), rng.choice([0.0, 0.3]))
    settings = Settings(contention, rng.choice([0.0, 0.01]), max_degree=3, min_gain=0.0)
    ms = steps_ms(Planner(random_costs(rng), settings), layers)
    assert ms["best"] <= min(ms[name] for name in PRESETS) * 1.01, ms


@pytest.mark.parametrize("max_degree", [1, 2, 3])
def test_best_keeps_to_the_highest_degree(max_degree: int) -> None:
    costs = kind_costs(load_cluster("testbed_b"), TESTBEDS["b"])
    layer = layer_work(Shape(4, 1024, 1024, 4096, 8), TESTBEDS["b"])
    plan = plan_by_name(Planner(costs, Settings(max_degree=max_degree)), "best", [layer])
    assert max(each.degree for each in (*plan.forward, *plan.backward)) <= max_degree


def test_the_order_beyond_the_paper_gains_and_is_never_a_loss() -> None:
    rng = random.Random(3)
    gained = 0
    for _ in range(6):
        costs = random_costs(rng)
        planner, layers = Planner(costs, Settings(max_degree=4, min_gain=0.0)), [layer_of("the paper's")] * 2
        all_ms = plan_by_name(planner, "best", layers).step_ms(costs)
        space = planner.settings.space("best")
        orders = tuple(each for each in space.orders if each.links != "reduce_first")
        request = PlanRequest([{"": each} for each in layers], replace(space, orders=orders), "adaptive")
        paper = planner.plan(request).step_ms(costs)
        gained += paper > all_ms * (1 + 1e-6)
        assert all_ms <= paper * (1 + 1e-9)
        assert paper <= steps_ms(planner, layers)["fsmoe"] * (1 + 1e-9)
    assert gained


@pytest.mark.parametrize("kappa", [0.0, 0.4])
def test_best_leaves_a_layer_alone_that_gains_less_than_the_margin(kappa: float) -> None:
    """What is predicted to gain less than three hundredths is lost in the noise, whoever has written the costs."""
    rng = random.Random(7)
    kept = 0
    for _ in range(40):
        costs, layers = random_costs(rng, alphas=2.0), [layer_of("the paper's")]
        free, wary = (Settings(Contention(kappa), max_degree=4, min_gain=gain) for gain in (0.0, 0.03))
        plans = [plan_by_name(Planner(costs, each), "best", layers) for each in (free, wary)]
        for choice in plans[1].choices(0):
            assert choice.order.degree == 1 or choice.time_ms < 0.97 * choice.unchunked_ms
        gained = [each.step_ms(costs, Contention(kappa)) for each in plans]
        kept += plans[0].forward != plans[1].forward
        assert gained[0] <= gained[1] * (1 + 1e-9)
    assert kept


@pytest.mark.parametrize("layout", ["the paper's", "2dh", "no expert parallelism"])
@pytest.mark.parametrize("contention", [Contention(), Contention(0.6)], ids=str)
def test_no_plan_of_a_model_beats_its_lower_bound(layout: str, contention: Contention) -> None:
    rng = random.Random(layout)
    layers = [layer_of(layout), layer_of(layout, Shape(1, 8, 8, 16, 8, 1, None, heads=2)), layer_of(layout)]
    costs = random_costs(rng)
    planner = Planner(costs, Settings(contention, max_degree=3))
    # best may use one chunk more than is allowed: see test_best_keeps_to_the_highest_degree.
    bounds = step_bounds_ms(layers, costs, 4)
    for name in (*PRESETS, "best"):
        played = plan_by_name(planner, name, layers).timelines(costs, contention)
        for timeline, bound_ms in zip(played, bounds, strict=True):
            assert timeline.makespan_ms >= bound_ms * (1 - 1e-3 if name == "best" else 1 - 1e-9), name


def bare(enter_ms: float, forward_ms: float, backward_ms: float) -> Layer:
    """A layer with an all-to-all and experts; sizes are milliseconds."""
    enter = (Stage("A2A_IN", (Lane.INTER,), enter_ms, group="ep"),)
    forward, backward = (
        BlockWork((), MoEWork(enter, Work(EXPERT, (Lane.COMPUTE,), ms), ()), ()) for ms in (forward_ms, backward_ms)
    )
    return Layer(forward, backward, ())


def test_the_bound_of_a_model_is_what_its_busiest_lane_has_to_do_and_no_less() -> None:
    costs = {kind: LinearCost(0.0, 1.0) for kind in ("A2A_IN", EXPERT, GRAD)}
    gradient = Gradient(GRAD, (Lane.INTER,), 5)
    sending, computing = replace(bare(10.0, 1.0, 2.0), gradients=(gradient,)), bare(1.0, 10.0, 12.0)
    # Three all-to-alls, and in the backward three times the gradients; a chunk has to be computed after the last.
    assert step_bounds_ms([sending] * 3, costs) == pytest.approx((30.0, 45.0), abs=0.2)
    assert lower_bound_ms(sending.backward, costs, grad_ms=5.0) == pytest.approx(15.0, abs=0.2)
    assert step_bounds_ms([computing] * 3, costs) == pytest.approx((30.0, 36.0), abs=0.5)
    # Plans of many chunks come near: it is no less than what can be done.
    for layer in (sending, computing):
        plan = plan_by_name(Planner(costs, Settings(max_degree=16, min_gain=0.0)), "best", [layer] * 3)
        forward_ms, backward_ms = (each.makespan_ms for each in plan.timelines(costs))
        bounds_ms = step_bounds_ms([layer] * 3, costs, 17)
        assert forward_ms <= 1.05 * bounds_ms[0]
        assert backward_ms <= 1.05 * bounds_ms[1]


def test_a_choice_is_said_to_be_bound_by_the_lane_that_its_end_waits_for_most() -> None:
    costs = {kind: LinearCost(0.0, 1.0) for kind in ("A2A_IN", EXPERT)}
    # An order that has no closed form, so that it is read off the critical path.
    order = Order(2, "reduce_first")
    for layer, lane in ((bare(10.0, 1.0, 2.0), Lane.INTER), (bare(1.0, 6.0, 12.0), Lane.COMPUTE)):
        times = BlockTimes(layer.backward, costs)
        assert not times.has_closed_form(order)
        assert choice_of(times, [order]).bottleneck == LANE_NAMES[lane]


def test_layers_of_nothing_and_layers_beyond_measure_are_planned() -> None:
    layer = layer_of("the paper's", SHAPE)
    for scale in (0.0, 1e-3, 1e6):
        costs = {kind: LinearCost(each.alpha_ms * scale, each.beta_ms * scale) for kind, each in PLAIN.items()}
        for contention in (Contention(), Contention(0.5)):
            planner = Planner(costs, Settings(contention, max_degree=2))
            for name in ("best", "tutel"):
                plan = plan_by_name(planner, name, [layer] * 2)
                reference = plan_by_name(Planner(PLAIN, planner.settings), name, [layer] * 2)
                expected_ms = reference.step_ms(PLAIN, contention) * scale
                assert plan.step_ms(costs, contention) == pytest.approx(expected_ms, rel=2e-3, abs=0)


PLAIN = random_costs(random.Random(12))


def test_ideal_links_are_best_with_more_freedom_at_every_switch() -> None:
    rng = random.Random(5)
    for _ in range(4):
        costs = random_costs(rng)
        planner, layers = Planner(costs, Settings(max_degree=6)), [layer_of("the paper's")] * 2

        def ms(switches: Switches, planner: Planner = planner, layers: list = layers, costs: dict = costs) -> float:
            return plan_by_switches(planner, switches, layers).step_ms(costs)

        for links in ("shared", "paper", "reduce_first"):
            off, common, free = (ms(Switches(each, links)) for each in ("off", "common", "per_phase"))
            assert free <= common * (1 + 1e-9) <= off * (1 + 2e-9)
        assert ms(Switches("per_phase", "paper")) <= ms(Switches("per_phase", "shared")) * (1 + 1e-9)

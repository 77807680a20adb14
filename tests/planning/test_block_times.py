# SPDX-License-Identifier: Apache-2.0
"""A layer's times for many orders at once are those of its schedules, however its groups lie."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from ds_fsmoe.planning.block import ORDERS, Slice, block_schedule
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order
from ds_fsmoe.planning.decide.bounds import lower_bound_ms
from ds_fsmoe.planning.decide.degree import Load, Phase
from ds_fsmoe.planning.schedule import GRAD, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention, simulate
from ds_fsmoe.planning.workload import BlockWork
from tests.planning.layers import LAYOUTS, bare_block, choice_of, grad_lanes_of, layer_of, random_costs

CONTENTIONS = (
    (IDEAL, 0.0),
    (IDEAL, 0.01),
    (Contention(0.45), 0.0),
    (Contention(0.6, 0.2), 0.02),
    (Contention(0.3, 0.2, 0.4), 0.01),
)


def all_orders(degrees: tuple[int, ...]) -> list[Order]:
    return [Order(degree, links) for degree, links in itertools.product(degrees, ORDERS)]


def played_ms(
    work: BlockWork,
    costs: dict[str, LinearCost],
    order: Order,
    grads_ms: tuple[float, float] = (0.0, 0.0),
    lanes: tuple[Lane, ...] = (Lane.INTER,),
    contention: Contention = IDEAL,
    host_ms: float = 0.0,
) -> float:
    slices = [(Slice(GRAD, lanes, each),) if each else () for each in grads_ms]
    schedule = block_schedule(work, order.plan(*slices))
    return simulate(schedule, costs | {GRAD: LinearCost(0.0, 1.0)}, contention, host_ms).makespan_ms


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_times_are_those_of_the_schedules(layout: str, phase: str) -> None:
    rng = random.Random(layout + phase)
    work, lanes = getattr(layer_of(layout), phase), grad_lanes_of(layout)
    orders = all_orders((1, 3, 4))
    grads_ms = [(0.0, 0.0), (0.7, 0.0), (0.0, 2.5), (40.0, 0.3)]
    for contention, host_ms in CONTENTIONS:
        costs = random_costs(rng)
        times = BlockTimes(work, costs, contention, host_ms, lanes)
        found = times.times_ms(orders, *map(np.array, zip(*grads_ms, strict=True)))
        assert found.shape == (len(orders), len(grads_ms))
        for index in rng.sample(range(len(orders)), 6):
            for column, pair in enumerate(grads_ms):
                expected = played_ms(work, costs, orders[index], pair, lanes, contention, host_ms)
                assert found[index, column] == pytest.approx(expected, rel=1e-9), (orders[index], pair)


def test_only_the_papers_own_layout_and_orders_have_a_closed_form() -> None:
    rng = random.Random(3)
    for layout in LAYOUTS:
        times = BlockTimes(layer_of(layout).backward, random_costs(rng), grad_lanes=grad_lanes_of(layout))
        is_papers = layout in ("the paper's", "all-to-all between nodes only")
        assert times.is_papers == is_papers, layout
        assert times.has_closed_form(Order(4)) == is_papers
        assert not times.has_closed_form(Order(4, "reduce_first"))
    for contention, host_ms in CONTENTIONS[1:]:
        times = BlockTimes(layer_of("the paper's").forward, random_costs(rng), contention, host_ms)
        assert not times.has_closed_form(Order(2))


@pytest.mark.parametrize(("contention", "host_ms"), [(IDEAL, 0.0), (Contention(0.5), 0.01)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_choice_is_the_best_of_all_schedules(layout: str, contention: Contention, host_ms: float) -> None:
    rng = random.Random(layout)
    work, costs = layer_of(layout).backward, random_costs(rng)
    times = BlockTimes(work, costs, contention, host_ms)
    for links in ORDERS:
        orders = [Order(degree, links) for degree in range(1, 13)]
        choice = choice_of(times, orders)
        played = [played_ms(work, costs, each, contention=contention, host_ms=host_ms) for each in orders]
        assert choice.time_ms == pytest.approx(played[choice.order.degree - 1], rel=1e-9)
        assert choice.time_ms == pytest.approx(min(played), rel=1e-9)
        if contention == IDEAL:
            assert all(each > min(played) * (1 + 0.5e-12) for each in played[: choice.order.degree - 1])
        assert choice.runner_up_ms == pytest.approx(sorted(played)[1], rel=1e-9)


def test_the_papers_choice_is_never_better_and_falls_back_where_it_does_not_apply() -> None:
    rng = random.Random(5)
    for layout in LAYOUTS:
        for _ in range(2):
            times = BlockTimes(layer_of(layout).backward, random_costs(rng))
            for links in ("paper", "shared"):
                orders = [Order(degree, links) for degree in range(1, 13)]
                exact, paper = choice_of(times, orders, 0.4), choice_of(times, orders, 0.4, "slsqp")
                assert exact.time_ms <= paper.time_ms * (1 + 1e-12)
                if links == "shared" or not times.is_papers:
                    assert exact == paper


def test_the_papers_choice_works_where_only_one_degree_is_open() -> None:
    rng = random.Random(6)
    for _ in range(10):
        times = BlockTimes(layer_of("the paper's").backward, random_costs(rng))
        for degree in (1, 2, 5, 16):
            assert choice_of(times, [Order(degree, "paper")], solver="slsqp").order.degree == degree


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_order_is_faster_than_the_lower_bound(layout: str) -> None:
    rng = random.Random(layout)
    layer, lanes = layer_of(layout), grad_lanes_of(layout)
    for phase, (contention, host_ms) in itertools.product(("forward", "backward"), CONTENTIONS):
        work = getattr(layer, phase)
        costs = random_costs(rng)
        times = BlockTimes(work, costs, contention, host_ms, lanes)
        orders = all_orders((1, 2, 7))
        assert times.times_ms(orders).min() >= lower_bound_ms(work, costs, 7) * (1 - 1e-9)
        for grad_ms in (1.0, 30.0) if Lane.INTER in lanes[:1] else ():
            found = times.times_ms(orders, np.array([grad_ms, 0.0]), np.array([0.0, grad_ms]))
            assert found.min() >= lower_bound_ms(work, costs, 7, grad_ms) * (1 - 1e-9)


def test_the_lower_bound_is_reached_where_nothing_can_overlap() -> None:
    costs = {kind: LinearCost(0.25, 1e-3) for kind in random_costs(random.Random(8))}
    work = layer_of("one rank").forward
    alone_ms = played_ms(work, costs, Order(1))
    assert lower_bound_ms(work, costs, 1) == pytest.approx(alone_ms)


def test_where_the_host_is_the_limit_a_layer_is_not_cut() -> None:
    """All of a layer's tasks take 16 ms; a host that needs 4 ms for each is busy for longer with two chunks of five."""
    whole = Load(LinearCost(0.0, 1.0), 4.0)
    phase = Phase(*(replace(whole, size=size) for size in (3.0, 2.0, 5.0, 3.0)))
    work, costs = bare_block(phase)
    orders = [Order(degree) for degree in range(1, 9)]
    degrees = []
    for host_ms in (0.0, 0.2, 1.0, 4.0):
        times = BlockTimes(work, costs, host_ms=host_ms)
        degrees.append(choice_of(times, orders).order.degree)
        # What is chosen is the best of what is simulated: the closed form, which knows of no host, has no say.
        simulated_ms = [played_ms(work, costs, order, host_ms=host_ms) for order in orders]
        assert simulated_ms[degrees[-1] - 1] == pytest.approx(min(simulated_ms))
        assert min(simulated_ms) >= host_ms * 5 * degrees[-1]
    assert degrees[0] == 8
    assert degrees[-1] == 1
    assert degrees == sorted(degrees, reverse=True)
    # By hand: the fifth of five tasks is issued after 20 ms and takes 3; the tenth of ten after 40 ms, and 1.5.
    times_ms = BlockTimes(work, costs, host_ms=4.0).times_ms(orders[:2])[:, 0]
    assert times_ms == pytest.approx([23.0, 41.5])

# SPDX-License-Identifier: Apache-2.0
"""A layer's times for many orders at once are those of its schedules, however its groups lie."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ds_fsmoe.planning.block import ORDERS, Slice
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import BlockTimes, Order
from ds_fsmoe.planning.decide.degree import Load, Phase
from ds_fsmoe.planning.schedule import GRAD
from tests.covering import covering
from tests.planning.layers import (
    CONTENTIONS,
    LAYOUTS,
    bare_block,
    choice_of,
    grad_lanes_of,
    layer_of,
    played_ms,
    random_costs,
)

GRADS_MS = ((0.0, 0.0), (0.7, 0.0), (0.0, 2.5), (40.0, 0.3))
CASES = covering(sorted(LAYOUTS), ("forward", "backward"), range(len(CONTENTIONS)), (0.0, 0.01), ORDERS)


@pytest.mark.parametrize(("layout", "phase", "contention", "host_ms", "links"), CASES)
def test_times_are_those_of_the_schedules(layout: str, phase: str, contention: int, host_ms: float, links: str) -> None:
    work, lanes, how = getattr(layer_of(layout), phase), grad_lanes_of(layout), CONTENTIONS[contention]
    costs = random_costs(random.Random(f"{layout}{phase}{contention}")) | {GRAD: LinearCost(0.0, 1.0)}
    orders = [Order(degree, links) for degree in (1, 3, 4)]
    found = BlockTimes(work, costs, how, host_ms, lanes).times_ms(orders, *map(np.array, zip(*GRADS_MS, strict=True)))
    for row, order in zip(found, orders, strict=True):
        for found_ms, grads_ms in zip(row, GRADS_MS, strict=True):
            slices = tuple((Slice(GRAD, lanes, each),) if each else () for each in grads_ms)
            expected_ms = played_ms(work, order, costs, how, host_ms, slices=slices)
            assert found_ms == pytest.approx(expected_ms, rel=1e-9), (order, grads_ms)


def test_only_the_papers_own_layout_and_orders_on_ideal_lanes_have_a_closed_form() -> None:
    costs = random_costs(random.Random(3))
    for layout in LAYOUTS:
        times = BlockTimes(layer_of(layout).backward, costs, grad_lanes=grad_lanes_of(layout))
        is_papers = layout in ("the paper's", "all-to-all between nodes only")
        assert times.is_papers == is_papers, layout
        assert times.has_closed_form(Order(4)) == is_papers
        assert not times.has_closed_form(Order(4, "reduce_first"))
    for contention, host_ms in ((CONTENTIONS[1], 0.0), (CONTENTIONS[0], 0.01)):
        assert not BlockTimes(layer_of("the paper's").forward, costs, contention, host_ms).has_closed_form(Order(2))


def test_the_papers_choice_is_never_better_and_falls_back_where_it_does_not_apply() -> None:
    rng = random.Random(5)
    for layout in LAYOUTS:
        times = BlockTimes(layer_of(layout).backward, random_costs(rng))
        for links in ("paper", "shared"):
            orders = [Order(degree, links) for degree in range(1, 13)]
            exact, paper = choice_of(times, orders, 0.4), choice_of(times, orders, 0.4, "slsqp")
            assert exact.time_ms <= paper.time_ms * (1 + 1e-12)
            assert exact == paper or (links == "paper" and times.is_papers)
        for degree in (1, 2, 5, 16):
            assert choice_of(times, [Order(degree, "paper")], solver="slsqp").order.degree == degree


def test_where_the_host_is_the_limit_a_layer_is_not_cut() -> None:
    """All of a layer's tasks take 16 ms; a host that needs 4 ms for each is busy for longer with two chunks of five."""
    whole = Load(LinearCost(0.0, 1.0), 4.0)
    phase = Phase(*(replace(whole, size=size) for size in (3.0, 2.0, 5.0, 3.0)))
    work, costs = bare_block(phase)
    orders = [Order(degree) for degree in range(1, 9)]
    degrees = [choice_of(BlockTimes(work, costs, host_ms=each), orders).order.degree for each in (0.0, 0.2, 1.0, 4.0)]
    assert degrees == sorted(degrees, reverse=True)
    assert (degrees[0], degrees[-1]) == (8, 1)
    # By hand: the fifth of five tasks is issued after 20 ms and takes 3; the tenth of ten after 40 ms, and 1.5.
    times_ms = BlockTimes(work, costs, host_ms=4.0).times_ms(orders[:2])[:, 0]
    assert times_ms == pytest.approx([23.0, 41.5])

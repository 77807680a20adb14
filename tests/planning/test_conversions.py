# SPDX-License-Identifier: Apache-2.0
"""Rows for narrow wires are converted by tasks, and the planner chooses on which lane."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_fsmoe.planning.block import ORDERS
from ds_fsmoe.planning.call_shape import CallShape, layer_of_call, moe_work
from ds_fsmoe.planning.cost import LayerCosts, LinearCost
from ds_fsmoe.planning.decide import rules
from ds_fsmoe.planning.decide.block_times import Order, order_words
from ds_fsmoe.planning.decide.bounds import lower_bound_ms
from ds_fsmoe.planning.decide.plan import Planner
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.measured import DEQUANTISED, QUANTISED
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import DEQUANTISING, EXPERT, HOLD, QUANTISING, REST, Lane
from ds_fsmoe.planning.two_batch import sub_batch_moe
from ds_fsmoe.planning.workload import Layer
from tests.planning.measured_layers import GROUPS, SIZES, line, made_up

SPREAD_OUT = Groups(8, 1, ep=8)
NARROW = CallShape(8, 64, 16, 2, 1, 100, num_tokens=64, wires=(0.625, 0.625))


def layer(expert_ms: float, conversion_ms: float, shape: CallShape = NARROW) -> Layer:
    """A layer whose links take 10 ms each way."""
    costs = {HOLD: LinearCost(0.0, 0.0), REST: LinearCost(0.0, 1.0)}
    for each in moe_work(SPREAD_OUT, False, replace(shape, wires=(0.625, 0.625))).stages:
        time_ms = conversion_ms if "QUANTISE" in each.kind else expert_ms if each.kind == EXPERT else 10.0
        costs[each.kind] = LinearCost(0.01, time_ms / each.size)
    return layer_of_call(SPREAD_OUT, shape, LayerCosts.written(costs, 0.0))


def chosen(of: Layer, schedule: str = "best") -> list[Order]:
    planner = Planner({})
    found = planner.plan(PlanRequest([{"flat": of}], planner.settings.space(schedule), "off"))
    return list(found.orders[0])


def test_conversions_are_beside_the_experts_where_links_are_full_and_on_links_where_experts_are() -> None:
    assert {each.conversions for each in chosen(layer(expert_ms=2.0, conversion_ms=3.0))} == {"compute"}
    assert {each.conversions for each in chosen(layer(expert_ms=60.0, conversion_ms=3.0))} == {"links"}


def test_the_lower_bound_holds_where_conversions_run_beside_the_experts_too() -> None:
    of = layer(expert_ms=2.0, conversion_ms=3.0)
    for work, choice in zip((of.forward, of.backward), Planner({}).choose(of, SearchSpace.of("best", 8)), strict=True):
        assert choice.order.conversions == "compute"
        assert lower_bound_ms(work, of.costs.forward, 8) <= choice.time_ms


def test_without_narrow_wires_there_is_nothing_to_choose() -> None:
    wide = layer(2.0, 3.0, replace(NARROW, wires=(1.0, 1.0)))
    space = SearchSpace.of("best", 8)
    assert not wide.forward.moe.may_convert_on_compute
    assert list(space.orders_of(wide.forward.moe, False)) == list(SearchSpace.of("best", 8).orders)
    narrow = layer(2.0, 3.0).forward.moe
    found = space.orders_of(narrow, False)
    assert [each for each in found if each.conversions == "links"] == list(space.orders)
    assert {each.degree for each in found if each.conversions == "compute"} == set(range(2, 9))
    # In halves the other half computes meanwhile.
    assert {each.conversions for each in space.orders_of(sub_batch_moe(narrow), False, is_two_batch=True)} == {"links"}


def test_what_is_asked_for_runs_as_written_and_a_rule_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    of = layer(2.0, 3.0)
    space = SearchSpace.of("fsmoe", 8).with_degrees(3, 3, "paper")
    assert [each.order for each in Planner({}).choose(of, space)] == [Order(3, "paper")] * 2
    monkeypatch.setattr(rules, "RULES", [*rules.RULES, lambda proposal: proposal.order.conversions == "links"])
    assert {each.conversions for each in chosen(of)} == {"links"}


@given(st.integers(1, 5), st.sampled_from(ORDERS), st.booleans(), st.sampled_from(["flat", "2dh", "node_deduplicated"]))
def test_on_either_lane_the_same_tasks_send_in_the_same_order(
    degree: int, links: str, backward: bool, alltoall: str
) -> None:
    groups = Groups(8, 4, ep=8)
    plans = [
        PhasePlan(Order(degree, links, where).plan(), groups, backward, alltoall, narrow=(True, True))
        for where in ("links", "compute")
    ]
    sending = []
    for plan in plans:
        tasks = plan.schedule.tasks
        kinds = {each.kind for each in plan._moe.collectives}
        sending.append([(each.kind, each.chunk) for each in tasks if each.kind in kinds])
        for chunk in range(degree):
            way = [each.kind for each in tasks if each.chunk == chunk and each.kind != HOLD]
            assert way == [each.kind for each in plan._moe.stages]
    assert sending[0] == sending[1]
    on_links, beside = [{each.kind for each in plan.schedule.tasks if each.lane is Lane.COMPUTE} for plan in plans]
    assert on_links == {EXPERT} < beside


def test_a_conversion_costs_what_was_measured_of_it_and_nothing_where_it_was_not() -> None:
    before = made_up()
    narrowing, widening = line(0.5, 2.0, 1e6), line(0.25, 1.0, 1e6)
    measured = replace(
        before, operations={**before.operations, QUANTISED: narrowing, DEQUANTISED: widening}, task_ms=0.125
    )
    for costs, kinds, wanted_ms in (
        (measured.costs(), QUANTISING, 0.5 + 2.0 + 0.125),
        (measured.costs(), DEQUANTISING, 0.25 + 1.0 + 0.125),
        # A recording of before conversions were tasks has them in the times of links.
        (before.costs(), (*QUANTISING, *DEQUANTISING), 0.0),
    ):
        for kind in kinds:
            assert costs.forward[kind].ms(1e6) == costs.backward[kind].ms(1e6) == pytest.approx(wanted_ms)
    of = layer_of_call(GROUPS, replace(SIZES, wires=(0.3, 0.3), num_tokens=840), before.costs())
    assert {each.conversions for each in chosen(of)} == {"links"}


def test_the_bytes_of_links_are_those_of_the_wire_and_of_conversions_those_of_whole_rows() -> None:
    for backward in (False, True):
        moe = moe_work(SPREAD_OUT, backward, replace(NARROW, wires=(0.625, 1.0)))
        whole = moe_work(SPREAD_OUT, backward, replace(NARROW, wires=(1.0, 1.0)))
        narrow, wide = (moe.behind, moe.ahead) if backward else (moe.ahead, moe.behind)
        (sent,) = whole.ahead
        assert [each.size for each in narrow] == [sent.size, 0.625 * sent.size, sent.size]
        assert [each.size for each in wide] == [sent.size]
        assert [each.size for each in moe.exchange] == [each.size for each in moe.collectives]


def test_the_choice_is_said() -> None:
    assert order_words(2, "paper") == order_words(2, "paper", "links") == "links side by side"
    assert order_words(2, "paper", "compute") == "links side by side, conversions beside experts"

# SPDX-License-Identifier: Apache-2.0
"""A rule is written in one place, and no plan that breaks it is predicted, tried or chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.offline.models.known import PlannedModel
from ds_fsmoe.offline.plan.report import PlannedJob, Report, report
from ds_fsmoe.planning.block import ORDERS
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.decide import rules as listed
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Settings
from ds_fsmoe.planning.decide.plan_requests import Kind, PlanRequest, requests_to_plan
from ds_fsmoe.planning.decide.plan_two_batch import plan_two_batch
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.decide.rules import RULES, Proposal, Rule, RuleError, may_be_chosen
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.recorded_costs import RecordedAllToAll, RecordedKind
from ds_fsmoe.planning.job.what_if import WhatIf
from ds_fsmoe.planning.schedule import A2A_IN_NODE, Lane
from ds_fsmoe.planning.two_batch import sub_batch_layer
from ds_fsmoe.planning.workload import Shape
from tests.planning.measured_layers import GROUPS, SIZES, Machine, layer_of, made_up
from tests.planning.test_recorded_costs import LABELS, job_of


@contextmanager
def also(rule: Rule) -> Iterator[None]:
    """Add a rule, as a line in ``rules.RULES`` does."""
    RULES.append(rule)
    try:
        yield
    finally:
        RULES.remove(rule)


def search(schedule: str, seed: int = 0) -> Search:
    """A search over two layers of which one has a choice of all-to-alls, in halves or not."""
    planner = Machine().planner()
    layers = [layer_of(made_up(seed + each)) for each in range(2)]
    options = [{"flat": layers[0], "other": layer_of(made_up(seed + 7))}, {"flat": layers[1]}]
    space = planner.settings.space(schedule)
    return Search(planner, PlanRequest(options, space, "adaptive", "reduce_first", can_split=True))


def found_by(of: Search) -> list[ModelPlan]:
    """Everything that is predicted for a choice, tried or chosen but DeepSpeed's own plan, which stands last."""
    plans = of.to_try()[:-1]
    near = of.refinements(plans[0], plans[-1], plans[len(plans) // 2])
    return [of.fastest(), of.whole(), *plans, *near, *of.refinements(of.stock(), plans[0], of.stock())]


def listed_by(of: Search) -> list[ModelPlan]:
    """The plan of every way in the list, for whatever it is listed."""
    ways = requests_to_plan(of.request, *get_args(Kind), near=(of.whole(), of.stock(), of.whole()))
    plans = [plan_two_batch(of.planner, each) if each.is_two_batch else of.planner.plan(each) for each in ways]
    return [each for each in plans if each is not None]


def planned(schedule: str, cluster: str, size: int = 256) -> Report:
    """What ``ds_fsmoe plan`` finds for two layers on a cluster."""
    bed, model = load_cluster(cluster), PlannedModel(Shape(B=2, L=size, M=2 * size, H=4 * size, E=8), 2)
    job = PlannedJob(bed, Groups(32, 4, mp=4, esp=4, ep=4), model, Settings(bed.contention, max_degree=6))
    return report(job, schedule, [*{"deepspeed": 0, schedule: 0}])


def read_elsewhere(schedule: str, seed: int) -> list[ModelPlan]:
    """What those choose who read the list without a search of training: what-if, ``ds_fsmoe plan`` and its halves."""
    ways = {"flat": RecordedAllToAll("flat", made_up(seed)), "other": RecordedAllToAll("flat", made_up(seed + 7))}
    what_if = WhatIf(job_of(kinds=(RecordedKind(LABELS, GROUPS, SIZES, ways),), max_degree=6))
    try:
        found = planned(schedule, "testbed_b")
    except RuleError:  # no chunks are left to a system that was named
        return [what_if.by_schedule(schedule).plan]
    halves = found.best_two_batch()
    return [what_if.by_schedule(schedule).plan, *found.plans.values(), *([] if halves is None else [halves])]


def ways_of(plan: ModelPlan) -> Iterator[Proposal]:
    """How a plan runs each layer in each phase."""
    for index, layer in enumerate(plan.layers):
        works = sub_batch_layer(layer) if plan.is_two_batch else layer
        for backward, choice in enumerate(plan.choices(index)):
            work = works.backward if backward else works.forward
            yield Proposal(choice.order, work.moe, bool(backward), plan.is_two_batch)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """A rule on chunks, orders, phases and halves."""
    most, links = draw(st.integers(1, 4)), draw(st.sets(st.sampled_from(ORDERS), max_size=2))
    phases = draw(st.sets(st.booleans(), min_size=1))
    halves = draw(st.sampled_from([{False}, {True}, {False, True}]))

    def rule(proposal: Proposal) -> bool:
        if proposal.backward not in phases or proposal.is_two_batch not in halves:
            return True
        return proposal.order.degree <= most and (proposal.order.degree == 1 or proposal.order.links not in links)

    return rule


@settings(max_examples=15)
@given(rules(), st.sampled_from(NAMES), st.integers(0, 50))
def test_no_plan_that_breaks_a_rule_is_predicted_tried_or_chosen(rule: Rule, schedule: str, seed: int) -> None:
    with also(rule):
        of = search(schedule, seed)
        for plan in (*found_by(of), *listed_by(of), *read_elsewhere(schedule, seed)):
            for proposal in ways_of(plan):
                assert may_be_chosen(proposal), (schedule, proposal.order, proposal.backward, proposal.is_two_batch)


def test_a_rule_may_forbid_halves_or_look_at_how_tokens_are_exchanged() -> None:
    with also(lambda proposal: not proposal.is_two_batch):
        assert search("best").best_two_batch() is None
        assert not any(plan.is_two_batch for plan in found_by(search("best")))
    assert any(plan.is_two_batch for plan in found_by(search("best")))
    with also(
        lambda proposal: proposal.order.degree == 1 or A2A_IN_NODE in {each.kind for each in proposal.moe.stages}
    ):
        assert {proposal.order.degree for plan in found_by(search("best")) for proposal in ways_of(plan)} == {1}


def test_what_a_user_names_runs_as_written_and_deepspeeds_own_plan_passes_every_rule() -> None:
    with also(lambda proposal: False):
        of = search("best")
        assert {proposal.order.degree for plan in found_by(of) for proposal in ways_of(plan)} == {1}
        request = replace(of.request, space=of.request.space.with_degrees(3, 2, "paper"))
        named = Search(of.planner, request).fastest()
        assert [each.order for each in named.choices(0)] == [Order(3, "paper"), Order(2, "paper")]
        assert {proposal.order for proposal in ways_of(of.stock())} == {Order(1, "shared")}
        assert all(map(may_be_chosen, ways_of(of.stock())))


def not_shared(proposal: Proposal) -> bool:
    return proposal.order.links != "shared"


@pytest.mark.parametrize("schedule", ["tutel", "tutel_improved", "fsmoe_no_iio"])
def test_a_schedule_by_name_that_a_rule_leaves_no_chunks_is_refused_with_the_rules_name(schedule: str) -> None:
    said = rf'fsmoe.schedule = "{schedule}": not_shared .* num_chunks'
    search(schedule).request.check_named()
    with also(not_shared):
        with pytest.raises(RuleError, match=said):
            search(schedule).request.check_named()
        with pytest.raises(RuleError, match=said):
            planned(schedule, "testbed_b")
        # Chunks that are given run as written, and there are other orders for others.
        of = search(schedule)
        replace(of.request, space=of.request.space.with_degrees(2, None, "shared")).check_named()
        replace(of.request, unchunked=[True, True]).check_named()
        for other in ("best", "fsmoe", "deepspeed"):
            search(other).request.check_named()
            planned(other, "testbed_b")


def test_rules_that_only_together_leave_no_chunks_are_all_named() -> None:
    def even(proposal: Proposal) -> bool:
        return proposal.order.degree % 2 == 0

    def odd(proposal: Proposal) -> bool:
        return proposal.order.degree % 2 == 1

    with also(even), also(odd), pytest.raises(RuleError, match="even and odd"):
        search("tutel").request.check_named()


def on_fast_links(proposal: Proposal) -> bool:
    """Two chunks at the most, where links inside the node have more than 100 GB/s."""
    inside = [proposal.costs.get(each.kind) for each in proposal.moe.collectives if each.lanes == (Lane.INTRA,)]
    is_fast = bool(inside) and all(each and each.ms(2e8) - each.ms(1e8) < 1.0 for each in inside)
    return proposal.order.degree <= 2 or not is_fast


@pytest.mark.parametrize(("cluster", "most"), [("testbed_b", 4), ("a100_200", 2)])
def test_a_rule_may_ask_how_fast_links_are(cluster: str, most: int) -> None:
    def chosen() -> int:
        return max(proposal.order.degree for proposal in ways_of(planned("best", cluster, 1024).plan))

    assert chosen() == 4
    with also(on_fast_links):
        assert chosen() == most
        search("best").candidates()  # a search in training knows the costs everywhere as well


def test_the_rules_that_there_are() -> None:
    assert [rule.__name__ for rule in RULES] == ["has_slots", "has_few_chunks_in_two_batch"]
    moe = layer_of(made_up()).forward.moe
    assert moe.capacity is not None
    assert may_be_chosen(Proposal(Order(moe.capacity), moe, False))
    assert not may_be_chosen(Proposal(Order(moe.capacity + 1), moe, False))
    assert may_be_chosen(Proposal(Order(listed.MOST_IN_TWO_BATCH), moe, False, is_two_batch=True))
    assert not may_be_chosen(Proposal(Order(listed.MOST_IN_TWO_BATCH + 1), moe, False, is_two_batch=True))

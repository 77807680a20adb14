# SPDX-License-Identifier: Apache-2.0
"""What other plans would have given in a recorded job: planned as in training, and held against what it took; and what
its experts over other ranks would give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.plan import Planner, mode_of, plan_by_name
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, stock_request
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.job.other_ranks import OtherRanks, on_other_ranks
from ds_fsmoe.planning.job.recorded_costs import RecordedAllToAll, RecordedJob, RecordedKind
from ds_fsmoe.planning.job.what_if import Ran, WhatIf, ran_of, with_dispatch_of
from tests.planning.measured_layers import SIZES, made_up
from tests.planning.test_recorded_costs import COLLECTIVES, GROUPS, LABELS, job_of

CLUSTER = Cluster(
    "made up",
    2,
    2,
    {
        **{
            f"{link}.{name}": Operation(LinearCost(0.05, beta_ms), 2)
            for link, beta_ms in (("inter", 4e-6), ("intra", 1e-6))
            for name in COLLECTIVES
        },
        **{name: Operation(LinearCost(0.02, 1e-9)) for name in ("gemm", "attention", "softmax", "routing", "order")},
    },
)


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_planned_as_training_plans_them(name: str) -> None:
    job = job_of(max_degree=5)
    found = WhatIf(job).by_schedule(name)
    planner = Planner({}, job.settings)
    layers = [each["flat"] for each in job.options(mode_of(name), (3.0, 5.0))]
    expected = plan_by_name(planner, name, layers)
    forward, backward = expected.timelines({})
    assert found.phases_ms == pytest.approx((forward.makespan_ms, backward.makespan_ms))
    assert found.ran.orders == tuple(
        tuple(each.order for each in expected.choices(index)) for index in range(len(layers))
    )


def test_given_degrees_are_kept() -> None:
    what_if = WhatIf(job_of())
    for degrees in ((1, 1), (3, 2), (7, 11)):
        found = what_if.with_degrees(*degrees)
        assert found.ran.degrees == degrees
        assert {pair[0].links for pair in found.ran.orders} == {"reduce_first"}
    assert what_if.with_degrees(None, 2).ran.degrees[0] == what_if.by_schedule("best").ran.degrees[0]
    assert not what_if.must_match
    assert what_if.of_schedule("tutel").must_match


def test_what_ran_is_read_from_the_plans() -> None:
    ways = {
        name: RecordedAllToAll("node_deduplicated" if name == "mine" else "flat", made_up())
        for name in ("flat", "mine")
    }
    kinds = (RecordedKind(LABELS, GROUPS, SIZES, ways),)
    job = job_of(kinds=kinds)
    rows = [
        {
            "layer": label,
            "phase": phase,
            "degree": 2 + number,
            "order": "paper",
            "late_dw": number * (phase != "forward"),  # of 0.2.0
        }
        | {"alltoall": "once_per_node" if number == 1 else "flat"}  # its name in 0.2.0
        for number, label in enumerate(LABELS)
        for phase in ("backward", "forward")
    ]
    ran = ran_of(job, rows[::-1])
    assert ran.orders == tuple((Order(each, "paper"), Order(each, "paper")) for each in (2, 3, 4))
    assert ran.alltoalls == ("flat", "mine", "flat")
    assert ran.degrees == (4, 4)
    with pytest.raises(ValueError, match="the run's plans do not contain L02"):
        ran_of(job, rows[:-1])


def half_empty(capacity: int = SIZES.capacity // 2) -> RecordedJob:
    """Layers that send 840 slots, padded, or so many rows, unpadded."""
    rows = replace(SIZES, capacity=capacity, num_tokens=2 * SIZES.capacity)
    ways = {
        "flat": RecordedAllToAll("flat", made_up()),
        "unpadded flat": RecordedAllToAll("flat", made_up(), rows=rows),
    }
    return job_of(kinds=(RecordedKind(LABELS, GROUPS, SIZES, ways),))


def test_rows_are_chosen_where_they_are_clearly_fewer_than_slots_and_numbers_of_rows_count() -> None:
    job = half_empty()
    planner, space = Planner({}, job.settings), job.settings.space("best")
    options = job.options("off", (0.0, 0.0))
    plan = planner.plan(PlanRequest(options, space, "off"))
    assert plan.alltoalls == ("unpadded flat",) * 3
    rows = options[0]["unpadded flat"]
    alpha_ms = rows.costs.forward["A2A_IN"].ms(0.0)
    assert 0 < alpha_ms < plan.alltoalls_ms[0]["unpadded flat"]
    moe_ms = sum(each.time_ms for each in planner.choose(rows, space))
    assert plan.alltoalls_ms[0]["unpadded flat"] == pytest.approx(moe_ms + alpha_ms)
    assert planner.plan(stock_request(options)).alltoalls == ("flat",) * 3
    # One slot in a hundred is empty.
    nearly_full = half_empty(SIZES.capacity * 99 // 100).options("off", (0.0, 0.0))
    assert planner.plan(PlanRequest(nearly_full, space, "off")).alltoalls == ("flat",) * 3


@pytest.mark.parametrize("way", ["flat", "unpadded flat"])
def test_a_run_is_predicted_with_the_dispatch_that_it_had(way: str) -> None:
    job = half_empty()
    rows = [
        {"layer": label, "phase": phase, "degree": 1, "order": "paper", "alltoall": "flat", "way": way}
        for label in LABELS
        for phase in ("forward", "backward")
    ]
    ran = ran_of(job, rows)
    assert ran.alltoalls == (way,) * 3
    alone, named = with_dispatch_of(job, ran)
    assert named.alltoalls == ("flat",) * 3
    assert [list(kind.alltoalls) for kind in alone.kinds] == [["flat"]]
    assert alone.kinds[0].shape.capacity == SIZES.capacity // (1 + (way != "flat"))
    waits_ms = 0.0 if way == "flat" else 3 * job.options("off", (0.0, 0.0))[0][way].forward.before[0].size
    before, after = WhatIf(job).as_ran(ran), WhatIf(alone).as_ran(named)
    assert before.step_ms == pytest.approx(after.step_ms + waits_ms)


def test_every_micro_batch_counts_and_gradients_travel_with_the_last() -> None:
    job = job_of(gradients_bytes={"GRAD": 90_000})
    costs = made_up(seed=3)
    grads = replace(
        costs, operations=dict(costs.operations) | {"all-reduce of gradients": costs.operations["all-to-all"]}
    )
    kind = replace(job.kinds[0], alltoalls={"flat": RecordedAllToAll("flat", grads)})
    job = replace(job, kinds=(kind,), mode="off", schedule="deepspeed", links="shared", _costs={})
    one, three = (WhatIf(replace(job, micro_batches=count, _costs={})).by_schedule("deepspeed") for count in (1, 3))
    bare = WhatIf(replace(job, gradients_bytes={}, _costs={})).by_schedule("deepspeed")
    assert one.backward_ms > bare.backward_ms
    assert three.forward_ms == pytest.approx(3 * one.forward_ms)
    assert three.backward_ms == pytest.approx(2 * bare.backward_ms + one.backward_ms)


RAN = Ran(((Order(2, "reduce_first"), Order(3, "reduce_first")),) * 3, ("flat",) * 3)


def test_the_rest_explains_what_was_measured() -> None:
    what_if = WhatIf(job_of())
    before = what_if.as_ran(RAN)
    after = what_if.with_rest_of((before.forward_ms + 7.0, before.backward_ms - 2.0), RAN)
    assert after.as_ran(RAN).phases_ms == pytest.approx((before.forward_ms + 7.0, before.backward_ms - 2.0), abs=1e-3)
    assert after.rest_ms == pytest.approx((10.0, 3.0), abs=1e-3)
    # Less than the layers alone take cannot be explained.
    least = what_if.with_rest_of((0.5, 0.5), RAN)
    assert least.rest_ms == pytest.approx((0.0, 0.0), abs=1e-3)


def test_gradients_take_what_is_left_of_the_backward() -> None:
    costs = made_up(seed=3)
    operations = dict(costs.operations) | {"all-reduce of gradients": costs.operations["all-to-all"]}
    job = job_of(gradients_bytes={"GRAD": 300_000})
    kind = replace(job.kinds[0], alltoalls={"flat": RecordedAllToAll("flat", replace(costs, operations=operations))})
    what_if = WhatIf(replace(job, kinds=(kind,), _costs={}))
    wanted_ms = what_if.as_ran(RAN).backward_ms + 1.75
    found = what_if.with_gradients_of(wanted_ms, RAN)
    assert found.as_ran(RAN).backward_ms == pytest.approx(wanted_ms, abs=1e-3)
    assert found.job.gradient_factor > 1.0
    # DeepSpeed has one way to reduce, which takes no less than was measured, whatever ours took.
    faster = what_if.with_gradients_of(what_if.as_ran(RAN).backward_ms - 1.25, RAN)
    assert faster.job.gradient_factor < 1.0
    raw, slow, fast = (each.by_schedule("tutel").step_ms for each in (what_if, found, faster))
    assert fast == raw < slow
    # Nothing can be told of gradients where there are none of ours.
    assert WhatIf(job_of()).with_gradients_of(99.0, RAN).job.gradient_factor == 1.0


# ---- other ranks


def test_the_same_ranks_cost_the_same() -> None:
    job = job_of()
    again = WhatIf(on_other_ranks(job, CLUSTER, OtherRanks(nodes=2, per_node=2, ep=2, esp=2)), (3.0, 5.0))
    assert again.by_schedule("best").step_ms == pytest.approx(WhatIf(job).by_schedule("best").step_ms)


def test_collectives_cost_what_the_cluster_says_of_the_other_group() -> None:
    job = job_of()
    other = on_other_ranks(job, CLUSTER, OtherRanks(nodes=4, ep=4, esp=2))
    (kind,) = other.kinds
    assert (kind.groups.world, kind.groups.ep, kind.groups.esp) == (8, 4, 2)
    was, now = job.costs_of(job.kinds[0], "flat"), other.costs_of(kind, "flat")
    size = SIZES.num_experts * SIZES.capacity * SIZES.width * SIZES.dtype_bytes
    # Of two nodes half of a buffer goes to the other, of four three quarters go to others.
    by_cluster = [CLUSTER.operations["inter.all_to_all"].among(nodes).ms(size) for nodes in (2, 4)]
    factor = by_cluster[1] / by_cluster[0]
    assert now.forward["A2A_IN"].ms(size) == pytest.approx(factor * was.forward["A2A_IN"].ms(size))
    assert now.forward["GATHER"].ms(size) == pytest.approx(was.forward["GATHER"].ms(size))
    assert now.backward["EXPERT"].ms(1e6) == was.backward["EXPERT"].ms(1e6)
    # Half as many experts on each rank.
    assert kind.shape.num_weights == SIZES.num_weights // 2


def test_experts_that_more_ranks_hold_are_summed_up() -> None:
    job = job_of(gradients_bytes={"GRAD": 1000})
    other = on_other_ranks(job, CLUSTER, OtherRanks(nodes=4, ep=2, esp=2))
    assert other.kinds[0].groups.edp == 2
    assert other.gradients_bytes == {"GRAD": 1000, "EXPERT_GRAD": 3 * SIZES.num_weights * SIZES.dtype_bytes}
    assert on_other_ranks(job, CLUSTER, OtherRanks(ep=2)).gradients_bytes == {"GRAD": 1000, "EXPERT_GRAD": 0}


@pytest.mark.parametrize(
    ("other", "ep"),
    [
        (OtherRanks(nodes=4), 4),  # over all ranks, as it was
        (OtherRanks(nodes=3), 1),  # 4 experts do not divide over 3, and 6 ranks not over 2 x 2
        (OtherRanks(esp=1), 4),
        (OtherRanks(ep=1, esp=1), 1),
        (OtherRanks(per_node=3, esp=1, nodes=2), 2),
    ],
)
def test_experts_spread_as_far_as_they_did(other: OtherRanks, ep: int) -> None:
    assert other.groups(GROUPS, SIZES.num_experts).ep == ep


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (OtherRanks(ep=3), "ep = 3: must divide the 4 experts"),
        (OtherRanks(nodes=0), "nodes = 0: must be at least 1"),
        (OtherRanks(esp=-1), "esp = -1: must be at least 1"),
        (OtherRanks(alltoall="node_deduplicated"), "whole experts on several ranks"),
    ],
)
def test_what_cannot_be_is_refused(other: OtherRanks, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_other_ranks(job_of(), CLUSTER, other)


def test_a_token_that_crosses_once_sends_less_between_nodes() -> None:
    kind = replace(job_of().kinds[0], num_choices=4)
    job = job_of(kinds=(kind,))
    spread = OtherRanks(nodes=2, per_node=2, ep=4, esp=1)
    flat, once = (
        WhatIf(on_other_ranks(job, CLUSTER, replace(spread, alltoall=name)), (0.0, 0.0)).by_schedule("deepspeed")
        for name in ("flat", "node_deduplicated")
    )
    assert once.ran.alltoalls == ("node_deduplicated",) * 3
    sent = [each.plan.layers[0].forward.moe.ahead[0].size for each in (flat, once)]
    # Its four choices lie in both nodes: two crossings in place of four.
    assert sent[1] == pytest.approx(sent[0] / 2)

# SPDX-License-Identifier: Apache-2.0
"""A recorded job as data and back, costs that are fitted to, or corrected by, the spans of a trace; and what other
plans would have given in it, planned as in training, and other ranks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ds_fsmoe.offline.plan.traced_costs import corrected, counted_tasks, fit_costs, read_tasks, with_slowdown_of
from ds_fsmoe.offline.report.critical_path import MeasuredTask
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.call_shape import moe_work, sized
from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cluster_schema import COLLECTIVES
from ds_fsmoe.planning.cost import LinearCost, SwitchedCost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.plan import Planner, mode_of, plan_by_name
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, stock_request
from ds_fsmoe.planning.decide.presets import NAMES
from ds_fsmoe.planning.groups import Fanout, PlacedGroups, Placement
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.job.other_ranks import OtherRanks, on_other_ranks
from ds_fsmoe.planning.job.recorded_costs import RecordedAllToAll, RecordedJob, RecordedKind, job_as_data, job_from_data
from ds_fsmoe.planning.job.what_if import Ran, WhatIf, ran_of, with_dispatch_of
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, HOLD, REDUCE, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention, play
from tests.planning.measured_layers import GROUPS, SIZES, made_up

LABELS = ("L00", "L01", "L02")
CLUSTER = Cluster(
    "made up",
    2,
    2,
    {f"inter.{name}": Operation(LinearCost(0.05, 4e-6), 2) for name in COLLECTIVES}
    | {f"intra.{name}": Operation(LinearCost(0.05, 1e-6), 2) for name in COLLECTIVES}
    | dict.fromkeys(("gemm", "attention", "softmax", "routing", "order"), Operation(LinearCost(0.02, 1e-9))),
)


def job_of(**more: Any) -> RecordedJob:
    """A job of three equal layers whose costs were measured."""
    kind = RecordedKind(LABELS, GROUPS, SIZES, {"flat": RecordedAllToAll("flat", made_up(seed=3))}, num_choices=2)
    return replace(RecordedJob((kind,), LABELS, "best", "adaptive", "reduce_first", (3.0, 5.0)), **more)


def without_costs(job: RecordedJob) -> RecordedJob:
    return replace(job, kinds=(replace(job.kinds[0], alltoalls={"flat": RecordedAllToAll("flat")}),), _costs={})


def test_a_job_is_read_back_as_it_was_written_and_by_names_of_before() -> None:
    placed = (("ep", Placement(2, 1, (Lane.INTER,), 2)), ("esp", Placement(2, 2, (Lane.INTRA,))))
    placed += tuple((name, Placement(1, 1, ())) for name in ("mp", "edp"))
    placed += (("dp", Placement(4, 3, (Lane.INTER, Lane.INTRA), 2)),)
    uneven = PlacedGroups(4, 2, ep=2, esp=2, placed=placed)
    shape = replace(SIZES, num_tokens=11, crossings=Fanout(0.75, 1.5), wires=(0.3, 1.0))
    ways = {
        "flat": RecordedAllToAll("flat", made_up()),
        "unpadded flat": RecordedAllToAll("flat", made_up(), rows=replace(shape, capacity=17, num_tokens=31)),
        "node_deduplicated": RecordedAllToAll("node_deduplicated", made_up(seed=1, is_written=False)),
    }
    kinds = RecordedKind(("L00", "L02"), uneven, shape, ways, True), RecordedKind(("L01",), GROUPS, SIZES, ways)
    slowed = Slowdowns({(Lane.INTER, Lane.INTRA): 1.25, (Lane.COMPUTE, Lane.INTER): 1.5})
    of_gradients = {"GRAD": 701}, {"GRAD": (500, 201)}
    job = RecordedJob(kinds, LABELS, "lina", "micro_ops", "shared", (1.5, 2.5), *of_gradients, slowed)
    job = replace(job, is_serial=True, max_degree=7, chunk_bytes=4096, micro_batches=3)
    text = json.dumps(job_as_data(job))
    again = job_from_data(json.loads(text))
    assert again == job == job_from_data(json.loads(text.replace("node_deduplicated", "once_per_node")))
    assert again.is_measured
    assert again.kinds[0].groups.placements == dict(placed)
    assert again.contention == Contention(1.25 - 1.0, 0.5)
    # One without measurements has no costs until some are fitted.
    unmeasured = without_costs(job_of())
    assert job_from_data(json.loads(json.dumps(job_as_data(unmeasured)))) == unmeasured
    assert not unmeasured.is_measured
    with pytest.raises(ValueError, match="no costs are known for the tasks of these layers"):
        unmeasured.options("off", (0.0, 0.0))


def damaged(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = copy.deepcopy(job_as_data(job_of()))
    change(data)
    return data


def measured_of(data: dict[str, Any]) -> dict[str, Any]:
    return data["kinds"][0]["ways"]["flat"]["measured"]["operations"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=99), "format 99"),
        (lambda data: data.pop("kinds"), "KeyError: 'kinds'"),
        (lambda data: data.update(mode="sometimes"), "unknown value 'sometimes': choose from"),
        (lambda data: data.update(rest_ms=[1.0]), "IndexError"),
        (lambda data: data.update(layers=["L00", "L07"]), "no costs for L07"),
        (lambda data: data["kinds"][0]["groups"].update(ep=3), "must divide"),
        (lambda data: data["kinds"][0]["ways"]["flat"].update(planned="pigeons"), "'pigeons'"),
        (lambda data: measured_of(data)["all-to-all"].update(sizes=[1]), "needs three"),
    ],
)
def test_what_no_run_writes_is_refused_with_a_reason(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job_from_data(damaged(change))


def test_layers_leave_their_share_of_rest_and_gradients() -> None:
    job = job_of(gradients_bytes={"GRAD": 902, "EXPERT_GRAD": 5000}, tensors_bytes={"GRAD": (100, 700, 102)})
    layer = job.options("adaptive", (3.0, 6.0))[1]["flat"]
    assert [each.size for each in layer.forward.after] == [pytest.approx(1.0)]
    assert [each.size for each in layer.backward.after] == [pytest.approx(2.0)]
    # Experts lie on all ranks once, but a kind of gradient that is reduced goes where dense ones do.
    assert {each.kind: each.size_bytes for each in layer.gradients} == {"GRAD": 300, "EXPERT_GRAD": 1666}
    assert all(not each.tensors_bytes for each in layer.gradients)
    (dense, *_) = job.options("micro_ops", (3.0, 6.0))[1]["flat"].gradients
    assert dense.tensors_bytes == (300,)


# ---- spans


def traced(
    job: RecordedJob,
    degrees: tuple[int, int],
    factor: float = 1.0,
    contention: Contention = IDEAL,
    steps: tuple[int, int] = (7, 8),
) -> list[MeasuredTask]:
    """The tasks of two steps, as if each task took a factor of what the job's costs say."""
    costs = job.costs_of(job.kinds[0], "flat")
    found: list[MeasuredTask] = []
    for step in steps:
        for backward, degree in enumerate(degrees):
            plan = PhasePlan(BlockPlan(degree, "reduce_first"), GROUPS, bool(backward))
            run, (cost, _) = sized(plan.schedule, plan, SIZES), costs.of(bool(backward))
            times_ms = [factor * cost[each.kind].ms(each.size, min(1, each.launches)) for each in run.tasks]
            spans = play(run, times_ms, [0.0] * len(times_ms), contention).spans
            for number, label in enumerate(LABELS):
                shift_ms = 1000.0 * step + 300.0 * number + 100.0 * backward
                found.extend(
                    MeasuredTask(
                        *(label, ("fwd", "bwd")[backward], step, 0, each.task.kind, each.task.chunk, each.task.lane),
                        *(1e3 * (shift_ms + each.start_ms), 1e3 * (shift_ms + each.end_ms)),
                        each.end_ms - each.start_ms,
                    )
                    for each in spans
                    if each.task.kind != HOLD
                )
    return found


def times_of(costs: Any, backward: bool) -> dict[str, float]:
    cost, _ = costs.of(backward)
    sizes = {A2A_IN: 7e4, A2A_OUT: 7e4, GATHER: 9e4, REDUCE: 9e4, EXPERT: 3e6}
    return {kind: cost[kind].ms(size) for kind, size in sizes.items()}


def test_two_sizes_give_the_line_of_every_task_and_a_fitted_job_plans_by_its_lines_and_slowdown() -> None:
    job, contention = job_of(), Contention(links=0.5, compute=0.25, traffic=0.125)
    slowed = read_tasks(traced(job, (2, 5), contention=contention), contention)
    costs, one_size = fit_costs(job, slowed)
    # Slowdown is taken out of the spans.
    alone = read_tasks(traced(job, (2, 5)))
    assert slowed.slices_ms == pytest.approx(alone.slices_ms)
    assert sum(slowed.runs_ms[7]) > sum(alone.runs_ms[7])
    # Experts' chunks are alike within a phase, and phases differ in their experts.
    assert one_size == (EXPERT,)
    for backward in (False, True):
        expected, found = (times_of(each, backward) for each in (job.costs_of(job.kinds[0], "flat"), costs["L01"]))
        del expected[EXPERT], found[EXPERT]
        assert found == pytest.approx(expected, rel=1e-6)
    fitted = without_costs(job).with_fitted(costs, contention)
    assert fitted.settings.contention == fitted.contention == contention
    assert fitted.options("off", (0.0, 0.0))[2]["flat"].costs is costs["L00"]


def test_one_size_takes_start_up_from_a_cluster_or_leaves_it_out() -> None:
    job = job_of()
    spans = read_tasks(traced(job, (2, 2)))
    for known, alpha_ms, count in ((None, 0.0, 5), (CLUSTER, 0.05, 0)):
        fitted, one_size = fit_costs(job, spans, known)
        assert len(one_size) == count
        cost = fitted["L00"].forward[A2A_IN]
        assert cost.alpha_ms == pytest.approx(alpha_ms)
        half_bytes = moe_work(GROUPS, False, SIZES).ahead[0].size / 2
        assert cost.ms(half_bytes) == pytest.approx(spans.slices_ms["L00", False, "flat", 2, A2A_IN, 1])
    assert fitted["L00"] is fitted["L02"]


def test_only_settled_steps_are_told_as_a_whole_but_all_tell_what_tasks_take() -> None:
    job = job_of()
    tried, kept = traced(job, (1, 4), steps=(3, 4)), traced(job, (3, 2))
    found = read_tasks([*tried, *kept], settled=7)
    assert {piece.degree for piece in found.slices_ms} == {1, 2, 3, 4}
    last: dict[tuple[bool, str], list[MeasuredTask]] = {}
    for each in kept:
        if each.step == 8:
            last.setdefault((each.phase == "bwd", each.layer), []).append(each)
    lengths = {False: 0.0, True: 0.0}
    for (backward, _), run in last.items():
        lengths[backward] += max(each.end_ms for each in run) - min(each.begin_ms for each in run)
    assert found.runs_ms == {step: pytest.approx((lengths[False], lengths[True])) for step in (7, 8)}


def test_measured_costs_are_corrected_by_what_tasks_took() -> None:
    job = job_of()
    after = corrected(job, read_tasks(traced(job, (3, 4), factor=0.7)))
    before, costs = (each.costs_of(each.kinds[0], "flat") for each in (job, after))
    for backward in (False, True):
        expected = {kind: 0.7 * each for kind, each in times_of(before, backward).items()}
        assert times_of(costs, backward) == pytest.approx(expected)
    assert not after.is_measured
    # At every size, on both sides of a switch too.
    cost = SwitchedCost(LinearCost(1.0, 2.0), LinearCost(3.0, 0.5), 10.0)
    for size in (0.0, 3.0, 10.0, 55.0):
        assert cost.times(1.5).ms(size) == pytest.approx(1.5 * cost.ms(size))


def test_weight_gradients_that_0_2_0_put_off_are_read_as_part_of_the_backward() -> None:
    def in_two(task: MeasuredTask) -> list[MeasuredTask]:
        if task.phase == "fwd" or task.kind != EXPERT:
            return [task]
        middle_us, half_ms = (task.begin_us + task.end_us) / 2, task.took_ms / 2
        first = replace(task, kind="EXPERT_DX", end_us=middle_us, took_ms=half_ms)
        return [first, replace(first, kind="EXPERT_DW", begin_us=middle_us, end_us=task.end_us)]

    whole = traced(job_of(), (3, 4))
    split = [part for task in whole for part in in_two(task)]
    assert len(split) > len(whole)
    assert read_tasks(split).slices_ms == pytest.approx(read_tasks(whole).slices_ms)
    # What was measured of the parts changes no cost.
    parts = ("experts dX", "experts dW")
    recorded = job_from_data(
        damaged(lambda data: measured_of(data).update(dict.fromkeys(parts, measured_of(data)["experts forward"])))
    )
    found, plain = (each.costs_of(each.kinds[0], "flat") for each in (recorded, job_of()))
    assert (found.forward, found.backward) == (plain.forward, plain.backward)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_as_much_slowdown_is_kept_as_the_spans_show(share: float) -> None:
    factors = {(Lane.INTER, Lane.INTRA): 1.75, (Lane.INTRA, Lane.INTER): 1.25, (Lane.COMPUTE, Lane.INTER): 1.5}
    job = job_of(slowed=Slowdowns(factors | {(Lane.INTER, Lane.COMPUTE): 1.25}))
    asked = job.contention
    real = Contention(share * asked.links, share * asked.compute, share * asked.traffic)
    spans: list[MeasuredTask] = []
    for first, degrees in ((1, (1, 2)), (11, (3, 4)), (27, (5, 1))):
        spans += traced(job, degrees, contention=real, steps=(first, first + 1))
    found, told = with_slowdown_of(job, spans, settled=20)
    assert found.contention == real
    assert set(told.runs_ms) == {27, 28}
    after = corrected(found, told)
    fitted = after.costs_of(after.kinds[0], "flat")
    measured = job.costs_of(job.kinds[0], "flat")
    assert times_of(fitted, False) == pytest.approx(times_of(measured, False))


def test_runs_of_a_phase_belong_to_micro_batches_by_their_numbers_and_the_time_between_layers_is_seen() -> None:
    first = traced(job_of(), (1, 1))
    second = [
        replace(each, run=9, begin_us=each.begin_us + 5e6, end_us=each.end_us + 5e6) for each in first if each.step == 7
    ]
    one, both = read_tasks(first), read_tasks([*second, *first])
    assert both.runs_ms[8] == pytest.approx(one.runs_ms[8])
    assert both.runs_ms[7] == pytest.approx([2 * each for each in one.runs_ms[7]])
    backward = [each for each in first if each.phase == "bwd" and each.step == 7]
    begins_ms = min(each.begin_ms for each in backward if each.layer == "L01")
    ends_ms = max(each.end_ms for each in backward if each.layer == "L00")
    assert both.behind_ms == pytest.approx(one.behind_ms) == pytest.approx(begins_ms - ends_ms)
    assert read_tasks([each for each in first if each.layer == "L00"]).behind_ms is None


def test_a_layer_that_was_not_traced_is_named() -> None:
    job = job_of()
    others = [replace(each, layer="L77") for each in traced(job, (1, 1))]
    with pytest.raises(ValueError, match="the trace has no task of L00, L01, L02"):
        fit_costs(job, read_tasks(others))
    half = [each for each in traced(job, (2, 2)) if each.kind != GATHER]
    with pytest.raises(ValueError, match="the trace has no GATHER"):
        fit_costs(job, read_tasks(half))


def test_events_of_unfinished_runs_and_predictions_do_not_count() -> None:
    args = {"layer": "L00", "phase": "bwd", "step": 3, "run": 5, "index": 0, "kind": A2A_IN, "chunk": 0}
    args |= {"lane": "inter", "ms": 2.5}
    event = {"ph": "X", "cat": "measured", "ts": 4000, "dur": 2500, "args": args}
    events = [
        event,
        event | {"args": args | {"run": 2, "ms": 1.5}},
        event | {"cat": "predicted"},
        event | {"args": args | {"cut_short": True}},
        event | {"args": args | {"kind": HOLD}},
        event | {"args": args | {"phase": "whole"}},
        {"ph": "M", "name": "process_name"},
    ]
    found = counted_tasks({"traceEvents": events})
    assert [(each.run, each.begin_ms, each.end_ms) for each in found] == [(5, 4.0, 6.5), (2, 4.0, 5.5)]
    assert all(each.phase == "bwd" and each.lane is Lane.INTER for each in found)


# ---- other plans


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


def rows_of(*of_layers: dict[str, Any]) -> list[dict[str, Any]]:
    """The plans of a run, as they are recorded."""
    phases = ("backward", "forward")
    named = zip(LABELS, of_layers, strict=True)
    return [{"layer": label, "phase": phase, "order": "paper", **each} for label, each in named for phase in phases]


def test_what_ran_is_read_from_the_plans() -> None:
    planned = {"flat": "flat", "mine": "node_deduplicated"}
    ways = {name: RecordedAllToAll(way, made_up()) for name, way in planned.items()}
    job = job_of(kinds=(RecordedKind(LABELS, GROUPS, SIZES, ways),))
    # "late_dw" and the name of the all-to-all are those of 0.2.0.
    alltoalls = ("flat", "once_per_node", "flat")
    rows = rows_of(*({"degree": 2 + n, "late_dw": n, "alltoall": name} for n, name in enumerate(alltoalls)))
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
    ran = ran_of(job, rows_of(*[{"degree": 1, "alltoall": "flat", "way": way}] * 3))
    assert ran.alltoalls == (way,) * 3
    alone, named = with_dispatch_of(job, ran)
    assert named.alltoalls == ("flat",) * 3
    assert [list(kind.alltoalls) for kind in alone.kinds] == [["flat"]]
    assert alone.kinds[0].shape.capacity == SIZES.capacity // (1 + (way != "flat"))
    waits_ms = 0.0 if way == "flat" else 3 * job.options("off", (0.0, 0.0))[0][way].forward.before[0].size
    before, after = WhatIf(job).as_ran(ran), WhatIf(alone).as_ran(named)
    assert before.step_ms == pytest.approx(after.step_ms + waits_ms)


def with_gradients(num_bytes: int, **more: Any) -> RecordedJob:
    """A job whose gradients are known to take what its all-to-alls do."""
    costs = made_up(seed=3)
    operations = {**costs.operations, "all-reduce of gradients": costs.operations["all-to-all"]}
    ways = {"flat": RecordedAllToAll("flat", replace(costs, operations=operations))}
    return job_of(gradients_bytes={"GRAD": num_bytes}, kinds=(replace(job_of().kinds[0], alltoalls=ways),), **more)


def test_every_micro_batch_counts_and_gradients_travel_with_the_last() -> None:
    stock = {"mode": "off", "schedule": "deepspeed", "links": "shared"}
    jobs = (with_gradients(90_000, **stock, micro_batches=count) for count in (1, 3))
    one, three = (WhatIf(each).by_schedule("deepspeed") for each in jobs)
    bare = WhatIf(replace(with_gradients(0, **stock), gradients_bytes={}, _costs={})).by_schedule("deepspeed")
    assert one.backward_ms > bare.backward_ms
    assert three.forward_ms == pytest.approx(3 * one.forward_ms)
    assert three.backward_ms == pytest.approx(2 * bare.backward_ms + one.backward_ms)


RAN = Ran(((Order(2, "reduce_first"), Order(3, "reduce_first")),) * 3, ("flat",) * 3)


def test_the_rest_explains_what_was_measured_and_gradients_what_is_left_of_the_backward() -> None:
    what_if = WhatIf(job_of())
    before = what_if.as_ran(RAN)
    measured_ms = before.forward_ms + 7.0, before.backward_ms - 2.0
    after = what_if.with_rest_of(measured_ms, RAN)
    assert after.as_ran(RAN).phases_ms == pytest.approx(measured_ms, abs=1e-3)
    assert after.rest_ms == pytest.approx((10.0, 3.0), abs=1e-3)
    # Less than the layers alone take cannot be explained.
    assert what_if.with_rest_of((0.5, 0.5), RAN).rest_ms == pytest.approx((0.0, 0.0), abs=1e-3)
    # Nothing can be told of gradients where there are none of ours.
    assert what_if.with_gradients_of(99.0, RAN).job.gradient_factor == 1.0
    sending = WhatIf(with_gradients(300_000))
    sent_ms = sending.as_ran(RAN).backward_ms
    longer, faster = (sending.with_gradients_of(sent_ms + each, RAN) for each in (1.75, -1.25))
    assert longer.as_ran(RAN).backward_ms == pytest.approx(sent_ms + 1.75, abs=1e-3)
    assert longer.job.gradient_factor > 1.0 > faster.job.gradient_factor
    # DeepSpeed has one way to reduce, which takes no less than was measured, whatever ours took.
    raw, slow, fast = (each.by_schedule("tutel").step_ms for each in (sending, longer, faster))
    assert fast == raw < slow


# ---- other ranks


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
    # Experts that more ranks hold are summed up.
    for ranks, summed in (
        (OtherRanks(nodes=4, ep=2, esp=2), 3 * SIZES.num_weights * SIZES.dtype_bytes),
        (OtherRanks(ep=2), 0),
    ):
        found = on_other_ranks(job_of(gradients_bytes={"GRAD": 1000}), CLUSTER, ranks)
        assert found.gradients_bytes == {"GRAD": 1000, "EXPERT_GRAD": summed}
    # The same ranks cost the same.
    same = WhatIf(on_other_ranks(job, CLUSTER, OtherRanks(nodes=2, per_node=2, ep=2, esp=2)), (3.0, 5.0))
    assert same.by_schedule("best").step_ms == pytest.approx(WhatIf(job).by_schedule("best").step_ms)


@pytest.mark.parametrize(
    ("other", "ep"),
    [
        (OtherRanks(nodes=4), 4),  # over all ranks, as it was
        (OtherRanks(nodes=3), 1),  # 4 experts do not divide over 3, and 6 ranks not over 2 x 2
        (OtherRanks(ep=1, esp=1), 1),
        (OtherRanks(per_node=3, esp=1, nodes=2), 2),
        (OtherRanks(ep=3), "ep = 3: must divide the 4 experts"),
        (OtherRanks(nodes=0), "nodes = 0: must be at least 1"),
        (OtherRanks(alltoall="node_deduplicated"), "whole experts on several ranks"),
    ],
)
def test_experts_spread_as_far_as_they_did_and_what_cannot_be_is_refused(other: OtherRanks, ep: int | str) -> None:
    if isinstance(ep, int):
        assert other.groups(GROUPS, SIZES.num_experts).ep == ep
        return
    with pytest.raises(ValueError, match=ep):
        on_other_ranks(job_of(), CLUSTER, other)

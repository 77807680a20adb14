# SPDX-License-Identifier: Apache-2.0
"""A recorded job as data and back, and costs that are fitted to, or corrected by, the spans of a trace."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ds_fsmoe.offline.plan.traced_costs import (
    corrected,
    counted_tasks,
    fit_costs,
    read_tasks,
    with_slowdown_of,
)
from ds_fsmoe.offline.report.critical_path import MeasuredTask
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.call_shape import moe_work, sized
from ds_fsmoe.planning.cluster import Cluster, Operation
from ds_fsmoe.planning.cost import LinearCost, SwitchedCost
from ds_fsmoe.planning.groups import Fanout, PlacedGroups, Placement
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.job.recorded_costs import (
    RecordedAllToAll,
    RecordedJob,
    RecordedKind,
    job_as_data,
    job_from_data,
)
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, HOLD, REDUCE, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention, play
from tests.planning.measured_layers import GROUPS, SIZES, made_up

LABELS = ("L00", "L01", "L02")
COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")


def job_of(**more: Any) -> RecordedJob:
    """A job of three equal layers whose costs were measured."""
    kind = RecordedKind(LABELS, GROUPS, SIZES, {"flat": RecordedAllToAll("flat", made_up(seed=3))}, num_choices=2)
    return replace(RecordedJob((kind,), LABELS, "best", "adaptive", "reduce_first", (3.0, 5.0)), **more)


def test_a_job_is_read_back_as_it_was_written() -> None:
    placed = (("ep", Placement(2, 1, (Lane.INTER,), 2)), ("esp", Placement(2, 2, (Lane.INTRA,))))
    placed += tuple((name, Placement(1, 1, ())) for name in ("mp", "edp"))
    placed += (("dp", Placement(4, 3, (Lane.INTER, Lane.INTRA), 2)),)
    uneven = PlacedGroups(4, 2, ep=2, esp=2, placed=placed)
    shape = replace(SIZES, num_tokens=11, crossings=Fanout(0.75, 1.5), wires=(0.3, 1.0))
    rows = replace(shape, capacity=17, num_tokens=31)
    ways = {
        "flat": RecordedAllToAll("flat", made_up()),
        "unpadded flat": RecordedAllToAll("flat", made_up(), rows=rows),
        "2dh": RecordedAllToAll("2dh", made_up(seed=1, is_written=False)),
    }
    kinds = RecordedKind(("L00", "L02"), uneven, shape, ways, True), RecordedKind(("L01",), GROUPS, SIZES, ways)
    job = RecordedJob(
        kinds,
        LABELS,
        "lina",
        "micro_ops",
        "shared",
        (1.5, 2.5),
        {"GRAD": 701},
        {"GRAD": (500, 201)},
        Slowdowns({(Lane.INTER, Lane.INTRA): 1.25, (Lane.COMPUTE, Lane.INTER): 1.5}),
        is_serial=True,
        max_degree=7,
        chunk_bytes=4096,
        micro_batches=3,
    )
    again = job_from_data(json.loads(json.dumps(job_as_data(job))))
    assert again == job
    assert again.kinds[0].groups.placements == dict(placed)
    assert again.contention == Contention(1.25 - 1.0, 0.5)


def test_a_job_of_before_has_other_names_of_all_to_alls() -> None:
    ways = {name: RecordedAllToAll(name, made_up()) for name in ("flat", "node_deduplicated")}
    job = replace(job_of(), kinds=(RecordedKind(LABELS, GROUPS, SIZES, ways),))
    text = json.dumps(job_as_data(job))
    assert "once_per_node" not in text
    assert job_from_data(json.loads(text.replace("node_deduplicated", "once_per_node"))) == job


def test_a_job_without_measurements_is_read_back_too() -> None:
    kind = RecordedKind(LABELS, GROUPS, SIZES, {"flat": RecordedAllToAll("flat")})
    job = RecordedJob((kind,), LABELS, "tutel", "off", "shared")
    again = job_from_data(json.loads(json.dumps(job_as_data(job))))
    assert again == job
    assert not again.is_measured
    assert job_of().is_measured
    with pytest.raises(ValueError, match="no costs are known for the tasks of these layers"):
        again.options("off", (0.0, 0.0))


def damaged(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = copy.deepcopy(job_as_data(job_of()))
    change(data)
    return data


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
        (
            lambda data: data["kinds"][0]["ways"]["flat"]["measured"]["operations"]["all-to-all"].update(sizes=[1]),
            "needs three",
        ),
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


def test_two_sizes_give_the_line_of_every_task() -> None:
    job = job_of()
    fitted, one_size = fit_costs(job, read_tasks(traced(job, (2, 5))))
    measured = job.costs_of(job.kinds[0], "flat")
    # Experts' chunks are alike within a phase, and phases differ in their experts.
    assert one_size == (EXPERT,)
    for backward in (False, True):
        expected, found = times_of(measured, backward), times_of(fitted["L01"], backward)
        for kind in (A2A_IN, A2A_OUT, GATHER, REDUCE):
            assert found[kind] == pytest.approx(expected[kind], rel=1e-6)


def test_one_size_takes_start_up_from_a_cluster_or_leaves_it_out() -> None:
    job = job_of()
    operations = {
        **{f"{link}.{name}": Operation(LinearCost(0.05, 1e-6)) for link in ("inter", "intra") for name in COLLECTIVES},
        **{name: Operation(LinearCost(0.02, 1e-9)) for name in ("gemm", "attention", "softmax", "routing", "order")},
    }
    cluster = Cluster("made up", 2, 2, operations)
    spans = read_tasks(traced(job, (2, 2)))
    for known, alpha_ms, count in ((None, 0.0, 5), (cluster, 0.05, 0)):
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
    before = job.costs_of(job.kinds[0], "flat")
    after = corrected(job, read_tasks(traced(job, (3, 4), factor=0.7)))
    costs = after.costs_of(after.kinds[0], "flat")
    for backward in (False, True):
        expected = {kind: 0.7 * each for kind, each in times_of(before, backward).items()}
        assert times_of(costs, backward) == pytest.approx(expected)
    assert not after.is_measured


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


def test_the_two_parts_of_a_backward_that_0_2_0_measured_change_no_cost() -> None:
    def measured_apart(data: dict[str, Any]) -> None:
        operations = data["kinds"][0]["ways"]["flat"]["measured"]["operations"]
        operations |= dict.fromkeys(("experts dX", "experts dW"), operations["experts forward"])

    job, recorded = job_of(), job_from_data(damaged(measured_apart))
    for name in ("forward", "backward"):
        assert getattr(recorded.costs_of(recorded.kinds[0], "flat"), name) == getattr(
            job.costs_of(job.kinds[0], "flat"), name
        )


def test_slowdown_is_taken_out_of_the_spans() -> None:
    job = job_of()
    contention = Contention(links=0.5, compute=0.25, traffic=0.125)
    slowed = read_tasks(traced(job, (4, 4), contention=contention), contention)
    alone = read_tasks(traced(job, (4, 4)))
    assert slowed.slices_ms == pytest.approx(alone.slices_ms)
    assert sum(slowed.runs_ms[7]) > sum(alone.runs_ms[7])


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


def test_the_time_between_layers_of_the_backward_is_seen() -> None:
    job = job_of()
    spans = traced(job, (1, 1))
    found = read_tasks(spans)
    of_backward = [each for each in spans if each.phase == "bwd" and each.step == 7]
    ends = {label: max(each.end_ms for each in of_backward if each.layer == label) for label in LABELS}
    begins = {label: min(each.begin_ms for each in of_backward if each.layer == label) for label in LABELS}
    assert found.behind_ms == pytest.approx(begins["L01"] - ends["L00"])
    only = read_tasks([each for each in spans if each.layer == "L00"])
    assert only.behind_ms is None


def test_runs_of_a_phase_belong_to_the_micro_batches_of_a_step_by_their_numbers() -> None:
    first = traced(job_of(), (1, 1))
    second = [
        replace(each, run=9, begin_us=each.begin_us + 5e6, end_us=each.end_us + 5e6) for each in first if each.step == 7
    ]
    one, both = read_tasks(first), read_tasks([*second, *first])
    assert both.behind_ms == pytest.approx(one.behind_ms)
    assert both.runs_ms[8] == pytest.approx(one.runs_ms[8])
    assert both.runs_ms[7] == pytest.approx([2 * each for each in one.runs_ms[7]])


def test_a_fitted_job_plans_by_its_lines_and_slowdown() -> None:
    job, contention = job_of(), Contention(links=0.5, compute=0.25, traffic=0.125)
    costs, _ = fit_costs(job, read_tasks(traced(job, (2, 3))))
    bare = replace(job, kinds=(replace(job.kinds[0], alltoalls={"flat": RecordedAllToAll("flat")}),), _costs={})
    fitted = bare.with_fitted(costs, contention)
    assert fitted.contention == contention
    assert fitted.settings.contention == contention
    assert fitted.options("off", (0.0, 0.0))[2]["flat"].costs is costs["L00"]


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


def test_a_cost_is_multiplied_at_every_size() -> None:
    cost = SwitchedCost(LinearCost(1.0, 2.0), LinearCost(3.0, 0.5), 10.0)
    for size in (0.0, 3.0, 10.0, 55.0):
        assert cost.times(1.5).ms(size) == pytest.approx(1.5 * cost.ms(size))

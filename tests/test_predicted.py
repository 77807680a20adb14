# SPDX-License-Identifier: Apache-2.0
"""What phases should take, with the sizes of each call, beside what they took."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe import CallbackBase, ConfigError
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Observer, SerialLanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.files.traces import range_name, rank_file, read_trace
from ds_fsmoe.observing.call_observer import CallObserver
from ds_fsmoe.observing.predicted import MeasuredPredictor, Predictor
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.block import BlockPlan, block_schedule
from ds_fsmoe.planning.call_shape import CallShape, moe_work
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.cost import LayerCosts
from ds_fsmoe.planning.groups import Fanout, Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, HOLD, Schedule
from ds_fsmoe.planning.timeline import IDEAL, Timeline, simulate
from ds_fsmoe.planning.workload import BlockWork, Shape, kind_costs, layer_work
from tests.calls import call_of
from tests.covering import covering
from tests.ranks import run_on_ranks
from tests.small_model import NUM_EXPERTS, WIDTH, Case, SmallModel, batch
from tests.trace_cases import assert_no_overlap, assert_valid, events_of, make_tracer, row_names, written

FIXTURES = (make_tracer,)  # which pytest finds by their names here
# None of them alike, so that none can stand for another.
OPERATIONS = {
    **{
        f"{link}.{name}": {"alpha_ms": 0.1 * at, "beta_ms_per_byte": 1e-5 * at}
        for link, first in (("inter", 2), ("intra", 11))
        for at, name in enumerate(("all_to_all", "all_reduce", "all_gather", "reduce_scatter"), first)
    },
    "gemm": {"alpha_ms": 0.07, "beta_ms_per_flop": 3e-6},
    "attention": {"alpha_ms": 0.3, "beta_ms_per_flop": 0.0},
    "softmax": {"alpha_ms": 0.0, "beta_ms_per_score": 0.0},
    "routing": {"alpha_ms": 0.1, "beta_ms_per_flop": 0.0},
    "order": {"alpha_ms": 0.15, "beta_ms_per_byte": 0.0},
}


def cluster_file(folder: Path, without: str = "") -> str:
    operations = {name: costs for name, costs in OPERATIONS.items() if name != without}
    data = {"name": "two", "num_nodes": 1, "gpus_per_node": 2, "contention": {"links": 0.3, "compute": 0.1}}
    path = folder / "two.json"
    path.write_text(json.dumps(data | {"host_ms": 0.01, "operations": operations}))
    return str(path)


# ---- sizes


@pytest.mark.parametrize(
    ("ep", "esp", "ffn", "backward", "in_rows"),
    covering((1, 3), (1, 2), ("gpt", "mixtral"), (False, True), (False, True)),
)
def test_sizes_of_a_call_are_those_of_the_planner(ep: int, esp: int, ffn: str, backward: bool, in_rows: bool) -> None:
    groups, num_products = Groups(world=6, gpus_per_node=2, ep=ep, esp=esp), {"gpt": 2, "mixtral": 3}[ffn]
    num_experts, capacity, width, hidden = 9, 7, 13, 22
    experts_here = num_experts // ep
    weights = experts_here * num_products * width * hidden // esp
    num_tokens = num_experts * capacity
    cut = {"num_tokens": num_tokens} if in_rows else {}
    sizes = CallShape(num_experts, capacity, width, 2, num_products * experts_here, weights, **cut)
    # Of that many tokens the planner sends as many copies as there are slots.
    sent = {"K": 1, "capacity_factor": None if in_rows else 1.0}
    shape = Shape(B=1, L=num_tokens, M=width, H=hidden, E=num_experts, ffn=ffn, heads=1, dtype_bytes=2, **sent)
    layer = layer_work(shape, groups, whole_slots=True)
    assert moe_work(groups, backward, sizes) == (layer.backward if backward else layer.forward).moe


def test_a_call_without_slots_costs_its_launches_alone(tmp_path: Path) -> None:
    plan = PhasePlan(BlockPlan(2), Groups(world=2, gpus_per_node=2, ep=2), backward=True)
    timeline = Predictor(cluster_file(tmp_path)).timeline(plan.schedule, plan, CallShape(4, 0, 3, 4, 4, 100))
    took_ms = {span.task.kind: span.end_ms - span.start_ms for span in timeline.spans if span.task.kind != HOLD}
    # In the backward each product is two; they run beside an all-to-all, which makes them slower by a tenth.
    assert took_ms["EXPERT"] == pytest.approx(8 * 0.07 * 1.1)
    assert took_ms["A2A_IN"] == pytest.approx(OPERATIONS["intra.all_to_all"]["alpha_ms"])


# ---- one process


def test_each_call_has_the_prediction_of_its_own_sizes(make_tracer: Callable[..., Tracer], tmp_path: Path) -> None:
    """Two forwards of other sizes before the first backward."""
    groups = Groups(world=1, gpus_per_node=1)
    plans = [PhasePlan(BlockPlan(2), groups, backward=backward) for backward in (False, True)]
    tracer, predictor = make_tracer(1, 1), Predictor(cluster_file(tmp_path))
    plain = LayerPipeline(SerialLanes(), Collectives(lambda x, group: x, None, None), *plans, "L07")
    observer = CallObserver(tracer, predictor=predictor)
    experts = ExpertSet([GPTFeedForward(5, 14) for _ in range(3)])
    for step in range(3):
        tracer.step(step)
        rows = [(torch.randn(3 * capacity, 5, requires_grad=True), capacity) for capacity in (4, 11)]
        outputs = [call_of(plain, x_RM, experts, observer)(x_RM, 3, capacity, experts) for x_RM, capacity in rows]
        for y_RM in outputs:
            y_RM.sum().backward()
    trace = written(tracer)
    found = defaultdict(list)
    for event in events_of(trace, "predicted"):
        found[event["args"]["run"], event["args"]["phase"]].append(event["args"]["ms"])
    assert list(found) == [(0, "fwd"), (1, "fwd"), (2, "bwd"), (3, "bwd")]
    for (_, phase), ms in found.items():
        assert len(ms) == 2
        assert phase in ("fwd", "bwd")
    # Experts and nothing else: launches and products, twice as many in the backward.
    expected_ms = [
        times * (3 * 2 * 0.07 + 3e-6 * 2 * 3 * slots * 2 * 5 * 14) for times in (1, 2) for slots in (4 / 2, 5.5)
    ]
    whole_ms = [sum(ms) for ms in found.values()]
    assert whole_ms == pytest.approx([2 * each for each in expected_ms], rel=1e-5)
    # The part that is cut anew is whole slots: 11 are 6 and 5, or 5 and 6.
    assert len({round(each, 6) for each in found[1, "fwd"]}) == 2


def test_a_prediction_that_cannot_be_made_costs_the_trace_nothing(make_tracer: Callable[..., Tracer]) -> None:
    tracer = make_tracer()
    tracer.step(0)
    groups = Groups(world=1, gpus_per_node=1)
    schedule = PhasePlan(BlockPlan(), groups, backward=False).schedule

    def predict() -> Timeline:
        raise ValueError("no cost for EXPERT")

    class Expecting(Observer):
        def of_run(self, schedule: Schedule, label: str) -> Observer:
            return tracer.of_run(schedule, label, predict)

    SerialLanes().run(schedule, {"EXPERT": lambda task: None}, "L00/forward", Expecting())
    tracer.step(1)
    assert len(events_of(written(tracer))) == 1
    assert events_of(written(tracer), "predicted") == []


# ---- on real ranks


class Capacities(CallbackBase):
    """Notes the slots of each call: layer -> phase -> how many each chunk has."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], list[int]] = defaultdict(list)

    def before_dispatch_hook(self, args: Any) -> None:
        self.seen[args.layer, args.direction].append(args.tensor.shape[1])


capacities = Capacities()


def train_with_predictions(rank: int, world_size: int, folder: str, cluster: str) -> list[dict[str, list[int]]]:
    import ds_fsmoe

    capacities.seen.clear()
    case = Case(2, 1, "fp32", 1, 2, True, moe_options=(("top2_2nd_expert_sampling", False),), expert="gpt")
    model = SmallModel(case, rank)
    block = {
        "enabled": True,
        "schedule": "fsmoe",
        "pipeline_degree": {"forward": 3, "backward": 2},
        "gradient_partition": {"mode": "off"},
        "hooks": ["tests.test_predicted.capacities"],
        "trace": {"enabled": True, "start_step": 1, "num_steps": 2, "path": folder, "cluster": cluster},
    }
    engine, *_ = ds_fsmoe.initialize(
        model=model, model_parameters=list(model.parameters()), config=case.ds_config(fsmoe=block)
    )
    for step in range(4):
        loss, _ = engine(*batch(step, rank, torch.float32))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return dict(capacities.seen)


def expected_timeline(cluster: str, backward: bool, chunks: list[int]) -> Timeline:
    """From the planner alone: one layer of two ranks, with these slots per chunk."""
    capacity = sum(chunks)
    groups = Groups(world=2, gpus_per_node=2, ep=2)
    shape = Shape(
        B=1, L=NUM_EXPERTS * capacity, M=WIDTH, H=28, E=NUM_EXPERTS, K=1, capacity_factor=1.0, heads=1, dtype_bytes=4
    )
    layer = layer_work(shape, groups, whole_slots=True)
    moe = (layer.backward if backward else layer.forward).moe
    plan = BlockPlan(len(chunks), "paper")
    numbers = load_cluster(cluster)
    schedule = block_schedule(BlockWork((), moe, ()), plan)
    return simulate(schedule, kind_costs(numbers, groups), numbers.contention, numbers.host_ms)


def test_two_ranks_trace_what_each_phase_should_take_beside_what_it_took(tmp_path: Path) -> None:
    folder, cluster = tmp_path / "trace", cluster_file(tmp_path)
    seen = run_on_ranks(train_with_predictions, 2, tmp_path / "ranks", str(folder), cluster)
    for rank in range(2):
        trace = read_trace(rank_file(folder, rank))
        assert_valid(trace)
        assert_no_overlap(trace)
        assert trace["otherData"]["complete"]
        names = row_names(trace)
        runs: dict[str, dict[int, list[dict[str, Any]]]] = {
            each: defaultdict(list) for each in ("measured", "predicted")
        }
        for category, of_run in runs.items():
            for event in events_of(trace, category):
                of_run[event["args"]["run"]].append(event)
                row = names[event["pid"], event["tid"]]
                assert row.startswith("predicted ") == (category == "predicted")
        # Two steps, two layers, two phases.
        assert runs["predicted"].keys() == runs["measured"].keys() == set(range(8))
        for number, events in runs["predicted"].items():
            layer, phase = events[0]["args"]["layer"], events[0]["args"]["phase"]
            degree, direction = (3, "forward") if phase == "fwd" else (2, "backward")
            timeline = expected_timeline(cluster, phase == "bwd", seen[rank][layer, direction][:degree])
            spans = [span for span in timeline.spans if span.task.kind != HOLD]
            label = f"{layer}/{direction}"
            assert [event["name"] for event in events] == [range_name(label, span.task) for span in spans]
            took_ms = [span.end_ms - span.start_ms for span in spans]
            assert [event["args"]["ms"] for event in events] == pytest.approx(took_ms, abs=2e-6)
            # From where the phase began, to the microsecond; the host had begun the first task soon after.
            began_us = events[0]["ts"] - spans[0].start_ms * 1e3
            starts_us = [event["ts"] - began_us for event in events]
            assert starts_us == pytest.approx([span.start_ms * 1e3 for span in spans], abs=2)
            measured = runs["measured"][number]
            assert {event["name"] for event in measured} == {event["name"] for event in events}
            assert -2 <= min(event["ts"] for event in measured) - began_us < 300e3


def test_a_cluster_without_a_number_that_a_group_needs_is_refused(tmp_path: Path) -> None:
    predictor = Predictor(cluster_file(tmp_path, without="inter.all_to_all"))
    predictor.of(Groups(world=2, gpus_per_node=2, ep=2))
    with pytest.raises(
        ConfigError, match=r"fsmoe\.trace\.cluster = .*operations\.inter\.all_to_all is missing, but the EP"
    ):
        predictor.of(Groups(world=2, gpus_per_node=1, ep=2))


def test_a_call_that_crosses_once_per_node_is_predicted_with_the_crossings_it_was_planned_with() -> None:
    """A call says how many rows it has, and not how often their tokens crossed."""
    groups = Groups(world=4, gpus_per_node=2, ep=4)
    plan = PhasePlan(BlockPlan(2, "paper"), groups, backward=False, alltoall="node_deduplicated")
    costs = LayerCosts.written(kind_costs(load_cluster("testbed_a"), groups, "node_deduplicated"))
    call = CallShape(16, 8, 64, 4, 16, 1000, num_tokens=16)
    seen = Fanout(nodes=0.25, ranks=0.5)
    planned = MeasuredPredictor(costs, IDEAL).timeline(plan.schedule, plan, replace(call, crossings=seen))
    found = MeasuredPredictor(costs, IDEAL, fanout=seen).timeline(plan.schedule, plan, call)
    assert found.makespan_ms == planned.makespan_ms
    without = MeasuredPredictor(costs, IDEAL).timeline(plan.schedule, plan, call)
    sent = [sum(each.task.size for each in of.spans if each.task.kind == A2A_IN) for of in (found, without)]
    assert sent[0] < 0.5 * sent[1]

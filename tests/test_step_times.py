# SPDX-License-Identifier: Apache-2.0
"""What a step takes, and what of it is in the layers' runs, task by task; and what phases should take, with the
sizes of each call, beside what they took."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe import CallbackBase, ConfigError
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, Observer, SerialLanes, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.files.traces import range_name, rank_file, read_trace
from ds_fsmoe.observing.call_observer import CallObserver
from ds_fsmoe.observing.predicted import MeasuredPredictor, Predictor
from ds_fsmoe.observing.step_timer import DenseTimes, StepClock
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.block import BlockPlan, block_schedule
from ds_fsmoe.planning.call_shape import CallShape, moe_work
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.cost import LayerCosts, LinearCost
from ds_fsmoe.planning.groups import Fanout, Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, EXPERT, HOLD, Schedule
from ds_fsmoe.planning.timeline import IDEAL, Timeline, simulate
from ds_fsmoe.planning.workload import BlockWork, Shape, kind_costs, layer_work
from tests.calls import call_of
from tests.covering import covering
from tests.fake_clock import FakeClock
from tests.lane_cases import CPU, NEEDS_GPU
from tests.ranks import run_on_ranks
from tests.small_model import NUM_EXPERTS, Case, batch, small_engine
from tests.small_model import WIDTH as MODEL_WIDTH
from tests.trace_cases import assert_no_overlap, assert_valid, events_of, make_tracer, row_names, written

FIXTURES = (make_tracer,)  # which pytest finds by their names here
EXPERTS, WIDTH = 3, 5
DENSE_S, EXPERT_S = 0.02, 0.03


class Sleepy(nn.Linear):
    """An expert that takes its time."""

    def __init__(self, host: FakeClock) -> None:
        super().__init__(WIDTH, WIDTH)
        self.host = host

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.host.sleep(EXPERT_S / EXPERTS)
        return super().forward(x)


class Model:
    """A dense part and a layer of one rank, told to a clock as an engine does it."""

    def __init__(self, clock: StepClock, lanes: Lanes, host: FakeClock, **others: Any) -> None:
        groups = Groups(world=1, gpus_per_node=1)
        plans = [PhasePlan(BlockPlan(degree), groups, degree == 1) for degree in (2, 1)]
        self.pipeline = LayerPipeline(lanes, Collectives(lambda x, group: x, None, None), *plans, "L07")
        self.observer = CallObserver(clock=clock, **others)
        self.clock, self.host = clock, host
        self.experts = ExpertSet([Sleepy(host) for _ in range(EXPERTS)])
        self.device = clock.device

    def layer(self, x_RM: torch.Tensor, capacity: int = 4) -> torch.Tensor:
        return call_of(self.pipeline, x_RM, self.experts, self.observer)(x_RM, EXPERTS, capacity, self.experts)

    def rows(self, capacity: int = 4) -> torch.Tensor:
        return torch.randn(EXPERTS * capacity, WIDTH, requires_grad=True)

    def forward(self, layer: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        self.clock.begin_forward()
        self.host.sleep(DENSE_S)
        loss = (layer or self.layer)(self.rows()).sum()
        self.clock.end_forward()
        return loss

    def backward(self, loss: torch.Tensor, sums_s: float = 0.0) -> None:
        self.clock.begin_backward()
        loss.backward()
        self.host.sleep(2 * DENSE_S)
        if sums_s:
            self.clock.begin_sums()
            self.host.sleep(sums_s)
        self.clock.end_backward()


@pytest.fixture(params=[True, False], ids=["threads", "serial"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    host = FakeClock()
    with closing(make_lanes(CPU, overlap=request.param)) as lanes:
        yield Model(StepClock(CPU, host), lanes, host)


def test_what_of_a_step_is_in_no_run_of_a_layer_is_dense(model: Model) -> None:
    model.clock.start()
    for _ in range(2):
        model.backward(model.forward())
    step = model.clock.read()
    assert (step.num_forwards, step.num_backwards) == (2, 2)
    assert [(run.label, run.in_backward) for run in step.runs] == 2 * [("L07/forward", False), ("L07/backward", True)]
    assert step.phases_ms.keys() == {"L07/forward", "L07/backward"}
    # Two chunks, so each expert is called twice.
    assert step.phases_ms["L07/forward"] == pytest.approx(2 * 2 * EXPERT_S * 1e3)
    assert step.dense_forward_ms == pytest.approx(2 * DENSE_S * 1e3)
    assert step.dense_backward_ms == pytest.approx(4 * DENSE_S * 1e3)
    assert step.dense_forward_ms == pytest.approx(step.forward_ms - step.phases_ms["L07/forward"])
    assert step.dense_backward_ms == pytest.approx(step.backward_ms - step.phases_ms["L07/backward"])
    for run in step.runs:
        assert [span.task for span in run.timeline.spans] == list(run.schedule.tasks)
        took_ms = [span.end_ms - span.start_ms for span in run.timeline.spans]
        assert run.in_backward or took_ms == pytest.approx([EXPERT_S * 1e3] * 2)
    # The marks of a device are off by more than nothing takes, and what is dense is never below zero.
    short = replace(step, forward_ms=0.9 * step.phases_ms["L07/forward"], backward_ms=0.0)
    assert (short.dense_forward_ms, short.dense_backward_ms) == (0.0, 0.0)
    # When there is nothing newer, what was read last is told.
    model.clock.stop()
    assert model.clock.dense_ms() == (step.dense_forward_ms / 2, step.dense_backward_ms / 2, 0.0)
    label, plan, sizes = step.runs[0].about
    assert (label, plan) == ("L07", model.pipeline.forward)
    assert sizes == CallShape(EXPERTS, 4, WIDTH, 4, EXPERTS, EXPERTS * WIDTH * WIDTH)


def test_a_batch_that_goes_through_stages_is_timed_with_its_waits_for_other_stages(model: Model) -> None:
    model.clock.start()
    model.clock.begin_step()
    losses = [model.forward(), model.forward()]
    model.host.sleep(1.0)
    for each in losses:
        model.backward(each)
    model.clock.end_step()
    step = model.clock.read()
    assert step.step_ms == pytest.approx(step.forward_ms + step.backward_ms + 1e3)
    assert step.dense_forward_ms == pytest.approx(2 * DENSE_S * 1e3)
    # Without stages there is no batch to be timed, and none is left over.
    model.clock.start()
    model.backward(model.forward())
    step = model.clock.read()
    assert step.step_ms == step.forward_ms + step.backward_ms


def test_unasked_the_second_forward_and_its_backward_are_timed(model: Model) -> None:
    clock, seen = model.clock, []
    for _ in range(4):
        clock.begin_forward()
        seen.append((clock.is_listening, clock.read()))
        loss = model.layer(model.rows()).sum()
        clock.end_forward()
        model.layer(model.rows())  # an evaluation, of which nobody is told
        model.backward(loss)
        seen[-1] = seen[-1][0], len(clock.read().runs)
    assert seen == [(False, 0), (True, 2), (False, 0), (False, 0)]
    forward_ms, backward_ms, wait_ms = clock.dense_ms()
    assert forward_ms == wait_ms == 0.0
    assert backward_ms == pytest.approx(2 * DENSE_S * 1e3)


@pytest.mark.parametrize(("num_micro_batches", "wait_ms"), [(1, 0.0), (3, 300.0)])
def test_unasked_it_tells_how_much_longer_the_first_forward_after_a_step_is(
    model: Model, num_micro_batches: int, wait_ms: float
) -> None:
    clock = model.clock
    for number in range(3 * num_micro_batches):
        is_first, is_last = number % num_micro_batches == 0, number % num_micro_batches == num_micro_batches - 1
        clock.begin_forward()
        loss = model.layer(model.rows()).sum()
        model.host.sleep(0.3 * is_first)
        clock.end_forward()
        model.backward(loss)
        if is_last:
            clock.step_is_over()
    # With one micro-batch the forward that was seen has waited too, and what waited is dense in it.
    assert clock.dense_ms().wait_ms == pytest.approx(wait_ms)
    assert clock.dense_ms().forward_ms == pytest.approx(300.0 - wait_ms)
    clock.start()
    for number in range(num_micro_batches):
        model.backward(
            model.forward(lambda x, number=number: (model.host.sleep(0.3 * (number == 0)), model.layer(x))[1])
        )
    assert clock.read() is not None
    assert clock.dense_ms().wait_ms == 0.0, "a whole step's forwards have it among them"
    # After a start nothing is timed unasked.
    clock.start()
    clock.stop()
    model.backward(model.forward())
    assert clock.read().runs == ()


def test_sums_of_gradients_that_end_a_backward_are_of_the_step_but_not_dense(model: Model) -> None:
    for _ in range(2):
        model.backward(model.forward(), sums_s=5.0)
    step = model.clock.read()
    assert step.sums_ms == pytest.approx(5e3)
    assert step.dense_backward_ms == pytest.approx(5e3 + 2 * DENSE_S * 1e3)
    assert model.clock.dense_ms().backward_ms == pytest.approx(2 * DENSE_S * 1e3)
    model.clock.begin_sums()  # in no backward that is timed
    assert model.clock.read().sums_ms == step.sums_ms


def test_a_step_that_is_not_known_as_a_whole_is_not_read(model: Model) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise OSError("the disk is on fire")

    model.clock.start()
    model.forward().backward()  # past the engine
    assert model.clock.read() is None
    model.clock.start()
    with pytest.raises(OSError, match="on fire"):
        model.forward(fails)
    assert model.clock.read() is None
    model.backward(model.forward())
    assert model.clock.read() is None
    model.clock.start()
    model.backward(model.forward())
    assert len(model.clock.read().runs) == 2


@NEEDS_GPU
def test_on_a_gpu_events_tell_the_same() -> None:
    device = torch.device("cuda")
    with closing(make_lanes(device)) as lanes:
        clock = StepClock(device)
        model = Model(clock, lanes, FakeClock())
        experts = nn.ModuleList(nn.Linear(1024, 1024, device=device) for _ in range(EXPERTS))
        model.experts = ExpertSet(list(experts))
        clock.start()
        x_RM = torch.randn(EXPERTS * 512, 1024, device=device, requires_grad=True)
        clock.begin_forward()
        torch.cuda._sleep(20_000_000)
        loss = model.layer(x_RM @ x_RM.new_ones(1024, 1024), 512).sum()
        clock.end_forward()
        clock.begin_backward()
        loss.backward()
        clock.end_backward()
        step = clock.read()
    # What is inside began later and ended sooner, by the device's own events.
    assert 0 < step.phases_ms["L07/forward"] < step.forward_ms
    assert 0 < step.phases_ms["L07/backward"] < step.backward_ms


# ---- ranks


def dense_of_ranks(rank: int, world_size: int) -> list[DenseTimes | None]:
    host = FakeClock()
    with closing(make_lanes(CPU)) as lanes:
        model = Model(StepClock(CPU, host), lanes, host)
        found = [model.clock.dense_ms()]
        model.clock.start()
        loss = model.forward(lambda x: (host.sleep(0.2 * (1 - rank)), model.layer(x))[1])
        found.append(model.clock.dense_ms())
        if rank == 0:
            model.backward(loss)
        found.append(model.clock.dense_ms())
        if rank == 1:
            model.clock.begin_backward()
            host.sleep(0.3)
            loss.backward()
            model.clock.end_backward()
        found.append(model.clock.dense_ms())
        return found


def test_what_is_dense_is_the_most_of_all_ranks_and_none_where_one_has_not_both(tmp_path: Any) -> None:
    one, other = run_on_ranks(dense_of_ranks, 2, tmp_path)
    assert one == other
    assert one[:3] == [None, None, None]
    assert one[3] == pytest.approx((200 + 1e3 * DENSE_S, 300, 0))


# ---- the trace


class Fixed:
    """Predicts so much for every launch, of which an expert has two."""

    def __init__(self, launch_ms: float) -> None:
        self.launch_ms = launch_ms

    def timeline(self, schedule: Schedule, plan: PhasePlan, sizes: CallShape) -> Timeline:
        return simulate(schedule, {EXPERT: LinearCost(self.launch_ms, 0.0)})


def test_what_was_measured_gives_the_trace_its_predictions_where_no_cluster_does(
    make_tracer: Callable[..., Tracer],
) -> None:
    tracer, predictors = make_tracer(0, 3), {}
    with closing(make_lanes(CPU)) as lanes:
        model = Model(StepClock(CPU), lanes, FakeClock(), tracer=tracer, predictors=lambda: predictors)
        of_cluster = replace(model.observer, predictor=Fixed(9.0))
        for step in range(3):
            tracer.step(step)
            model.layer(model.rows())
            if step == 1:
                x_RM = model.rows()
                call_of(model.pipeline, x_RM, model.experts, of_cluster)(x_RM, EXPERTS, 4, model.experts)
            predictors["L07"] = Fixed(2.0 + step)
        tracer.step(3)
    found = [(event["args"]["step"], event["args"]["ms"]) for event in events_of(written(tracer), "predicted")]
    # Two chunks each. Nothing was known in the first step.
    assert found == [(1, 4.0), (1, 4.0), (1, 18.0), (1, 18.0), (2, 6.0), (2, 6.0)]


# ---- what phases should take

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
    assert [len(ms) for ms in found.values()] == [2] * 4
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


class Capacities(CallbackBase):
    """Notes the slots of each call: layer -> phase -> how many each chunk has."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], list[int]] = defaultdict(list)

    def before_dispatch_hook(self, args: Any) -> None:
        self.seen[args.layer, args.direction].append(args.tensor.shape[1])


capacities = Capacities()


def train_with_predictions(rank: int, world_size: int, folder: str, cluster: str) -> list[dict[str, list[int]]]:
    capacities.seen.clear()
    case = Case(2, 1, "fp32", 1, 2, True, moe_options=(("top2_2nd_expert_sampling", False),), expert="gpt")
    block = {
        "schedule": "fsmoe",
        "pipeline_degree": {"forward": 3, "backward": 2},
        "gradient_partition": {"mode": "off"},
        "hooks": ["tests.test_step_times.capacities"],
        "trace": {"enabled": True, "start_step": 1, "num_steps": 2, "path": folder, "cluster": cluster},
    }
    engine = small_engine(case, rank, block)
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
        B=1,
        L=NUM_EXPERTS * capacity,
        M=MODEL_WIDTH,
        H=28,
        E=NUM_EXPERTS,
        K=1,
        capacity_factor=1.0,
        heads=1,
        dtype_bytes=4,
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
            # From where the phase began, to the microsecond; the host began the first task after that, and before the
            # last task of any ended.
            began_us = events[0]["ts"] - spans[0].start_ms * 1e3
            starts_us = [event["ts"] - began_us for event in events]
            assert starts_us == pytest.approx([span.start_ms * 1e3 for span in spans], abs=2)
            measured = runs["measured"][number]
            assert {event["name"] for event in measured} == {event["name"] for event in events}
            first_us, last_us = min(event["ts"] for event in measured), max(e["ts"] + e["dur"] for e in measured)
            assert began_us - 2 <= first_us <= last_us


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

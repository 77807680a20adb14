# SPDX-License-Identifier: Apache-2.0
"""What a step takes, and what of it is in the layers' runs, task by task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.observing.call_observer import CallObserver
from ds_fsmoe.observing.step_timer import DenseTimes, StepClock
from ds_fsmoe.observing.trace import Tracer
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.call_shape import CallShape
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import EXPERT, Schedule
from ds_fsmoe.planning.timeline import Timeline, simulate
from tests.calls import call_of
from tests.fake_clock import FakeClock
from tests.lane_cases import CPU, NEEDS_GPU
from tests.ranks import run_on_ranks
from tests.trace_cases import events_of, make_tracer, written

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

    def backward(self, loss: torch.Tensor) -> None:
        self.clock.begin_backward()
        loss.backward()
        self.host.sleep(2 * DENSE_S)
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

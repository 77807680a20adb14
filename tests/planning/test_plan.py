# SPDX-License-Identifier: Apache-2.0
"""A whole model planned by every system: bytes and laws kept, the promised order among systems, and work done once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.simulations.paper import table_4
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide import plan as plan_module
from ds_fsmoe.planning.decide.block_times import BlockTimes
from ds_fsmoe.planning.decide.bounds import step_bounds_ms
from ds_fsmoe.planning.decide.gradients import MODES
from ds_fsmoe.planning.decide.plan import ModelPlan, Planner, Settings, plan_by_name
from ds_fsmoe.planning.decide.presets import NAMES, PRESETS, Switches
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import EXPERT, EXPERT_GRAD, GRAD, HOLD, Schedule
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import Shape, Work, kind_costs, layer_work
from tests.covering import covering
from tests.planning.layers import LAYOUTS, SHAPE, plan_by_switches, random_costs

TESTBEDS = {"a": Groups(48, 8, mp=8, esp=8, ep=6), "b": Groups(32, 4, mp=4, esp=4, ep=8)}
PLACED = {**LAYOUTS, "eight replicas of every expert": (Groups(16, 4, mp=4, esp=1, ep=2), "flat")}
OTHER = Shape(B=1, L=8, M=8, H=16, E=8, K=1, capacity_factor=None, heads=2)
HOWS = ((Contention(), 0.0), (Contention(0.3), 0.01), (Contention(0.5, 0.1), 0.0))
MAX_DEGREE = 3


def costs_of(testbed: str) -> dict[str, LinearCost]:
    return dict(kind_costs(load_cluster(f"testbed_{testbed}"), TESTBEDS[testbed]))


def check_laws(plan: ModelPlan) -> None:
    """Bytes of gradients and tokens, and expert gradients behind what they are of."""
    layers = plan.layers[::-1]
    forward, backward = plan.schedules()
    for kind in (GRAD, EXPERT_GRAD):
        sent = [task.size for task in backward.tasks if task.kind == kind]
        assert sum(sent) == sum(each.size_bytes for layer in layers for each in layer.gradients if each.kind == kind)
        assert not [task for task in forward.tasks if task.kind == kind]
    for schedule, phase in ((forward, "forward"), (backward, "backward")):
        done = dict.fromkeys(range(len(layers)), 0.0)
        for task in schedule.tasks:
            if task.kind.startswith(EXPERT) and task.kind != EXPERT_GRAD:
                done[task.layer] += task.size
        for index, layer in enumerate(layers if phase == "backward" else plan.layers):
            again = layer.forward.moe.expert.size if phase == "backward" and layer.recompute else 0.0
            assert done[index] == pytest.approx(getattr(layer, phase).moe.expert.size + again)
    check_expert_gradients(plan, backward)


def check_expert_gradients(plan: ModelPlan, backward: Schedule) -> None:
    """What is sent of experts' gradients waits for all tasks that compute them."""
    layers, sent, tasks = plan.layers[::-1], 0, backward.tasks
    ends = np.cumsum([sum(e.size_bytes for e in layer.gradients if e.kind == EXPERT_GRAD) for layer in layers])
    # Those of a forward that is run again compute none.
    twice = [layer.backward.moe.expert.launches for layer in layers]
    ancestors: list[set[int]] = []
    for task in tasks:
        ancestors.append(set(task.after).union(*(ancestors[each] for each in task.after)))
        if task.kind == EXPERT_GRAD:
            sent += task.size
            newest = int(np.searchsorted(ends, sent))
            of_newest = {at for at, each in enumerate(tasks) if (each.kind, each.layer) == (EXPERT, newest)}
            needed = {each for each in of_newest if tasks[each].launches == twice[newest]}
            assert needed <= ancestors[-1], "an expert gradient travels before it exists"


@pytest.mark.parametrize(("layout", "recompute", "how"), covering(sorted(PLACED), (False, True), (0, 1, 2)))
def test_every_systems_plan_keeps_all_laws_and_best_is_as_fast_as_any(layout: str, recompute: bool, how: int) -> None:
    costs = random_costs(random.Random(f"{layout}{recompute}{how}"))
    first, second = (layer_work(shape, *PLACED[layout], recompute) for shape in (SHAPE, OTHER))
    layers, steps_ms = [first, second, first], {}
    planner = Planner(costs, Settings(*HOWS[how], max_degree=MAX_DEGREE, min_gain=0.0))
    # best may use one chunk more than others where all are uncut.
    bounds_ms = step_bounds_ms(layers, costs, MAX_DEGREE + 1)
    for name in NAMES:
        plan = plan_by_name(planner, name, layers)
        check_laws(plan)
        assert max(each.degree for each in (*plan.forward, *plan.backward)) <= MAX_DEGREE, name
        # Lina's follow from the bytes of each layer.
        if name in PRESETS and PRESETS[name]().pipeline in ("off", "common"):
            assert [each.degree for each in plan.forward] == [each.degree for each in plan.backward[::-1]], name
        times_ms = planner.phases_ms(plan)
        for time_ms, bound_ms in zip(times_ms, bounds_ms, strict=True):
            assert time_ms >= bound_ms * (1 - 1e-9), name
        steps_ms[name] = sum(times_ms)
    assert steps_ms["best"] <= min(steps_ms.values()) * 1.01, steps_ms


@pytest.mark.parametrize("testbed", ["a", "b"])
def test_with_ideal_links_a_system_is_never_slower_than_those_it_improves_on(testbed: str) -> None:
    groups, planner = TESTBEDS[testbed], Planner(costs_of(testbed))
    for shape in random.Random(testbed).sample(list(table_4(testbed, groups.ep)), 12):
        layers = [layer_work(shape, groups)] * 2
        ms = {name: planner.step_ms(plan_by_name(planner, name, layers, layers[0].gradients)) for name in PRESETS}
        for slower in ("fsmoe_no_iio", "tutel_improved", "tutel", "deepspeed"):
            assert ms["fsmoe"] <= ms[slower] * (1 + 1e-9), (shape, slower)
        assert ms["tutel_improved"] <= ms["tutel"] * (1 + 1e-9) <= ms["deepspeed"] * (1 + 2e-9), shape


@pytest.mark.parametrize("name", PRESETS)
def test_the_chosen_times_are_those_of_the_schedule(name: str) -> None:
    """What is said of each layer adds up to what playing the model says, but for gradients that reach into the next
    layer's first operation, before it needs the link."""
    costs = costs_of("b")
    layer = layer_work(Shape(4, 512, 2048, 4096, 8), TESTBEDS["b"])
    plan = plan_by_name(Planner(costs), name, [layer] * 3)
    forward, backward = plan.timelines(costs)

    def rest_ms(works: tuple[Work, ...]) -> float:
        return sum(costs[each.kind].ms(each.size, each.launches) for each in works)

    phases = layer.forward, layer.backward
    forward_ms, backward_ms = (3 * rest_ms((*each.before, *each.after)) for each in phases)
    assert forward.makespan_ms == pytest.approx(forward_ms + sum(each.time_ms for each in plan.forward_choices))
    tail_ms = sum(costs[each.kind].ms(each.size_bytes) for each in plan.tail)
    said_ms = backward_ms + sum(each.time_ms for each in plan.backward_choices) + tail_ms
    # What travels beside the rest of a layer takes no longer than that, or reaches into the next one.
    beside_ms = sum(costs[each.kind].ms(each.size_bytes) for block in plan.backward for each in block.dense_slices)
    assert said_ms - 1e-9 <= backward.makespan_ms <= said_ms + beside_ms + 1e-9


def test_equal_layers_are_planned_once_and_alike_whatever_was_planned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, made = costs_of("b"), []
    layers = [layer_work(Shape(4, 512, M, 4096, 8), TESTBEDS["b"]) for M in (1024, 2048, 1024)]
    used = Planner(costs)
    for name in NAMES:
        plan_by_switches(used, Switches("per_phase", "paper", "dense_only"), layers[::-1])
        assert plan_by_name(used, name, layers) == plan_by_name(Planner(costs), name, layers)

    class Counted(BlockTimes):
        def __init__(self, work: object, *more: object) -> None:
            made.append(work)
            super().__init__(work, *more)

    monkeypatch.setattr(plan_module, "BlockTimes", Counted)
    planner = Planner(costs)
    plan_by_name(planner, "fsmoe", layers[:1] * 20)
    assert len(made) == 3, "one per phase, and the backward with what is around it"
    plan_by_name(planner, "fsmoe", layers[:2] * 10)
    assert len(made) == 6


def test_recompute_runs_the_forward_again_ahead_of_the_backward() -> None:
    costs = costs_of("b")
    shape = Shape(4, 512, 2048, 4096, 8)
    once, again = (layer_work(shape, TESTBEDS["b"], recompute=each) for each in (False, True))
    plain, longer = (plan_by_name(Planner(costs), "deepspeed", [each] * 2) for each in (once, again))
    (forward, backward), (forward_again, backward_again) = (each.timelines(costs) for each in (plain, longer))
    assert forward_again.makespan_ms == forward.makespan_ms
    assert backward_again.makespan_ms == pytest.approx(backward.makespan_ms + forward.makespan_ms)

    def kinds(plan: ModelPlan, phase: int) -> list[str]:
        tasks = plan.schedules()[phase].tasks
        return [task.kind for task in tasks if task.layer == 0 and task.kind not in (GRAD, HOLD)]

    assert kinds(longer, 1) == kinds(plain, 0) + kinds(plain, 1)


@pytest.mark.parametrize("solver", ["exact", "slsqp"])
@pytest.mark.parametrize("links", ["shared", "paper", "reduce_first"])
def test_every_switch_goes_with_every_other(links: str, solver: str) -> None:
    layers = [layer_work(SHAPE, *LAYOUTS["the paper's"])] * 2
    planner = Planner(random_costs(random.Random(1)), Settings(max_degree=4, solver=solver))
    for pipeline in ("off", "common", "per_phase", "by_bytes"):
        for mode in MODES:
            plan = plan_by_switches(planner, Switches(pipeline, links, mode), layers)
            check_laws(plan)
            degrees = {each.degree for each in (*plan.forward, *plan.backward)}
            assert degrees == {1} if pipeline == "off" else len(degrees) == 1 or pipeline == "per_phase"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_degree": 0}, "num_chunks.max = 0: must be a whole number from 1 to 256"),
        ({"max_degree": True}, "num_chunks.max = True: must be a whole number"),
        ({"solver": "exakt"}, "solver = 'exakt': did you mean 'exact'"),
        ({"host_ms": -1.0}, "host_ms = -1.0"),
        ({"gradient_solver": "ga"}, "solver = 'ga': the choices are dp, de"),
        ({"chunk_bytes": 0}, "chunk_bytes = 0"),
        ({"num_micro_batches": 0}, "num_micro_batches = 0: must be"),
    ],
)
def test_impossible_settings_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**change)

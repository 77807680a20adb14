# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline are planned for their own layers: nothing is forgotten, and a batch takes what its closed form
says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_fsmoe.offline.models.known import load_model
from ds_fsmoe.offline.models.model_layers import DenseStage, dense_stage, stages
from ds_fsmoe.offline.models.pipeline import (
    PlannedPipeline,
    batch_ms,
    lane_between,
    pipeline_of_layers,
    pipeline_of_model,
    plan_stage,
    send_cost,
)
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.decide.plan import Planner, Settings, plan_by_name
from ds_fsmoe.planning.decide.presets import BEST, NAMES
from ds_fsmoe.planning.decide.step_time import StageTimes, stage_times
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.workload import Shape, kind_costs, layer_work
from tests.planning.test_model_layers import ODD, B, L

TESTBED = load_cluster("testbed_a")
SHAPE = Shape(1, 1024, 1600, 6400, 8, 2, 1.2, "gpt", 25)
GROUPS = Groups(48, 8, mp=8, esp=8, ep=1, pp=2)


def equal_layers(
    num_layers: int = 3, num_micro_batches: int = 4, groups: Groups = GROUPS
) -> tuple[PlannedPipeline, Planner]:
    layers = (layer_work(SHAPE, groups, whole_slots=True),) * num_layers
    settings = Settings(TESTBED.contention, max_degree=4, num_micro_batches=num_micro_batches)
    return pipeline_of_layers(TESTBED, groups, layers, SHAPE), Planner(kind_costs(TESTBED, groups), settings)


# ---- what stages send


def test_stages_in_one_node_send_inside_it_and_others_between_nodes() -> None:
    groups = Groups(world=16, gpus_per_node=8, pp=4)
    assert [lane_between(groups, each, each + 1) for each in range(3)] == [Lane.INTRA, Lane.INTER, Lane.INTRA]
    # Where a stage has more than a node, or parts of two, every rank's peer counts.
    assert lane_between(Groups(world=32, gpus_per_node=8, pp=2), 0, 1) is Lane.INTER
    assert lane_between(Groups(world=12, gpus_per_node=8, pp=3), 0, 1) is Lane.INTRA
    assert lane_between(Groups(world=12, gpus_per_node=4, pp=2), 0, 1) is Lane.INTER


def test_a_rank_sends_its_share_of_the_tokens_at_the_cost_of_what_an_all_to_all_between_two_ranks_moves() -> None:
    without = {name: each for name, each in TESTBED.operations.items() if name != "inter.all_to_all"}
    for known, operation in ((TESTBED.operations, "inter.all_to_all"), (without, "inter.all_gather")):
        between_two = TESTBED.operation(operation, "a test").among(2)
        assert send_cost(replace(TESTBED, operations=known), Lane.INTER).ms(1e6) == pytest.approx(between_two.ms(2e6))
    with pytest.raises(ValueError, match=r"operations.intra.all_to_all is missing, but what a stage sends"):
        send_cost(replace(TESTBED, operations={}), Lane.INTRA)
    pipeline, _ = equal_layers()
    assert pipeline.send_bytes == SHAPE.L / GROUPS.mp * SHAPE.M * SHAPE.dtype_bytes
    assert pipeline.sends_ms == (send_cost(TESTBED, Lane.INTER).ms(pipeline.send_bytes),)


# ---- how they are planned


@pytest.mark.parametrize("name", NAMES)
def test_one_stage_takes_what_its_micro_batches_take_one_after_the_other(name: str) -> None:
    groups = Groups(24, 8, mp=8, esp=8, ep=1)
    pipeline, planner = equal_layers(groups=groups)
    (stage,) = pipeline.plan(planner, name)
    plan = plan_by_name(planner, name, pipeline.works[0])
    bare_ms, last_ms = planner.step_ms(plan.without_gradients()), planner.step_ms(plan)
    assert planner.batch_ms(plan) == pytest.approx(3 * bare_ms + last_ms)
    assert pipeline.batch_ms([stage.times], 4) == pytest.approx(planner.batch_ms(plan))
    assert stage.times.busy_ms(4) == pytest.approx(planner.batch_ms(plan))
    sent = sum(each.size_bytes for layer in pipeline.works[0] for each in layer.gradients)
    assert stage.hidden_bytes + stage.after_bytes == pytest.approx(sent)


def test_the_first_stage_hides_gradients_and_the_last_one_sends_them_while_others_compute() -> None:
    pipeline, planner = equal_layers(num_layers=24)
    first, last = pipeline.plan(planner, BEST)
    assert first.hidden_bytes > 0.9 * (first.hidden_bytes + first.after_bytes)
    assert last.times.last_backward_ms < 1.05 * last.times.backward_ms
    alone = stage_times(planner, plan_by_name(planner, BEST, pipeline.works[1]))
    assert alone.times.last_backward_ms > 5 * last.times.last_backward_ms
    batches_ms = [pipeline.batch_ms([first.times, each.times], 4) for each in (last, alone)]
    assert batches_ms[0] < batches_ms[1]


def test_the_last_stage_hides_gradients_too_where_that_makes_the_shorter_batch() -> None:
    pipeline, planner = equal_layers(num_micro_batches=1)
    free = replace(pipeline, sends_ms=(0.0,))
    ways = [plan_stage(planner, BEST, pipeline.works[1])]
    ways.append(stage_times(planner, ways[0].plan.sending_at_the_end()))
    first, last = free.plan(planner, BEST)
    times_ms = [free.batch_ms([first.times, each.times], 1) for each in ways]
    assert free.batch_ms([first.times, last.times], 1) == min(times_ms)


@pytest.mark.parametrize("name", ["tutel_improved", "lina", "deepspeed"])
def test_systems_that_place_gradients_by_a_rule_keep_to_it(name: str) -> None:
    pipeline, planner = equal_layers()
    first, last = pipeline.plan(planner, name)
    assert first == last == plan_stage(planner, name, pipeline.works[0])


def test_stages_send_what_they_share_when_all_backwards_are_over_and_all_else_early() -> None:
    model, groups = replace(load_model("olmoe").first(4), is_tied=True), Groups(16, 8, ep=8, pp=2)
    shape = Shape(1, 256, model.M, 1024, 64, 8, None, "mixtral", 16, dtype_bytes=2)
    pipeline, untied = (
        pipeline_of_model(TESTBED, replace(model, is_tied=each), groups, stages(model, 2), shape)
        for each in (True, False)
    )
    assert pipeline.tied_ms > 0 == untied.tied_ms
    planner = Planner(kind_costs(TESTBED, groups), Settings(max_degree=2, num_micro_batches=4))
    for name in ("fsmoe", BEST):
        found = pipeline.plan(planner, name)
        assert all(stage.after_bytes >= model.M * model.vocab * shape.dtype_bytes for stage in found)
        assert found[0].hidden_bytes > 0
        times = [each.times for each in found]
        assert pipeline.batch_ms(times, 4) == batch_ms(times, 4, pipeline.sends_ms) + pipeline.tied_ms


def test_a_stage_without_experts_is_planned_with_its_gradients_behind_it() -> None:
    groups = Groups(world=16, gpus_per_node=8, pp=8)
    shape = Shape(B, L, ODD.M, 10, 4, 2, None, "mixtral", 3)
    pipeline = pipeline_of_model(TESTBED, ODD, groups, stages(ODD, 8), shape, recompute=True)
    planner = Planner(kind_costs(TESTBED, groups), Settings(max_degree=2, num_micro_batches=3))
    found, costs = pipeline.plan(planner, BEST), planner.costs
    assert [each.plan is None for each in found] == [each.experts is None for each in ODD.blocks]
    first, dense = found[0], pipeline.works[0]
    assert isinstance(dense, DenseStage)
    forward_ms = sum(costs[each.kind].ms(each.size, each.launches) for each in dense.forward)
    assert first.times.forward_ms == pytest.approx(forward_ms)
    assert first.times.last_backward_ms == first.times.backward_ms > 2 * forward_ms
    assert first.hidden_bytes == 0.0
    assert first.times.gradients_ms == pytest.approx(costs["GRAD"].ms(first.after_bytes))
    # One that recomputes runs its forward again, all but the head.
    for stage in (stages(ODD, 4)[0], stages(ODD, 8)[-1]):
        plain, again = (dense_stage(ODD, groups, B, L, 4, stage, recompute=each) for each in (False, True))
        assert again.forward == plain.forward
        runs_again = plain.forward[:-3] if stage.has_head else plain.forward
        expected = sum(each.size for each in (*runs_again, *plain.backward))
        assert sum(each.size for each in again.backward) == pytest.approx(expected)


# ---- the closed form of a batch


def played_ms(stages: list[StageTimes], m: int, sends_ms: list[float]) -> float:
    """A batch task by task in DeepSpeed's order: forwards and backwards take turns, and a stage waits for what it
    receives."""
    p = len(stages)
    lists: list[list[tuple[str, int]]] = []
    for s in range(p):
        warm_up = min(m, p - s)
        order = [("F", i) for i in range(warm_up)]
        for i in range(m):
            order += [("B", i), *([("F", i + warm_up)] if i + warm_up < m else [])]
        lists.append(order)
    at_ms, done_ms = [0.0] * p, dict[tuple[str, int, int], float]()
    while any(lists):
        for stage, (order, times) in enumerate(zip(lists, stages, strict=True)):
            if not order:
                continue
            kind, i = order[0]
            other = stage - 1 if kind == "F" else stage + 1
            if 0 <= other < p:
                if (kind, other, i) not in done_ms:
                    continue
                at_ms[stage] = max(at_ms[stage], done_ms[kind, other, i]) + sends_ms[min(stage, other)]
            order.pop(0)
            last = kind == "B" and i == m - 1
            at_ms[stage] += times.forward_ms if kind == "F" else times.last_backward_ms if last else times.backward_ms
            done_ms[kind, stage, i] = at_ms[stage]
    return max(ms + times.gradients_ms for ms, times in zip(at_ms, stages, strict=True))


def test_a_batch_by_hand() -> None:
    """Two stages, two micro-batches: of 1 and 2 ms forward, 3 and 4 ms backward, in the end 5 and 6; sends of 0.5."""
    stages = [StageTimes(1, 3, 5, 0.25), StageTimes(2, 4, 6)]
    #  stage 1: F0 0-1, > 1-1.5, F1 1.5-2.5, < 7.5-8, > 8-8.5, B0 8.5-11.5, < 16.5-17, B1 17-22, end 22.25
    #  stage 2:          > 1-1.5, F0 1.5-3.5, B0 3.5-7.5, < 7.5-8, > 8-8.5, F1 8.5-10.5, B1 10.5-16.5, < 16.5-17
    assert batch_ms(stages, 2, 0.5) == batch_ms(stages, 2, [0.5]) == pytest.approx(22.25)
    # What the last stage sums takes longer than the last send and backward of the first one.
    assert batch_ms([StageTimes(1, 3, 5), StageTimes(2, 4, 6, 8)], 2, 0.5) == pytest.approx(16.5 + 8)
    # In a long batch the slowest stage alone counts, which sends there and back to both neighbours.
    three = [StageTimes(1, 2, 2), StageTimes(2, 4, 4), StageTimes(1, 2, 2)]
    assert batch_ms(three, 1000, 0.5) - batch_ms(three, 999, 0.5) == pytest.approx(6.0 + 4 * 0.5)
    # Equal stages with free sends take what textbooks say.
    for p, m in ((1, 3), (2, 1), (4, 8), (6, 4)):
        equal, textbooks_ms = [StageTimes(3, 5, 5)] * p, (m + p - 1) * (3 + 5)
        assert batch_ms(equal, m) == pytest.approx(textbooks_ms) == pytest.approx(played_ms(equal, m, [0.0] * (p - 1)))
    with pytest.raises(ValueError, match="send_ms: 2 times, must be one for each of 1 pairs of neighbours"):
        batch_ms(stages, 2, [0.5, 0.5])


def test_the_closed_form_is_near_a_batch_that_is_played_task_by_task() -> None:
    """Stages differ by a tenth; their sends take some hundredths, and gradients a fifth of the last backward."""
    coin, off = random.Random(0), []
    for _ in range(300):
        p, m, stages = coin.randint(1, 6), coin.randint(1, 16), []
        for _ in range(p):
            forward_ms, hidden_ms, left_ms = coin.uniform(9, 11), coin.uniform(0, 4), coin.uniform(0, 4)
            stages.append(StageTimes(forward_ms, 2 * forward_ms, 2 * forward_ms + hidden_ms, left_ms))
        sends_ms = [coin.uniform(0, 0.3) for _ in stages[1:]]
        off.append(batch_ms(stages, m, sends_ms) / played_ms(stages, m, sends_ms) - 1)
        assert batch_ms(stages, m, sends_ms) >= max(each.busy_ms(m) for each in stages) - 1e-9
    assert -0.02 < min(off) <= max(off) < 0.1
    assert abs(sorted(off)[len(off) // 2]) < 0.02

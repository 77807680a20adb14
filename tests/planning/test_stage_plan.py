# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline are planned for their own layers, as they run in a batch: nothing is forgotten, and no other
choice of these plans makes a shorter batch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from ds_fsmoe.planning.architecture import Architecture
from ds_fsmoe.planning.block_times import Order
from ds_fsmoe.planning.cluster import load_cluster
from ds_fsmoe.planning.gradient_prices import window_prices
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.model_layers import DenseStage, dense_stage, model_layers, stages
from ds_fsmoe.planning.models import load_model
from ds_fsmoe.planning.phase_times import PhaseTimes
from ds_fsmoe.planning.plan import Planner, Settings, plan_by_name
from ds_fsmoe.planning.presets import BEST, NAMES
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.planning.search import SearchSpace, choose
from ds_fsmoe.planning.stage_batch import simulate_batch
from ds_fsmoe.planning.stage_plan import (
    PATIENT_SHARE,
    Pipeline,
    lane_between,
    pipeline_of_layers,
    pipeline_of_model,
    plan_stage,
    send_cost,
    stage_times,
)
from ds_fsmoe.planning.workload import BlockWork, Layer, Shape, Work, kind_costs, layer_work
from tests.planning.test_model_layers import ODD, B, L

TESTBED = load_cluster("testbed_a")
SHAPE = Shape(1, 1024, 1600, 6400, 8, 2, 1.2, "gpt", 25)
GROUPS = Groups(48, 8, mp=8, esp=8, ep=1, pp=2)


def equal_layers(num_layers: int = 3, num_micro_batches: int = 4, groups: Groups = GROUPS) -> tuple[Pipeline, Planner]:
    layers = (layer_work(SHAPE, groups, whole_slots=True),) * num_layers
    settings = Settings(TESTBED.contention, max_degree=4, num_micro_batches=num_micro_batches)
    return pipeline_of_layers(TESTBED, groups, layers, SHAPE), Planner(kind_costs(TESTBED, groups), settings)


# ---- what stages have to do


def all_works(stage: tuple[Layer, ...] | DenseStage, phase: str) -> list[Work]:
    if isinstance(stage, DenseStage):
        return list(getattr(stage, phase))
    blocks: list[BlockWork] = [getattr(layer, phase) for layer in stage]
    return [work for each in blocks for work in (*each.before, *each.moe.collectives, each.moe.expert, *each.after)]


def done(architecture: Architecture, pp: int, mp: int, phase: str) -> tuple[dict[str, float], dict[str, float]]:
    """Kind -> its computation and traffic on all stages of a model, and kind -> the bytes of its gradients."""
    groups = Groups(world=24 * pp, gpus_per_node=4, mp=mp, ep=2, pp=pp)
    sizes, gradients = dict[str, float](), dict[str, float]()
    for each in stages(architecture, pp):
        is_dense = all(architecture.blocks[place].experts is None for place in each.places)
        made = (dense_stage if is_dense else model_layers)(architecture, groups, B, L, 4, stage=each)
        for work in all_works(made, phase):
            sizes[work.kind] = sizes.get(work.kind, 0.0) + work.size
        for part in (made,) if isinstance(made, DenseStage) else made:
            for gradient in part.gradients:
                gradients[gradient.kind] = gradients.get(gradient.kind, 0.0) + gradient.size_bytes
    return sizes, gradients


@pytest.mark.parametrize("mp", [1, 2])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_stages_with_and_without_experts_do_together_what_the_model_does(pp: int, mp: int, phase: str) -> None:
    whole, parts = done(ODD, 1, mp, phase), done(ODD, pp, mp, phase)
    assert parts[0] == pytest.approx(whole[0])
    assert parts[1] == pytest.approx(whole[1])


def test_a_tied_embedding_is_on_both_ends_and_its_gradients_are_summed_twice() -> None:
    tied = replace(ODD, is_tied=True)
    whole, parts = (done(tied, pp, 1, "forward") for pp in (1, 4))
    assert parts[0] == pytest.approx(whole[0])
    assert parts[1]["GRAD"] - whole[1]["GRAD"] == pytest.approx(tied.M * tied.vocab * 4)


def test_a_stage_of_dense_blocks_that_recomputes_runs_its_forward_again() -> None:
    groups = Groups(world=24 * 4, gpus_per_node=4, pp=4)
    for stage in (stages(ODD, 4)[0], stages(ODD, 8)[-1]):
        plain, again = (dense_stage(ODD, groups, B, L, 4, stage, recompute=each) for each in (False, True))
        assert again.forward == plain.forward
        expected = sum(each.size for each in (*plain.forward, *plain.backward))
        head = 0.0
        if stage.has_head:
            # The head does not run again.
            head = sum(each.size for each in plain.forward[-3:])
        assert sum(each.size for each in again.backward) == pytest.approx(expected - head)


# ---- what they send


def test_stages_in_one_node_send_inside_it_and_others_between_nodes() -> None:
    groups = Groups(world=16, gpus_per_node=8, pp=4)
    assert [lane_between(groups, each, each + 1) for each in range(3)] == [Lane.INTRA, Lane.INTER, Lane.INTRA]
    # Where a stage has more than a node, or parts of two, every rank's peer counts.
    assert lane_between(Groups(world=32, gpus_per_node=8, pp=2), 0, 1) is Lane.INTER
    assert lane_between(Groups(world=12, gpus_per_node=8, pp=3), 0, 1) is Lane.INTRA
    assert lane_between(Groups(world=12, gpus_per_node=4, pp=2), 0, 1) is Lane.INTER


def test_a_send_costs_what_an_all_to_all_between_two_ranks_moves() -> None:
    cost = send_cost(TESTBED, Lane.INTER)
    between_two = TESTBED.operation("inter.all_to_all", "a test").among(2)
    assert cost.ms(1e6) == pytest.approx(between_two.ms(2e6))
    without = {name: each for name, each in TESTBED.operations.items() if name != "inter.all_to_all"}
    gather = TESTBED.operation("inter.all_gather", "a test").among(2)
    assert send_cost(replace(TESTBED, operations=without), Lane.INTER).ms(1e6) == pytest.approx(gather.ms(2e6))
    with pytest.raises(ValueError, match=r"operations.intra.all_to_all is missing, and what a stage sends"):
        send_cost(replace(TESTBED, operations={}), Lane.INTRA)


def test_a_rank_sends_its_share_of_the_tokens() -> None:
    pipeline, _ = equal_layers()
    assert pipeline.send_bytes == SHAPE.L / GROUPS.mp * SHAPE.M * SHAPE.dtype_bytes
    assert pipeline.links[0].activation_ms == send_cost(TESTBED, Lane.INTER).ms(pipeline.send_bytes)


# ---- how they are planned


@pytest.mark.parametrize("name", NAMES)
def test_one_stage_takes_what_its_micro_batches_take_one_after_the_other(name: str) -> None:
    groups = Groups(24, 8, mp=8, esp=8, ep=1)
    pipeline, planner = equal_layers(groups=groups)
    batch = pipeline.plan(planner, name)
    (stage,) = batch.stages
    plan = plan_by_name(planner, name, pipeline.works[0].layers)
    assert batch.timeline.makespan_ms == pytest.approx(planner.batch_ms(plan))
    bare_ms, last_ms = planner.step_ms(plan.without_gradients()), planner.step_ms(plan)
    assert batch.timeline.makespan_ms == pytest.approx(3 * bare_ms + last_ms)
    sent = sum(each.size_bytes for layer in pipeline.works[0].layers for each in layer.gradients)
    assert stage.hidden_bytes + stage.after_bytes == pytest.approx(sent)


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 1000])
def test_the_cut_that_all_micro_batches_share_is_the_best_for_their_sum(micro_batches: int) -> None:
    layer = layer_work(SHAPE, Groups(16, 8, mp=8, esp=8, ep=2), whole_slots=True)
    planner = Planner(kind_costs(TESTBED, Groups(16, 8, mp=8, esp=8, ep=2)), Settings(max_degree=8))
    times = planner.times(BlockWork((), layer.backward.moe, ()), backward=True)
    orders = [Order(degree) for degree in range(1, 9)]
    alone_ms = times.times_ms(orders)[:, 0]
    for grad_ms in (0.5, 5.0, 50.0):
        last_ms = times.times_ms(orders, grad_ms)[:, 0]
        backward = PhaseTimes(times, grad_ms=grad_ms, num_micro_batches=micro_batches)
        _, found = choose(PhaseTimes(times), backward, SearchSpace(lambda backward, splits: orders))
        sums_ms = (micro_batches - 1) * alone_ms + last_ms
        assert found.time_ms * micro_batches == pytest.approx(sums_ms.min())
        assert sums_ms[orders.index(found.order)] == pytest.approx(sums_ms.min())


def test_gradients_pay_for_a_cut_that_is_worse_without_them_in_every_micro_batch() -> None:
    groups = Groups(16, 8, mp=8, esp=8, ep=2)
    layer = layer_work(SHAPE, groups, whole_slots=True)
    for settings in (Settings(), Settings(TESTBED.contention)):
        planner = Planner(kind_costs(TESTBED, groups), settings)
        moe = planner.times(BlockWork((), layer.backward.moe, ()), backward=True)
        whole = planner.times(layer.backward, backward=True)
        orders = [Order(degree) for degree in range(1, 9)]
        grads_ms = np.linspace(0.0, 20.0, 33)
        best = orders[int(moe.times_ms(orders)[:, 0].argmin())]
        prices = [window_prices(orders, best, moe, whole, each)[0](grads_ms) for each in (1, 2, 9)]
        fixed = window_prices([best], best, moe, whole)[0](grads_ms)
        for cheaper, dearer in itertools.pairwise((*prices, fixed)):
            assert (cheaper <= dearer + 1e-9).all()
        assert (prices[0] < fixed - 1e-6).any()


@pytest.mark.parametrize("name", ["fsmoe", BEST])
@pytest.mark.parametrize("pp", [2, 3, 6])
def test_no_other_mix_of_a_stages_two_plans_makes_a_shorter_batch(name: str, pp: int) -> None:
    pipeline, planner = equal_layers(groups=Groups(96, 8, mp=8, esp=8, ep=1, pp=pp))
    even, patient = (
        plan_stage(each, name, pipeline.works[0]) for each in (planner, planner.counting_tails(PATIENT_SHARE))
    )
    batches_ms = [
        pipeline.batch([even, *others], 4).timeline.makespan_ms
        for others in itertools.product((even, patient), repeat=pp - 1)
    ]
    assert pipeline.plan(planner, name).timeline.makespan_ms == pytest.approx(min(batches_ms))
    # Else nothing was chosen.
    assert min(batches_ms) < batches_ms[0] * 0.99


def test_the_first_stage_hides_gradients_and_the_last_one_sends_them_while_others_compute() -> None:
    pipeline, planner = equal_layers(num_layers=24)
    first, last = pipeline.plan(planner, BEST).stages
    assert first.hidden_bytes > 0.9 * (first.hidden_bytes + first.after_bytes)
    assert last.times.last_backward_ms < 1.05 * last.times.backward_ms
    alone = stage_times(planner, plan_by_name(planner, BEST, pipeline.works[1].layers))
    assert alone.times.last_backward_ms > 5 * last.times.last_backward_ms


@pytest.mark.parametrize("name", ["tutel_improved", "lina", "deepspeed"])
def test_systems_that_place_gradients_by_a_rule_keep_to_it(name: str) -> None:
    pipeline, planner = equal_layers()
    first, last = pipeline.plan(planner, name).stages
    assert first == last == plan_stage(planner, name, pipeline.works[0])


def test_stages_send_what_they_share_when_all_backwards_are_over_and_all_else_early() -> None:
    model = replace(load_model("olmoe").first(4), is_tied=True)
    groups = Groups(16, 8, ep=8, pp=2)
    shape = Shape(1, 256, model.M, 1024, 64, 8, None, "mixtral", 16, dtype_bytes=2)
    pipeline = pipeline_of_model(TESTBED, model, groups, stages(model, 2), shape)
    settings = Settings(max_degree=2, num_micro_batches=4)
    planner = Planner(kind_costs(TESTBED, groups), settings)
    assert pipeline.tied_ms > 0
    for name in ("fsmoe", BEST):
        batch = pipeline.plan(planner, name)
        shared_bytes = model.M * model.vocab * shape.dtype_bytes
        for stage in batch.stages:
            assert stage.after_bytes >= shared_bytes
        assert batch.stages[0].hidden_bytes > 0
        free = simulate_batch([each.times for each in batch.stages], 4, pipeline.links)
        assert batch.timeline.makespan_ms > free.makespan_ms
    untied = pipeline_of_model(TESTBED, replace(model, is_tied=False), groups, stages(model, 2), shape)
    assert untied.tied_ms == 0.0


def test_a_stage_without_experts_is_planned_with_its_gradients_behind_it() -> None:
    groups = Groups(world=16, gpus_per_node=8, pp=8)
    shape = Shape(B, L, ODD.M, 10, 4, 2, None, "mixtral", 3)
    pipeline = pipeline_of_model(TESTBED, ODD, groups, stages(ODD, 8), shape, recompute=True)
    planner = Planner(kind_costs(TESTBED, groups), Settings(max_degree=2, num_micro_batches=3))
    batch = pipeline.plan(planner, BEST)
    assert [each.plan is None for each in batch.stages] == [each.experts is None for each in ODD.blocks]
    first = batch.stages[0]
    costs = planner.costs
    assert pipeline.works[0].dense is not None
    forward_ms = sum(costs[each.kind].ms(each.size, each.launches) for each in pipeline.works[0].dense.forward)
    assert first.times.forward_ms == pytest.approx(forward_ms)
    assert first.times.last_backward_ms == first.times.backward_ms > 2 * forward_ms
    assert first.hidden_bytes == 0.0
    assert first.times.gradients_ms == pytest.approx(costs["GRAD"].ms(first.after_bytes))


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"num_micro_batches": 0}, "num_micro_batches = 0: must be"), ({"tail_share": 2.0}, "tail_share = 2.0: must be")],
)
def test_settings_that_are_none_are_refused(setting: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(**setting)

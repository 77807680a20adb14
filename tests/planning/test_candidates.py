# SPDX-License-Identifier: Apache-2.0
"""Which all-to-all is taken, which plans are worth a try, and which stand near the one that was the fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan_requests import MIN_GAIN, TRIED_DEGREES, PlanRequest, SearchSpace
from ds_fsmoe.planning.job.measured import LayerProfile, Timing
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, Lane
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.planning.workload import Gradient, Layer
from tests.planning.measured_layers import Machine, layer_of, made_up

UNCUT = SearchSpace.of("deepspeed", 4)
BUSY = Machine(contention=Contention(0.4, 0.4, 0.4))


def times(profile: LayerProfile, factor: float) -> LayerProfile:
    """All of it in so many times the time."""

    def longer(each: Timing) -> Timing:
        return replace(each, times_ms=tuple(factor * time_ms for time_ms in each.times_ms))

    return replace(profile, operations={name: longer(each) for name, each in profile.operations.items()})


def search_of(
    *options: dict[str, Layer],
    space: SearchSpace | None = None,
    machine: Machine = BUSY,
    links: str = "reduce_first",
    uncut: bool = False,
) -> Search:
    planner = machine.planner()
    space = space or planner.settings.space("best")
    return Search(planner, PlanRequest(options, space, "adaptive", links, [uncut] * len(options)))


def asking(search: Search, **more) -> Search:
    """The same search, of which something else is asked."""
    return replace(search, request=replace(search.request, **more))


def orders_of(plan: ModelPlan, index: int = 0) -> tuple[Order, Order]:
    forward, backward = plan.choices(index)
    return forward.order, backward.order


def test_another_all_to_all_is_taken_where_it_gains_more_than_the_margin_and_else_the_one_that_is_run() -> None:
    profile = made_up(1)

    def chosen(*factors: tuple[str, float]) -> ModelPlan:
        options = {name: layer_of(times(profile, factor)) for name, factor in factors}
        return search_of(options, space=UNCUT, machine=Machine()).fastest()

    for factor, taken in ((1 - MIN_GAIN - 0.01, "2dh"), (1 - MIN_GAIN + 0.01, "flat"), (1.3, "flat")):
        plan = chosen(("flat", 1.0), ("2dh", factor))
        assert plan.alltoalls == (taken,)
        (of_names,) = plan.alltoalls_ms
        assert of_names["2dh"] == pytest.approx(factor * of_names["flat"])
        assert sum(each.time_ms for each in plan.choices(0)) == pytest.approx(of_names[taken])
    assert chosen(("flat", 1.0), ("1dh", 0.9), ("2dh", 0.8)).alltoalls == ("2dh",)


def test_plans_to_be_tried_are_what_is_predicted_first_and_every_small_degree_in_every_order() -> None:
    layer = layer_of(made_up(2), BUSY)
    search = search_of({"flat": layer})
    found = search.candidates()
    tried = [orders_of(each) for each in found]
    assert tried[0] == orders_of(search.fastest())
    assert len(set(tried)) == len(tried)
    cut = {(f.degree, f.links) for f, b in tried if f.degree == b.degree and f.links == b.links}
    wanted = {(degree, links) for degree in (2, 3, 4) for links in ("shared", "paper", "reduce_first")}
    assert wanted | {(1, "reduce_first")} <= cut
    assert TRIED_DEGREES == (1, 2, 3, 4)
    # All are timed on the same machine, whatever they were found by.
    for plan in found:
        pair = search.planner.choose(layer, SearchSpace.fixed(*orders_of(plan)))
        assert [each.time_ms for each in plan.choices(0)] == pytest.approx([each.time_ms for each in pair])
    by_hand = search_of({"flat": layer}, space=search.request.space.with_degrees(5, None, "paper"), links="paper")
    assert {orders_of(each)[0].degree for each in by_hand.candidates()} == {5}


def test_each_all_to_all_is_tried_with_the_plan_that_suits_it_best() -> None:
    slow, fast = (layer_of(times(made_up(2), factor), BUSY) for factor in (1.0, 0.5))
    search = search_of({"flat": slow, "node_deduplicated": fast}, {"flat": slow})
    found = [each for each in search.candidates() if each.alltoalls == ("flat", "flat")]
    best = search_of({"flat": slow}, {"flat": slow}).fastest()
    assert [orders_of(best, index) for index in (0, 1)] in [
        [orders_of(each, index) for index in (0, 1)] for each in found
    ]
    assert search.candidates()[0].alltoalls == ("node_deduplicated", "flat")


def test_layers_that_may_not_be_cut_are_not_cut_by_any_candidate() -> None:
    search = search_of({"flat": layer_of(made_up(0))}, machine=Machine(), uncut=True)
    for plan in search.candidates():
        assert {each.degree for each in orders_of(plan)} == {1}


def near(kept: tuple[Order, Order], first: tuple[Order, Order], second: tuple[Order, Order], **more) -> list:
    options = {"flat": layer_of(more.pop("profile", made_up(0)))}
    search = search_of(options, machine=Machine(), **more)
    plans = [asking(search, space=SearchSpace.fixed(*each)).whole() for each in (kept, first, second)]
    return [orders_of(each) for each in search.refinements(*plans)]


THREE, FOUR = Order(3, "reduce_first"), Order(4, "paper")


def test_a_refinement_joins_the_fastest_halves() -> None:
    found = near((THREE, THREE), (FOUR, THREE), (THREE, FOUR))
    assert found[0] == (THREE, THREE)
    assert set(found) == {(THREE, THREE), (FOUR, FOUR)}


def test_halves_are_not_joined_where_both_phases_have_to_be_cut_alike() -> None:
    drawing = made_up(0, is_written=False, uses_rng=True)
    assert near((THREE, THREE), (FOUR, FOUR), (THREE, THREE), profile=drawing) == [(THREE, THREE)]
    common = SearchSpace.of("tutel", 8)
    shared = Order(2, "shared")
    assert near((shared, shared), (Order(4, "shared"),) * 2, (shared, shared), space=common) == [(shared, shared)]


def test_a_phase_of_deepspeeds_schedule_is_joined_only_where_the_degree_is_open() -> None:
    by_bytes = SearchSpace.of("lina", 8, micro_op_bytes=100)
    layer = layer_of(made_up(0))
    (given,) = {each.degree for backward in (False, True) for each in by_bytes.orders_of(layer.forward.moe, backward)}
    assert given > 1
    own, stock = Order(given, "shared"), Order(1, "shared")
    for first, second in ((stock, stock), (own, stock), (stock, own)):
        assert near((own, own), (first, first), (second, second), space=by_bytes) == [(own, own)]
    both = near((THREE, THREE), (stock, stock), (stock, stock))
    assert (stock, stock) in both, "where uncut is open it is joined"


DENSE = Gradient(GRAD, (Lane.INTER,), 1200)
OF_EXPERTS = Gradient(EXPERT_GRAD, (Lane.INTER,), 700)


def with_gradients(*gradients: Gradient) -> Layer:
    layer = layer_of(made_up(0))
    assert layer.costs is not None
    of_grads = {each.kind: LinearCost(0.01, 1e-3) for each in gradients}
    costs = replace(layer.costs, backward={**layer.costs.backward, **of_grads})
    return replace(layer, gradients=gradients, costs=costs)


def anyhow(*layers: Layer, may_send_anyhow: bool = True) -> list[ModelPlan]:
    """The refinements of the fastest plan."""
    search = asking(search_of(*({"flat": each} for each in layers)), may_send_anyhow=may_send_anyhow)
    plan = search.fastest()
    return search.refinements(plan, plan, plan)


def bytes_of_windows(plan: ModelPlan) -> list[dict[str, float]]:
    """The gradients of each window inside a layer and behind it, and those after the backward."""
    windows = [each for block in plan.backward for each in (block.moe_slices, block.dense_slices)]
    return [{each.kind: each.size_bytes for each in slices} for slices in (*windows, plan.tail)]


def test_the_fastest_plan_is_also_tried_with_its_gradients_at_once_and_with_all_of_them_at_the_end() -> None:
    layer = with_gradients(DENSE, OF_EXPERTS)
    kept, *_, at_once, at_the_end = anyhow(layer, layer, layer)
    of_layer, nothing = {GRAD: 1200, EXPERT_GRAD: 700}, {}
    assert (at_once.sending, at_the_end.sending) == ("at_once", "at_the_end")
    assert bytes_of_windows(at_once) == [nothing, nothing, of_layer, nothing, of_layer, nothing, of_layer]
    whole = {kind: 3 * size for kind, size in of_layer.items()}
    assert bytes_of_windows(at_the_end) == [*[nothing] * 6, whole]
    for plan in (at_once, at_the_end):
        assert [orders_of(plan, index) for index in range(3)] == [orders_of(kept, index) for index in range(3)]
        # Nothing is sent before it exists, or the schedule could not be written.
        for timeline in plan.timelines({}):
            assert timeline.makespan_ms > 0


def test_gradients_are_sent_as_placed_where_that_was_asked_for_or_there_are_none() -> None:
    assert all(each.sending == "placed" for each in anyhow(with_gradients(DENSE), may_send_anyhow=False))
    assert all(each.sending == "placed" for each in anyhow(layer_of(made_up(0))))


def told(plan: ModelPlan) -> tuple:
    """What a plan says beside the ways that were chosen."""
    pairs = [plan.choices(index) for index in range(len(plan.layers))]
    alternatives = [
        [(each.runner_up, each.runner_up_ms, each.unchunked_ms, each.auto_degree) for each in pair] for pair in pairs
    ]
    return alternatives, [dict(each) for each in plan.alltoalls_ms]


def test_stages_behind_the_first_try_their_best_with_its_gradients_at_the_end_when_the_first_runs_its_best() -> None:
    search = asking(search_of({"flat": with_gradients(DENSE)}), may_send_anyhow=True)
    alone, first, second = (search.to_try(each) for each in (None, 0, 1))
    assert first == [alone[0], *alone]
    assert second == [alone[0], alone[0].sending_at_the_end(), *alone[1:]]
    # A system that was named is run as it is, and without layers there is one way.
    named = asking(search, may_send_anyhow=False)
    assert named.to_try(0) == named.to_try(1) == named.to_try()
    nothing = asking(search, options=(), unchunked=()).to_try(1)
    assert len(nothing) == 2
    assert nothing[0] == nothing[1]


def test_a_plan_that_is_run_again_by_its_orders_tells_the_same_alternatives() -> None:
    flat = layer_of(made_up(2), BUSY)
    search = search_of({"flat": flat, "2dh": layer_of(made_up(4), BUSY)})
    plan = search.fastest()
    again, *_ = search.refinements(plan, plan, plan)
    assert orders_of(again) == orders_of(plan)
    alternatives, alltoalls_ms = told(again)
    assert all(runner_up is not None for pair in alternatives for runner_up, *_ in pair)
    assert alternatives == told(plan)[0]
    assert [set(each) for each in alltoalls_ms] == [{"flat", "2dh"}]


def test_what_was_chosen_after_trials_is_told_beside_what_the_prediction_prefers() -> None:
    search = search_of({"flat": layer_of(made_up(2), BUSY)})
    preferred = search.fastest()
    other = asking(search, orders=[(THREE, FOUR)]).whole()
    assert orders_of(other) == (THREE, FOUR)
    for at, choice in enumerate(other.choices(0)):
        assert choice.auto_degree == preferred.choices(0)[at].auto_degree
        assert choice.runner_up not in (None, choice.order.degree)
        assert choice.runner_up_ms is not None

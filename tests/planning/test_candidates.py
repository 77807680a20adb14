# SPDX-License-Identifier: Apache-2.0
"""Which all-to-all is taken, which plans are worth a try, in halves or not, which stand near the one that was the
fastest, and how much is simulated for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.call_shape import layer_of_call
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide import block_times
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.bounds import busiest_ms
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner, Settings
from ds_fsmoe.planning.decide.plan_requests import MIN_GAIN, TRIED_DEGREES, PlanRequest, SearchSpace
from ds_fsmoe.planning.job.measured import LayerProfile, Timing
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, EXPERT_GRAD, GATHER, GRAD, REDUCE, REST, Lane
from ds_fsmoe.planning.timeline import Contention, simulate
from ds_fsmoe.planning.two_batch import sub_batch_moe, two_batch_schedule
from ds_fsmoe.planning.workload import Gradient, Layer, Work
from tests.planning.layers import CONTENTIONS, LAYOUTS, random_costs
from tests.planning.layers import layer_of as laid_out
from tests.planning.measured_layers import GROUPS, SIZES, Machine, layer_of, made_up

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
    can_split: bool = False,
) -> Search:
    planner = machine.planner()
    space = space or planner.settings.space("best")
    return Search(planner, PlanRequest(options, space, "adaptive", links, [uncut] * len(options), can_split))


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
    assert wanted <= cut
    # One chunk has one order.
    assert {links for degree, links in cut if degree == 1} == {"reduce_first"}
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


# ---- two halves that take turns


def with_rest(layer: Layer, forward_ms: float, backward_ms: float) -> Layer:
    """The layer with so much of the rest of a model beside it, as it is measured."""
    rest = [(Work(REST, (Lane.COMPUTE,), each),) for each in (forward_ms, backward_ms)]
    forward, backward = replace(layer.forward, before=rest[0]), replace(layer.backward, after=rest[1])
    return replace(layer, forward=forward, backward=backward)


def busy(sent_ms: float = 6.0, **more) -> list[dict[str, Layer]]:
    """Six layers between which the rest takes about as long as tokens are on their way."""
    wholes = {"experts_forward": 1.0, "experts_backward": 2.0, "experts_dX": 1.0, "experts_dW": 1.0}
    layer = with_rest(layer_of(made_up(**{"all-to-all": sent_ms}, **wholes, **more)), 10.0, 20.0)
    return [{"flat": layer}] * 6


ALONE = Machine()


def search_in_halves(*options: dict[str, Layer], machine: Machine = ALONE, **more) -> Search:
    return search_of(*options, machine=machine, can_split=True, **more)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_no_plan_in_halves_is_chosen_that_gains_less_than_the_margin_and_all_are_above_the_bound(layout: str) -> None:
    rng = random.Random(layout)
    settings = Settings(rng.choice(CONTENTIONS), host_ms=rng.choice((0.0, 0.05)), max_degree=2)
    planner = Planner(random_costs(rng), settings)
    options = [{"flat": laid_out(layout)}] * rng.randint(1, 3)
    search = Search(planner, PlanRequest(options, settings.space("best"), "adaptive", can_split=True))
    found, chosen, whole = search.candidates(), search.fastest(), search.whole()
    halves = search.best_two_batch()
    gains = halves is not None and planner.step_ms(halves) < (1 - MIN_GAIN) * planner.step_ms(whole)
    assert chosen.is_two_batch is gains
    assert not (layout == "one rank" and gains), "there is nothing to hide"
    keys = [(each.is_two_batch, each.orders) for each in found]
    assert keys[0] == (chosen.is_two_batch, chosen.orders)
    assert (False, whole.orders) in keys
    assert len(set(keys)) == len(keys)
    bound_ms = sum(busiest_ms(whole.layers, planner.costs))
    assert all(planner.step_ms(each) >= bound_ms * (1 - 1e-9) for each in found)


def test_candidates_have_the_best_in_halves_and_halves_in_one_and_two_chunks() -> None:
    search = search_in_halves(*busy())
    halves = [each for each in search.candidates() if each.is_two_batch]
    best = search.best_two_batch()
    assert best is not None
    assert orders_of(best) in map(orders_of, halves)
    assert {1, 2} <= {orders_of(each)[0].degree for each in halves}
    assert not any(each.is_two_batch for each in asking(search, can_split=False).candidates())
    serial = search_in_halves(*busy(), machine=Machine(is_serial=True))
    assert not any(each.is_two_batch for each in serial.candidates())


def test_refinements_of_a_plan_in_halves_stay_in_halves_and_those_of_others_do_not() -> None:
    search = search_in_halves(*busy())
    halves, whole = asking(search, degree=2).best_two_batch(), search.whole()
    assert halves is not None
    near = search.refinements(halves, halves, whole)
    assert orders_of(near[0]) == orders_of(halves)
    assert all(each.is_two_batch for each in near)
    # Forwards and backwards of the other kind are not mixed with it.
    assert all(orders_of(each)[0] == orders_of(halves)[0] for each in near)
    assert not any(each.is_two_batch for each in search.refinements(whole, halves, whole))


def test_layers_that_recompute_are_run_in_halves_and_gain_in_what_runs_again_too() -> None:
    again = [{"flat": replace(each["flat"], recompute=True)} for each in busy()]
    plain, recomputing = search_in_halves(*busy()), search_in_halves(*again)
    halves, whole = recomputing.best_two_batch(), recomputing.whole()
    assert halves is not None
    assert any(each.is_two_batch for each in recomputing.candidates())
    step_ms = recomputing.planner.step_ms
    assert step_ms(halves) < 0.9 * step_ms(whole)
    # What runs again takes turns: it adds less than its whole forward does to the whole micro-batch.
    of_plain = plain.best_two_batch()
    assert of_plain is not None
    assert step_ms(halves) - step_ms(of_plain) < step_ms(whole) - step_ms(plain.whole())
    mixed = search_in_halves(*again[:3], *busy()[:3]).best_two_batch()
    assert mixed is not None
    assert step_ms(of_plain) < step_ms(mixed) < step_ms(halves)
    assert asking(plain, options=()).best_two_batch() is None


def test_another_all_to_all_is_taken_for_the_whole_model_where_the_step_gains_enough() -> None:
    (slow, *_), (fast, *_) = busy(9.0), busy(4.0)
    options = [{"flat": slow["flat"], "2dh": fast["flat"]}] * 5
    found = search_in_halves(*options).best_two_batch()
    assert found is not None
    assert set(found.alltoalls) == {"2dh"}
    assert len(found.alltoalls_ms) == 5
    same = search_in_halves(*[{"flat": slow["flat"], "2dh": slow["flat"]}] * 5).best_two_batch()
    assert same is not None
    assert set(same.alltoalls) == {"flat"}


def test_degrees_that_are_asked_for_are_those_of_a_half_and_both_are_alike_where_experts_draw_numbers() -> None:
    planner = Machine().planner()
    asked = planner.settings.space("best").with_degrees(3, 1, "reduce_first")
    found = search_in_halves(*busy(), space=asked).best_two_batch()
    assert found is not None
    assert [each.degree for each in orders_of(found)] == [3, 1]
    rng = search_in_halves(*busy(uses_rng=True)).best_two_batch()
    assert rng is not None
    assert orders_of(rng)[0].degree == orders_of(rng)[1].degree
    uncut = search_in_halves(*busy(), uncut=True).best_two_batch()
    assert uncut is not None
    assert {each.degree for each in orders_of(uncut)} == {1}


def test_reduces_go_ahead_of_the_other_halfs_gathers_where_they_would_wait_for_tokens() -> None:
    layer = laid_out("the paper's")
    moe = sub_batch_moe(layer.forward.moe)
    space = Settings().space("best")
    assert {each.links for each in space.orders_of(moe, False, is_two_batch=True)} == {
        "shared",
        "paper",
        "reduce_first",
    }
    # Tokens are on their way between nodes most of the time, and gathers of the second half wait for them: on the link
    # that the first half's results need before they can set out.
    ms_of = {A2A_IN: 8.0, GATHER: 3.0, EXPERT: 1.0, REDUCE: 3.0, A2A_OUT: 8.0}
    sizes = {each.kind: each.size for each in moe.stages}
    costs = {kind: LinearCost(0.0, ms / sizes[kind]) for kind, ms in ms_of.items()}
    layers = [replace(layer, forward=replace(layer.forward, before=(), after=()))] * 4
    took_ms = {}
    for links in ("paper", "reduce_first"):
        line = simulate(two_batch_schedule(layers, [BlockPlan(1, links)] * 4, "forward"), costs)
        took_ms[links] = line.makespan_ms
        assert line.busy_ms(Lane.INTER) == 4 * 2 * 2 * 8.0
    # The link between nodes waits no longer but for the first layer's results, and what comes behind the last ones.
    assert took_ms["reduce_first"] < 0.95 * took_ms["paper"]


def test_gradients_are_also_tried_in_the_next_layer_and_all_of_them_are_sent() -> None:
    layer = replace(laid_out("all-to-all between nodes only"), gradients=(Gradient(GRAD, (Lane.INTER,), 5000),))
    planner = Planner(random_costs(random.Random(3)), Settings())
    options = [{"flat": layer}] * 5
    for mode in ("adaptive", "dense_only", "off"):
        request = PlanRequest(options, planner.settings.space("best"), mode, can_split=True)
        found = Search(planner, request).best_two_batch()
        assert found is not None
        blocks = found.backward
        sent = [each for block in blocks for each in (*block.moe_slices, *block.dense_slices)]
        assert sum(each.size_bytes for each in (*sent, *found.tail)) == pytest.approx(5 * 5000)
        assert bool(sent) == (mode != "off")
        bare = found.without_gradients()
        assert bare.is_two_batch
        assert not bare.tail


# ---- each way to run a kind of layer is simulated once, whatever number of plans

GRADIENTS = Gradient(GRAD, (Lane.INTER,), 3000), Gradient(EXPERT_GRAD, (Lane.INTER,), 2000)


@contextmanager
def counting() -> Iterator[list[int]]:
    """The candidates of each batch that is simulated meanwhile."""
    counts: list[int] = []
    simulate = block_times.makespans_ms

    def counted(jobs: Sequence[Any], *how: Any) -> list[np.ndarray]:
        counts.append(sum(task_ms.shape[1] for _, task_ms, _ in jobs))
        return simulate(jobs, *how)

    block_times.makespans_ms = counted
    try:
        yield counts
    finally:
        block_times.makespans_ms = simulate


def kind(number: int, gradients: tuple[Gradient, ...]) -> Layer:
    costs = made_up(number).costs()
    costs.backward.update({each.kind: LinearCost(0.01, 1e-3) for each in gradients})
    return layer_of_call(GROUPS, SIZES, costs, "flat", (2.0, 4.0), gradients)


def search_over(layers: int, kinds: int, gradients: tuple[Gradient, ...] = ()) -> Search:
    made = [{"flat": kind(each, gradients)} for each in range(kinds)]
    return search_of(*(made[each % kinds] for each in range(layers)), space=SearchSpace.of("best", 6))


def all_plans(of: Search) -> None:
    first, second, *_ = of.candidates()
    assert len(of.refinements(first, first, second)) > 1


def simulated(of: Search, plan: Callable[[Search], Any] = all_plans) -> int:
    with counting() as counts:
        plan(of)
    return sum(counts)


def test_a_way_to_run_a_layer_is_simulated_once_for_all_plans_that_are_tried() -> None:
    assert 0 < simulated(search_over(2, 1)) <= 2.2 * simulated(search_over(2, 1), Search.fastest)


@pytest.mark.parametrize("gradients", [(), GRADIENTS], ids=["without gradients", "with gradients"])
def test_twice_the_layers_and_twice_the_kinds_take_twice_the_work_at_the_most(gradients: tuple[Gradient, ...]) -> None:
    few = simulated(search_over(8, 1, gradients))
    assert simulated(search_over(16, 1, gradients)) <= 2.2 * few
    assert simulated(search_over(16, 2, gradients)) <= 2.2 * few


def test_layers_of_all_kinds_are_simulated_together() -> None:
    batches = []
    for kinds in (2, 8):
        with counting() as counts:
            search_over(8, kinds).whole()
        batches.append(len(counts))
    # Besides, each choice is looked at by itself for what it takes on lanes that do not slow each other down.
    assert batches[1] <= batches[0] + 2 * 6

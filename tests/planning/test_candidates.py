# SPDX-License-Identifier: Apache-2.0
"""Which all-to-all is taken, which plans are worth a try, in halves or not, which stand near the one that was the
fastest, and how much is simulated for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

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
from ds_fsmoe.planning.schedule import EXPERT_GRAD, GRAD, REST, Lane
from ds_fsmoe.planning.timeline import Contention
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
    uncut = search_of({"flat": layer}, uncut=True)
    assert {each.degree for plan in uncut.candidates() for each in orders_of(plan)} == {1}


def test_each_all_to_all_is_tried_with_the_plan_that_suits_it_best() -> None:
    slow, fast = (layer_of(times(made_up(2), factor), BUSY) for factor in (1.0, 0.5))
    search = search_of({"flat": slow, "node_deduplicated": fast}, {"flat": slow})
    found = [each for each in search.candidates() if each.alltoalls == ("flat", "flat")]
    best = search_of({"flat": slow}, {"flat": slow}).fastest()
    assert [orders_of(best, index) for index in (0, 1)] in [
        [orders_of(each, index) for index in (0, 1)] for each in found
    ]
    assert search.candidates()[0].alltoalls == ("node_deduplicated", "flat")


def near(kept: tuple[Order, Order], first: tuple[Order, Order], second: tuple[Order, Order], **more) -> list:
    options = {"flat": layer_of(more.pop("profile", made_up(0)))}
    search = search_of(options, machine=Machine(), **more)
    plans = [asking(search, space=SearchSpace.fixed(*each)).whole() for each in (kept, first, second)]
    return [orders_of(each) for each in search.refinements(*plans)]


THREE, FOUR = Order(3, "reduce_first"), Order(4, "paper")


def test_a_refinement_joins_the_fastest_halves_unless_both_phases_have_to_be_cut_alike() -> None:
    found = near((THREE, THREE), (FOUR, THREE), (THREE, FOUR))
    assert (found[0], {*found}) == ((THREE, THREE), {(THREE, THREE), (FOUR, FOUR)})
    drawing = made_up(0, is_written=False, uses_rng=True)
    assert near((THREE, THREE), (FOUR, FOUR), (THREE, THREE), profile=drawing) == [(THREE, THREE)]
    common, shared = SearchSpace.of("tutel", 8), Order(2, "shared")
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


def bytes_of_windows(plan: ModelPlan) -> list[Counter[str]]:
    """The gradients of each window inside a layer and behind it, and those after the backward."""
    windows = [each for block in plan.backward for each in (block.moe_slices, block.dense_slices)]
    found = []
    for slices in (*windows, plan.tail):
        found.append(Counter())
        for each in slices:
            found[-1][each.kind] += each.size_bytes
    return found


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
        assert all(timeline.makespan_ms > 0 for timeline in plan.timelines({}))
    assert all(each.sending == "placed" for each in anyhow(layer, may_send_anyhow=False))
    assert all(each.sending == "placed" for each in anyhow(layer_of(made_up(0))))


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


def test_of_few_plans_those_that_are_predicted_to_be_fastest_are_tried() -> None:
    layers = [{"flat": with_gradients(DENSE)}] * 2
    for search, stage in ((search_of(*layers), None), (asking(search_of(*layers), may_send_anyhow=True), 1)):
        best, *others, stock = search.to_try(stage)
        first, *few, last = search.to_try(stage, most=3)
        assert (first, last) == (best, stock)
        # Stages try together what the second of them sends late.
        late = others[:1] if stage else []
        by_time = sorted(others[len(late) :], key=search.planner.batch_ms)
        assert len(by_time) > 2
        assert few == [*late, *by_time][:2]


# ---- two halves that take turns


def busy(sent_ms: float = 6.0, **more) -> list[dict[str, Layer]]:
    """Six layers between which the rest takes about as long as tokens are on their way."""
    wholes = {"experts_forward": 1.0, "experts_backward": 2.0, "experts_dX": 1.0, "experts_dW": 1.0}
    layer = layer_of(made_up(**{"all-to-all": sent_ms}, **wholes, **more))
    before, after = ((Work(REST, (Lane.COMPUTE,), each),) for each in (10.0, 20.0))
    rest = {"forward": replace(layer.forward, before=before), "backward": replace(layer.backward, after=after)}
    return [{"flat": replace(layer, **rest)}] * 6


ALONE = Machine()


def search_in_halves(*options: dict[str, Layer], machine: Machine = ALONE, **more) -> Search:
    return search_of(*options, machine=machine, can_split=True, **more)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_halves_are_chosen_for_a_gain_above_the_margin_send_all_gradients_and_are_above_the_bound(layout: str) -> None:
    rng = random.Random(layout)
    settings = Settings(rng.choice(CONTENTIONS), host_ms=rng.choice((0.0, 0.05)), max_degree=2)
    planner, layer = Planner(random_costs(rng), settings), laid_out(layout, recompute=rng.random() < 0.5)
    options = [{"flat": layer}] * rng.randint(1, 3)
    search = Search(planner, PlanRequest(options, settings.space("best"), "adaptive", can_split=True))
    found, chosen, whole, halves = search.candidates(), search.fastest(), search.whole(), search.best_two_batch()
    gains = halves is not None and planner.step_ms(halves) < (1 - MIN_GAIN) * planner.step_ms(whole)
    assert chosen.is_two_batch is gains
    assert not (layout == "one rank" and gains), "there is nothing to hide"
    keys = [(each.is_two_batch, each.orders) for each in found]
    assert keys[0] == (chosen.is_two_batch, chosen.orders)
    assert (False, whole.orders) in keys
    assert len(set(keys)) == len(keys)
    bound_ms = sum(busiest_ms(whole.layers, planner.costs))
    for plan in found:
        assert planner.step_ms(plan) >= bound_ms * (1 - 1e-9)
        sent = sum(size for window in bytes_of_windows(plan) for size in window.values())
        assert sent == pytest.approx(len(options) * sum(each.size_bytes for each in layer.gradients))


def test_candidates_have_the_best_in_halves_and_refinements_of_it_stay_in_halves() -> None:
    search = search_in_halves(*busy())
    halves = [each for each in search.candidates() if each.is_two_batch]
    best, whole = search.best_two_batch(), search.whole()
    assert best is not None
    assert orders_of(best) in map(orders_of, halves)
    assert {1, 2} <= {orders_of(each)[0].degree for each in halves}
    for other in (asking(search, can_split=False), search_in_halves(*busy(), machine=Machine(is_serial=True))):
        assert not any(each.is_two_batch for each in other.candidates())
    # Forwards and backwards of the other kind are not mixed with it.
    two = asking(search, degree=2).best_two_batch()
    assert two is not None
    near = search.refinements(two, two, whole)
    assert orders_of(near[0]) == orders_of(two)
    assert all(each.is_two_batch and orders_of(each)[0] == orders_of(two)[0] for each in near)
    assert not any(each.is_two_batch for each in search.refinements(whole, two, whole))


def test_halves_keep_to_what_is_asked_for_and_take_the_all_to_all_that_gains_enough_in_the_step() -> None:
    def best(*options: dict[str, Layer], **more) -> ModelPlan:
        found = search_in_halves(*options, **more).best_two_batch()
        assert found is not None
        return found

    asked = Machine().planner().settings.space("best").with_degrees(3, 1, "reduce_first")
    assert [each.degree for each in orders_of(best(*busy(), space=asked))] == [3, 1]
    assert len({each.degree for each in orders_of(best(*busy(uses_rng=True)))}) == 1, "experts draw numbers"
    assert {each.degree for each in orders_of(best(*busy(), uncut=True))} == {1}
    # A layer with too few slots has as many chunks as there may be.
    few = layer_of_call(GROUPS, replace(SIZES, capacity=4), made_up().costs(False))
    mixed = asking(search_in_halves(*busy(), {"flat": few}), degree=3).best_two_batch()
    assert mixed is not None
    assert [each.order.degree for index in (0, -1) for each in mixed.choices(index)] == [3, 3, 2, 2]
    (slow, *_), (fast, *_) = busy(9.0), busy(4.0)
    for other, taken in ((fast, "2dh"), (slow, "flat")):
        found = best(*[{"flat": slow["flat"], "2dh": other["flat"]}] * 5)
        assert (set(found.alltoalls), len(found.alltoalls_ms)) == ({taken}, 5)


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


@pytest.mark.parametrize("gradients", [(), GRADIENTS], ids=["without gradients", "with gradients"])
def test_twice_the_layers_and_twice_the_kinds_take_twice_the_work_at_the_most(gradients: tuple[Gradient, ...]) -> None:
    def simulated(layers: int, kinds: int) -> int:
        of = search_over(layers, kinds, gradients)
        with counting() as counts:
            first, second, *_ = of.candidates()
            assert len(of.refinements(first, first, second)) > 1
        return sum(counts)

    few = simulated(8, 1)
    assert simulated(16, 1) <= 2.2 * few
    assert simulated(16, 2) <= 2.2 * few
    if not gradients:
        # A way to run a layer is simulated once for all plans that are tried.
        with counting() as counts:
            search_over(8, 1).fastest()
        assert 0 < few <= 2.2 * sum(counts)


def test_layers_of_all_kinds_are_simulated_together() -> None:
    with counting() as of_two:
        search_over(8, 2).whole()
    with counting() as of_eight:
        search_over(8, 8).whole()
    # Besides, each choice is looked at by itself for what it takes on lanes that do not slow each other down.
    assert len(of_eight) <= len(of_two) + 2 * 6

# SPDX-License-Identifier: Apache-2.0
"""When a plan in halves is chosen, how it is searched for, and what stays beside it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_fsmoe import cli
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.bounds import busiest_ms
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.planning.decide.gradients import Mode
from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.planning.decide.plan import Planner, Settings
from ds_fsmoe.planning.decide.plan_requests import MIN_GAIN, PlanRequest, SearchSpace
from ds_fsmoe.planning.decide.step_time import predict_step
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import A2A_IN, A2A_OUT, EXPERT, GATHER, GRAD, REDUCE, REST, Lane
from ds_fsmoe.planning.timeline import IDEAL, Contention, simulate
from ds_fsmoe.planning.two_batch import sub_batch_layer, sub_batch_moe, two_batch_schedule
from ds_fsmoe.planning.workload import Gradient, Layer, Work, layer_work
from tests.planning.layers import LAYOUTS, SHAPE, layer_of, random_costs
from tests.planning.measured_layers import Machine, made_up
from tests.planning.measured_layers import layer_of as measured_layer
from tests.planning.test_candidates import asking

PLAIN = Machine()


def with_rest(layer: Layer, forward_ms: float, backward_ms: float) -> Layer:
    """The layer with so much of the rest of a model beside it, as it is measured."""
    rest = [(Work(REST, (Lane.COMPUTE,), each),) for each in (forward_ms, backward_ms)]
    forward, backward = replace(layer.forward, before=rest[0]), replace(layer.backward, after=rest[1])
    return replace(layer, forward=forward, backward=backward)


def search_of(
    *options: dict[str, Layer],
    machine: Machine = PLAIN,
    space: SearchSpace | None = None,
    can_split: bool = True,
    uncut: bool = False,
    mode: Mode = "adaptive",
) -> Search:
    planner = machine.planner()
    space = space or planner.settings.space("best")
    uncuts = [uncut] * len(options)
    return Search(planner, PlanRequest(options, space, mode, "reduce_first", uncuts, can_split))


def busy(sent_ms: float = 6.0, **more) -> list[dict[str, Layer]]:
    """Six layers between which the rest takes about as long as tokens are on their way."""
    wholes = {"experts_forward": 1.0, "experts_backward": 2.0, "experts_dX": 1.0, "experts_dW": 1.0}
    layer = with_rest(measured_layer(made_up(**{"all-to-all": sent_ms}, **wholes, **more)), 10.0, 20.0)
    return [{"flat": layer}] * 6


def orders_of(plan: ModelPlan, index: int = 0) -> tuple[Order, Order]:
    forward, backward = plan.choices(index)
    return forward.order, backward.order


def test_a_plan_in_halves_is_taken_where_it_gains_more_than_the_margin() -> None:
    search = search_of(*busy())
    chosen, whole = search.fastest(), search.whole()
    assert chosen.is_two_batch
    assert not whole.is_two_batch
    assert search.planner.step_ms(chosen) < (1 - MIN_GAIN) * search.planner.step_ms(whole)
    assert not asking(search, can_split=False).fastest().is_two_batch
    assert asking(search, can_split=False).best_two_batch() is None


def test_with_nothing_to_hide_no_plan_in_halves_is_chosen() -> None:
    groups = Groups(1, 4)
    layer = layer_work(SHAPE, groups)
    for seed in range(5):
        planner = Planner(random_costs(random.Random(seed)), Settings())
        request = PlanRequest([{"flat": layer}] * 4, planner.settings.space("best"), "off", can_split=True)
        search = Search(planner, request)
        assert not search.fastest().is_two_batch


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_in_halves_is_chosen_that_is_predicted_to_be_slower(seed) -> None:
    rng = random.Random(seed)
    layout = rng.choice(sorted(LAYOUTS))
    contention = rng.choice((IDEAL, Contention(0.4, 0.2, 0.1)))
    planner = Planner(random_costs(rng), Settings(contention, host_ms=rng.choice((0.0, 0.05)), max_degree=4))
    options = [{"flat": layer_of(layout)}] * rng.randint(1, 4)
    search = Search(planner, PlanRequest(options, planner.settings.space("best"), "adaptive", can_split=True))
    found = search.candidates()
    chosen, whole = search.fastest(), search.whole()
    assert planner.step_ms(chosen) <= planner.step_ms(whole)
    keys = [(each.is_two_batch, *(orders_of(each, index) for index in range(len(options)))) for each in found]
    assert keys[0] == (chosen.is_two_batch, *(orders_of(chosen, index) for index in range(len(options))))
    assert (False, *(orders_of(whole, index) for index in range(len(options)))) in keys
    assert len(set(keys)) == len(keys)
    bound_ms = sum(busiest_ms(whole.layers, planner.costs))
    assert all(planner.step_ms(each) >= bound_ms * (1 - 1e-9) for each in found)


def test_candidates_have_the_best_in_halves_and_halves_in_one_and_two_chunks() -> None:
    search = search_of(*busy())
    halves = [each for each in search.candidates() if each.is_two_batch]
    best = search.best_two_batch()
    assert best is not None
    assert orders_of(best) in map(orders_of, halves)
    assert {1, 2} <= {orders_of(each)[0].degree for each in halves}
    assert not any(each.is_two_batch for each in asking(search, can_split=False).candidates())
    serial = search_of(*busy(), machine=Machine(is_serial=True))
    assert not any(each.is_two_batch for each in serial.candidates())


def test_refinements_of_a_plan_in_halves_stay_in_halves_and_those_of_others_do_not() -> None:
    search = search_of(*busy())
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
    plain, recomputing = search_of(*busy()), search_of(*again)
    halves, whole = recomputing.best_two_batch(), recomputing.whole()
    assert halves is not None
    assert any(each.is_two_batch for each in recomputing.candidates())
    step_ms = recomputing.planner.step_ms
    assert step_ms(halves) < 0.9 * step_ms(whole)
    # What runs again takes turns: it adds less than its whole forward does to the whole micro-batch.
    of_plain = plain.best_two_batch()
    assert of_plain is not None
    assert step_ms(halves) - step_ms(of_plain) < step_ms(whole) - step_ms(plain.whole())
    mixed = search_of(*again[:3], *busy()[:3]).best_two_batch()
    assert mixed is not None
    assert step_ms(of_plain) < step_ms(mixed) < step_ms(halves)
    assert asking(plain, options=()).best_two_batch() is None


def test_another_all_to_all_is_taken_for_the_whole_model_where_the_step_gains_enough() -> None:
    (slow, *_), (fast, *_) = busy(9.0), busy(4.0)
    options = [{"flat": slow["flat"], "2dh": fast["flat"]}] * 5
    found = search_of(*options).best_two_batch()
    assert found is not None
    assert set(found.alltoalls) == {"2dh"}
    assert len(found.alltoalls_ms) == 5
    same = search_of(*[{"flat": slow["flat"], "2dh": slow["flat"]}] * 5).best_two_batch()
    assert same is not None
    assert set(same.alltoalls) == {"flat"}


def test_degrees_that_are_asked_for_are_those_of_a_half_and_both_are_alike_where_experts_draw_numbers() -> None:
    planner = PLAIN.planner()
    asked = planner.settings.space("best").with_degrees(3, 1, "reduce_first")
    found = search_of(*busy(), space=asked).best_two_batch()
    assert found is not None
    assert [each.degree for each in orders_of(found)] == [3, 1]
    rng = search_of(*busy(uses_rng=True)).best_two_batch()
    assert rng is not None
    assert orders_of(rng)[0].degree == orders_of(rng)[1].degree
    uncut = search_of(*busy(), uncut=True).best_two_batch()
    assert uncut is not None
    assert {each.degree for each in orders_of(uncut)} == {1}


def test_a_half_has_no_more_chunks_than_slots_and_its_orders_can_be_paused() -> None:
    space = Settings().space("best")
    moe = sub_batch_moe(replace(layer_of("no sharding").backward.moe, capacity=5))
    ways = space.orders_of(moe, True, is_two_batch=True)
    assert max(each.degree for each in ways) == 3
    assert ways[0] == Order(1, "paper")
    assert {each.links for each in ways} == {"shared", "paper"}


def test_reduces_go_ahead_of_the_other_halfs_gathers_where_they_would_wait_for_tokens() -> None:
    layer = layer_of("the paper's")
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


def test_what_is_printed_of_a_plan_in_halves_is_of_one_half() -> None:
    search = search_of(*busy())
    found = search.best_two_batch()
    assert found is not None
    pair = search.planner.choose(sub_batch_layer(found.layers[0]), SearchSpace.fixed(*orders_of(found)))
    assert [each.time_ms for each in found.choices(0)] == [each.time_ms for each in pair]
    times = predict_step(search.planner, found, search.request.options, 30.0 * 6, 0.0)
    assert times.bound_ms <= times.chosen_ms <= times.isolated_ms + 1e-9
    assert times.exposed_ms == 0.0


SMALL = ["--model", "olmoe", "--layers", "2", "--nodes", "2", "--ep", "8", "--max-degree", "2", "--two-batch-overlap"]


def test_plan_shows_what_halves_give_over_best(capsys, tmp_path) -> None:
    files = ["--json", str(tmp_path / "plan.json"), "--gantt"]
    assert cli.main(["plan", "--cluster", "testbed_a", *SMALL, "--samples", "2", *files]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text[text.index("two-batch overlap, relative to best") :].splitlines()]
    shown = {" ".join(line[:-7]) or line[0]: line for line in lines if line and line[0].startswith("best")}
    assert len(shown) >= 1
    assert "best, two-batch" in text
    assert "two layers, backward, best, two-batch:" in text
    assert "(lower bound, batches whole)" in text


def test_one_sample_is_said_to_have_no_halves_and_layers_that_recompute_have(capsys) -> None:
    assert cli.main(["plan", "--cluster", "testbed_a", *SMALL, "--samples", "1"]) == 0
    text = capsys.readouterr().out
    assert "--two-batch-overlap: needs at least two samples in a batch: --samples 2" in text
    assert "best, two-batch" not in text
    assert cli.main(["plan", "--cluster", "testbed_a", *SMALL, "--samples", "3", "--recompute"]) == 0
    assert "best, two-batch" in capsys.readouterr().out
    assert cli.main(["plan", "--cluster", "testbed_a", *SMALL, "--samples", "3"]) == 0
    assert "computed as if both sub-batches had 1.5" in capsys.readouterr().out


def test_gradients_are_also_tried_in_the_next_layer_and_all_of_them_are_sent() -> None:
    layer = replace(layer_of("all-to-all between nodes only"), gradients=(Gradient(GRAD, (Lane.INTER,), 5000),))
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

# SPDX-License-Identifier: Apache-2.0
"""What the autotuner makes of its measurements: which all-to-all, which plans to try, what a step should take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ds_fsmoe.autotune_choice import TRIED_DEGREES, Found, candidates, choose, other_esp_sizes, predict
from ds_fsmoe.autotune_subjects import Way
from ds_fsmoe.autotune_table import Row, Told, describe
from ds_fsmoe.measured_costs import Machine
from ds_fsmoe.planning.block import BlockPlan, equal_shares
from ds_fsmoe.planning.cluster import UNITS, Cluster, Operation
from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.schedule import GRAD, Lane
from ds_fsmoe.planning.timeline import Contention
from ds_fsmoe.runtime import topology
from ds_fsmoe.runtime.corun import Slowdowns
from ds_fsmoe.runtime.link_times import LinkTimes
from ds_fsmoe.runtime.pipeline import PhasePlan
from ds_fsmoe.runtime.profiler import GRADIENTS, LayerProfile
from ds_fsmoe.runtime.stopwatch import Timing
from ds_fsmoe.step_prediction import Bounds, StepTimes, idle_ms, predict_step
from ds_fsmoe.telemetry.plans import plans_as_data
from ds_fsmoe.tuned_degrees import MARGIN, PhaseChoice, Ways
from tests.measured_layers import GROUPS, SIZES, made_up

UNCUT = Ways.of("deepspeed", 4)


def kind_of(name: str = "experts", layers: int = 1) -> Any:
    """Equal layers, as much of them as choosing asks for."""
    plans = {"forward": PhasePlan(BlockPlan(), GROUPS, False), "backward": PhasePlan(BlockPlan(), GROUPS, True)}
    labels = [f"{name} {number}" for number in range(layers)]
    subject = SimpleNamespace(kind=name, link_name=lambda link: link)
    layer = SimpleNamespace(is_uncut=False)
    return SimpleNamespace(subject=subject, sizes=SIZES, labels=labels, layer=layer, pipeline=SimpleNamespace(**plans))


def found_of(**profiles: dict[str, LayerProfile]) -> Found:
    """Kind of layer -> its all-to-alls, the one that is run now first -> what tasks cost with it."""
    way: Any = SimpleNamespace()
    ways = {kind: {name: Way(way, "flat") for name in of} for kind, of in profiles.items()}
    flat = {(kind, name): profile for kind, of in profiles.items() for name, profile in of.items()}
    return Found(ways, flat, LinkTimes({}, {}), Slowdowns({}))


def times(profile: LayerProfile, factor: float) -> LayerProfile:
    """All of it in so many times the time."""

    def longer(each: Timing) -> Timing:
        return replace(each, times_ms=tuple(factor * time_ms for time_ms in each.times_ms))

    return replace(profile, operations={name: longer(each) for name, each in profile.operations.items()})


def choice_of(kind: Any, found: Found, ways: Ways = UNCUT, machine: Machine | None = None) -> Any:
    return choose(kind, found, machine or Machine(), ways, (None, None), "paper")


def test_another_all_to_all_is_taken_where_it_gains_more_than_the_margin_and_else_the_one_that_is_run() -> None:
    profile = made_up(1)
    for factor, taken in ((1 - MARGIN - 0.01, "2dh"), (1 - MARGIN + 0.01, "flat"), (1.3, "flat")):
        found = found_of(experts={"flat": profile, "2dh": times(profile, factor)})
        choice = choice_of(kind_of(), found)
        assert choice.alltoall == taken
        assert choice.alltoalls_ms["2dh"] == pytest.approx(factor * choice.alltoalls_ms["flat"])
        assert sum(each.time_ms for each in choice.phases) == pytest.approx(choice.alltoalls_ms[taken])
    three = {"flat": profile, "1dh": times(profile, 0.9), "2dh": times(profile, 0.8)}
    assert choice_of(kind_of(), found_of(experts=three)).alltoall == "2dh"


def test_plans_to_be_tried_are_what_is_predicted_first_and_every_small_degree_in_every_order() -> None:
    found = found_of(experts={"flat": made_up(2)})
    ways, machine = Ways.of("best", 8), Machine(contention=Contention(0.4, 0.4, 0.4))
    tried = candidates([kind_of()], found, machine, ways, (None, None), "reduce_first")
    blocks = [tuple(phase.block for phase in choice.phases) for (choice,) in tried]
    predicted = choice_of(kind_of(), found, ways, machine)
    assert blocks[0] == tuple(phase.block for phase in predicted.phases)
    assert len(set(blocks)) == len(blocks)
    cut = {(f.degree, b.degree, f.links) for f, b in blocks if f.degree == b.degree and f.links == b.links}
    wanted = {(degree, links) for degree in (2, 3, 4) for links in ("shared", "paper", "reduce_first")}
    assert wanted | {(1, "reduce_first")} <= {(degree, links) for degree, _, links in cut}
    assert TRIED_DEGREES == (1, 2, 3, 4)
    # All are timed on the same machine, whatever they were found by.
    for (choice,) in tried:
        for backward, phase in zip((False, True), choice.phases, strict=True):
            plan = PhasePlan(phase.block, GROUPS, backward)
            assert phase.time_ms == pytest.approx(machine.predict_ms(plan, SIZES, found.flat(kind_of())))
    by_hand = candidates([kind_of()], found, machine, ways, (5, None), "paper")
    assert {choice.phases[0].block.degree for (choice,) in by_hand} == {5}


def test_a_step_is_predicted_from_all_layers_of_every_kind_and_all_their_gradients() -> None:
    profile = made_up(3)
    gradients = Timing("byte", (1e3, 2e3, 4e3), (1.5, 2.5, 4.5))
    profile = replace(profile, operations=profile.operations | {GRADIENTS: gradients})
    found = found_of(first={"flat": profile}, second={"flat": times(profile, 2.0)})
    kinds = [kind_of("first", layers=3), kind_of("second")]
    ways, machine = Ways.of("fsmoe", 4), Machine()
    choices = [choice_of(kind, found, ways) for kind in kinds]
    buffers = [SimpleNamespace(kind=GRAD, numel=numel, element_bytes=4) for numel in (500, 1000)]
    reduction: Any = SimpleNamespace(reducer=SimpleNamespace(flats=buffers))
    step = predict(kinds, choices, found, machine, (5.0, 40.0), reduction)
    # A message for each buffer, of half a millisecond and one for each thousand bytes.
    assert step.gradients_ms == pytest.approx(2 * 0.5 + 2.0 + 4.0)
    rest_ms = 5.0 + 40.0 - step.gradients_ms
    chosen_ms, uncut_ms, room_ms = 0.0, 0.0, 0.0
    for kind, choice in zip(kinds, choices, strict=True):
        measured = found.flat(kind)
        uncut = [PhasePlan(BlockPlan(), GROUPS, backward) for backward in (False, True)]
        backward = PhasePlan(choice.phases[1].block, GROUPS, backward=True)
        chosen_ms += len(kind.labels) * sum(each.time_ms for each in choice.phases)
        uncut_ms += len(kind.labels) * sum(machine.predict_ms(plan, SIZES, measured) for plan in uncut)
        room_ms += len(kind.labels) * idle_ms(machine, backward, SIZES, measured)
    assert chosen_ms < uncut_ms
    exposed_ms = max(0.0, step.gradients_ms - (room_ms + 40.0 - step.gradients_ms) * 3 / 4)
    assert step.chosen_ms == pytest.approx(rest_ms + exposed_ms + chosen_ms)
    assert step.deepspeed_ms == pytest.approx(rest_ms + step.gradients_ms + uncut_ms)
    assert isinstance(found.bounds(kinds[0], machine), Bounds)
    # Where DeepSpeed reduces them, they are in what was measured of the rest.
    assert predict(kinds, choices, found, machine, (5.0, 40.0), None).gradients_ms == 0.0


def test_the_table_has_every_number_under_its_head() -> None:
    forward = PhaseChoice(BlockPlan(equal_shares(2), "paper"), 1.5, 1.25, 2.5, 3, 1.75, 2, 1.5)
    backward = PhaseChoice(BlockPlan(equal_shares(4), "reduce_first", 2), 3.5, 3.25, 4.5, 1, 4.0, 4, 3.5)
    row = Row(("L00",), made_up(1), (forward, backward), (None, None), "flat", {"flat": 5.0}, ())
    step = StepTimes(20.0, 18.0, 30.0, 9.0, 4.0, 1.0, 15.0)
    text = describe([row], Told(step, Slowdowns({}), {}, 1, "best", Cluster("here", 1, 2, {})), 1.0, "a test")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    heads = "predicted [ms] isolated [ms] runner-up its [ms] degree 1 [ms] order all-to-all"
    assert f"layers phase degree {heads}" in lines
    assert "L00 forward 2 1.500 1.250 3 1.750 2.500 paper flat" in lines
    assert "L00 backward 4 3.500 3.250 1 4.000 4.500 reduce_first, 2 late dW flat" in lines
    assert (
        "predicted: 20.000 ms (18.000 if lanes did not slow each other down), deepspeed 30.000 ms: 1.50 times" in text
    )

    # What a run records says the same.
    stage: Any = SimpleNamespace(rows=[row], step=step, took_s=1.0, num_measured=8, tried=[])
    keys = ("phase", "degree", "late_dw", "predicted_ms", "isolated_ms", "runner_up", "runner_up_ms", "uncut_ms")
    recorded = plans_as_data({}, stage)
    assert [tuple(choice[key] for key in keys) for choice in recorded["choices"]] == [
        ("forward", 2, 0, 1.5, 1.25, 3, 1.75, 2.5),
        ("backward", 4, 2, 3.5, 3.25, 1, 4.0, 4.5),
    ]
    assert (recorded["step"]["chosen_ms"], recorded["step"]["deepspeed_ms"]) == (20.0, 30.0)


def test_the_table_says_where_two_lanes_at_once_gain_less_than_a_tenth() -> None:
    step = predict_step((), None, 0.0, in_windows=True)
    cluster = Cluster("here", 1, 2, {})
    for slowed, pays in ((1.78, False), (1.85, True), (1.0, False)):
        factors = {(Lane.INTRA, Lane.COMPUTE): slowed, (Lane.COMPUTE, Lane.INTRA): slowed}
        text = describe([], Told(step, Slowdowns(factors), {}, 1, "best", cluster), 1.0, "a test")
        does = f"{Lane.COMPUTE} and {Lane.INTRA} at once do {2 / slowed:.2f} of what one does alone"
        assert (f"{does}: overlap of these will not pay" in text) == pays


def test_other_esp_sizes_are_priced_for_all_layers_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_fsmoe.autotune_choice.world_size_now", lambda: 4)
    profile = made_up(4)
    found = found_of(first={"flat": profile}, second={"flat": times(profile, 2.0)})
    kinds = [kind_of("first", layers=3), kind_of("second")]
    cluster = Cluster("here", 2, 2, {name: Operation(LinearCost(0.25, 0.0), ranks=2) for name in UNITS})
    of_hosts = topology.topology_of_hosts("aabb")

    def priced(kinds: list[Any]) -> dict[int, float]:
        return other_esp_sizes(kinds, found, Machine(), UNCUT, cluster, of_hosts)

    of_all, of_each = priced(kinds), [priced([kind_of("first")]), priced([kind_of("second")])]
    assert set(of_all) == {1, 2}
    for size, time_ms in of_all.items():
        assert time_ms == pytest.approx(3 * of_each[0][size] + of_each[1][size])
    # Gathering and reducing cost a launch each, in both phases.
    assert of_each[0][2] == pytest.approx(of_each[0][1] + 4 * 0.25)

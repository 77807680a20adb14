# SPDX-License-Identifier: Apache-2.0
"""The autotuner's screen is short, says what it gained and why, and contradicts itself nowhere.

Its table gives a reason wherever a degree that it shows beside the chosen one is faster.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ds_fsmoe.planning.decide.block_times import Order
from ds_fsmoe.planning.decide.plan_requests import PlanRequest, SearchSpace
from ds_fsmoe.planning.decide.search import Choice
from ds_fsmoe.planning.decide.step_time import StepTimes
from ds_fsmoe.planning.job.measured import FORWARD, LayerProfile, Slowdowns
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.tuning.summary import MOST_ROWS, Outcome, hints, summarize, too_short
from ds_fsmoe.tuning.table import (
    Row,
    TuningContext,
    _costs,
    _plans,
    describe_plan,
    describe_rows,
    plans_as_data,
    rows_of_plan,
)
from ds_fsmoe.tuning.trials import TrialGain, Tried
from tests.planning.measured_layers import Machine, layer_of, made_up

STEP = StepTimes(80.0, 70.0, 120.0, 9.0, 4.0, 1.0, 60.0)
"""Chosen 80 ms, DeepSpeed's schedule 120, at least 60."""
CHOICES = (
    Choice(Order(3, "paper"), 20.0, 18.0, 30.0, 2, 21.0, 3, 20.0, bottleneck="inter-node link"),
    Choice(Order(2, "reduce_first"), 40.0, 38.0, 60.0, 3, 41.0, 2, 40.0, bottleneck="computation"),
)


def row(*labels: str, alltoall: str = "node_deduplicated", **others: Any) -> Row:
    given: dict[str, Any] = {"profile": made_up(), "choices": CHOICES, "asked": (None, None)} | others
    return Row(labels or ("L00", "L01", "L02"), *given.values(), alltoall, {"flat": 1.0}, ())


def told(step: StepTimes = STEP) -> TuningContext:
    return TuningContext(step, Slowdowns({}), {}, 1)


def outcome(ratio: float, low: float, high: float, *others_ms: float, turns: int = 3) -> Outcome:
    """What stays takes 80 ms, and in the turns in which it was found others took this long."""
    tried = [Tried("kept", 80.0, turns, True), *(Tried(f"other {ms}", ms, turns, False) for ms in others_ms)]
    found = Outcome(6.0, 12, 40, 40 * 95.0, 8.0, TrialGain(ratio, low, high, turns), 80.0, 80.0 * ratio)
    found.tried = sorted(tried, key=lambda each: each.step_ms)
    return found


def head_of(text: str) -> str:
    """The lines ahead of the table of steps, as one."""
    return "; ".join(line.strip() for line in text.partition(" measured ms")[0].rstrip().splitlines())


def test_the_first_lines_say_what_was_chosen_what_it_gains_and_when_it_breaks_even() -> None:
    rows = [row("L00"), row("L02"), row("L01")]  # cut alike, and so named together, though they may differ
    assert summarize(rows, told(), outcome(1.5, 1.45, 1.6, 90.0)).splitlines()[:3] == [
        "autotune: L00..L02 in 3 and 2 chunks, node_deduplicated",
        "  1.50 times as fast as DeepSpeed's schedule (1.45 to 1.60 in 3 turns)",
        "  measuring took 6 s, tried 12 plans in 40 steps, breaks even 125 steps from now",
    ]
    # 6 s of measuring; 40 steps of 95 ms instead of 120 have paid for a second of it; and each from now on for 40 ms.
    assert outcome(1.5, 1.45, 1.6).steps_to_break_even() == (6000 - 40 * 25) / 40


NO_GAIN = [
    (outcome(1.05, 0.97, 1.2), "(0.97 to 1.20 in 3 turns), within the noise"),
    (outcome(1.3, 1.3, 1.3, turns=1), "DeepSpeed's schedule (one step of each: no interval); measuring took 6 s"),
    (
        outcome(0.8, 0.79, 0.81),
        "slower than stock, but set by name: 0.80 times as fast as DeepSpeed's schedule (0.79 to",
    ),
    (Outcome(6.0), "predicted 1.50 times as fast as DeepSpeed's schedule, not tried; measuring took 6 s"),
    (replace(outcome(0.86, 0.47, 1.08), is_stock=True), "none of 11 other plans was faster; the best of them was 0.86"),
    (replace(outcome(1.2, 1.1, 1.3), is_stock=True), "none of 11 other plans was faster"),
]


@pytest.mark.parametrize(("found", "sentence"), NO_GAIN)
def test_what_is_no_clear_gain_is_called_what_it_is_and_never_said_to_pay(found: Outcome, sentence: str) -> None:
    first = head_of(summarize([row()], told(), found))
    assert sentence in first
    assert ("noise" in first) == ("noise" in sentence)
    assert "breaks even" not in first


def test_a_step_is_predicted_with_what_is_beside_its_layers_as_the_trials_have_seen_it() -> None:
    # 9 ms and 4 of gradients before; in the trials one of three steps was disturbed.
    seen = Outcome(rest_ms=[10.0, 40.0, 11.0]).with_observed_rest(STEP)
    assert seen == replace(STEP, chosen_ms=78.0, isolated_ms=68.0, deepspeed_ms=118.0, dense_ms=7.0, bound_ms=58.0)
    assert Outcome(rest_ms=[3.0]).with_observed_rest(STEP).dense_ms == 0.0  # type: ignore[union-attr]
    # Where no trial has seen it, it stays as it was predicted.
    unknown = replace(STEP, dense_ms=None)
    for of_rest, step in (([], STEP), ([10.0], None), ([10.0], unknown)):
        assert Outcome(rest_ms=of_rest).with_observed_rest(step) == step


def test_where_deepspeeds_schedule_is_the_fastest_it_stays_and_no_gain_is_claimed() -> None:
    text = summarize([row()], told(), Outcome(6.0, 12, 40, 4000.0, kept_ms=80.0, baseline_ms=80.0, is_stock=True))
    assert text.startswith("autotune: DeepSpeed's schedule stays: none of 11 other plans was faster")
    assert "times as fast" not in text.splitlines()[0]
    # The rows of layers are a plan that does not run: in their place is one line that says why.
    assert [word for word in ("L00", "  chosen") if word in text] == []
    assert "  why: bottleneck of the layers: computation; predicted, no order is more than 2.00 times" in text
    assert replace(outcome(1.2, 1.1, 1.3), is_stock=True).steps_to_break_even() is None


@pytest.mark.parametrize("rows", [1, 12])
def test_it_fits_on_one_screen(rows: int) -> None:
    text = summarize([row(f"L{i:02d}") for i in range(rows)], told(), outcome(1.5, 1.45, 1.6, 90.0))
    assert len(text.splitlines()) <= 15 + 2 * min(rows, MOST_ROWS)
    assert all(len(line) <= 120 for line in text.splitlines())


def line_of(name: str, step: StepTimes, found: Outcome) -> str:
    seen = found.with_observed_rest(step)
    assert seen is not None
    (line,) = (each for each in summarize([row()], told(seen), found).splitlines() if each.startswith(f"  {name}"))
    return " ".join(line.split())


def test_a_bound_above_what_was_measured_or_predicted_is_not_shown_as_one() -> None:
    fast = outcome(1.5, 1.4, 1.6)
    # The rest of the model took 9 ms once, and 8 since.
    assert line_of("bound", STEP, fast) == "bound 59 no order of these tasks takes less"
    assert line_of("bound", STEP, Outcome(6.0)) == "bound 60 no order of these tasks takes less"
    for step, found in (
        (replace(STEP, bound_ms=81.5), fast),
        (replace(STEP, bound_ms=80.0), outcome(1.5, 1.4, 1.6, 78.0)),
        (replace(STEP, bound_ms=80.5, chosen_ms=80.2), Outcome(6.0)),
    ):
        assert line_of("bound", step, found).startswith("bound none: steps take less than the ")


def test_the_next_plan_is_named_with_its_distance_in_the_turns_of_both() -> None:
    assert line_of("second", STEP, outcome(1.5, 1.4, 1.6, 79.6)) == "second: other 79.6, -0.5%"
    assert line_of("second", STEP, outcome(1.5, 1.4, 1.6, 95.0, 84.0)) == "second: other 84.0, +5.0%"
    assert line_of("chosen", STEP, outcome(1.5, 1.4, 1.6)) == "chosen 80 80"
    of_stock = "DeepSpeed's schedule 120 120 one chunk, gradients after the backward"
    assert line_of("DeepSpeed", STEP, outcome(1.5, 1.4, 1.6)) == of_stock


def test_layers_are_shown_with_chunks_order_and_what_they_are_bound_by() -> None:
    lines = [" ".join(line.split()) for line in summarize([row()], told(), Outcome(1.0)).splitlines()]
    assert "L00..L02 forward 3 links side by side node_deduplicated 20 30 inter-node link" in lines
    assert "L00..L02 backward 2 reduces first node_deduplicated 40 60 computation" in lines


def test_fits_are_judged_at_the_sizes_that_are_used() -> None:
    def said(factor: float) -> str:
        operations = dict(made_up().operations)
        timing = operations[FORWARD]
        off = [each * (factor if place % 2 else 1 / factor) for place, each in enumerate(timing.times_ms)]
        operations[FORWARD] = replace(timing, times_ms=tuple(off))
        shown = row(profile=replace(made_up(), operations=operations))
        (line,) = (x for x in summarize([shown], told(), Outcome(1.0)).splitlines() if "cost model: " in x)
        return line

    assert "of its line at the sizes used" in said(1.05)
    assert f"operations fit poorly ({FORWARD} " in said(1.4)


def test_hints_name_what_limits_and_what_to_try() -> None:
    factors = {(Lane.COMPUTE, Lane.INTER): 1.9, (Lane.INTER, Lane.COMPUTE): 1.9}
    busy = replace(told(), slowed=Slowdowns(factors), sharded_ms={1: 50.0, 2: 40.0})
    said = hints([row()], replace(busy, step=replace(STEP, exposed_ms=30.0)), Outcome(1.0))
    for each, words in zip(said, ("gains little", "idle link", "= 2 would"), strict=True):
        assert words in each
    assert hints([row()], told(), Outcome(1.0)) == []
    # Where overlap has gained, nobody is told that it cannot.
    assert "gains little" not in " ".join(hints([row()], busy, outcome(1.5, 1.4, 1.6)))


def test_a_job_that_was_too_short_says_so_at_its_end() -> None:
    assert "ended after 7 steps, before measuring begins (step 10)" in too_short(Outcome(), 7, True, False)
    assert "during trials, so 6 s of measuring were lost" in too_short(Outcome(6.0), 3, False, True)
    gained = outcome(1.5, 1.4, 1.6)
    assert "124 steps after the plans were settled" in too_short(gained, 124, False, False)
    assert "breaks even after 125" in too_short(gained, 124, False, False)
    assert too_short(gained, 125, False, False) == ""
    # An engine that has never trained has nothing to say.
    assert too_short(Outcome(), 0, True, False) == ""


def test_a_prediction_that_steps_have_disproved_is_said_to_be_that() -> None:
    slow = replace(row(), choices=tuple(replace(each, time_ms=each.unchunked_ms + 5.0) for each in CHOICES))
    note = "one chunk is predicted to be faster, but was slower in trials, which decide"
    tried = outcome(1.5, 1.4, 1.6, 90.0)
    for shown, found, is_said in ((slow, tried, True), (slow, Outcome(1.0), False), (row(), tried, False)):
        assert (note in summarize([shown], told(), found)) == is_said


# ---- the table with details


def choice(degree: int, time_ms: float, runner_up_ms: float, both_ms: float, runner_up_both_ms: float) -> Choice:
    order = Order(degree, "paper")
    return Choice(order, time_ms, time_ms, 30.0, 3, runner_up_ms, degree, time_ms, both_ms, runner_up_both_ms)


def notes(*choices: Choice, asked: tuple[int | None, int | None] = (None, None)) -> list[str]:
    lines = map(str, _plans([row("L00", choices=choices, asked=asked)]))
    return [line for line in lines if line.startswith("L00 ") and ": " in line]


FINE = choice(2, 20.0, 21.0, 50.0, 51.0)


@pytest.mark.parametrize(
    ("of_backward", "sentence"),
    [
        (FINE, ""),
        (choice(2, 30.0, 29.999, 50.0, 49.999), ""),
        (
            choice(2, 30.0, 25.0, 50.0, 51.0),
            "with 3 chunks it would take less, but 51.000 ms instead of 50.000 in both phases together",
        ),
        (choice(2, 30.0, 29.4, 50.0, 49.4), "with 3 chunks it would take 2.0% less; chunks have to gain more than 3%"),
    ],
)
def test_a_runner_up_that_would_be_faster_has_its_reason(of_backward: Choice, sentence: str) -> None:
    assert notes(FINE, of_backward) == ([f"L00 backward: {sentence}"] if sentence else [])
    if sentence:
        (said,) = notes(FINE, of_backward, asked=(None, 2))
        assert "num_chunks = 2 is given by hand" in said


def test_what_the_host_needs_to_issue_is_said_where_it_was_measured() -> None:
    def said(profile: LayerProfile) -> list[str]:
        lines = map(str, _costs([row("L00", profile=profile, choices=(FINE, FINE))]))
        return [line for line in lines if "one thread issues all of it" in line]

    assert said(made_up()) == []
    operations = dict(made_up().operations)
    operations[FORWARD] = replace(operations[FORWARD], issued_ms=(0.4, 0.5, 0.6))
    (line,) = said(replace(made_up(), operations=operations))
    assert line.endswith(f"in ms: {FORWARD} 0.500")


def test_the_table_has_every_number_under_its_head() -> None:
    forward = Choice(Order(2, "paper"), 1.5, 1.25, 2.5, 3, 1.75, 2, 1.5)
    backward = Choice(Order(4, "reduce_first"), 3.5, 3.25, 4.5, 1, 4.0, 4, 3.5)
    shown = row("L00", profile=made_up(1), choices=(forward, backward), alltoall="flat")
    step = StepTimes(20.0, 18.0, 30.0, 9.0, 4.0, 1.0, 15.0)
    text = describe_rows([shown], told(step), 1.0, "a test")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    heads = "order of tasks all-to-all predicted ms 1 chunk isolated ms runner-up its ms bound by"
    assert f"layers phase chunks {heads}" in lines
    assert "L00 forward 2 links side by side flat 1.5 2.5 1.25 3 1.75" in lines
    assert "L00 backward 4 reduces first flat 3.5 4.5 3.25 1 4" in lines
    assert (
        "predicted: 20.000 ms (18.000 if lanes did not slow each other down), deepspeed 30.000 ms: 1.50 times" in text
    )

    # What a run records says the same.
    untried: Any = {"tried": [], "outcome": Outcome(), "hints": []}
    stage: Any = SimpleNamespace(result=SimpleNamespace(rows=[shown], step=step, took_s=1.0, num_measured=8, **untried))
    keys = ("phase", "degree", "predicted_ms", "isolated_ms", "runner_up", "runner_up_ms", "uncut_ms")
    recorded = plans_as_data({}, stage)
    assert [tuple(choice[key] for key in keys) for choice in recorded["choices"]] == [
        ("forward", 2, 1.5, 1.25, 3, 1.75, 2.5),
        ("backward", 4, 3.5, 3.25, 1, 4.0, 4.5),
    ]
    assert (recorded["step"]["chosen_ms"], recorded["step"]["deepspeed_ms"]) == (20.0, 30.0)


def test_the_table_says_where_two_lanes_at_once_gain_less_than_a_tenth() -> None:
    step = StepTimes(0.0, 0.0, 0.0, None, 0.0, 0.0, 0.0)
    for slowed, pays in ((1.78, False), (1.85, True), (1.0, False)):
        factors = {(Lane.INTRA, Lane.COMPUTE): slowed, (Lane.COMPUTE, Lane.INTRA): slowed}
        text = describe_rows([], replace(told(step), slowed=Slowdowns(factors)), 1.0, "a test")
        does = f"{Lane.COMPUTE} and {Lane.INTRA} at once do {2 / slowed:.2f} of what one does alone"
        assert (f"{does}: overlap of these will not pay" in text) == pays


def test_layers_that_are_equal_and_run_alike_share_a_row() -> None:
    """Gradients that travel in a layer may change how that one is run: then it has a row of its own."""
    first, second = (
        SimpleNamespace(
            labels=labels,
            layer=SimpleNamespace(fsmoe=SimpleNamespace(why_unchunked=reason)),
            empty_share=lambda _, label=labels[0]: 0.25 * (label == "L00"),
        )
        for labels, reason in ((["L00", "L01", "L02"], ""), (["L03"], "it has dropout"))
    )
    kind_of = dict.fromkeys(first.labels, first) | dict.fromkeys(second.labels, second)
    measured: Any = SimpleNamespace(kind_of=kind_of, profile_of=lambda *_: made_up(), reduces=lambda _: ())
    planner, labels = Machine().planner(), list(kind_of)
    layer = layer_of(made_up())
    two, three = (SearchSpace.fixed(Order(2), Order(degree)) for degree in (2, 3))
    orders = [each.asked for each in (two, three, two, two)]
    request = PlanRequest([{"flat": layer}] * 4, two, "off")
    plan = planner.plan(replace(request, orders=orders))
    rows = rows_of_plan(measured, labels, plan, (None, None))
    assert [row.labels for row in rows] == [("L00", "L02"), ("L01",), ("L03",)]
    assert [row.choices[1].order.degree for row in rows] == [2, 3, 2]
    assert [row.empty_share for row in rows] == [0.25, 0.25, 0.0]
    assert [row.why_unchunked for row in rows] == ["", "", "it has dropout"]
    assert describe_plan(labels, plan) == (
        "L00, L02, L03 2 and 2 chunks, links side by side; L01 2 and 3 chunks, links side by side"
    )
    alike = planner.plan(request)
    assert describe_plan(labels, alike.sending_at_once()) == "2 and 2 chunks, links side by side, gradients at once"
    assert describe_plan(labels, alike.sending_at_the_end()).endswith("links side by side, gradients at the end")

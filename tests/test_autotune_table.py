# SPDX-License-Identifier: Apache-2.0
"""The autotuner's table gives a reason wherever a degree that it shows beside the chosen one is faster."""

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
from ds_fsmoe.tuning.summary import Outcome
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
from tests.planning.measured_layers import Machine, layer_of, made_up


def choice(degree: int, time_ms: float, runner_up_ms: float, both_ms: float, runner_up_both_ms: float) -> Choice:
    order = Order(degree, "paper")
    return Choice(order, time_ms, time_ms, 30.0, 3, runner_up_ms, degree, time_ms, both_ms, runner_up_both_ms)


def notes(*choices: Choice, asked: tuple[int | None, int | None] = (None, None)) -> list[str]:
    row = Row(("L00",), made_up(), choices, asked, "flat", {"flat": 1.0}, ())
    return [line for line in map(str, _plans([row])) if line.startswith("L00 ") and ": " in line]


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
        row = Row(("L00",), profile, (FINE, FINE), (None, None), "flat", {"flat": 1.0}, ())
        return [line for line in map(str, _costs([row])) if "one thread issues all of it" in line]

    assert said(made_up()) == []
    operations = made_up().operations
    operations |= {FORWARD: replace(operations[FORWARD], issued_ms=(0.4, 0.5, 0.6))}
    (line,) = said(replace(made_up(), operations=operations))
    assert line.endswith(f"in ms: {FORWARD} 0.500")


def test_the_table_has_every_number_under_its_head() -> None:
    forward = Choice(Order(2, "paper"), 1.5, 1.25, 2.5, 3, 1.75, 2, 1.5)
    backward = Choice(Order(4, "reduce_first"), 3.5, 3.25, 4.5, 1, 4.0, 4, 3.5)
    row = Row(("L00",), made_up(1), (forward, backward), (None, None), "flat", {"flat": 5.0}, ())
    step = StepTimes(20.0, 18.0, 30.0, 9.0, 4.0, 1.0, 15.0)
    text = describe_rows([row], TuningContext(step, Slowdowns({}), {}, 1), 1.0, "a test")
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
    stage: Any = SimpleNamespace(result=SimpleNamespace(rows=[row], step=step, took_s=1.0, num_measured=8, **untried))
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
        text = describe_rows([], TuningContext(step, Slowdowns(factors), {}, 1), 1.0, "a test")
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

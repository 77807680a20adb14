# SPDX-License-Identifier: Apache-2.0
"""The autotuner's table gives a reason wherever a degree that it shows beside the chosen one is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fsmoe.autotune_table import Row, _costs, _plans
from ds_fsmoe.planning.block import BlockPlan, equal_shares
from ds_fsmoe.runtime.profiler import FORWARD, LayerProfile
from ds_fsmoe.tuned_degrees import PhaseChoice
from tests.measured_layers import made_up


def choice(degree: int, time_ms: float, runner_up_ms: float, both_ms: float, runner_up_both_ms: float) -> PhaseChoice:
    block = BlockPlan(equal_shares(degree), "paper")
    return PhaseChoice(block, time_ms, time_ms, 30.0, 3, runner_up_ms, degree, time_ms, both_ms, runner_up_both_ms)


def notes(*choices: PhaseChoice, asked: tuple[int | None, int | None] = (None, None)) -> list[str]:
    row = Row(("L00",), made_up(), choices, asked, "flat", {"flat": 1.0}, ())
    return [line for line in _plans([row], "best") if line.startswith("L00 ") and ": " in line]


FINE = choice(2, 20.0, 21.0, 50.0, 51.0)


@pytest.mark.parametrize(
    ("of_backward", "sentence"),
    [
        (FINE, None),
        (choice(2, 30.0, 29.999, 50.0, 49.999), None),
        (
            choice(2, 30.0, 25.0, 50.0, 51.0),
            "with degree 3 it would take less, but 51.000 ms instead of 50.000 in both phases together",
        ),
        (
            choice(2, 30.0, 29.4, 50.0, 49.4),
            "with degree 3 it would take 2.0% less; a cut has to gain more than 3%",
        ),
    ],
)
def test_a_runner_up_that_would_be_faster_has_its_reason(of_backward: PhaseChoice, sentence: str | None) -> None:
    assert notes(FINE, of_backward) == ([f"L00 backward: {sentence}"] if sentence else [])


def test_what_the_host_needs_to_issue_is_said_where_it_was_measured() -> None:
    def said(profile: LayerProfile) -> list[str]:
        row = Row(("L00",), profile, (FINE, FINE), (None, None), "flat", {"flat": 1.0}, ())
        return [line for line in _costs([row]) if "one thread issues all of it" in line]

    assert said(made_up()) == []
    operations = made_up().operations
    some = {FORWARD: replace(operations[FORWARD], issued_ms=(0.4, 0.5, 0.6))}
    (line,) = said(replace(made_up(), operations=operations | some))
    assert line.endswith(f"in ms: {FORWARD} 0.500")


def test_a_degree_that_was_asked_for_says_so_instead() -> None:
    (said,) = notes(FINE, choice(2, 30.0, 25.0, 50.0, 51.0), asked=(None, 2))
    assert "degree 2 is given by hand" in said

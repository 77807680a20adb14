# SPDX-License-Identifier: Apache-2.0
"""What the rounds of trials say is gained is the gain of the plan that stays, over DeepSpeed's schedule."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_fsmoe.planning.decide.model_plan import ModelPlan
from ds_fsmoe.tuning.summary import Outcome
from ds_fsmoe.tuning.trial_rounds import TrialRounds
from ds_fsmoe.tuning.tuned_model import Candidate
from tests.test_trials import Step

STOCK, NEAR = 3, 9
"""The numbers of DeepSpeed's schedule, and of the neighbour of the fastest plan."""
MS = {0: 12.0, 1: 10.0, 2: 14.0, STOCK: 15.0, NEAR: 30.0}


def plan_of(number: int) -> Any:
    return SimpleNamespace(number=number)


def candidates_of(plans: list[ModelPlan]) -> list[Candidate]:
    return [Candidate(each, SimpleNamespace(name=f"plan {each.number}")) for each in plans]


class Model:
    """Of which the search finds one neighbour."""

    def __init__(self) -> None:
        self.labels = ()
        request = SimpleNamespace(options=(0,))
        self.search = SimpleNamespace(request=request, refinements=lambda best, *_: [best, plan_of(NEAR)])


class Clock:
    """Takes what it is told for the plan that runs."""

    device = torch.device("cpu")

    def __init__(self, ms: Callable[[int], float]) -> None:
        self.ms, self.running = ms, STOCK

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def read(self) -> Step:
        return Step(self.ms(self.running))


def settled(ms: Callable[[int], float], may_keep_stock: bool = True, can_refine: bool = False) -> tuple[Outcome, int]:
    """What rounds of trials find where plans take so long, and which plan runs then."""
    outcome, clock = Outcome(), Clock(ms)
    rounds = TrialRounds(
        Model(),  # type: ignore[arg-type]
        candidates_of([plan_of(number) for number in (0, 1, 2, STOCK)]),
        3,
        clock,  # type: ignore[arg-type]
        lambda each: setattr(clock, "running", each.plan.number),
        lambda make: make(),
        candidates_of,
        None,
        outcome,
        may_keep_stock,
        can_refine,
        None,
        has_details=False,
    )
    while not rounds.step_is_over():
        pass
    return outcome, clock.running


@pytest.mark.parametrize(
    ("changed", "options", "stays"),
    [
        ({}, {}, 1),
        ({}, {"can_refine": True}, 1),
        ({NEAR: 8.0}, {"can_refine": True}, NEAR),
        ({STOCK: 9.0}, {"may_keep_stock": False}, 1),
    ],
)
def test_the_gain_is_that_of_the_plan_that_stays_over_deepspeeds_schedule(
    changed: dict[int, float], options: dict[str, bool], stays: int
) -> None:
    ms = MS | changed
    outcome, running = settled(ms.__getitem__, **options)
    assert running == stays
    assert outcome.gain is not None
    assert (outcome.gain.low, outcome.gain.ratio, outcome.gain.high) == (ms[STOCK] / ms[stays],) * 3
    assert (outcome.kept_ms, outcome.baseline_ms, outcome.is_stock) == (ms[stays], ms[STOCK], False)


def test_the_gain_is_that_of_turns_with_these_two_plans_alone() -> None:
    """The turns in which a plan was found show it faster than it is."""
    tried: list[int] = []

    def ms(plan: int) -> float:
        tried.append(plan)
        return 5.0 if plan == 1 and tried.count(1) <= 3 else MS[plan]

    outcome, running = settled(ms)
    assert running == 1
    assert outcome.gain is not None
    assert (outcome.gain.ratio, outcome.gain.num_turns) == (MS[STOCK] / MS[1], 5)


def test_where_deepspeeds_schedule_stays_the_gain_is_that_of_the_best_other_plan() -> None:
    outcome, running = settled((MS | {STOCK: 9.0}).__getitem__)
    assert running == STOCK
    assert (outcome.is_stock, outcome.kept_ms, outcome.baseline_ms) == (True, 9.0, 9.0)
    assert outcome.gain is not None
    assert outcome.gain.ratio == 9.0 / MS[1]

# SPDX-License-Identifier: Apache-2.0
"""Runs that took turns: the interval is over turns, holds the truth as often as it says; a drift is not in it."""

from __future__ import annotations

import math
import random

from ds_fsmoe.offline.report.comparison import Turn, interval_of, middle, order_of


def turns_of(ratio: float, noise: float, seed: int, num: int = 10) -> list[Turn]:
    """Both runs of a turn share what the machine does then, which is a lot; each has noise of its own."""
    draw = random.Random(seed)
    found = []
    for number in range(num):
        machine = math.exp(draw.gauss(0, 0.5))
        stock_ms, ours_ms = (machine * each * math.exp(draw.gauss(0, noise)) for each in (10 * ratio, 10))
        found.append(Turn(number, 20, stock_ms, ours_ms))
    return found


def test_the_interval_over_turns_holds_the_truth_in_about_95_of_100() -> None:
    held = 0
    for seed in range(400):
        interval = interval_of(turns_of(1.2, 0.05, seed))
        held += interval.low <= 1.2 <= interval.high
    assert 366 <= held <= 394  # 380 and three times what chance makes of it


def test_what_a_machine_does_to_both_runs_of_a_turn_does_not_widen_it() -> None:
    found = turns_of(1.3, 0.0, 1)
    interval = interval_of(found)
    assert math.isclose(middle(found), 1.3)
    assert math.isclose(interval.low, 1.3)
    assert math.isclose(interval.high, 1.3)


def test_of_fewer_than_ten_turns_there_is_none() -> None:
    assert interval_of(turns_of(2.0, 0.01, 1, num=9)) is None
    assert interval_of([]) is None


def test_neither_goes_first_more_often_and_a_slower_machine_favours_neither() -> None:
    order = [each for turn in range(4) for each in order_of(turn)]
    assert order == [False, True, True, False, False, True, True, False]
    # A machine that gets slower by the same factor from run to run.
    times = {True: [], False: []}
    for place, is_ours in enumerate([each for turn in range(10) for each in order_of(turn)]):
        times[is_ours].append(10 * 1.02**place)
    turns = [Turn(i, 1, *each) for i, each in enumerate(zip(times[False], times[True], strict=True))]
    assert math.isclose(middle(turns), 1.0)
    interval = interval_of(turns)
    assert interval.low < 1 < interval.high

# SPDX-License-Identifier: Apache-2.0
"""What an operation is said to take is the median of those of its repetitions that count, by a clock that tests set."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ds_fsmoe.measuring.stopwatch import BUDGET_S, FEWEST, MOST, Stopwatch
from tests.fake_clock import SetClock

# What an operation of each size takes.
TRUE_MS = {1: 2.0, 10: 11.0}


class Played:
    """A stopwatch whose clock moves with what it times.

    Args:
        times_ms: (size, repetition, 0 for the one that does not count) -> what it takes.
        ready_ms: making ready for it.
    """

    def __init__(self, times_ms: Callable[[int, int], float], ready_ms: float = 0.0):
        self.clock = SetClock()
        self.order: list[int] = []
        self._times_ms, self._ready_ms = times_ms, ready_ms
        self.watch = Stopwatch(torch.device("cpu"), host=self.clock)

    def prepare(self, size: int) -> Callable[[], None]:
        self._pass(self._ready_ms)

        def work() -> None:
            self._pass(self._times_ms(size, self.order.count(size)))
            self.order.append(size)

        return work

    def _pass(self, time_ms: float) -> None:
        self.clock.now_ms += time_ms

    def found_ms(self) -> list[float]:
        return self.watch.times_ms("a test", list(TRUE_MS), self.prepare)


def test_the_first_repetition_does_not_count_and_one_that_was_disturbed_changes_nothing() -> None:
    for disturbed in range(1, 4):
        factors = {0: 50.0, disturbed: 20.0}
        played = Played(lambda size, repeat, of=factors: TRUE_MS[size] * of.get(repeat, 1.0))
        assert played.found_ms() == pytest.approx(list(TRUE_MS.values()))


def test_it_is_the_median_neither_the_least_nor_the_mean() -> None:
    # Making ready takes so long that three are all there is time for; the first of all would move the median down.
    factors = {0: 0.01, 1: 0.1, 2: 1.0, 3: 1.5}
    played = Played(lambda size, repeat: TRUE_MS[size] * factors[repeat], ready_ms=BUDGET_S * 1e3)
    assert played.found_ms() == pytest.approx(list(TRUE_MS.values()))


def test_sizes_take_turns_and_what_makes_ready_is_not_timed() -> None:
    played = Played(lambda size, repeat: TRUE_MS[size], ready_ms=7.0)
    assert played.found_ms() == pytest.approx(list(TRUE_MS.values()))
    assert played.order == list(TRUE_MS) * (1 + MOST)
    assert played.watch.num_timed == 1


@pytest.mark.parametrize(
    ("round_ms", "repeats"),
    [(1.0, MOST), (BUDGET_S * 1e3 / 6.5, 6), (BUDGET_S * 1e3, FEWEST), (100 * BUDGET_S * 1e3, FEWEST)],
)
def test_there_are_as_many_repetitions_as_there_is_time_for_making_ready_included(
    round_ms: float, repeats: int
) -> None:
    played = Played(lambda size, repeat: round_ms / 4, ready_ms=round_ms / 4)
    played.found_ms()
    assert played.order.count(1) == 1 + repeats

# SPDX-License-Identifier: Apache-2.0
"""Linear costs, and how they are fitted to measurements."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fsmoe.planning.cost import Fit, LinearCost, SwitchedCost, fit, fit_switched, least_ms


def test_a_cost_is_a_start_up_per_launch_and_a_slope_per_unit() -> None:
    cost = LinearCost(0.5, 0.25)
    assert (cost.ms(8), cost.ms(8, launches=3), cost.ms(0)) == (2.5, 3.5, 0.5)
    for coefficients in ((-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0), (0.0, float("inf"))):
        with pytest.raises(ValueError, match="must be a finite number of at least 0"):
            LinearCost(*coefficients)


def test_a_line_is_fitted_and_a_bad_fit_is_not_called_good() -> None:
    sizes = [2.0**i for i in range(10, 25, 2)]
    exact = fit(sizes, [0.25 + 3e-7 * n for n in sizes])
    assert (exact.cost.alpha_ms, exact.cost.beta_ms, exact.r2) == pytest.approx((0.25, 3e-7, 1.0))
    assert exact.worst_share < 1e-9
    assert exact.is_good
    hardly_growing = fit(sizes, [0.25 + 0.001 * (i % 2) for i in range(len(sizes))])
    assert hardly_growing.r2 < 0.5
    assert hardly_growing.is_good
    assert not fit([1, 2, 3, 4], [5, 1, 4, 2]).is_good
    # What a fit is typically off by is the root of the mean square.
    found = Fit(LinearCost(0.0, 2.0), 0.9, (5.0, 10.0, 20.0, 40.0), (3.0, -4.0, 0.0, 0.0))
    assert (found.typical_share, found.worst_share) == (pytest.approx(math.sqrt((0.3**2 + 0.2**2) / 4)), 0.3)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0.1, 1e3)), min_size=3, max_size=12))
def test_no_line_with_neither_coefficient_below_zero_fits_better(points: list[tuple[float, float]]) -> None:
    sizes, times_ms = zip(*points, strict=True)
    if max(sizes) - min(sizes) < 1e-3 * max(sizes) or max(sizes) == 0:
        return
    found, least_ms = fit(sizes, times_ms).cost, 1e-6 * max(times_ms)
    assert min(found.alpha_ms, found.beta_ms) >= 0

    def loss(alpha: float, beta: float) -> float:
        logs = [math.log(max(alpha + beta * x, least_ms) / max(y, least_ms)) for x, y in points]
        return sum(math.sqrt(1 + (each / 0.1) ** 2) - 1 for each in logs)

    ours = loss(found.alpha_ms, found.beta_ms)
    for factor in (0.0, 0.98, 0.99, 1.01, 1.02):
        for other in (0.99, 1.0, 1.01):
            assert ours <= loss(found.alpha_ms * factor, found.beta_ms * other) + 1e-4 * (1 + ours)
            assert ours <= loss(found.alpha_ms * other, found.beta_ms * factor) + 1e-4 * (1 + ours)


def test_a_measurement_that_was_disturbed_hardly_moves_the_line() -> None:
    sizes = [2.0**power for power in range(4, 11)]
    for disturbed in range(len(sizes)):
        times_ms = [(5 if place == disturbed else 1) * (0.5 + 0.01 * size) for place, size in enumerate(sizes)]
        found = fit(sizes, times_ms).cost
        assert [found.ms(size) for size in sizes] == pytest.approx([0.5 + 0.01 * size for size in sizes], rel=0.2)
    # The largest is off by a tenth, which is fifty times the smallest, and counts no more than that one.
    sizes = [1.0, 4.0, 16.0, 64.0, 256.0]
    found = fit(sizes, [0.2 + 0.4 * size for size in sizes[:-1]] + [1.1 * (0.2 + 0.4 * 256)])
    assert found.cost.ms(1.0) == pytest.approx(0.6, rel=0.03)


WRONG_SIZES = [([1, 1, 1], [1, 2, 3]), ([0, 0, 0], [1, 2, 3]), ([1, 2, -3], [1, 2, 3])]
WRONG = [*WRONG_SIZES, ([], []), ([1, 2], [1, 2]), ([1, 2, 3], [1, 2]), ([1, 2, 3], [1, 2, float("nan")])]


@pytest.mark.parametrize(("sizes", "times_ms"), WRONG)
def test_impossible_measurements_are_refused(sizes: list, times_ms: list) -> None:
    with pytest.raises(ValueError, match="fit: "):
        fit(sizes, times_ms)


def test_a_protocol_switch_is_fitted_with_two_lines() -> None:
    sizes = [1e3 * 2**power for power in range(9)]
    below, above = LinearCost(0.1, 4e-4), LinearCost(9.0, 2e-5)
    times_ms = [(below if size < 10e3 else above).ms(size) for size in sizes]
    found = fit_switched(sizes, times_ms)
    assert isinstance(found.cost, SwitchedCost)
    assert found.cost.switch_size == 16e3
    assert found.worst_share < 1e-9
    for size, time_ms in zip(sizes, times_ms, strict=True):
        assert found.cost.ms(size) == pytest.approx(time_ms)
        assert found.cost.plus(0.5).ms(size) == pytest.approx(time_ms + 0.5)
    assert not fit(sizes, times_ms).is_good


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_protocol_switch(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [1e3 * 2**power for power in range(8)]
    times_ms = [LinearCost(0.5, 1e-4).ms(size) * chance.uniform(0.96, 1.04) for size in sizes]
    assert isinstance(fit_switched(sizes, times_ms).cost, LinearCost)
    # Nor is what leaves half of the deviation.
    found = fit_switched(sizes, [(1.0 + size) * (1.5 if place % 2 else 1 / 1.5) for place, size in enumerate(sizes)])
    assert isinstance(found.cost, LinearCost)
    assert not found.is_good


@pytest.mark.parametrize("seed", range(8))
def test_no_way_to_cut_takes_less_than_the_least(seed: int) -> None:
    chance = random.Random(seed)
    below, above = (LinearCost(chance.uniform(0, 3), chance.uniform(0.01, 0.1)) for _ in range(2))
    cost = SwitchedCost(below, above, 100.0)
    for size in (0.0, 50.0, 99.9, 100.0, 250.0, 1000.0):
        least = least_ms(cost, size)
        assert least <= cost.ms(size)
        for pieces in range(1, 17):
            weights = [chance.random() for _ in range(pieces)]
            taken = sum(cost.ms(size * each / sum(weights)) for each in weights)
            assert taken >= least - 1e-9


def test_the_least_is_reached_by_pieces_that_just_stay_below_the_switch() -> None:
    cost = SwitchedCost(LinearCost(0.1, 0.01), LinearCost(5.0, 0.05), 100.0)
    assert least_ms(cost, 300.0) == pytest.approx(3 * 0.1 + 3.0)
    assert sum(cost.ms(99.999) for _ in range(3)) == pytest.approx(least_ms(cost, 300.0), rel=1e-3)
    assert least_ms(LinearCost(0.1, 0.01), 300.0) == LinearCost(0.1, 0.01).ms(300.0)

# SPDX-License-Identifier: Apache-2.0
"""The statistics of the benchmarks against truths that are known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness import AA, CaseResult, Goal
from benchmarks.intervals import percentiles_ms, speedup
from benchmarks.outcome import CpuShares, evaluate, rows, table
from benchmarks.result_files import made_with
from tests.harness_cases import GRID

IDLE = CpuShares(0.5, 0.5, 0.0)


def noise(rng: np.random.Generator, blocks: int, steps: int, rho: float) -> np.ndarray:
    """[blocks, steps], standard normal, each with correlation rho to the one before."""
    fresh = rng.standard_normal(blocks * steps)
    values = fresh.copy()
    for i in range(1, values.size):
        values[i] = rho * values[i - 1] + (1 - rho**2) ** 0.5 * fresh[i]
    return values.reshape(blocks, steps)


def test_percentiles_are_those_computed_by_hand() -> None:
    assert percentiles_ms(np.array([[5.0, 1.0, 3.0], [2.0, 4.0, 6.0]])) == pytest.approx((2.0, 3.5, 5.0))


def test_the_ratio_is_the_median_over_pairs_of_the_same_round() -> None:
    baseline = np.array([[10.0, 20.0], [100.0, 9.0], [8.0, 6.0]])
    variant = np.array([[5.0, 10.0], [50.0, 3.0], [8.0, 3.0]])
    # Pairs: 2, 2, 2, 3, 1, 2. The ratio of the medians would be 9.5 / 6.5.
    assert speedup(baseline, variant).middle == 2.0


def test_an_interval_over_equal_pairs_is_a_point() -> None:
    baseline = np.linspace(1.0, 7.0, 12).reshape(6, 2)
    found = speedup(baseline, baseline / 1.5)
    assert (found.middle, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_an_interval_over_two_blocks_runs_from_the_one_to_the_other() -> None:
    found = speedup(np.array([[1.0, 1.0], [3.0, 3.0]]), np.ones((2, 2)))
    assert (found.low, found.middle, found.high) == (1.0, 2.0, 3.0)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    rng = np.random.default_rng(1)
    baseline, variant = np.exp(0.1 * rng.standard_normal((2, 60, 4)))
    assert speedup(baseline, variant) == speedup(baseline, variant)
    # Few draws: with many, both find the same two of so few ratios.
    assert speedup(baseline, variant, draws=20, seed=1) != speedup(baseline, variant, draws=20)


def coverage(resample_steps: bool) -> float:
    """How often the interval holds a true ratio of 1.3 when neighbouring steps are correlated by 0.6."""
    held, runs = 0, 300
    rng = np.random.default_rng(0)
    for _ in range(runs):
        # Slow drifts that hit both variants cancel; this is what is left in the ratio.
        variant = np.exp(0.3 * noise(rng, 20, 8, rho=0.95))
        ratios = 1.3 * np.exp(0.1 * noise(rng, 20, 8, rho=0.6))
        if resample_steps:
            variant, ratios = variant.reshape(-1, 1), ratios.reshape(-1, 1)
        held += speedup(variant * ratios, variant, draws=300).contains(1.3)
    return held / runs


def test_the_interval_holds_the_truth_as_often_as_it_says_and_would_not_if_steps_were_drawn_singly() -> None:
    assert 0.91 <= coverage(resample_steps=False) <= 0.98
    assert coverage(resample_steps=True) < 0.87


@pytest.mark.parametrize(
    ("baseline", "variant", "said"),
    [
        (np.ones((1, 4)), np.ones((1, 4)), "1 block"),
        (np.ones((2, 4)), np.ones((2, 3)), "must be"),
        (np.ones(4), np.ones(4), "must be"),
        (np.ones((2, 1)), np.array([[1.0], [0.0]]), "not above 0"),
        (np.ones((2, 1)), np.array([[1.0], [np.nan]]), "not above 0"),
    ],
)
def test_times_that_mean_nothing_are_refused(baseline: np.ndarray, variant: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        speedup(baseline, variant)


def synthetic(true_ratios: dict[str, float], goals: list[Goal], spread: float = 0.05, seed: int = 0) -> CaseResult:
    """A case of 20 blocks with noise, its shape that of a run; the baseline and A/A first."""
    rng = np.random.default_rng(seed)
    ratios = {"stock": 1.0, AA: 1.0} | true_ratios
    times_ms = np.stack([10 / r * np.exp(spread * noise(rng, 20, 4, rho=0.5)) for r in ratios.values()])
    return evaluate(GRID.cases[0], list(ratios), times_ms, [IDLE] * len(ratios), goals)


def test_a_goal_is_passed_by_the_lower_end_of_the_interval_only() -> None:
    goals = [Goal("fast", 1.2), Goal("same", 1.2)]
    stock, aa, fast, same = synthetic({"fast": 1.5, "same": 1.0}, goals).variants
    assert (stock.passed, aa.passed, fast.passed, same.passed) == (None, None, True, False)
    # Its median is above 1.2 and its lower end is not.
    (*_, near) = synthetic({"near": 1.25}, [Goal("near", 1.2)], spread=0.2).variants
    assert near.speedup.low < 1.2 < near.speedup.middle
    assert near.passed is False


def test_a_goal_of_one_case_asks_nothing_of_others() -> None:
    assert synthetic({"fast": 1.5}, [Goal("fast", 1.2, case="another")]).variants[2].passed is None
    assert synthetic({"fast": 1.5}, [Goal("fast", 1.2, case="only")]).variants[2].passed is True


def test_a_case_whose_aa_differs_from_1_is_marked_noisy() -> None:
    quiet = synthetic({"ours": 1.5}, [])
    assert not quiet.noisy
    times_ms = np.full((3, 6, 2), 10.0)
    times_ms[1] = 9.0
    noisy = evaluate(GRID.cases[0], ["stock", AA, "ours"], times_ms, [IDLE] * 3)
    assert noisy.noisy
    made = made_with(("torch", "deepspeed"))
    assert {row["noisy"] for row in rows(GRID, noisy, made, 1)} == {True}
    assert "noisy" in table(GRID, [noisy], made, 1)
    assert "noisy" not in table(GRID, [quiet], made, 1)


def test_a_case_that_leaves_no_core_idle_is_marked_cpu_bound() -> None:
    times_ms = np.ones((4, 6, 2))
    shares = [CpuShares(0.95, 0.0, 0.0), CpuShares(0.9, 0.9, 0.1), CpuShares(0.5, 0.8, 0.3), CpuShares(0.5, 0.95, 0.45)]
    result = evaluate(GRID.cases[0], ["stock", AA, "x", "y"], times_ms, shares)
    assert [row.cpu_bound for row in result.variants] == [True, False, False, True]

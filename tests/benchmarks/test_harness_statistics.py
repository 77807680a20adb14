# SPDX-License-Identifier: Apache-2.0
"""The statistics of the benchmarks against truths that are known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness import intervals
from benchmarks.harness.harness import AA, CaseResult, Goal
from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE, Interval, percentiles_ms, speedup
from benchmarks.harness.outcome import CpuShares, evaluate, rows, table
from benchmarks.harness.result_files import made_with
from tests.benchmarks.harness_cases import GRID

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
    baseline = np.linspace(1.0, 7.0, 24).reshape(12, 2)
    found = speedup(baseline, baseline / 1.5)
    assert (found.middle, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


@pytest.mark.parametrize("blocks", range(2, MIN_BLOCKS_TO_JUDGE))
def test_of_fewer_than_ten_blocks_there_is_a_ratio_and_no_interval(blocks: int) -> None:
    found = speedup(np.arange(1.0, 1.0 + blocks).reshape(blocks, 1), np.ones((blocks, 1)))
    assert found == Interval((blocks + 1) / 2, None, None)
    assert found.contains(found.middle) is None
    assert MIN_BLOCKS_TO_JUDGE == 10


def test_of_ten_blocks_there_is_an_interval() -> None:
    found = speedup(np.arange(1.0, 11.0).reshape(10, 1), np.ones((10, 1)))
    assert found.low is not None
    assert found.high is not None
    assert 1.0 <= found.low < found.middle == 5.5 < found.high <= 10.0
    assert found.contains(5.5)
    assert not found.contains(0.9)


def test_neighbouring_blocks_are_drawn_two_at_a_time() -> None:
    # In turns 1 and 2: of every two neighbours there is one of each, so all that is drawn has the same median.
    in_turns = np.tile([[1.0], [2.0]], (10, 1))
    assert speedup(in_turns, np.ones((20, 1))) == Interval(1.5, 1.5, 1.5)
    # Three at a time would not, and more than two would here.
    in_pairs = np.tile([[1.0], [1.0], [2.0], [2.0]], (5, 1))
    assert speedup(in_pairs, np.ones((20, 1))) == Interval(1.5, 1.0, 2.0)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    rng = np.random.default_rng(1)
    baseline, variant = np.exp(0.1 * rng.standard_normal((2, 60, 4)))
    assert speedup(baseline, variant) == speedup(baseline, variant)
    # Few draws: with many, both find the same two of so few ratios.
    assert speedup(baseline, variant, draws=20, seed=1) != speedup(baseline, variant, draws=20)


def coverage(resample_steps: bool = False, steps: int = 8, rho: float = 0.6) -> float:
    """How often the interval holds a true ratio of 1.3 when neighbouring steps are correlated by ``rho``."""
    held, runs = 0, 300
    rng = np.random.default_rng(0)
    for _ in range(runs):
        # Slow drifts that hit both variants cancel; this is what is left in the ratio.
        variant = np.exp(0.3 * noise(rng, 20, steps, rho=0.95))
        ratios = 1.3 * np.exp(0.1 * noise(rng, 20, steps, rho=rho))
        if resample_steps:
            variant, ratios = variant.reshape(-1, 1), ratios.reshape(-1, 1)
        held += speedup(variant * ratios, variant, draws=300).contains(1.3)
    return held / runs


def test_the_interval_holds_the_truth_as_often_as_it_says_and_would_not_if_steps_were_drawn_singly() -> None:
    assert 0.91 <= coverage() <= 0.98
    assert coverage(resample_steps=True) < 0.87


def test_with_few_steps_in_a_block_the_interval_would_be_too_narrow_if_blocks_were_drawn_singly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_at_a_time = coverage(steps=4, rho=0.8)
    monkeypatch.setattr(intervals, "RUN_OF_BLOCKS", 1)
    assert coverage(steps=4, rho=0.8) < two_at_a_time - 0.05
    assert two_at_a_time > 0.82


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
    assert quiet.noisy is False
    times_ms = np.full((3, 12, 2), 10.0)
    times_ms[1] = 9.0
    noisy = evaluate(GRID.cases[0], ["stock", AA, "ours"], times_ms, [IDLE] * 3)
    assert noisy.noisy is True
    made = made_with(("torch", "deepspeed"))
    assert {row["noisy"] for row in rows(GRID, noisy, made, 1)} == {True}
    assert "noisy" in table(GRID, [noisy], made, 1)
    assert "noisy" not in table(GRID, [quiet], made, 1)


def test_of_three_blocks_nothing_is_judged_and_no_interval_is_shown_or_written() -> None:
    times_ms = np.array([[10.0, 12.0, 11.0], [20.0, 9.0, 8.0], [4.0, 5.0, 6.0]]).reshape(3, 3, 1)
    found = evaluate(GRID.cases[0], ["stock", AA, "ours"], times_ms, [IDLE] * 3, [Goal("ours", 1.2)])
    assert found.noisy is None
    assert [row.passed for row in found.variants] == [None, None, None]
    made = made_with(("torch", "deepspeed"))
    text = table(GRID, [found], made, 1)
    assert "3 steps of each in 3 blocks" in text
    assert "times faster than stock (no interval: 3 blocks)" in text
    assert "95%" not in text
    assert " to " not in text
    assert "noisy" not in text
    assert "goal 1.2: not judged" in text
    (line,) = [line for line in text.splitlines() if line.strip().startswith("ours")]
    assert line.split()[4] == "2.400"
    columns = ("ratio", "ratio_low", "ratio_high", "noisy", "passed")
    assert [[row[column] for column in columns] for row in rows(GRID, found, made, 1)] == [
        ["1.0000", "1.0000", "1.0000", "", ""],
        ["1.3333", "", "", "", ""],
        ["2.4000", "", "", "", ""],
    ]


def test_a_table_has_intervals_from_ten_blocks_on() -> None:
    found = synthetic({"ours": 1.5}, [])
    made = made_with(("torch", "deepspeed"))
    text = table(GRID, [found], made, 1)
    assert "80 steps of each in 20 blocks" in text
    assert "times faster than stock (95%)" in text
    ours = found.variants[2].speedup
    assert f"{ours.middle:.3f} ({ours.low:.3f} to {ours.high:.3f})" in text
    assert "no interval" not in text
    (*_, written) = rows(GRID, found, made, 1)
    assert (written["ratio_low"], written["ratio_high"]) == (f"{ours.low:.4f}", f"{ours.high:.4f}")


def test_a_case_that_leaves_no_core_idle_is_marked_cpu_bound() -> None:
    times_ms = np.ones((4, 6, 2))
    shares = [CpuShares(0.95, 0.0, 0.0), CpuShares(0.9, 0.9, 0.1), CpuShares(0.5, 0.8, 0.3), CpuShares(0.5, 0.95, 0.45)]
    result = evaluate(GRID.cases[0], ["stock", AA, "x", "y"], times_ms, shares)
    assert [row.cpu_bound for row in result.variants] == [True, False, False, True]

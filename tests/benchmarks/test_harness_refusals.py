# SPDX-License-Identifier: Apache-2.0
"""What the harness refuses, and what it says of a run that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness.harness import AA, Effort, Goal, RunError, Variant, run_grid
from tests.benchmarks.harness_cases import GRID, QUICK, Settings, sleeper
from tests.fake_clock import FakeClock


@pytest.mark.parametrize(
    ("names", "baseline", "goals", "said"),
    [
        ([], "stock", [], "no baseline"),
        (["ours"], "stock", [], r"no baseline: there is no variant 'stock' among \['ours'\]"),
        (["stock", "ours", "ours"], "stock", [], "a name of its own"),
        (["stock", "stock"], "stock", [], "a name of its own"),
        (["stock", AA], "stock", [], "call the variant something else"),
        (["stock", "ours"], "stock", [Goal("other", 1.2)], r"a goal for 'other'.*\['ours'\]"),
        (["stock", "ours"], "stock", [Goal("stock", 1.2)], "a goal for 'stock'"),
        (["stock", "ours"], "stock", [Goal(AA, 1.2)], "a goal for 'A/A'"),
        (["stock", "ours"], "stock", [Goal("ours", 1.2, case="none")], r"case 'none'.*\['only'\]"),
        (["stock", "ours"], "stock", [Goal("ours", 1.2)], "2 blocks: to judge by an interval takes 10"),
    ],
)
def test_a_run_that_could_say_nothing_is_refused(
    tmp_path: Path, names: list[str], baseline: str, goals: list[Goal], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run_grid(GRID, [sleeper(FakeClock(), name, 1) for name in names], baseline, QUICK, goals, tmp_path)


@pytest.mark.parametrize("further", [{"stock": ["ours"]}, {"ours": []}, {"ours": ["none"]}, {"ours": ["stock"]}])
def test_a_further_baseline_is_another_variant_with_others_to_compare(tmp_path: Path, further: dict) -> None:
    variants = [sleeper(FakeClock(), name, 1) for name in ("stock", "ours", "other")]
    with pytest.raises(ValueError, match="further baseline"):
        run_grid(GRID, variants, "stock", QUICK, results=tmp_path, further=further)


def test_what_is_judged_takes_ten_blocks() -> None:
    with pytest.raises(ValueError, match="9 blocks: to judge by an interval takes 10"):
        Effort(blocks=9, judged=True)
    with pytest.raises(ValueError, match="11 blocks: to judge takes an even number"):
        Effort(blocks=11, judged=True)
    assert Effort(blocks=10, judged=True).blocks == 10


@pytest.mark.parametrize(("arguments", "said"), [({"blocks": 1}, "1 block"), ({"steps": 0}, "at least 1 step")])
def test_an_effort_needs_two_blocks_with_a_step_in_each(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Effort(**arguments)


def fails_at(call: int) -> Callable[[Settings], Callable[[], None]]:
    def make(settings: Settings) -> Callable[[], None]:
        count = iter(range(100))

        def step() -> None:
            if next(count) == call:
                raise KeyError("lost")

        return step

    return make


def test_a_failure_says_case_variant_and_step(tmp_path: Path) -> None:
    effort = Effort(blocks=2, steps=2, warmup=1)
    stock = sleeper(FakeClock(), "stock", 1)
    with pytest.raises(RunError, match=r"case 'only', variant 'ours', step 1 of block 1, rank 0: KeyError: 'lost'"):
        run_grid(GRID, [stock, Variant("ours", fails_at(4))], "stock", effort, results=tmp_path)
    with pytest.raises(RunError, match=r"variant 'ours', warm-up step 0"):
        run_grid(GRID, [stock, Variant("ours", fails_at(0))], "stock", effort, results=tmp_path)
    with pytest.raises(RunError, match=r"variant 'ours', making it, rank 0: ZeroDivisionError"):
        run_grid(GRID, [stock, Variant("ours", lambda settings: 1 // 0)], "stock", effort, results=tmp_path)

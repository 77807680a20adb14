# SPDX-License-Identifier: Apache-2.0
"""What is said of two runs follows from their records: medians of settled steps, ratios the right way round, losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ds_fsmoe.files import runs
from ds_fsmoe.files.runs import Run, read_run
from ds_fsmoe.offline.commands.compare import print_comparison
from ds_fsmoe.offline.commands.training_command import OURS, STOCK
from ds_fsmoe.offline.report.comparison import WARM_UP, losses_of, settled_after, times_of

QUIET = {"step_ms": 20.0, "forward_ms": 5.0, "backward_ms": 9.0, "optimizer_ms": 1.0}


def record(folder: Path, schedule: str, steps: list[dict[str, Any]], first: int = 1, settled_at: int = 0) -> Run:
    """A run as one is recorded; its steps are numbered from ``first`` on."""
    folder.mkdir(parents=True)
    about = {"format": 1, "schedule": schedule, "world_size": 2, "device": "a CPU", "host": "here", "layers": {}}
    runs.write_json(folder / runs.RUN, about | {"ended": "now"})
    runs.append_lines(folder / runs.STEPS, [{"step": n} | row for n, row in enumerate(steps, first)])
    runs.write_json(folder / runs.PLANS, {"layers": [], "settled_at": settled_at})
    return read_run(folder)


def disturbed(factor: float, times: dict[str, float]) -> dict[str, float]:
    return {name: factor * time_ms for name, time_ms in times.items()}


def test_times_are_medians_of_the_steps_after_which_nothing_is_measured_or_tried(tmp_path: Path) -> None:
    # Slow while it warms up and while it tries; of those that count some were disturbed, one was fast by chance.
    steps = [disturbed(50.0, QUIET)] * 12
    steps += [QUIET, disturbed(9.0, QUIET), QUIET, disturbed(0.1, QUIET), QUIET, disturbed(7.0, QUIET), QUIET]
    run = record(tmp_path / "run", "best", steps, settled_at=12)
    assert settled_after(run) == 12
    found = times_of(run)
    assert found is not None
    assert (found.num_steps, found.step_ms) == (7, 20.0)
    assert sorted(found.parts_ms.values()) == [1.0, 5.0, 5.0, 9.0]
    assert found.parts_ms["rest"] == 20.0 - 5.0 - 9.0 - 1.0
    # The step named counts no more.
    assert times_of(run, after=18).num_steps == 1
    assert times_of(run, after=19) is None


def test_the_first_steps_never_count_whatever_they_are_numbered(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "best", [disturbed(50.0, QUIET)] * WARM_UP + [QUIET] * 3, first=101)
    assert settled_after(run) == 100 + WARM_UP
    assert (times_of(run).num_steps, times_of(run).step_ms) == (3, 20.0)
    assert WARM_UP >= 2


def test_losses_are_apart_by_the_largest_relative_difference_of_the_steps_that_both_have(tmp_path: Path) -> None:
    ours = [2.0, 3.99, 8.4, 1.0]
    one = record(tmp_path / "one", "stock", [{"loss": loss} for loss in (2.0, 4.0, 8.0)])
    other = record(tmp_path / "other", "best", [{"loss": loss} for loss in ours])
    found = losses_of(one, other)
    assert found is not None
    assert (found.num_steps, found.at_step, found.last) == (3, 3, (8.0, 8.4))
    assert found.largest_difference == pytest.approx(0.4 / 8.0)
    assert found.not_finite_from == (None, None)
    broken = record(tmp_path / "broken", "best", [{"loss": loss} for loss in (2.0, math.nan, math.inf)])
    found = losses_of(one, broken)
    assert found is not None
    assert (found.largest_difference, found.at_step, found.not_finite_from) == (math.inf, 2, (None, 2))
    assert losses_of(one, record(tmp_path / "none", "best", [QUIET])) is None


def test_compare_says_how_many_times_as_fast_ours_is_and_not_the_other_way_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"step_ms": 30.0, "forward_ms": 10.0, "backward_ms": 4.5, "optimizer_ms": 1.0}
    # Ours has settled after step 10: the same steps count of both, though stock's before it were faster.
    record(tmp_path / STOCK, runs.STOCK, [disturbed(0.1, slow)] * 10 + [slow] * 8)
    record(tmp_path / OURS, "best", [disturbed(50.0, QUIET)] * 10 + [QUIET] * 8, settled_at=10)
    assert print_comparison(tmp_path) == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    (head,) = [line for line in lines if line[:3] == ["medians", "of", "8"]]
    (ratios,) = [line for line in lines if line[:1] == ["ratio"]]
    (stock,) = [line for line in lines if line[:2] == ["stock", "DeepSpeed"]]
    assert dict(zip(head[-len(ratios) + 1 :], ratios[1:], strict=True))["step"] == "1.50x"
    assert ratios[1:4] == ["1.50x", "2.00x", "0.50x"]
    assert stock[2:5] == ["30.00", "10.00", "4.50"]
    assert "1.50 times as fast" in said


def test_two_long_runs_have_an_interval_by_blocks_of_steps_and_inside_the_noise_there_is_no_winner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = [{"step_ms": 20.0 * (0.9 + 0.2 * (step % 3))} for step in range(60)]
    shifted = [{"step_ms": 20.0 * (0.9 + 0.2 * ((step + 1) % 3))} for step in range(60)]
    record(tmp_path / STOCK, runs.STOCK, noisy)
    record(tmp_path / OURS, "best", shifted)
    assert print_comparison(tmp_path) == 0
    said = capsys.readouterr().out
    assert "95% interval, by how much the steps of each run vary" in said
    assert "no winner: the interval contains 1, so the difference is within the noise" in said
    assert "not a fair comparison" in said

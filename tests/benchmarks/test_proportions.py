# SPDX-License-Identifier: Apache-2.0
"""What ``bench_proportions`` says of named systems: a step is divided among parts, and gains come from its times."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from benchmarks.cases import bench_proportions
from benchmarks.cases.bench_proportions import KAPPAS, rows_of, shares_of, systems


def test_every_task_of_a_step_is_in_one_part() -> None:
    (system, *_) = systems(["gpt2-xl"])
    shares, step_ms = shares_of(system)
    assert sum(astuple(shares)) == pytest.approx(1.0)
    row = next(rows_of(system, {}))
    assert step_ms == pytest.approx(float(row["deepspeed_ms"]), rel=1e-4)


def test_a_row_for_each_kappa_has_the_gains_that_its_times_give() -> None:
    *_, system = systems(["gpt2-xl"])
    rows = list(rows_of(system, {"commit": "c0de"}))
    assert [float(row["kappa"]) for row in rows] == list(KAPPAS)
    for row in rows:
        assert row["commit"] == "c0de"
        gained = float(row["deepspeed_ms"]) / float(row["best_ms"])
        assert float(row["best_over_deepspeed"]) == pytest.approx(gained, rel=1e-4)
        assert float(row["best_over_tutel"]) >= 1 - 1e-9
    # Links that slow each other down leave less to gain from doing things at once.
    free, slowed = (float(row["best_over_deepspeed"]) for row in rows)
    assert slowed <= free


def test_a_system_of_the_paper_is_beside_its_own_table(tmp_path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["bench_proportions.py", "--models", "gpt2-xl", "--results", str(tmp_path)])
        assert bench_proportions.main() == 0
    head, *lines = (tmp_path / bench_proportions.FILE).read_text().splitlines()
    assert "from_table_2" in head
    assert len(lines) == 2 * len(KAPPAS)

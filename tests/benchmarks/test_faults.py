# SPDX-License-Identifier: Apache-2.0
"""Jobs of real processes that are killed, delayed or given something else than the others end soon, say where they
were, and go on from their last checkpoint as if nothing had happened. ``make soak`` has many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.bench_faults import KILLS, REFUSED, Trial, losses, trials, try_it, undisturbed
from tests.built_ops import build_ops
from tests.waiting import LIMIT_S

BY_LAUNCHERS = [
    Trial("kill in a collective"),
    Trial("kill in a save", "torchrun restarts", stage=2),
    Trial("late", "torchrun"),
    Trial("other layers"),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict:
    found: dict = {}

    build_ops()

    def of(stage: int) -> dict:
        if stage not in found:
            found[stage] = undisturbed(tmp_path_factory.mktemp("undisturbed"), Trial("none", stage=stage))
        return found[stage]

    return of


# Three launches each. What they are made of is also tested rank by rank: reports in test_watchdog_processes.py, losses
# after a resume in test_resume.py, whole checkpoints after a kill in test_publishing.py.
@pytest.mark.daily("benchmarks", 4)
@pytest.mark.parametrize("trial", BY_LAUNCHERS, ids=str)
def test_a_job_ends_soon_and_its_next_start_goes_on_unbroken(trial: Trial, tmp_path: Path, expected: dict) -> None:
    outcome = try_it(trial, tmp_path, expected(trial.stage), LIMIT_S)
    assert outcome.passes(trial, LIMIT_S), (outcome, (tmp_path / "log.txt").read_text()[-3000:])
    if trial.fault in KILLS and trial.launcher == "deepspeed":
        assert outcome.reports == (1 - trial.rank,)
        report = (tmp_path / "fsmoe_reports" / f"rank{1 - trial.rank}.txt").read_text()
        assert "begun last" in report
        # It heard of the end, and has not waited until it was taken for a hang.
        assert "reason: hang" not in report
        assert "A2A" in report
    if trial.fault in REFUSED:
        assert "DisagreementError" in outcome.said
    assert sorted(losses(tmp_path)) == [0, 1]


def test_every_fault_is_tried_by_every_launcher() -> None:
    tried = {(each.fault, each.launcher) for each in trials(quick=False)}
    for fault in (*KILLS, *REFUSED, "late"):
        assert {(fault, "deepspeed"), (fault, "torchrun")} <= tried
    assert {(fault, "torchrun restarts") for fault in KILLS} <= tried

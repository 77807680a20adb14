# SPDX-License-Identifier: Apache-2.0
"""``make bench-full`` goes on where it stopped, says how long it will take, and takes nothing for done that is not."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.bed.bed import Bed
from benchmarks.cases import bench_layer
from benchmarks.everything import ROOT, run_all, tell
from benchmarks.harness.jobs import JUDGED_LAYERS, MODELS, Job, jobs
from benchmarks.harness.progress import FILE, Progress, code_digest, in_hours
from benchmarks.harness.result_files import RESULTS, append_rows, commit
from benchmarks.reporting.claims import claims
from benchmarks.reporting.figures import Results
from benchmarks.reporting.rows import read

NODES = Bed("bench", nodes=2)
FIRST, SECOND, THIRD = (Job(f"cases/bench_layer.py --only {n}", NODES) for n in range(3))
ALONE = Job("cases/bench_ops.py")


class Machine:
    """Runs jobs without running them: each leaves two rows, unless it is to fail or to leave none."""

    def __init__(self, results: Path, fails: Sequence[Job] = (), leaves_none: Sequence[Job] = ()) -> None:
        self.results = results
        self.ran: list[Job] = []
        self.beds: list[Bed | None] = []
        self._fails, self._leaves_none = fails, leaves_none

    def run(self, job: Job, command: Sequence[str], timeout_s: float | None) -> int:
        assert Path(command[0]) == ROOT / "benchmarks" / job.script
        assert list(command[-2:]) == ["--results", str(self.results)]
        self.ran.append(job)
        if job in self._fails:
            return 3
        if job not in self._leaves_none:
            name = "layer" if job.bed else "ops"
            row = {"commit": commit(), "grid": f"abc{job.command[-1]}", "case": job.command, "variant": "stock"}
            file = self.results / f"{name}.csv"
            append_rows(file, (*row, "p50", "steps"), [row | {"p50": 1000, "steps": 60}] * 2)
        return 0

    @contextmanager
    def on(self, bed: Bed | None) -> Iterator[None]:
        self.beds.append(bed)
        yield


def progress(results: Path, code: str = "c0de", machine: str = "here") -> Progress:
    return Progress(results, code, machine)


def run(machine: Machine, wanted: Sequence[Job], of: Progress) -> list[Job]:
    return run_all(wanted, of, machine.results, None, machine.run, machine.on)


def test_what_ended_well_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    every = (FIRST, SECOND, THIRD, ALONE)
    machine = Machine(tmp_path, fails=[SECOND], leaves_none=[THIRD])
    assert run(machine, every, progress(tmp_path)) == [SECOND, THIRD]
    assert machine.ran == list(every)
    # One bed for those that follow each other on it.
    assert machine.beds == [NODES, None]
    found = progress(tmp_path)
    assert [found.is_done(job) for job in every] == [True, False, False, True]
    assert [row["status"] for row in read(tmp_path / FILE)] == ["0", "3", "no rows", "0"]
    left = [job for job in every if not found.is_done(job)]
    assert run(Machine(tmp_path), left, found) == []
    assert all(progress(tmp_path).is_done(job) for job in every)


def test_a_run_that_was_killed_goes_on_with_the_job_it_was_in(tmp_path: Path) -> None:
    class Killed(Machine):
        def run(self, job: Job, command: Sequence[str], timeout_s: float | None) -> int:
            if job == SECOND:
                raise KeyboardInterrupt
            return super().run(job, command, timeout_s)

    with pytest.raises(KeyboardInterrupt):
        run(Killed(tmp_path), (FIRST, SECOND, THIRD), progress(tmp_path))
    found = progress(tmp_path)
    assert [found.is_done(job) for job in (FIRST, SECOND, THIRD)] == [True, False, False]


def test_nothing_is_done_with_other_code_on_another_machine_or_bed_or_without_its_rows(tmp_path: Path) -> None:
    run(Machine(tmp_path), (FIRST, ALONE), progress(tmp_path))
    assert progress(tmp_path).is_done(FIRST)
    assert not progress(tmp_path, code="0ther").is_done(FIRST)
    assert not progress(tmp_path, machine="there").is_done(FIRST)
    assert not progress(tmp_path).is_done(Job(FIRST.command, Bed("bench", nodes=3)))
    rows = read(tmp_path / "layer.csv")
    with (tmp_path / "layer.csv").open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"grid": "of others"} for row in rows)
    assert not progress(tmp_path).is_done(FIRST)
    (tmp_path / "ops.csv").unlink()
    assert not progress(tmp_path).is_done(ALONE)


def durations(results: Path, **seconds: float) -> Progress:
    found = progress(results)
    for command, each in seconds.items():
        job = {"first": FIRST, "second": SECOND, "alone": ALONE}[command]
        found.begin()
        Machine(results).run(job, [str(ROOT / "benchmarks" / job.script), "--results", str(results)], None)
        found.ended(job, 0, each)
    return found


def test_how_long_it_takes_follows_from_how_long_jobs_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    durations(tmp_path, first=600, second=1200, alone=60)
    # Also of other code, as nothing else is known of its duration.
    found = progress(tmp_path, code="newer")
    assert [found.seconds_of(job) for job in (FIRST, SECOND, ALONE)] == [600, 1200, 60]
    # A job that never ran is counted like the others of its script.
    assert found.seconds_of(THIRD) == 900
    assert found.left((FIRST, SECOND, THIRD, ALONE)) == "about 46 min"
    assert progress(tmp_path, machine="there").seconds_of(FIRST) is None
    tell((FIRST, THIRD), progress(tmp_path))
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:3] == ["done", "10", "min"]
    assert said[1].split()[:2] == ["15", "min"]


def test_where_no_duration_is_known_the_steps_of_earlier_rows_are_the_least_it_takes(tmp_path: Path) -> None:
    assert progress(tmp_path).left((FIRST,)).startswith("at least 0 min (1 of these 1 jobs")
    durations(tmp_path, first=600, second=600)
    # Two cases, each of 60 steps of a second.
    elsewhere = progress(tmp_path, machine="there")
    assert elsewhere.least_seconds_of(THIRD) == 60
    assert elsewhere.least_seconds_of(Job("cases/bench_layer.py --judged --only 1 4 13", NODES)) == 180
    assert elsewhere.least_seconds_of(Job("cases/bench_layer.py", NODES)) == 120
    assert elsewhere.least_seconds_of(Job("cases/bench_layer.py --blocks 2 --only 0", NODES)) == 0
    assert elsewhere.left((THIRD,)).startswith("at least 1 min (1 of these 1 jobs")
    assert elsewhere.brief((THIRD,)) == "at least 1 min"
    assert in_hours(3 * 3600 + 125) == "3 h 02 min"


def test_each_line_says_which_job_it_is_and_how_long_the_others_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = durations(tmp_path, first=600, second=1200)
    capsys.readouterr()
    run(Machine(tmp_path), (FIRST, SECOND), found)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("== 1 of 2, about 30 min left: cases/bench_layer.py --only 0, 2 nodes x 2 ranks")
    assert said[1].startswith("== 2 of 2, about 20 min left: cases/bench_layer.py --only 1")


def test_the_digest_of_code_is_that_of_what_measures(tmp_path: Path) -> None:
    (tmp_path / "ds_fsmoe").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "ds_fsmoe" / "a.py").write_text("1")
    first = code_digest(tmp_path)
    assert first == code_digest(tmp_path)
    for aside in ("docs/a.py", "benchmarks/results/made.py", "benchmarks/LOG.md"):
        (tmp_path / aside).write_text("2")
        assert code_digest(tmp_path) == first
    (tmp_path / "ds_fsmoe" / "a.py").write_text("2")
    assert code_digest(tmp_path) != first


def test_full_judges_eight_layers_and_four_models_and_runs_each_job_once() -> None:
    full = jobs(is_full=True)
    assert len({(job.command, job.where) for job in full}) == len(full) > 100
    judged = [job.command for job in full if "--judged" in job.command]
    assert JUDGED_LAYERS == bench_layer.JUDGED
    assert len(set(JUDGED_LAYERS)) == 8
    assert judged[:8] == [f"cases/bench_layer.py --judged --sweep --only {number}" for number in JUDGED_LAYERS]
    assert judged[8:12] == [f"cases/bench_models.py --judged --only {name}" for name in MODELS]
    best = "cases/bench_layer.py --best-layout --judged --sweep --only"
    assert judged[12:20] == [f"{best} {number}" for number in JUDGED_LAYERS]
    many = range(len(bench_layer.many_experts()))
    assert judged[20:] == [f"cases/bench_layer.py --many --judged --only {number}" for number in many]
    plain = [f"cases/bench_layer.py --only {n}" for n in range(len(bench_layer.cases())) if n not in JUDGED_LAYERS]
    assert set(plain) <= {job.command for job in full}
    for job in (*full, *jobs(is_full=False)):
        assert (ROOT / "benchmarks" / job.script).is_file()


def test_the_judged_layers_are_of_every_kind() -> None:
    layers = [bench_layer.cases()[number].settings for number in bench_layer.JUDGED]
    assert len({(each.L, each.M, each.ratio) for each in layers}) == 8
    assert {each.f for each in layers} == {1.25, 2.5, None}
    assert sorted(each.ffn for each in layers) == ["gpt"] * 4 + ["mixtral"] * 4


def test_every_row_that_a_figure_of_the_docs_is_read_from_is_one_that_full_makes_again() -> None:
    files = {figure.file for claim in claims(Results()) for figure in claim.figures}
    made = {Path(job.script).stem.removeprefix("bench_"): job for job in jobs(is_full=True)}
    # What whole models gain by one word is one of the things that their rows say.
    made["whole"] = made["one_word"]
    commands = [f"{job.command}, {job.where}" for job in jobs(is_full=True)]
    stages = "".join(each.read_text() for each in (ROOT / "benchmarks" / "gpu").glob("*.py"))
    for file in files:
        if f'"{file}.csv"' in stages:  # on a GPU, by benchmarks.gpu.run
            continue
        script = max((name for name in made if f"{file}_".startswith(f"{name}_")), key=len, default=None)
        assert script is not None, f"nothing makes {file}.csv"
        kind = file.removeprefix(script).lstrip("_")
        # Files beside that of a script have its rows' other numbers, unless they are of other cases or links.
        if kind in ("many", "skew", "table2", "shared"):
            assert any(f"bench_{script}.py" in each and kind in each for each in commands), file


def test_what_was_published_can_be_estimated() -> None:
    found = Progress(RESULTS, "c0de", "a machine that has measured nothing")
    assert found.left(jobs(is_full=True)).startswith("at least ")

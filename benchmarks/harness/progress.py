# SPDX-License-Identifier: Apache-2.0
"""Which jobs of ``make bench-full`` are done, so that it goes on where it stopped, and how long the others will take.

The file has a row for each job that ended, with what it left and how long it took. A job is done if it ended well with
the same code on the same machine, and if the rows it left are still there, by the digest of their grid and the commit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.harness.jobs import Job
from benchmarks.harness.result_files import RESULTS, append_rows, hardware, made_with
from benchmarks.reporting.rows import Row, newest, read

FILE = "everything.csv"
COLUMNS = ("date", "commit", "hardware", "python", "torch", "deepspeed", "ds_fsmoe")
COLUMNS += ("code", "job", "bed", "status", "seconds", "left")
_MEASURED_BY = ("ds_fsmoe", "benchmarks", "csrc", "op_builder")
_FEWER_STEPS = ("--blocks", "--steps", "--quick", "--budget")
_IS_CODE = (".py", ".cpp", ".h", ".cu", ".cuh", ".npz")


def code_digest(root: Path = RESULTS.parents[1]) -> str:
    """12 hex digits of all that can change a figure, by content: commits of docs and tests change nothing."""
    found = hashlib.sha256()
    for folder in _MEASURED_BY:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _IS_CODE and path.is_file() and "results" not in path.relative_to(root).parts:
                found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


class Progress:
    """What has been done of some jobs.

    Args:
        results: the folder of rows.
        code: the digest of the code that measures; ``None``: that of the checkout.
        machine: the hardware, without beds; ``None``: that of this one.
    """

    def __init__(self, results: Path, code: str | None = None, machine: str | None = None) -> None:
        self._results = results
        self._file = results / FILE
        self._given_code = code
        self._code = code_digest() if code is None else code
        self._machine = hardware() if machine is None else machine
        self._rows: list[Row] = read(self._file) if self._file.is_file() else []
        self._before: dict[str, int] = {}

    def is_done(self, job: Job) -> bool:
        """Whether a job has ended well with this code on this machine, and its rows are there."""
        same = {"code": self._code, "hardware": self._machine, "job": job.command, "bed": job.where, "status": "0"}
        found = [row for row in self._rows if same.items() <= row.items()]
        return bool(found) and self._are_there(found[-1])

    def _are_there(self, done: Row) -> bool:
        for each in done["left"].split("; "):
            name, grid = re.fullmatch(r"(\S+) \d+(?: of grid (\w+))?", each).groups()
            file = self._results / name
            rows = read(file) if file.is_file() else []
            if not any(row["commit"] == done["commit"] and row.get("grid", "") == (grid or "") for row in rows):
                return False
        return True

    def begin(self) -> None:
        """Take note of the rows there are before a job, and of the code it runs: files may have been edited."""
        if self._given_code is None:
            self._code = code_digest()
        self._before = {name: len(rows) for name, rows in self._files().items()}

    def ended(self, job: Job, status: int, seconds: float) -> bool:
        """Write a job's row, and return whether it was done: it ended well and has left rows.

        Args:
            job: what ended.
            status: its exit status.
            seconds: how long it took.
        """
        new = {name: rows[self._before.get(name, 0) :] for name, rows in self._files().items()}
        left = "; ".join(text for name, rows in sorted(new.items()) for text in _words(name, rows))
        made = made_with(("torch", "deepspeed"))
        # What the rows say, as files may have been edited since the job began.
        commits = {row["commit"] for rows in new.values() for row in rows}
        made |= {"hardware": self._machine} | ({"commit": commits.pop()} if len(commits) == 1 else {})
        row = made | {"code": self._code, "job": job.command, "bed": job.where, "left": left}
        row |= {"status": str(status if left else status or "no rows"), "seconds": f"{seconds:.0f}"}
        append_rows(self._file, COLUMNS, [row])
        self._rows.append(row)
        return row["status"] == "0"

    def _files(self) -> dict[str, list[Row]]:
        files = [each for each in self._results.rglob("*.csv") if each.name != FILE]
        return {each.relative_to(self._results).as_posix(): read(each) for each in files}

    # ---- how long

    def seconds_of(self, job: Job) -> float | None:
        """How long a job took when it last ended well on this machine, or jobs of its script on average."""
        well = [row for row in self._rows if row["status"] == "0" and row["hardware"] == self._machine]
        own = [float(row["seconds"]) for row in well if (row["job"], row["bed"]) == (job.command, job.where)]
        alike = newest([row for row in well if row["job"].split()[0] == job.script], ("job", "bed"))
        return own[-1] if own else fmean(float(row["seconds"]) for row in alike) if alike else None

    def least_seconds_of(self, job: Job) -> float:
        """How long the steps alone took that earlier rows of a script's file are of: a job without a duration takes at
        least that, unless it asks for fewer steps."""
        if any(option in job.command for option in _FEWER_STEPS):
            return 0.0
        file = self._results / f"{Path(job.script).stem.removeprefix('bench_')}.csv"
        rows = read(file) if file.is_file() else []
        if not rows or not {"p50", "steps", "case", "variant"} <= set(rows[0]):
            return 0.0
        rows = newest(rows, ("case", "variant"))
        seconds = sum(float(row["p50"]) * int(row["steps"]) for row in rows) / 1e3
        asked = re.search(r"--only((?: \w+)+)", job.command)
        cases = len({row["case"] for row in rows})
        return seconds / cases * (len(asked[1].split()) if asked else cases)

    def brief(self, jobs: Sequence[Job]) -> str:
        """How long some jobs will take: "about 3 h 20 min", or "at least" so long where some have no duration."""
        known = [self.seconds_of(job) for job in jobs]
        unknown = [job for job, seconds in zip(jobs, known, strict=True) if seconds is None]
        total_s = sum(seconds for seconds in known if seconds is not None) + sum(map(self.least_seconds_of, unknown))
        return f"{'at least' if unknown else 'about'} {in_hours(total_s)}"

    def left(self, jobs: Sequence[Job]) -> str:
        """The same with the reason, where some have no duration."""
        unknown = sum(self.seconds_of(job) is None for job in jobs)
        if not unknown:
            return self.brief(jobs)
        return (
            f"{self.brief(jobs)} ({unknown} of these {len(jobs)} jobs, or others of their script, have never ended "
            "here: counted are the steps in their earlier rows, without what comes before them)"
        )


def _words(name: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """What a job has left in a file: rows, by the digest of their grid where they have one."""
    grids: dict[str, int] = {}
    for row in rows:
        grid = row.get("grid", "")
        grids[grid] = grids.get(grid, 0) + 1
    return [f"{name} {count}" + (f" of grid {grid}" if grid else "") for grid, count in grids.items()]


def in_hours(seconds: float) -> str:
    """A duration in words, to the minute."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"

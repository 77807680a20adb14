# SPDX-License-Identifier: Apache-2.0
"""``make bench`` and ``make bench-full``: the benchmarks one after another, on a bed of their own, then the report.

Beds are built and removed by this. One benchmark that fails does not keep the others from running; the exit status
says so. ``--full`` says first how long it will take, and goes on where it stopped: what has ended well with the same
code on the same machine is not measured again (``benchmarks/results/everything.csv``; ``--again`` measures it all the
same, ``--list`` shows what is done and starts nothing).
"""

from __future__ import annotations

import argparse
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(ROOT))

from benchmarks.bed.bed import Bed, BedError, cleared_if_killed  # noqa: E402
from benchmarks.bed.job import run_job  # noqa: E402
from benchmarks.harness.jobs import Job, jobs  # noqa: E402
from benchmarks.harness.progress import Progress, in_hours  # noqa: E402
from benchmarks.harness.result_files import RESULTS  # noqa: E402

SHORT_LIMIT_S = 400.0


@contextmanager
def standing(bed: Bed | None) -> Iterator[None]:
    """A bed for as long as it is needed, or none."""
    if bed is None:
        yield
        return
    bed.up()
    with cleared_if_killed(bed.name):
        yield


def run_on(job: Job, command: Sequence[str], timeout_s: float | None) -> int:
    """Run a job's command on its bed, which is up, or by itself; return the exit status."""
    if job.bed is not None:
        return run_job(job.bed, command, timeout_s)
    try:
        return subprocess.run([sys.executable, *command], cwd=ROOT, check=False, timeout=timeout_s).returncode
    except subprocess.TimeoutExpired:
        return 124


def run_all(
    wanted: Sequence[Job],
    progress: Progress,
    results: Path,
    timeout_s: float | None = None,
    run: Callable[[Job, Sequence[str], float | None], int] = run_on,
    on: Callable[[Bed | None], AbstractContextManager[None]] = standing,
) -> list[Job]:
    """Run jobs, a bed for those that follow each other on it, and return those that failed.

    Raises:
        BedError: there can be no bed here.
    """
    failed: list[Job] = []
    number = 0
    for bed, of_bed in itertools.groupby(wanted, key=lambda job: job.bed):
        with on(bed):
            for job in of_bed:
                left = progress.brief(wanted[number:])
                number += 1
                print(f"== {number} of {len(wanted)}, {left} left: {job.command}, {job.where}", flush=True)
                script, *rest = job.command.split()
                progress.begin()
                start_s = time.monotonic()
                status = run(job, [str(ROOT / "benchmarks" / script), *rest, "--results", str(results)], timeout_s)
                if not progress.ended(job, status, time.monotonic() - start_s):
                    failed.append(job)
    return failed


def tell(wanted: Sequence[Job], progress: Progress) -> None:
    """Print each job, whether it is done, and how long it takes."""
    for job in wanted:
        seconds = progress.seconds_of(job)
        about = "not known" if seconds is None else in_hours(seconds)
        print(f"{'done' if progress.is_done(job) else '    '}  {about:>10}  {job.command}, {job.where}")


def main() -> int:
    """Exit status 0 if every benchmark ran, 1 if one did not, 2 if there can be no bed here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every case of every benchmark (hours)")
    parser.add_argument("--again", action="store_true", help="with --full: measure also what is done")
    parser.add_argument("--list", action="store_true", help="print the jobs, what is done and how long, and start none")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start_s, progress = time.monotonic(), Progress(args.results)
    every = jobs(args.full)
    wanted = [job for job in every if args.again or not args.full or not progress.is_done(job)]
    if args.list:
        tell(every, progress)
    print(f"bench: {len(every) - len(wanted)} of {len(every)} jobs are done; left: {progress.left(wanted)}", flush=True)
    if args.list:
        return 0
    try:
        failed = run_all(wanted, progress, args.results, None if args.full else SHORT_LIMIT_S)
    except BedError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for options in ([], ["--page"]):
        command = [sys.executable, "-m", "benchmarks.report", "--results", str(args.results), *options]
        subprocess.run(command, cwd=ROOT, check=False)
    names = ", ".join(job.command for job in failed) or "none"
    print(f"bench: {time.monotonic() - start_s:.0f} s; failed: {names}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""Every benchmark of the bed runs to its end on a bed of 2 nodes and 2 ranks, on layers of no interest, and its rows
become tables and pictures. What they measure here means nothing."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bed import Bed, BedError, check_machine, down
from benchmarks.bed_job import run_job
from tests.built_ops import build_ops

ROOT = Path(__file__).resolve().parents[1]
JOBS = {
    "bench_layer.py": (["--smoke"], ["layer", "layer_predicted"]),
    "bench_models.py": (["--smoke"], ["models", "models_loss"]),
    "bench_models.py in stages": (["--smoke", "--stages", "2"], ["models", "models_loss"]),
    "bench_operations.py": (["--smoke", "--steps", "2"], ["operations"]),
    "bench_gates.py": (["--smoke", "--only", "xmoe"], ["gates"]),
    "bench_interference.py": (["--steps", "3", "--tokens-bytes", "32768"], ["interference"]),
    "bench_timeline.py": (["--smoke"], ["timeline", "fits"]),
}


try:
    check_machine()
    missing = ""
except BedError as error:
    missing = str(error)
pytestmark = pytest.mark.skipif(bool(missing), reason=missing or "there can be a bed here")


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    build_ops()
    found = Bed(f"s{os.getpid() % 1_000_000}", inter="200mbit", intra="400mbit")
    found.up()
    yield found
    down(found.name)


SLOW = ("bench_layer.py", "bench_models.py", "bench_timeline.py")
"""Those that tune: a minute each, and more beside other tests."""


@pytest.mark.parametrize("job", [pytest.param(job, marks=pytest.mark.slow) if job in SLOW else job for job in JOBS])
def test_a_benchmark_runs_and_its_rows_can_be_shown(bed: Bed, job: str, tmp_path: Path) -> None:
    arguments, files = JOBS[job]
    said: list[str] = []
    script = str(ROOT / "benchmarks" / job.split()[0])
    status = run_job(bed, [script, *arguments, "--results", str(tmp_path)], 900.0, said.append)
    assert status == 0, "\n".join(said[-60:])
    for name in files:
        with (tmp_path / f"{name}.csv").open(newline="") as opened:
            assert list(csv.DictReader(opened)), name
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", "--results", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    if "interference" not in files:
        assert shown.stdout.strip()

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the bed run to their end on a bed of 2 nodes and 2 ranks, on layers of no interest, and its rows
become tables and pictures. What they measure here means nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bed.bed import Bed, BedError, check_machine, down
from benchmarks.bed.job import run_job
from benchmarks.harness.outcome import AA
from benchmarks.reporting.rows import read
from tests.benchmarks.result_laws import broken, judged_by_few
from tests.built_ops import build_ops

ROOT = Path(__file__).resolve().parents[2]
ONE_WORD = {"stock", "ours", "ours, rows", "deepspeed", "tutel", "pipemoe_lina", "fsmoe"}
FEW = {"stock", "deepspeed", "best", "best, best layout"}
VARIANTS = {
    "cases/bench_layer.py": {"layer": FEW, "layer_predicted": {"best"}},
    "cases/bench_models.py": {"models": FEW, "models_loss": FEW},
    "cases/bench_stages.py": {"stages": {"stock", "deepspeed", "tutel", "fsmoe", "best"}},
    "cases/bench_one_word.py": {
        "whole": ONE_WORD,
        "whole_memory": ONE_WORD,
        "whole_tuning": {"ours", "ours, rows", "fsmoe"},
    },
    "cases/bench_ladder.py": {"ladder": {"stock", "ep_size", "once per node", "schedule"}},
    "cases/bench_schedule.py": {"schedule": {"serial", "windows", "best"}},
    "cases/bench_gates.py": {"gates": {"stock", "ours", "ours, uncut", "stock, best layout", "ours, best layout"}},
    "cases/bench_timeline.py": {"timeline": {"deepspeed", "best"}},
    "cases/bench_choice.py": {"choice": {"flat", "once", "chosen", "once, tutel", "once, fsmoe", "AutoEP"}},
    "cases/bench_lina.py": {
        each: {"deepspeed", "lina, not packed", "lina", "best"} for each in ("lina", "lina_alltoalls")
    },
}
"""Of each file, where there are some."""
JOBS = {
    "cases/bench_layer.py": (["--smoke"], ["layer", "layer_predicted"]),
    "cases/bench_models.py": (["--smoke"], ["models", "models_loss"]),
    "cases/bench_stages.py": (["--only", "tiny", "--blocks", "2"], ["stages"]),
    "cases/bench_one_word.py": (
        ["--sweep", "--only", "gpt", "--tiny", "--blocks", "2"],
        ["whole", "whole_sweep", "whole_operations", "whole_memory", "whole_tuning"],
    ),
    "cases/bench_ladder.py": (["--only", "qwen3", "--tiny", "--blocks", "2"], ["ladder"]),
    "cases/bench_schedule.py": (["--only", "gpt", "--tiny", "--blocks", "2"], ["schedule"]),
    "cases/bench_operations.py": (["--smoke", "--steps", "2"], ["operations"]),
    "cases/bench_gates.py": (["--smoke", "--only", "xmoe"], ["gates"]),
    "cases/bench_timeline.py": (["--smoke"], ["timeline", "fits"]),
    "cases/bench_choice.py": (["--smoke"], ["choice", "choice_predicted"]),
    "cases/bench_lina.py": (["--smoke"], ["lina", "lina_alltoalls"]),
    "cases/bench_parts.py": (["--only", "gpt", "--tiny", "--blocks", "2"], ["parts"]),
    "cases/bench_placement.py": (["--smoke", "--blocks", "2"], ["placement", "placement_moves"]),
    "cases/bench_inference.py": (["--smoke", "--blocks", "2"], ["inference", "inference_tail"]),
}
ELSEWHERE = {"bed": "test_bed", "lora": "test_bench_lora", "proportions": "test_proportions"}
"""Benchmark -> the file of its tests."""
TOO_LONG = {"fp8", "halves", "hf", "levels", "once", "ops", "rows", "split_plan"}
"""Without a case that takes less than minutes."""


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


def test_every_benchmark_runs_here_or_is_named() -> None:
    every = {each.stem.removeprefix("bench_") for each in (ROOT / "benchmarks" / "cases").glob("bench_*.py")}
    here = {Path(each).stem.removeprefix("bench_") for each in JOBS}
    assert every == here | set(ELSEWHERE) | TOO_LONG
    assert all((ROOT / "tests" / "benchmarks" / f"{each}.py").exists() for each in ELSEWHERE.values())


# A minute and more each, beside other tests.
@pytest.mark.daily("benchmarks", 4)
@pytest.mark.parametrize("job", JOBS)
def test_a_benchmark_runs_and_its_rows_can_be_shown(bed: Bed, job: str, tmp_path: Path) -> None:
    arguments, files = JOBS[job]
    said: list[str] = []
    script = str(ROOT / "benchmarks" / job.split()[0])
    status = run_job(bed, [script, *arguments, "--results", str(tmp_path)], 900.0, said.append)
    assert status == 0, "\n".join(said[-60:])
    rows = {name: read(tmp_path / f"{name}.csv") for name in files}
    for name, found in rows.items():
        assert broken(name, found) == []
        assert {row["ranks"] for row in found if "ranks" in row} <= {"4"}
        assert all("2 nodes x 2 ranks" in row["hardware"] for row in found)
        if "ratio_low" in found[0]:
            assert judged_by_few(name, found) == []
        if name in VARIANTS.get(job, {}):
            assert {row["variant"] for row in found} - {AA, "AutoEP, best layout"} == VARIANTS[job][name]
    if job == "cases/bench_one_word.py":
        for row in rows["whole_memory"]:
            assert 0 < float(row["held"]) < float(row["peak"])
    if job == "cases/bench_layer.py":
        # What was predicted stands beside what was measured of the same.
        measured_ms = {row["variant"]: float(row["p50"]) for row in rows["layer"]}
        for row in rows["layer_predicted"]:
            assert float(row["measured_ms"]) == pytest.approx(measured_ms[row["variant"]], rel=1e-4)
            assert float(row["uncut_measured_ms"]) == pytest.approx(measured_ms["deepspeed"], rel=1e-4)
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", "--results", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()

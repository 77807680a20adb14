# SPDX-License-Identifier: Apache-2.0
"""The benchmark of LoRA runs to its end on one rank and on two, on a model of no interest. Times mean nothing here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.outcome import AA
from benchmarks.reporting.rows import read
from tests.benchmarks.result_laws import broken, judged_by_few
from tests.built_ops import build_ops
from tests.python_path import python_path
from tests.scripts import ROOT

pytest.importorskip("peft")


def run(folder: Path, ranks: int) -> str:
    """Return what the benchmark has printed."""
    build_ops()
    wanted = ["--ranks", str(ranks), "--only", "narrow-few", "--tiny", "--blocks", "2", "--results", str(folder)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cases" / "bench_lora.py"), *wanted],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path(), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.daily("benchmarks", 4)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_variant_has_rows_and_the_losses_of_stock(ranks: int, tmp_path: Path) -> None:
    printed = run(tmp_path, ranks)
    variants = {"stock", "ours", "eager" if ranks == 1 else "ours, ep_size 1"}
    rows, memory = (read(tmp_path / f"{name}.csv") for name in ("lora", "lora_memory"))
    assert broken("lora", rows) == []
    assert judged_by_few("lora", rows) == []
    assert {row["variant"] for row in rows} - {AA} == {row["variant"] for row in memory} == variants, printed
    assert {row["ranks"] for row in (*rows, *memory)} == {str(ranks)}
    trained = {row["variant"]: int(row["trained"]) for row in memory}
    for row in memory:
        assert float(row["loss_off"]) < 1e-5
        assert float(row["above"]) > 0
    # Of the adapters of experts each of two ranks trains a half.
    assert (trained["ours"] == trained["stock"]) == (ranks == 1)
    others = variants - {"ours"}
    assert len({trained[each] for each in others}) == 1

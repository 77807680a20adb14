# SPDX-License-Identifier: Apache-2.0
"""Ranks that share one GPU, over NCCL where it takes them. What they do is done here on the CPU as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_cases import BODY_ON_CPU
from tests.gpu_ranks import SEVERAL_RANKS, VARIABLES, nccl_version, run_ranks
from tests.waiting import LIMIT_S

COLLECTIVES = {"collectives": ("ok", "{}")}


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_train_as_stock_does(tmp_path: Path) -> None:
    version = nccl_version()
    if version < SEVERAL_RANKS:
        pytest.skip(f"NCCL {version} takes one rank on a GPU")
    found = run_ranks(tmp_path / "ranks", 2, "nccl", True, LIMIT_S, **VARIABLES)
    assert {name: each for name, each in found.items() if each[0] != "ok"} == {}
    assert COLLECTIVES.items() <= found.items()


@BODY_ON_CPU
def test_what_those_ranks_do_is_done_on_the_cpu_and_one_that_fails_is_told(tmp_path: Path) -> None:
    found = run_ranks(tmp_path / "ranks", 2, "gloo", True, LIMIT_S, DS_ACCELERATOR="cpu")
    assert {name: each for name, each in found.items() if each[0] != "ok"} == {}
    assert COLLECTIVES.items() <= found.items()
    assert len(found) == 3
    failed = run_ranks(tmp_path / "failed", 2, "no backend", True, LIMIT_S, DS_ACCELERATOR="cpu")
    assert list(failed) == ["end"]
    assert "no backend" in failed["end"][1]

# SPDX-License-Identifier: Apache-2.0
"""Grids, variants that sleep by a clock of ours, and rows read back, for the tests of the harness."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.harness import Case, Effort, Grid, Variant
from tests.fake_clock import FakeClock


@dataclass(frozen=True)
class Settings:
    k: int = 1
    dtype: str = "fp32"
    rates: tuple[float, ...] = (1.0, 2.5)


GRID = Grid("example", (Case("only", Settings()),))
QUICK = Effort(blocks=2, steps=1, warmup=0)


def sleeper(clock: FakeClock, name: str, ms: float) -> Variant:
    return Variant(name, lambda settings: lambda: clock.sleep(ms / 1e3))


def grid_of(**settings: Any) -> Grid:
    return Grid("example", (Case("only", Settings(**settings)),))


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))

# SPDX-License-Identifier: Apache-2.0
"""Finds the settings that a variant of a whole model is fastest with, and what its tensors take with each.

``sweep`` measures, and writes a row for each setting to ``whole_sweep.csv``; ``found`` reads the newest rows again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.cases import Case
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.models.step_costs import StepMemory, step_memory, storages_now
from benchmarks.models.whole_models import IN_A_ROW, Setting, Training, Whole
from benchmarks.reporting.rows import newest, read

STOCK, OURS = "stock", "ours"
FILE = "whole_sweep.csv"
CUT = ("tutel", "pipemoe_lina")
"""The presets whose number of chunks is that of the user."""
MOST_CHUNKS = 4
TURNS = 3
HOPELESS = 1.25
"""Times as long as the fastest so far: one turn tells enough."""
OFF: dict[str, Any] = {"fsmoe": {"enabled": False}}


def with_chunks(preset: str, num_chunks: int) -> dict[str, Any]:
    """Return the config of a preset with that many chunks in both phases."""
    return {"fsmoe": {"enabled": True, "schedule": preset, "autotune": False, "num_chunks": num_chunks}}


@dataclass(frozen=True)
class Swept:
    """What a sweep has found for a model.

    Attributes:
        stock: the setting with which stock is fastest.
        no_more_memory: the same among those whose tensors take no more than ours do with ``stock``; ``None``: there is
            none, or it is ``stock`` itself.
        num_chunks: preset -> the number of chunks with which it is fastest.
    """

    stock: Setting
    no_more_memory: Setting | None
    num_chunks: Mapping[str, int]


def sweep(case: Case, results: Path) -> None:
    """Measure stock with every setting, ours with the fastest one, and presets with every number of chunks. Collective.

    Args:
        case: of a whole model.
        results: folder of the rows.
    """
    model: Whole = case.settings
    rows: list[dict[str, str]] = []
    for each in model.settings():
        rows.append(_tried(case, STOCK, each, OFF, min(map(_ms, rows), default=None)))
    fastest = _setting(min(rows, key=_ms))
    rows.append(_tried(case, OURS, fastest, {"fsmoe": {"enabled": True}}))
    for preset in CUT:
        for n in range(1, MOST_CHUNKS + 1):
            rows.append(_tried(case, preset, fastest, with_chunks(preset, n)) | {"num_chunks": str(n)})
    if dist.get_rank() == 0:
        made = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": case.name, "num_chunks": ""}
        append_rows(results / FILE, tuple(made | rows[0]), [made | row for row in rows])
    # The others read them.
    dist.barrier()


def found(case: Case, results: Path) -> Swept:
    """Return what the newest sweep of a case has found.

    Raises:
        FileNotFoundError: there is none.
    """
    file = results / FILE
    every = read(file) if file.is_file() else []
    keys = ("variant", "stage", "bucket", "overlap", "num_chunks")
    rows = newest([row for row in every if row["case"] == case.name], keys)
    if not rows:
        raise FileNotFoundError(f"{file} has no rows of {case.name!r}: run bench_one_word.py --sweep for it")
    stock = sorted((row for row in rows if row["variant"] == STOCK), key=_ms)
    (ours,) = (row for row in rows if row["variant"] == OURS and _setting(row) == _setting(stock[0]))
    light = [row for row in stock if float(row["peak_mb"]) <= float(ours["peak_mb"])]
    chunks = {preset: min((row for row in rows if row["variant"] == preset), key=_ms) for preset in CUT}
    return Swept(
        _setting(stock[0]),
        _setting(light[0]) if light and light[0] is not stock[0] else None,
        {preset: int(row["num_chunks"]) for preset, row in chunks.items()},
    )


def counted(training: Training, before: set[int]) -> StepMemory:
    """Return the memory of one step of an engine.

    Args:
        training: the engine.
        before: the storages that were there before it.
    """
    state = getattr(training.engine, "fsmoe", None)
    layers = [] if state is None else list(state.inner_layers.values())
    # In the first step with it, a plan that was settled on moves what is there.
    training()
    memory = step_memory(training, layers, before, training.engine.zero_reduce_bucket_size())
    training.finish()
    return memory


def _tried(
    case: Case, name: str, setting: Setting, more: dict[str, Any], fastest_ms: float | None = None
) -> dict[str, str]:
    before = storages_now()
    training = Training(case.settings, setting, more, name)
    peak_mb = _most(counted(training, before).peak / 1e6)
    times_ms = [_most(1e3 * _turn_s(training))]
    while len(times_ms) < TURNS and (fastest_ms is None or times_ms[0] < HOPELESS * fastest_ms):
        times_ms.append(_most(1e3 * _turn_s(training)))
    training.close()
    ms = median(times_ms)
    if dist.get_rank() == 0:
        words = [f"{key} {value}" for key, value in more["fsmoe"].items() if key == "num_chunks"]
        print(f"{case.name}: {', '.join([name, str(setting), *words])}: {ms:.1f} ms, {peak_mb:.4g} MB", flush=True)
    shown = {key: str(value) for key, value in asdict(setting).items()}
    return {"variant": name} | shown | {"ms": f"{ms:.1f}", "peak_mb": f"{peak_mb:.6g}"}


def _most(value: float) -> float:
    """Return the largest of all ranks'. Collective."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _turn_s(training: Training) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(IN_A_ROW):
        training()
    training.finish()
    return (time.perf_counter() - start_s) / IN_A_ROW


def _ms(row: Mapping[str, str]) -> float:
    return float(row["ms"])


def _setting(row: Mapping[str, str]) -> Setting:
    return Setting(int(row["stage"]), int(row["bucket"]), row["overlap"] == "True")

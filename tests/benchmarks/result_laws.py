# SPDX-License-Identifier: Apache-2.0
"""What must hold of the rows of a benchmark, whatever was measured."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE
from benchmarks.harness.outcome import AA, ADDED, COLUMNS
from benchmarks.reporting.rows import Row, blocks_of
from benchmarks.reporting.tables import OF_COMMUNICATION

LANES = ("compute", "intra", "inter")


def broken(name: str, rows: list[Row]) -> list[str]:
    """The laws that rows of a file do not keep, a line each; there are none for files of other benchmarks."""
    law = _LAWS.get(name, _of_harness if rows and set(COLUMNS) - set(ADDED) <= set(rows[0]) else _of_nothing)
    return list(law(name, rows)) if rows else [f"{name}: no rows"]


def _of_nothing(name: str, rows: list[Row]) -> Iterator[str]:
    yield from ()


def _of_harness(name: str, rows: list[Row]) -> Iterator[str]:
    runs: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        runs[row["date"], row["commit"], row["grid"], row.get("over") or "", row["case"]].append(row)
    for key, run in runs.items():
        where = f"{name}, {key[0]}, {key[-1]}"
        exact = {row["variant"] for row in run if row["ratio"] == row["ratio_low"] == row["ratio_high"] == "1.0000"}
        if AA not in {row["variant"] for row in run} or len(exact) != 1:
            yield f"{where}: one baseline and one A/A are wanted, found {exact}"
        if len({(row["steps"], row["noisy"], row["ranks"]) for row in run}) != 1:
            yield f"{where}: variants differ in steps, noise or ranks"
        for row in run:
            p20, p50, p80 = (float(row[each]) for each in ("p20", "p50", "p80"))
            if not 0 < p20 <= p50 <= p80 < math.inf:
                yield f"{where}, {row['variant']}: percentiles {p20}, {p50}, {p80}"
            if bool(row["ratio_low"]) != bool(row["ratio_high"]):
                yield f"{where}, {row['variant']}: half an interval"
            if row["ratio_low"] and not float(row["ratio_low"]) <= float(row["ratio"]) <= float(row["ratio_high"]):
                yield f"{where}, {row['variant']}: {row['ratio']} is not in its interval"
            shares = [float(row[each]) for each in ("cpu_share", "machine_cpu_share", "network_cpu_share")]
            if not all(0 <= share <= 1.02 for share in shares) or shares[2] > shares[1]:
                yield f"{where}, {row['variant']}: shares of the processors {shares}"


def _of_predictions(name: str, rows: list[Row]) -> Iterator[str]:
    for row in rows:
        if not all(0 < float(row[each]) < math.inf for each in row if each.endswith("_ms")):
            yield f"{name}, {row['case']}, {row['variant']}: times must be above 0"


def _of_operations(name: str, rows: list[Row]) -> Iterator[str]:
    runs: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        runs[row["date"], row["case"], row["layout"]].append(row)
    for key, run in runs.items():
        where, shares = f"{name}, {', '.join(key)}", [float(row["share"]) for row in run]
        if abs(sum(shares) - 1) > 1e-2:
            yield f"{where}: shares sum to {sum(shares)}"
        total_ms = sum(float(row["ms"]) for row in run)
        if any(abs(float(row["ms"]) / total_ms - share) > 1e-2 for row, share in zip(run, shares, strict=True)):
            yield f"{where}: shares are not those of the times"
        for phase in ("forward", "backward"):
            seen = {row["operation"] for row in run if row["phase"] == phase and float(row["ms"]) > 0}
            if not {"all-to-all", "experts", "attention"} <= seen:
                yield f"{where}: in the {phase} there are only {sorted(seen)}"
        if not any(row["operation"] in OF_COMMUNICATION for row in run):
            yield f"{where}: nothing was sent"


def _of_timeline(name: str, rows: list[Row]) -> Iterator[str]:
    lanes: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        start_ms, end_ms = float(row["start_ms"]), float(row["end_ms"])
        if row["lane"] not in LANES or not 0 <= start_ms <= end_ms:
            yield f"{name}, {row['variant']}: {row['kind']} on {row['lane']} from {start_ms} to {end_ms}"
        lanes[row["date"], row["variant"], row["lane"]].append((start_ms, end_ms))
    for key, spans in lanes.items():
        spans.sort()
        if any(later[0] < earlier[1] - 2e-3 for earlier, later in itertools.pairwise(spans)):
            yield f"{name}, {', '.join(key)}: two tasks at once on one lane"
    for variant in {row["variant"] for row in rows}:
        phases = {(row["layer"], row["phase"]) for row in rows if row["variant"] == variant}
        if len({layer for layer, _ in phases}) * 2 != len(phases):
            yield f"{name}, {variant}: a layer lacks a phase"


def _of_fits(name: str, rows: list[Row]) -> Iterator[str]:
    for row in rows:
        r2, size, *times_ms = (float(row[each]) for each in ("r2", "size", "measured_ms", "line_ms"))
        if not (r2 <= 1 and size > 0 and min(times_ms) >= 0):
            yield f"{name}, {row['operation']}: {times_ms} ms for {size}, r^2 {r2}"


def _of_interference(name: str, rows: list[Row]) -> Iterator[str]:
    for row in rows:
        found = [float(row[each]) for each in ("p5", "p50", "p95", "max")]
        if found != sorted(found) or found[0] <= 0:
            yield f"{name}, {row['variant']}: {found}"
        # Times are in units of what it takes alone.
        if row["variant"] == "alone" and abs(found[1] - 1) > 0.02:
            yield f"{name}: alone it takes {found[1]} times as long as alone"


def _of_losses(name: str, rows: list[Row]) -> Iterator[str]:
    runs: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row["date"], row["case"]][row["variant"]].append(float(row["loss"]))
    for key, losses in runs.items():
        if len({len(values) for values in losses.values()}) != 1:
            yield f"{name}, {key}: variants differ in steps"
        if not all(math.isfinite(each) and each > 0 for values in losses.values() for each in values):
            yield f"{name}, {key}: a loss is not a number above 0"
        first = losses["stock"][0]
        for variant, values in losses.items():
            # From the same weights and batches; auxiliary losses are those of a rank's tokens.
            if abs(values[0] / first - 1) > 0.02:
                yield f"{name}, {key}: {variant} begins at {values[0]}, stock at {first}"


_LAWS: dict[str, Callable[[str, list[Row]], Iterator[str]]] = {
    "layer_predicted": _of_predictions,
    "models_loss": _of_losses,
    "operations": _of_operations,
    "timeline": _of_timeline,
    "fits": _of_fits,
    "interference": _of_interference,
}


def judged_by_few(name: str, rows: list[Row]) -> list[str]:
    """Variants in rows of the harness of which more is said than so few blocks can say. (Older rows say it.)"""
    return [
        row["variant"]
        for row in rows
        if blocks_of(name, row) < MIN_BLOCKS_TO_JUDGE
        and (row["noisy"] or row["passed"] or row["ratio_low"] not in ("", row["ratio"]))
    ]

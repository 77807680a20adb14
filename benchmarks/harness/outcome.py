# SPDX-License-Identifier: Apache-2.0
"""What came out of a case: per variant times, how many times faster, whether the goal is reached; as table and rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.allocator import described
from benchmarks.harness.cases import Case, Grid
from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE, Interval, percentiles_ms, speedup

AA = "A/A"
# Above this share of the cores' time there is no time left in which anything could overlap.
CPU_BOUND_ABOVE = 0.9
PACKAGES = ("torch", "deepspeed")
COLUMNS = (
    *("date", "commit", "hardware", "python", *PACKAGES, "ds_fsmoe", "ranks", "grid", "case", "settings", "variant"),
    *("unit", "p20", "p50", "p80", "ratio", "ratio_low", "ratio_high", "steps", "cpu_share"),
    *("machine_cpu_share", "network_cpu_share", "cpu_bound", "noisy", "goal", "passed"),
    *("blocks", "allocator", "over"),
)
ADDED = ("blocks", "allocator", "over")
"""The columns that files of earlier versions lack; in their rows they are empty."""


@dataclass(frozen=True)
class Goal:
    """``variant`` is to be ``at_least`` times as fast as the baseline, in ``case`` or, if None, in every case."""

    variant: str
    at_least: float
    case: str | None = None


@dataclass(frozen=True)
class CpuShares:
    """Of the time of all cores during the steps."""

    ranks: float
    """What the ranks' processes used, threads and ended children included."""
    machine: float
    """What the machine as a whole was busy; 0 if it does not say."""
    network: float
    """What it spent in the kernel, for the network and for memory that it hands out page by page (where a C library
    gives large buffers back to it, that may be as much); 0 if it does not say."""


@dataclass(frozen=True)
class VariantResult:
    """One row: step times in ms, the maximum over ranks, and how many times faster than the baseline."""

    name: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    speedup: Interval
    cpu: CpuShares
    goal: float | None = None

    @property
    def cpu_bound(self) -> bool:
        """True if the cores were so busy that overlap could not show."""
        return max(self.cpu.ranks, self.cpu.machine) > CPU_BOUND_ABOVE

    @property
    def passed(self) -> bool | None:
        """Whether the lower end of the interval reaches the goal; None if there is no goal, or no interval."""
        return None if self.goal is None or self.speedup.low is None else self.speedup.low >= self.goal


@dataclass(frozen=True)
class CaseResult:
    """The rows of one case, the baseline first and A/A second."""

    case: Case
    variants: tuple[VariantResult, ...]
    steps: int
    """Of each variant."""
    blocks: int
    """That these steps came in."""
    over: str = ""
    """The baseline where it is a further one, and not that of the grid."""
    further: tuple[CaseResult, ...] = ()
    """The same steps compared with further baselines."""

    @property
    def noisy(self) -> bool | None:
        """True if the interval of A/A does not hold 1. By its nature that happens in 1 of 20 quiet runs, too. ``None``:
        too few blocks to know."""
        holds = self.variants[1].speedup.contains(1.0)
        return None if holds is None else not holds


def evaluate(
    case: Case,
    names: Sequence[str],
    times_ms: np.ndarray,
    shares: Sequence[CpuShares],
    goals: Sequence[Goal] = (),
    over: str = "",
) -> CaseResult:
    """What step times mean.

    Args:
        case: what was measured.
        names: the baseline first, A/A second.
        times_ms: [V, B, R], the maximum over ranks.
        shares: [V].
        goals: what is to be reached.
        over: the baseline where it is a further one.
    """
    rows = []
    for i, name in enumerate(names):
        wanted = [goal.at_least for goal in goals if goal.variant == name and goal.case in (None, case.name)]
        ratio = speedup(times_ms[0], times_ms[i]) if i else Interval(1.0, 1.0, 1.0)
        rows.append(VariantResult(name, *percentiles_ms(times_ms[i]), ratio, shares[i], max(wanted, default=None)))
    return CaseResult(case, tuple(rows), times_ms[0].size, times_ms.shape[1], over)


def table(grid: Grid, results: Sequence[CaseResult], made_with: Mapping[str, str], num_ranks: int) -> str:
    """All results as text, with units."""
    made = f"{made_with['hardware']}, commit {made_with['commit']}"
    lines = [f"{grid.name}: grid {grid.digest}, {num_ranks} rank(s), {made}"]
    for result in (each for of_case in results for each in (of_case, *of_case.further)):
        baseline = result.variants[0].name
        width = max(12, *(len(row.name) for row in result.variants))
        steps = f"{result.steps} steps of each in {result.blocks} blocks"
        lines += ["", f"{result.case.name}: {steps}, {json.dumps(result.case.plain())}"]
        has_intervals = result.blocks >= MIN_BLOCKS_TO_JUDGE
        ratios = f"times faster than {baseline} ({'95%' if has_intervals else f'no interval: {result.blocks} blocks'})"
        lines.append(f"  {'':<{width}} {'p20 ms':>10} {'p50 ms':>10} {'p80 ms':>10}   {ratios}   CPU")
        for row in result.variants:
            times = f"{row.p20_ms:>10.4g} {row.p50_ms:>10.4g} {row.p80_ms:>10.4g}"
            ratio = f"{row.speedup.middle:.3f}"
            if has_intervals:
                ratio += f" ({row.speedup.low:.3f} to {row.speedup.high:.3f})"
            notes = [f"{row.cpu.machine or row.cpu.ranks:.0%} (kernel {row.cpu.network:.0%})"]
            if row.cpu_bound:
                notes.append("CPU-BOUND")
            if row.name == AA and result.noisy:
                notes.append("noisy: the interval does not hold 1")
            if row.goal is not None:
                reached = {None: "not judged", True: "reached", False: "NOT reached"}[row.passed]
                notes.append(f"goal {row.goal:g}: {reached}")
            lines.append(f"  {row.name:<{width}} {times}   {ratio:<{len(ratios)}}   {', '.join(notes)}")
    return "\n".join(lines)


def rows(grid: Grid, result: CaseResult, made_with: Mapping[str, str], num_ranks: int) -> list[dict[str, Any]]:
    """The lines of one case; times in the column "unit". Those of a further baseline have its name in "over"."""
    of_all = [_rows(grid, each, made_with, num_ranks) for each in (result, *result.further)]
    return [row for each in of_all for row in each]


def _rows(grid: Grid, result: CaseResult, made_with: Mapping[str, str], num_ranks: int) -> list[dict[str, Any]]:
    of_case = {
        **made_with,
        "ranks": num_ranks,
        "grid": grid.digest,
        "case": result.case.name,
        "settings": json.dumps(result.case.plain(), sort_keys=True),
        "unit": "ms",
        "steps": result.steps,
        # Of the whole case: what its A/A cannot tell from 1, its other rows cannot either.
        "noisy": "" if result.noisy is None else result.noisy,
        "blocks": result.blocks,
        "allocator": described(),
        "over": result.over,
    }
    return [
        of_case
        | {
            "variant": row.name,
            "p20": f"{row.p20_ms:.6g}",
            "p50": f"{row.p50_ms:.6g}",
            "p80": f"{row.p80_ms:.6g}",
            "ratio": f"{row.speedup.middle:.4f}",
            # Empty where there are too few blocks for an interval, but for the baseline's, which is a point by itself.
            "ratio_low": "" if row.speedup.low is None else f"{row.speedup.low:.4f}",
            "ratio_high": "" if row.speedup.high is None else f"{row.speedup.high:.4f}",
            "cpu_share": f"{row.cpu.ranks:.3f}",
            "machine_cpu_share": f"{row.cpu.machine:.3f}",
            "network_cpu_share": f"{row.cpu.network:.3f}",
            "cpu_bound": row.cpu_bound,
            "goal": "" if row.goal is None else row.goal,
            "passed": "" if row.passed is None else row.passed,
        }
        for row in result.variants
    ]

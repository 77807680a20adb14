# SPDX-License-Identifier: Apache-2.0
"""Rows of results, read again: the newest of each configuration, and variants beside their baseline."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE

Row = dict[str, str]

STEPS_OF_A_BLOCK = {"alltoall": 2, "alltoall_layer": 2, "bed": 2, "experts": 2, "pipeline": 2, "wire": 2}
STEPS_OF_A_BLOCK |= {"rows": 2, "hf": 2, "lina": 2, "placement": 2, "recording": 4, "inference": 8}
STEPS_OF_A_BLOCK |= {"metrics": 10, "unchunked": 8}
"""Benchmark -> steps of a variant in a block, where there is more than one: for older rows, which have the ends of an
interval however few blocks they are of, and say how many steps but not how many blocks."""


@dataclass(frozen=True)
class Comparison:
    """What one benchmark of the harness found: every variant against the baseline.

    Attributes:
        name: of the benchmark.
        baseline: the variant that the others are compared with.
        cases: in the order of the file.
        variants: likewise, without the baseline.
        rows: newest for (case, variant).
    """

    name: str
    baseline: str
    cases: tuple[str, ...]
    variants: tuple[str, ...]
    rows: dict[tuple[str, str], Row]

    def blocks(self, row: Row) -> int:
        """How many blocks of steps it is of."""
        return blocks_of(self.name, row)

    def interval(self, case: str, variant: str) -> tuple[float, float] | None:
        """The ends of the ratio's 95% interval; ``None`` if it was not measured, or in too few blocks to have one."""
        row = self.rows.get((case, variant))
        if row is None or not row["ratio_low"] or self.blocks(row) < MIN_BLOCKS_TO_JUDGE:
            return None
        return float(row["ratio_low"]), float(row["ratio_high"])

    def ratio(self, case: str, variant: str) -> float | None:
        """Times faster than the baseline; ``None`` if it was not measured."""
        row = self.rows.get((case, variant))
        return None if row is None else float(row["ratio"])

    def mean(self, variant: str) -> float:
        """Geometric, over the cases that were measured."""
        ratios = [ratio for case in self.cases if (ratio := self.ratio(case, variant)) is not None]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    def markdown(self) -> str:
        """A table: cases down, variants across."""
        heads = [f"times faster than {self.baseline}", *self.variants]
        lines = [f"### {self.name}", "", made_with_words(list(self.rows.values())), "", self._of_intervals(), ""]
        lines += [line(heads), line(["---", *("---:" for _ in self.variants)])]
        for case in self.cases:
            lines.append(line([case, *(self._cell(case, variant) for variant in self.variants)]))
        lines.append(line(["**geometric mean**", *map(self._mean_cell, self.variants)]))
        return "\n".join(lines)

    def num_measured(self, variant: str) -> int:
        """In how many of the cases."""
        return sum((case, variant) in self.rows for case in self.cases)

    def _mean_cell(self, variant: str) -> str:
        # Means over other cases do not compare.
        count = self.num_measured(variant)
        return f"**{self.mean(variant):.3f}**" + ("" if count == len(self.cases) else f" of {count} only")

    def _cell(self, case: str, variant: str) -> str:
        row = self.rows.get((case, variant))
        if row is None:
            return ""
        interval, mark = self.interval(case, variant), " CPU" if row["cpu_bound"] == "True" else ""
        if interval is None:
            return f"{float(row['ratio']):.3f}{mark}"
        noisy = " noisy" if row["noisy"] == "True" else ""
        return f"{float(row['ratio']):.3f} ({interval[0]:.2f} to {interval[1]:.2f}){mark}{noisy}"

    def _of_intervals(self) -> str:
        """What stands in parentheses, and why nothing does."""
        few = sorted({self.blocks(row) for at, row in self.rows.items() if self.interval(*at) is None})
        said = []
        if any(self.interval(*at) for at in self.rows):
            said.append("In parentheses: 95% intervals over blocks of steps.")
        if few:
            count = f"{few[0]} to {few[-1]}" if len(few) > 1 else str(few[0])
            said.append(f"{'Else no' if said else 'No'} interval: {count} blocks, and it takes {MIN_BLOCKS_TO_JUDGE}.")
        return " ".join(said)


def blocks_of(name: str, row: Row) -> int:
    """How many blocks of steps a row of a benchmark is of."""
    return int(row["blocks"]) if row.get("blocks") else int(row["steps"]) // STEPS_OF_A_BLOCK.get(name, 1)


def further_baselines(rows: Sequence[Row]) -> tuple[str, ...]:
    """The baselines besides the first that variants were compared with."""
    return tuple(dict.fromkeys(over for row in rows if (over := row.get("over"))))


def comparison(name: str, rows: Sequence[Row], over: str = "") -> Comparison:
    """Of the rows of one file.

    Args:
        name: of the benchmark.
        rows: all of its file.
        over: the baseline, if it is a further one.

    Raises:
        ValueError: no row of a baseline, which is the one compared with itself as A/A.
    """
    rows = [row for row in rows if (row.get("over") or "") == over]
    newest = {(row["case"], row["variant"]): row for row in rows}
    cases = tuple(dict.fromkeys(case for case, _ in newest))
    variants = tuple(dict.fromkeys(variant for _, variant in newest))
    # A row's ratio is 1 and so is its interval: the baseline's, by how it is made.
    exact = {each for (_, each), row in newest.items() if row["ratio"] == row["ratio_low"] == row["ratio_high"]}
    if not exact:
        raise ValueError(f"{name}: no row of a baseline among {', '.join(variants)}")
    baseline = next(each for each in variants if each in exact)
    return Comparison(name, baseline, cases, tuple(each for each in variants if each != baseline), newest)


def read(file: Path) -> list[Row]:
    """The rows of a file of results, oldest first."""
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def made_with_words(rows: Sequence[Row]) -> str:
    """What rows were measured on and with."""
    facts = []
    for column in ("hardware", "deepspeed", "torch", "allocator", "commit", "date"):
        values = sorted({row[column] for row in rows if row.get(column)})
        if values:
            facts.append(f"{column} {', '.join(values[:3])}{' and more' if len(values) > 3 else ''}")
    return "; ".join(facts)


def line(cells: Sequence[str]) -> str:
    """Of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def newest(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """The last row of each configuration, which is what ``keys`` names."""
    return list({tuple(row[key] for key in keys): row for row in rows}.values())

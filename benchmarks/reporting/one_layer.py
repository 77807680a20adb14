# SPDX-License-Identifier: Apache-2.0
"""What docs/benchmarks.md says of single layers in the layout that stock is fastest in."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from benchmarks.reporting.figures import Claim, Figure, Results, mean
from benchmarks.reporting.rows import newest

_FILE = "layer_best"
_VARIANTS = ("deepspeed", "tutel", "pipemoe_lina", "fsmoe")
"""All but `best`, which has its interval beside it."""


def claims(of: Results, page: str) -> Iterator[Claim]:
    """All of them.

    Args:
        of: the rows.
        page: the file of the page.

    Raises:
        NoRowError: a figure has no row.
    """
    cases = of.comparison(_FILE).cases
    for case in cases:
        figures = (
            *(of.ratio(_FILE, case, each) for each in _VARIANTS),
            of.ratio_in(_FILE, case, "best"),
            of.ratio_in(_FILE, case, "best", over="tutel"),
            of.ratio_in(_FILE, case, "A/A"),
        )
        # Its name has numbers, too.
        name = Figure(case.removesuffix(", all ranks"), _FILE, figures[0].rows, "the layer")
        yield Claim(page, f"| {' | '.join(['{}'] * (1 + len(figures)))} |", (name, *figures))
    means = [_mean(of, each) for each in (*_VARIANTS, "best")]
    quotients = of.of_cases(_FILE, "best", "tutel")
    over = of.computed(mean(quotients), ".2f", _FILE, "best over tutel: geometric mean", {"best", "tutel"})
    yield Claim(page, "| geometric mean | {} | {} | {} | {} | {} | {} | - |", (*means, over))
    yield Claim(page, "In layers of the grid, `best` is off its prediction by {} on average and {} at worst", _off(of))


def _mean(of: Results, variant: str) -> Figure:
    what = f"{variant} over stock: geometric mean"
    return of.computed(mean(of.of_cases(_FILE, variant)), ".2f", _FILE, what, {variant, "stock"})


def _off(of: Results) -> tuple[Figure, Figure]:
    rows = [row for row in newest(of.rows(f"{_FILE}_predicted"), ("case", "variant")) if row["variant"] == "best"]
    off = [abs(float(row["predicted_ms"]) / float(row["measured_ms"]) - 1) for row in rows]
    average, worst = (
        Figure(f"{share:.0%}", f"{_FILE}_predicted", tuple(rows), f"best, off its prediction {what}")
        for share, what in ((fmean(off), "on average"), (max(off), "at worst"))
    )
    return average, worst

# SPDX-License-Identifier: Apache-2.0
"""What the notes on figures say of single layers: in stock's best layout, and in that of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from benchmarks.reporting.figures import Claim, Figure, Results, mean
from benchmarks.reporting.rows import Row, newest

SCHEDULES = ("deepspeed", "tutel", "pipemoe_lina", "fsmoe")
"""All but `best`, which has its interval beside it."""

_KIN_OF_TUTEL = ("tutel_improved", "pipemoe_lina", "fsmoe_no_iio")
"""The presets that add the paper's ideas to it one by one."""


@dataclass(frozen=True)
class Table:
    """The layers of one file of results, as the page shows them.

    Attributes:
        file: of the rows.
        layout: what ends the names of its cases.
        further: the variants behind `best`, which have no interval either.
    """

    file: str
    layout: str
    further: tuple[str, ...] = ()

    def rows(self, of: Results, page: str) -> Iterator[Claim]:
        """A line for each layer, and one for their means."""
        for case in of.comparison(self.file).cases:
            figures = (
                *(of.ratio(self.file, case, each) for each in SCHEDULES),
                of.ratio_in(self.file, case, "best"),
                of.ratio_in(self.file, case, "best", over="tutel"),
                *(of.ratio(self.file, case, each) for each in self.further),
                of.ratio_in(self.file, case, "A/A"),
            )
            # Its name has numbers, too.
            name = Figure(case.removesuffix(self.layout), self.file, figures[0].rows, "the layer")
            yield Claim(page, f"| {' | '.join(['{}'] * (1 + len(figures)))} |", (name, *figures))
        means = (
            *(self.mean(of, each) for each in (*SCHEDULES, "best")),
            self.mean(of, "best", "tutel"),
            *(self.mean(of, each) for each in self.further),
        )
        yield Claim(page, f"| geometric mean | {' | '.join(['{}'] * len(means))} | - |", means)

    def mean(self, of: Results, variant: str, other: str = "") -> Figure:
        """How many times as fast a variant is as another, or as stock: the geometric mean of all layers."""
        what = f"{variant} over {other or 'stock'}: geometric mean"
        values = of.of_cases(self.file, variant, other)
        return of.computed(mean(values), ".2f", self.file, what, {variant, other or "stock"})

    def predicted(self, of: Results) -> list[Row]:
        """The newest prediction of `best` for each layer."""
        rows = newest(of.rows(f"{self.file}_predicted"), ("case", "variant"))
        return [row for row in rows if row["variant"] == "best"]

    def off(self, of: Results) -> tuple[Figure, Figure]:
        """How far predictions of `best` are off, on average and at worst."""
        rows = self.predicted(of)
        off = [abs(float(row["predicted_ms"]) / float(row["measured_ms"]) - 1) for row in rows]
        average, worst = (
            Figure(f"{share:.0%}", f"{self.file}_predicted", tuple(rows), f"best, off its prediction {what}")
            for share, what in ((fmean(off), "on average"), (max(off), "at worst"))
        )
        return average, worst


BEST_LAYOUT = Table("layer_best", ", all ranks")
PAPER = Table("layer", ", stock fixed", ("stock, best layout", "best, best layout"))


def claims(of: Results, page: str) -> Iterator[Claim]:
    """All of them.

    Args:
        of: the rows.
        page: the file that has them.

    Raises:
        NoRowError: a figure has no row.
    """
    yield from BEST_LAYOUT.rows(of, page)
    yield Claim(
        page,
        "In layers of the grid, `best` is off its prediction by {} on average and {} at worst",
        BEST_LAYOUT.off(of),
    )
    yield from PAPER.rows(of, page)
    best, layout, schedule = PAPER.mean(of, "best"), PAPER.mean(of, "deepspeed"), PAPER.mean(of, "best", "deepspeed")
    yield Claim(page, "gains {} there, of which {} is the layout and {} the schedule", (best, layout, schedule))
    yield Claim(page, "`fsmoe` is {} times as fast (the paper:", (PAPER.mean(of, "fsmoe", "tutel"),))
    kin = sorted((PAPER.mean(of, each, "tutel") for each in _KIN_OF_TUTEL), key=lambda each: float(each.text))
    yield Claim(page, "are {} to {} times as fast as `tutel` on average", (kin[0], kin[-1]))
    yield Claim(page, "`best` is {} times as fast as `fsmoe`", (PAPER.mean(of, "best", "fsmoe"),))
    yield Claim(page, "off its prediction by {} on average, {} at worst", PAPER.off(of))
    yield _beside_the_bound(of, page)


def _beside_the_bound(of: Results, page: str) -> Claim:
    rows = PAPER.predicted(of)
    over = [float(row["measured_ms"]) / float(row["bound_ms"]) for row in rows]
    figures = tuple(
        Figure(f"{value:.2f}", f"{PAPER.file}_predicted", tuple(rows), f"best, measured over the bound: {what}")
        for value, what in ((fmean(over), "mean"), (min(over), "least"), (max(over), "most"))
    )
    return Claim(page, "takes {} times as long as its busiest lane alone should, from {} to {}", figures)

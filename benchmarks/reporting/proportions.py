# SPDX-License-Identifier: Apache-2.0
"""What stock's step is spent on: systems that have a name, simulated, beside what was measured on the testbed.

Of what was measured, all-reduces, reduce-scatters and all-gathers are ZeRO's, of gradients and of parameters, since no
whole model has its attention or its experts split over ranks; they count as gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.reporting.figures import Claim, Figure, Results, shown
from benchmarks.reporting.rows import Row, line
from benchmarks.reporting.shares import PARTS, Shares

NAME, MEASURED = "proportions", "whole_operations"
PART_OF_OPERATION = {"all-to-all": "all_to_all", "experts": "experts"}
PART_OF_OPERATION |= dict.fromkeys(("all-reduce", "reduce-scatter", "all-gather", "reduce", "broadcast"), "gradients")
BEGIN, END = f"<!-- {NAME} -->", f"<!-- /{NAME} -->"
_HEADS = ("stock's step", "all-to-all", "AG + RS", "experts", "gradients", "rest", "communication")
_RATIOS = ("all-to-all / experts", "gradients / all-to-all", "nearest system")
_WORDS = ("stock's step", "nearest system", "gain of `best`", "to be like", "is made of")
"""The heads of columns that have no figures."""
KAPPAS = ("0", "0.45")


@dataclass(frozen=True)
class Step:
    """A step whose shares are known.

    Attributes:
        name: of the system or case.
        shares: what it is spent on.
        file: of its rows.
        rows: what the shares follow from.
    """

    name: str
    shares: Shares
    file: str
    rows: tuple[Row, ...]

    def figure(self, value: float | None, form: str, what: str) -> Figure:
        """A figure of this step; a dash where there is none."""
        return Figure("-" if value is None else shown(repr(value), form), self.file, self.rows, f"{self.name}: {what}")


@dataclass(frozen=True)
class Line:
    """A line of a table: cells with ``{}`` for each figure."""

    cells: tuple[str, ...]
    figures: tuple[Figure, ...]

    @property
    def text(self) -> str:
        """As it stands in a table."""
        return line(self.cells).format(*(each.text for each in self.figures))


def systems(of: Results) -> list[Step]:
    """Return the systems that have a name, by the newest row of each."""
    found = {row["system"]: row for row in of.rows(NAME) if row["kappa"] == KAPPAS[0]}
    return [Step(name, _shares(row), NAME, (row,)) for name, row in found.items()]


def printed(of: Results) -> list[Step]:
    """Return the same as the paper's Table 2 has them."""
    return [
        Step(f"the paper's Table 2: {each.name}", _shares(each.rows[0], "table_2_"), NAME, each.rows)
        for each in systems(of)
        if each.rows[0]["from_table_2"]
    ]


def measured(of: Results) -> list[Step]:
    """Return the cases in which stock's step was measured, by the newest rows of each; none before there are any."""
    if not (of.folder / f"{MEASURED}.csv").is_file():
        return []
    runs: dict[str, dict[tuple[str, str], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in of.rows(MEASURED):
        runs[row["case"]][row["date"], row["commit"]].append(row)
    steps = []
    for case, of_case in runs.items():
        rows = list(of_case.values())[-1]
        times_ms: dict[str, float] = defaultdict(float)
        for row in rows:
            times_ms[PART_OF_OPERATION.get(row["operation"], "rest")] += float(row["ms"])
        steps.append(Step(case, Shares.of(times_ms), MEASURED, tuple(rows)))
    return steps


def nearest(step: Step, others: Sequence[Step]) -> tuple[Step, float]:
    """Return the system from which a step differs in the least share of its time, and that share."""
    found = min(others, key=lambda each: step.shares.distance(each.shares))
    return found, step.shares.distance(found.shares)


def _shares(row: Row, prefix: str = "") -> Shares:
    return Shares(**{name: float(row[prefix + name]) for name in PARTS})


def shares_lines(of: Results) -> Iterator[Line]:
    """The first table: shares, of the systems, of the paper, and of what was measured with the system next to it."""
    named = systems(of)
    for step in (*named, *printed(of), *measured(of)):
        shares = step.shares
        figures = [step.figure(getattr(shares, name), ".0%", name) for name in (*PARTS, "communication")]
        figures.append(step.figure(shares.a2a_over_experts, ".2f", "all-to-all over experts"))
        figures.append(step.figure(shares.gradients_over_a2a, ".2f", "gradients over all-to-all"))
        last = ""
        if step.file == MEASURED:
            other, distance = nearest(step, named)
            last = f"{other.name} ({{}})"
            figures.append(step.figure(distance, ".0%", f"distance from {other.name}"))
        yield Line((step.name, *["{}"] * 8, last), tuple(figures))


def gains_lines(of: Results) -> Iterator[Line]:
    """The second table: what the best schedule gains over two others, for each kappa."""
    for name in dict.fromkeys(each.name for each in systems(of)):
        cell = partial(of.cell, NAME, form=".2f", system=name)
        figures = [cell(f"best_over_{other}", kappa=kappa) for kappa in KAPPAS for other in ("deepspeed", "tutel")]
        yield Line((name, *["{}"] * 4), tuple(figures))


def matching_lines(of: Results) -> Iterator[Line]:
    """The third table: for each system the measured case that would differ from it the least, if it had more tokens and
    other links and widths; how much of each; and what would differ then."""
    steps = measured(of)
    for system in systems(of) if steps else ():
        other = system.shares
        step = min(steps, key=lambda each: each.shares.matched_to(other).distance(other))
        wider, more = step.shares.change_to(other)
        figures = [
            Step(step.name, step.shares, MEASURED, (*step.rows, *system.rows)).figure(value, form, what)
            for value, form, what in (
                (wider, ".2f", f"bandwidth x H, times, to be like {system.name}"),
                (more, ".2f", f"tokens x k, times, to be like {system.name}"),
                (step.shares.matched_to(other).distance(other), ".0%", f"distance from {system.name} then"),
            )
        ]
        yield Line((system.name, step.name, *["{}"] * 3), tuple(figures))


_TABLES = (
    ((*_HEADS, *_RATIOS), shares_lines),
    (
        ("gain of `best`", *(f"over `{each}`, kappa {kappa}" for kappa in KAPPAS for each in ("deepspeed", "tutel"))),
        gains_lines,
    ),
    (("to be like", "is made of", "bandwidth x H, times", "tokens x k, times", "differs then"), matching_lines),
)


def tables(of: Results) -> str:
    """Return all tables as Markdown; one without lines is left out."""
    found = []
    for heads, lines in _TABLES:
        texts = [each.text for each in lines(of)]
        if texts:
            rule = ["---" if head in _WORDS else "---:" for head in heads]
            found.append("\n".join([line(heads), line(rule), *texts]))
    return "\n\n".join(found)


def claims(of: Results, page: str) -> Iterator[Claim]:
    """What a page says that has the tables."""
    for _, lines in _TABLES:
        for each in lines(of):
            yield Claim(page, line(each.cells), each.figures)


def write_into(page: Path, of: Results) -> None:
    """Write the tables of a page again, between its two marks."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{tables(of)}\n\n{END}{rest.split(END)[1]}")

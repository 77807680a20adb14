# SPDX-License-Identifier: Apache-2.0
"""Figures of the docs, each read from the rows it stands for, and what the docs say that no row stands for.

A claim is a stretch of a page with its figures read from rows, so that a row that says something else, or is not there,
shows; a test holds all claims against the pages, and finds figures that are in no claim. The claims are in
``claims.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.result_files import RESULTS
from benchmarks.reporting.rows import Comparison, Row, blocks_of, comparison, further_baselines, read

TOKEN = re.compile(r"(?<![\w.,/-])(?!95%)(?:\d+(?:\.\d+)?(?= times\b| ms\b|x\b|%)|\d+\.\d+)(?![\w.]*\d)")
"""What looks like a figure: with a decimal point, or so many times, ms or per cent. Versions have two
points, and 95% is what every interval is of."""


class NoRowError(ValueError):
    """Raised when there is no row for a figure, or none that can say it."""


@dataclass(frozen=True)
class Figure:
    """A figure as a page shows it, and what it is read from."""

    text: str
    file: str
    """Without ``.csv``."""
    rows: tuple[Row, ...]
    what: str
    """Case and variant, or how it follows from several rows."""
    is_ratio: bool = True
    """Whether it is the ratio of its row, if that has one."""


def shown(number: str, form: str, scale: float = 1.0) -> str:
    """A number of a row in a form such as ``.2f`` or ``.0%``, halves rounded up as on paper."""
    percent = form.endswith("%")
    value = Decimal(number) * Decimal(str(scale)) * (100 if percent else 1)
    rounded = value.quantize(Decimal(1).scaleb(-int(form[1:-1])), ROUND_HALF_UP)
    return f"{rounded}{'%' * percent}"


@dataclass(frozen=True)
class Claim:
    """A stretch of a page.

    Attributes:
        page: below the repository.
        template: the stretch, with ``{}`` for each figure; white space does not matter.
        figures: in their order.
    """

    page: str
    template: str
    figures: tuple[Figure, ...]

    @property
    def text(self) -> str:
        """As it has to stand on the page, each stretch of white space one space."""
        return plain(self.template.format(*(each.text for each in self.figures)))


def plain(text: str) -> str:
    """Text in which each stretch of white space is one space."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Excuse:
    """A stretch of a page, or all of a section, with figures that no row stands for.

    Attributes:
        page: below the repository.
        where: the stretch; or, behind a ``#``, the heading of the section.
        why: what its figures are.
    """

    page: str
    where: str
    why: str


class Results:
    """Looks rows up; of several alike the newest counts."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self.rows = cache(self._read)

    def _read(self, file: str) -> list[Row]:
        path = self.folder / f"{file}.csv"
        if not path.is_file():
            raise NoRowError(f"{file}.csv: there is no such file in {self.folder}")
        return read(path)

    def comparison(self, file: str, over: str = "") -> Comparison:
        """All of a file."""
        return comparison(file, self.rows(file), over)

    def find(self, file: str, settings: dict[str, Any] | None = None, **where: str) -> Row:
        """The newest row with these values in its columns and these among its settings.

        Raises:
            NoRowError: there is none.
        """
        wanted = (settings or {}).items()
        for row in reversed(self.rows(file)):
            if all((row.get(column) or "") == value for column, value in where.items()) and (
                not wanted or wanted <= json.loads(row["settings"]).items()
            ):
                return row
        raise NoRowError(f"{file}.csv has no row with {where | (settings or {})}")

    # ---- figures

    def cell(self, file: str, column: str, form: str, scale: float = 1.0, **where: str) -> Figure:
        """A number of a row, in a form such as ``.2f``."""
        row = self.find(file, **where)
        what = f"{column} of {', '.join(filter(None, where.values()))}"
        return Figure(shown(row[column], form, scale), file, (row,), what, column == "ratio")

    def ratio(self, file: str, case: str, variant: str, form: str = ".2f", over: str = "", **settings: Any) -> Figure:
        """How many times as fast as the baseline."""
        row = self.find(file, settings, case=case, variant=variant, over=over)
        return Figure(shown(row["ratio"], form), file, (row,), f"{case}: {variant}")

    def interval(
        self, file: str, case: str, variant: str, form: str = ".2f", over: str = "", **settings: Any
    ) -> Figure:
        """The ends of its interval, as "1.01 to 1.19".

        Raises:
            NoRowError: the row has none, being of too few blocks.
        """
        row = self.find(file, settings, case=case, variant=variant, over=over)
        if interval_of(file, row) is None:
            raise NoRowError(f"{file}.csv, {case}: {variant} has no interval: {blocks_words(file, row)}")
        ends = " to ".join(shown(row[end], form) for end in ("ratio_low", "ratio_high"))
        return Figure(ends, file, (row,), f"{case}: {variant}, 95% interval")

    def ratio_in(self, file: str, case: str, variant: str, **settings: Any) -> Figure:
        """The ratio with its interval, as "1.08 (1.01 to 1.19)"."""
        one, ends = (each(file, case, variant, **settings) for each in (self.ratio, self.interval))
        return Figure(f"{one.text} ({ends.text})", file, one.rows, one.what)

    def over(self, file: str, case: str, variant: str, other: str, form: str = ".2f") -> Figure:
        """How many times as fast as another variant that is not the baseline, in the newest run with that one: a
        quotient, so without an interval."""
        of_other = self.find(file, case=case, variant=other, over="")
        rows = self.find(file, case=case, variant=variant, over="", date=of_other["date"]), of_other
        quotient = float(rows[0]["ratio"]) / float(rows[1]["ratio"])
        return Figure(format(quotient, form), file, rows, f"{case}: {variant} over {other}")

    def of_cases(self, file: str, variant: str, other: str = "") -> list[float]:
        """How many times as fast a variant is as another, or as the baseline, case by case.

        Ratios over another variant are those of steps that were its neighbours, where rows have them.
        """
        found = self.comparison(file)
        if other in further_baselines(self.rows(file)):
            paired = self.comparison(file, other)
            if set(found.cases) <= {case for case, name in paired.rows if name == variant}:
                return [paired.ratio(case, variant) for case in found.cases]
        return [found.ratio(case, variant) / (found.ratio(case, other) if other else 1) for case in found.cases]

    def computed(self, value: float | str, form: str, file: str, what: str, variants: Iterable[str] = ()) -> Figure:
        """What was computed of all rows of a file, or of those of some variants."""
        wanted = set(variants)
        rows = [row for row in self.rows(file) if not wanted or row.get("variant") in wanted]
        text = value if isinstance(value, str) else format(value, form)
        return Figure(text, file, tuple({(row.get("case"), row.get("variant")): row for row in rows}.values()), what)


def mean(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(fmean(map(math.log, values)))


def interval_of(file: str, row: Row) -> tuple[float, float] | None:
    """The ends of a row's interval, or ``None``."""
    return Comparison(file, "", (), (), {("", ""): row}).interval("", "")


def blocks_words(file: str, row: Row) -> str:
    """How many blocks a row is of. Older rows have the number of steps."""
    if row.get("blocks"):
        return f"{row['blocks']} blocks"
    return f"{row['steps']} steps" + ("" if interval_of(file, row) else f" in {blocks_of(file, row)} blocks")


# ---- pages


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading."""

    page: str
    heading: str
    text: str
    """Plain."""
    shown: str
    """The same with code blanked out, letter by letter."""


def sections(page: str, text: str) -> list[Section]:
    """The sections of a page, without blocks of code, which show what a program says."""
    found, heading, lines, fenced = [], "", [], False
    for line in [*text.splitlines(), "# end"]:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif line.startswith("#") and not fenced:
            whole = plain(" ".join(lines))
            blanked = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", lambda code: " " * len(code[0]), whole)
            found.append(Section(page, heading, whole, blanked))
            heading, lines = line.strip("# "), []
        elif not fenced:
            lines.append(line)
    return [each for each in found if each.text]


def unexplained(section: Section, claims: Sequence[Claim], excuses: Sequence[Excuse]) -> list[str]:
    """The figures of a section that are in no claim and are not excused, each with the words around it."""
    covered: set[int] = set()
    stretches = [each.text for each in claims if each.page == section.page]
    stretches += [plain(each.where) for each in excuses if each.page == section.page and each.where[0] != "#"]
    if any((each.page, each.where) == (section.page, f"# {section.heading}") for each in excuses):
        return []
    for stretch in stretches:
        start = section.text.find(stretch)
        while start >= 0:
            covered.update(range(start, start + len(stretch)))
            start = section.text.find(stretch, start + 1)
    return [
        section.text[max(0, found.start() - 40) : found.end() + 20]
        for found in TOKEN.finditer(section.shown)
        if found.start() not in covered
    ]

# SPDX-License-Identifier: Apache-2.0
"""One page that says of every figure in README and docs/ which row it is read from, and how that was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE
from benchmarks.reporting.claims import NOT_MEASURED, claims
from benchmarks.reporting.figures import Figure, Results, blocks_words, interval_of
from benchmarks.reporting.rows import Row, line

NAME = "README.md"
"""Of the file, in the folder of the rows."""
_HEAD = """# Where the figures come from

Every figure that `README.md` and the pages of `docs/` give of a measurement, with the row of this folder it is read
from. Made by `python -m benchmarks.report --page`; do not edit it. A test reads all of these again
(`tests/benchmarks/test_figures.py`). The numbers in brackets are the machines and versions at the end. An interval is
of 95% over blocks of steps, and there is none of fewer than ten blocks. All is of processors and emulated links but for
what `benchmarks/notes/gpus.md` has of one GPU.
"""
_WHERE_MEASURED = ("hardware", "python", "torch", "deepspeed", "ds_fsmoe", "allocator")


def page(of: Results) -> str:
    """Return the page as Markdown.

    Args:
        of: the rows.

    Raises:
        NoRowError: a figure has no row.
    """
    by_page: dict[str, list[Figure]] = {}
    for claim in claims(of):
        by_page.setdefault(claim.page, []).extend(claim.figures)
    places: dict[tuple[str, ...], int] = {}
    lines = [_HEAD]
    for name, figures in by_page.items():
        lines += [f"## {name}", "", line(["figure", "of", "rows of", "interval", "commit, day, place"])]
        # A figure that a page gives twice has one line.
        once = {(each.text, each.file, each.what): each for each in figures}.values()
        lines += [line(["---"] * 5), *(line(_cells(each, places)) for each in once), ""]
    lines += ["## Machines and versions", ""]
    lines += [f"{number}. {_words(place)}" for place, number in places.items()]
    lines += ["", "## Figures that no row stands for", "", line(["page", "where", "what they are"]), line(["---"] * 3)]
    lines += [line([each.page, _escaped(each.where.lstrip("# ")), each.why]) for each in NOT_MEASURED]
    return "\n".join(lines) + "\n"


def _cells(figure: Figure, places: dict[tuple[str, ...], int]) -> list[str]:
    rows = figure.rows
    for row in rows:
        places.setdefault(_place(row), len(places) + 1)
    # In one pair of brackets: two in a row are a link in Markdown.
    at = f" [{', '.join(str(number) for number in sorted({places[_place(row)] for row in rows}))}]"
    file = f"{figure.file}.csv" + (f", {len(rows)} rows" if len(rows) > 1 else "")
    commits, days = _some(row["commit"] for row in rows), _some(row["date"].split()[0] for row in rows)
    return [_escaped(figure.text), _escaped(figure.what), file, _interval(figure), f"{commits}, {days}{at}"]


def _interval(figure: Figure) -> str:
    if len(figure.rows) > 1:
        return "none: it follows from several rows"
    (row,) = figure.rows
    if "ratio" not in row or not figure.is_ratio:
        return "none: no ratio of times"
    ends = interval_of(figure.file, row)
    blocks = blocks_words(figure.file, row)
    if ends is None:
        return f"none: {blocks}, fewer than {MIN_BLOCKS_TO_JUDGE}"
    noisy = ", noisy" if row.get("noisy") == "True" else ""
    return f"{ends[0]:.2f} to {ends[1]:.2f} ({blocks}{noisy})"


def _place(row: Row) -> tuple[str, ...]:
    return tuple(row.get(column) or "" for column in _WHERE_MEASURED)


def _words(place: Sequence[str]) -> str:
    hardware, python, torch, deepspeed, ours, allocator = place
    versions = f"Python {python}, torch {torch}, DeepSpeed {deepspeed}, ds_fsmoe {ours}"
    return f"{hardware}; {versions}; {allocator or 'the allocator as it was'}"


def _some(values: Iterable[str]) -> str:
    found = sorted(set(values))
    return " ".join(found[:2]) + (f" and {len(found) - 2} more" if len(found) > 2 else "")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")

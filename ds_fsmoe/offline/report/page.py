# SPDX-License-Identifier: Apache-2.0
"""Builds one self-contained HTML page of text, tables and interactive charts, with the program that draws them. The
report commands call it.

The shown data comes from untrusted files. It enters the page as escaped text or as JSON. The page allows only its own
program, and no address.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ds_fsmoe.files.runs import Run
from ds_fsmoe.offline.report.charts import Chart, needs
from ds_fsmoe.offline.report.palette import DARK, LIGHT

if TYPE_CHECKING:
    from jinja2 import Environment

_T = TypeVar("_T")
TEMPLATES = Path(__file__).parent / "templates"
_CANNOT_BE_SHOWN = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)


@dataclass
class Section:
    """Holds a part of the page under a heading, from top to bottom."""

    title: str
    parts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """Return the anchor of the section for the table of contents."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


class Page:
    """Holds a page of sections with a table of contents.

    Args:
        title: the title of the page.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._sections: list[Section] = []
        self._open: Section | None = None

    def section(self, write: Callable[..., _T | None], *about: Any) -> _T | None:
        """Call a function that writes a section of the page. If its data are contradictory, the page has a warning
        instead.

        Args:
            write: a function of this page and ``about``; its name appears in the warning.
            about: runs, or data from them.

        Returns:
            The function's result; ``None`` after a warning.
        """
        before = [(each, len(each.parts)) for each in self._sections]
        was_open = self._open
        try:
            return write(self, *about)
        except _CANNOT_BE_SHOWN as error:
            self._sections = [each for each, _ in before]
            for each, length in before:
                del each.parts[length:]
            self._open = was_open
            what = write.__name__.strip("_").replace("_", " ")
            self.warn(f"{_names(about)}: the record cannot be shown ({what}): {type(error).__name__}: {error}")
            return None

    def heading(self, words: str) -> None:
        """Begin a section, or continue the one with that title."""
        self._open = self._titled(words)

    def warn(self, words: str) -> None:
        """Write a sentence about a missing or wrong part, near the top."""
        self._titled(MISSING).parts.append({"kind": "paragraph", "words": words, "is_warning": True})

    def paragraph(self, words: str, is_warning: bool = False) -> None:
        """Write a short paragraph; a warning stands out."""
        self._add("paragraph", words=words, is_warning=is_warning)

    def subheading(self, words: str) -> None:
        """Write a heading within a section."""
        self._add("subheading", words=words)

    def points(self, sentences: Iterable[str]) -> None:
        """Write sentences as a list."""
        if found := list(sentences):
            self._add("points", sentences=found)

    def code(self, words: str) -> None:
        """Write verbatim text, such as a command line."""
        self._add("code", words=words)

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[Any]], is_text: bool = False) -> None:
        """Write a table. One of words has left-aligned columns with wrapped cells. Any other has only the first
        column left-aligned, and scrolls on narrow screens.
        """
        self._add("table", heads=heads, rows=[[_text(cell) for cell in row] for row in rows], is_text=is_text)

    def tiles(self, values: Iterable[tuple[str, str]]) -> None:
        """Write pairs of (value, description) in large type."""
        self._add("tiles", values=list(values))

    def chart(self, chart: Chart) -> None:
        """Write a chart of the page's width; a broad one scrolls on narrow screens."""
        self._add("charts", charts=[chart], is_grid=False)

    def charts(self, charts: Sequence[Chart]) -> None:
        """Write small charts side by side, as many as fit."""
        if charts:
            self._add("charts", charts=list(charts), is_grid=True)

    def html(self) -> str:
        """Return the page as HTML.

        Raises:
            ModuleNotFoundError: a package is missing; the message says how to install it.
        """
        # What is missing is found in any part, and said ahead of all that could be misread without.
        places = {CONCLUSION: 0, MISSING: 1}
        ordered = sorted(self._sections, key=lambda each: places.get(each.title, len(places)))
        sections = [each for each in ordered if each.parts]
        has_charts = any(part["kind"] == "charts" for each in sections for part in each.parts)
        scripts = [(TEMPLATES / "page.js").read_text(encoding="utf-8")]
        if has_charts:
            scripts = [_chart_program(), *scripts]
        return (
            environment()
            .get_template("page.html")
            .render(
                title=self._title,
                light=LIGHT,
                dark=DARK,
                sections=sections,
                style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
                scripts=scripts,
                hashes=[_hash(each) for each in scripts],
            )
        )

    def _add(self, kind: str, **values: Any) -> None:
        (self._open or self._titled(CONCLUSION)).parts.append({"kind": kind, **values})

    def _titled(self, title: str) -> Section:
        for each in self._sections:
            if each.title == title:
                return each
        self._sections.append(Section(title))
        return self._sections[-1]


CONCLUSION, MISSING = "Conclusion", "What is missing"


@cache
def environment() -> Environment:
    """Return the jinja2 environment that renders the templates, with escaping.

    Raises:
        ModuleNotFoundError: jinja2 is missing; the message says how to install it.
    """
    with needs("jinja2"):
        import jinja2
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["finite"] = finite
    return made


@cache
def _chart_program() -> str:
    with needs("vl-convert-python"):
        import vl_convert
    return vl_convert.javascript_bundle()


def _hash(script: str) -> str:
    """Return the hash of a script for the page's content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def finite(value: Any) -> Any:
    """Return a value for JSON, with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _names(about: Sequence[Any]) -> str:
    runs = [each for one in about for each in (one if isinstance(one, (list, tuple)) else (one,))]
    return " and ".join(each.name for each in runs if isinstance(each, Run)) or "this run"

# SPDX-License-Identifier: Apache-2.0
"""What people read has the words of the config, such as ``num_chunks``, and no older ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OLD = re.compile(r"\b(pipeline_degree|esp_size|degrees?|uncut)\b")
# Arguments and keys of Python, by the name that a script writes.
ALLOWED = {"MOELayer: pipeline_degree = "}


def printed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts of a file that are sentences, heads or names of measures: keys of data have no space or slash."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None) if isinstance(node, documented) else None
        for each in body or ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                docstrings.add(id(each.value))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_text and {" ", "/"} & set(node.value):
            yield node.lineno, node.value


def files() -> list[Path]:
    return [file for folder in ("ds_fsmoe", "examples") for file in (ROOT / folder).rglob("*.py")]


def test_no_text_that_is_printed_has_a_word_of_before() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in files()
        for line, text in printed(ast.parse(file.read_text()))
        if OLD.search(text) and text not in ALLOWED
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ['x = "in degree 2"', 'y = f"{z}/degree"', 'x = f"{y} esp_size {z}"', 'print("run uncut")']
)
def test_a_text_with_such_a_word_is_found(line: str) -> None:
    assert any(OLD.search(text) for _, text in printed(ast.parse(f'"""Doc of a degree."""\nx = {line}')))


def test_pages_that_quote_logs_and_errors_have_no_word_of_before() -> None:
    """In the blocks that show what is printed; a block that shows a config may have both words."""
    found = []
    for page in (*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"):
        if page.name in ("planning.md", "scale.md", "extend.md", "config.md", "glossary.md"):
            continue
        language = None
        for line in page.read_text().splitlines():
            if fence := re.match(r" *```(\w*)", line):
                language = fence[1] if language is None else None
            elif language in ("", "text") and OLD.search(line):
                found.append(f"{page.relative_to(ROOT)}: {line}")
    assert found == []

# SPDX-License-Identifier: Apache-2.0
"""No name and no message of the package has a word that the glossary lists as no longer said, or an old word of the
config."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.pages import blocks_of
from tests.sources import FILES, ROOT, named, tree

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

# Names that hold such a word rightly, each with its reason.
NAMES: dict[str, str] = {
    "cut": "key of a checkpoint's manifest",
    "cuts": "key of a checkpoint's manifest",
    "pieces": "key of a checkpoint's index",
    "SavedPieces": "reads fsmoe_pieces.json",
    "wires": "key of version 0.2.0; alias: comm_dtype",
    "crossings": "key of recorded costs",
    "bfloat16_wire": "module of version 0.2.0, by which configs name the hook",
    "Wires": "class of the builder of version 0.2.0",
    "pays_within": "key of version 0.2.0",
    "look_again": "public name of version 0.2.0",
    "says_entropy": "a gate of a user may have it",
    "fullest_at_home": "a field of what ds_fsmoe.inference records",
    "homes": "a policy of a user may ask for it",
}


def no_longer_said() -> dict[str, set[str]]:
    """Return the words of the glossary's column, as {"name" or "message": words}.

    The column's cells look like ``cut, uncut; in names: half; *a phrase of words*``. Plain words count for both, those
    behind "in names:" for names alone, and phrases between asterisks for messages alone.
    """
    found: dict[str, set[str]] = {"name": set(), "message": set()}
    rows = [
        line.split("|") for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("|")
    ]
    at = next(index for row in rows for index, cell in enumerate(row) if cell.strip() == "no longer said")
    for row in rows:
        if len(row) <= at or row[at].strip() in ("no longer said", "") or set(row[at].strip()) <= {"-"}:
            continue
        cell = row[at].strip()
        for phrase in re.findall(r"\*([^*]+)\*", cell):
            found["message"].add(phrase)
        for part in re.sub(r"\*[^*]+\*", "", cell).split(";"):
            only_names = part.strip().startswith("in names:")
            words = {each.strip() for each in part.replace("in names:", "").split(",") if each.strip()}
            found["name"] |= {each for each in words if " " not in each}
            if not only_names:
                found["message"] |= words
    return found


SAID = no_longer_said()


def names_in(tree: ast.AST, is_inside: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what others can see: classes, functions, methods, fields, attributes and constants.

    Parameters and local names are left out, but for those of public functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not is_inside:
                yield node.lineno, node.name
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    arguments = node.args
                    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                        yield each.lineno, each.arg
            yield from names_in(node, is_inside or not isinstance(node, ast.ClassDef))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for each in (inner for target in targets for inner in ast.walk(target)):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and not is_inside:
                    yield each.lineno, each.id
                elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    yield each.lineno, each.attr
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from names_in(node, is_inside)


# Texts that hold such a word rightly: old names that are read.
TEXTS = ("    Wires = CommDtype",)


def texts_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each string with a space or a slash, docstrings and descriptions of fields left out."""
    apart = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart
        if is_text and {" ", "/"} & set(node.value):
            yield node.lineno, node.value


def words_of(name: str) -> set[str]:
    return {each.lower() for each in WORD.findall(name)}


def test_no_name_has_a_word_that_is_no_longer_said_and_every_exception_is_needed() -> None:
    every = [(path, *each) for path in FILES for each in ((0, path.stem), *names_in(tree(path)))]
    said = [(path, line, name) for path, line, name in every if words_of(name) & SAID["name"]]
    assert [f"{named(path)}:{line} {name}" for path, line, name in said if name not in NAMES] == []
    assert set(NAMES) == {name for _, _, name in said}


def test_no_message_has_a_word_that_is_no_longer_said_and_no_text_that_is_printed_a_word_of_before() -> None:
    """A message is a sentence or a part of one: keys of data have no space, and heads and names of measures a slash."""
    words = sorted(SAID["message"], key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b", re.IGNORECASE)
    found = []
    for path in (*FILES, *(ROOT / "examples").rglob("*.py")):
        is_ours = path in FILES
        for line, text in texts_in(tree(path)):
            is_message = is_ours and " " in text and not text.startswith(TEXTS)
            if (is_message and pattern.search(text)) or (OLD.search(text) and text not in ALLOWED):
                found.append(f"{path.relative_to(ROOT)}:{line} {text}")
    assert found == []
    for code in ('x = "in degree 2"', 'y = f"{z}/degree"', 'x = f"{y} esp_size {z}"', 'print("run uncut")'):
        assert any(OLD.search(text) for _, text in texts_in(ast.parse(code))), code


# ---- words of the config


OLD = re.compile(r"\b(pipeline_degree|esp_size|degrees?|uncut)\b")
# Arguments and keys of Python, by the name that a script writes.
ALLOWED = {"MOELayer: pipeline_degree = "}


def test_pages_that_quote_logs_and_errors_have_no_word_of_before() -> None:
    """In the blocks that show what is printed; a block that shows a config may have both words."""
    apart = ("planning.md", "scale.md", "extend.md", "config.md", "glossary.md")
    found = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in (*(ROOT / "docs").rglob("*.md"), ROOT / "README.md")
        if page.name not in apart
        for language, text in blocks_of(page.read_text())
        if language in ("", "text")
        for line in text.splitlines()
        if OLD.search(line)
    ]
    assert found == []

# SPDX-License-Identifier: Apache-2.0
"""Docstrings of the package: a function's begins with a verb and names its arguments, and each module has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "ds_fsmoe").rglob("*.py"))

_WORDS = """
Abandon Add Allow Answer Append Apply Arrange Ask Assign Attach Begin Broadcast Build Call Cancel Change Check
Choose Claim Clip Compare Compile Compute Connect Continue Convert Copy Count Create Decide Describe
Distribute Divide Draw Drop End Enlarge Exchange Extend Fill Find Finish Fit Flush Free Gather Import
Initialize Install Issue Iterate Join Keep Leave Link List Load Log Make Map Mark Measure Merge Move Number
Open Pack Parse Partition Pass Pause Place Plan Predict Prepare Print Queue Raise Read Receive Record Reduce
Refresh Refuse Register Release Remove Rename Reorder Repeat Replace Replay Report Reserve Reshape Restore
Return Route Run Save Scale Score Send Set Share Show Simulate Skip Split Start Stop Store Sum Tag Take Time
Try Turn Undo Unpickle Update Use Validate Vote Wait Warn Watch Wrap Write Yield
"""
VERBS = set(_WORDS.split())
"""The first words of functions' docstrings. A further one is a verb in the imperative that says more than "do"."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def documented(path: Path) -> Iterator[tuple[Function, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function) and (text := ast.get_docstring(node)):
            yield node, text


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "ds_fsmoe"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_function_s_docstring_begins_with_a_verb(path: Path) -> None:
    words = {f"{each.lineno} {each.name}": first(text) for each, text in documented(path)}
    others = {name: word for name, word in words.items() if word not in VERBS}
    assert others == {}


def first(text: str) -> str:
    return text.split()[0].rstrip(",.:;")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_has_a_docstring_that_is_a_sentence(path: Path) -> None:
    tree = ast.parse(path.read_text())
    text = ast.get_docstring(tree) or ""
    assert not tree.body or "." in text


ENTRY = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):(?= |$)")


def arguments_in(text: str) -> set[str]:
    """Return the names under ``Args:``."""
    found: set[str] = set()
    if "\nArgs:\n" not in f"\n{text}":
        return found
    for line in f"\n{text}".split("\nArgs:\n")[1].splitlines():
        if line and not line.startswith(" "):
            break
        if match := ENTRY.match(line):
            found |= {each.strip().lstrip("*") for each in match[1].split(",")}
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_arguments_in_a_docstring_are_the_function_s(path: Path) -> None:
    wrong = {}
    for each, text in documented(path):
        of = each.args
        has = {arg.arg for arg in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg) if arg is not None}
        if unknown := arguments_in(text) - has:
            wrong[f"{each.lineno} {each.name}"] = unknown
    assert wrong == {}

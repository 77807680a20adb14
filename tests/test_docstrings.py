# SPDX-License-Identifier: Apache-2.0
"""Docstrings of the package: a function's begins with a verb and names its arguments, and each module has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.sources import FILES, named, tree

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


def documented() -> Iterator[tuple[str, Function, str]]:
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, Function) and (text := ast.get_docstring(node)):
                yield f"{named(path)}:{node.lineno} {node.name}", node, text


def test_a_functions_docstring_begins_with_a_verb() -> None:
    words = {name: text.split()[0].rstrip(",.:;") for name, _, text in documented()}
    assert len(words) > 2000
    assert {name: word for name, word in words.items() if word not in VERBS} == {}


def test_a_module_has_a_docstring_that_is_a_sentence() -> None:
    texts = {named(path): ast.get_docstring(tree(path)) or "" for path in FILES if tree(path).body}
    assert {name: text for name, text in texts.items() if "." not in text} == {}


ENTRY = re.compile(r"(?m)^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):(?= |$)")


def test_arguments_in_a_docstring_are_the_functions() -> None:
    wrong = {}
    for name, function, text in documented():
        of = function.args
        has = {arg.arg for arg in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg) if arg is not None}
        # Up to the next line that is not indented.
        for entries in re.findall(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", text):
            names = {each.strip(" *") for line in ENTRY.findall(entries) for each in line.split(",")}
            if unknown := names - has:
                wrong[name] = unknown
    assert wrong == {}

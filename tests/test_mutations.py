# SPDX-License-Identifier: Apache-2.0
"""The tool that breaks the package in one place at a time: what it changes, what it leaves alone, and what it runs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import FILES, ROOT
from tools.mutations import Mutation, drawn, known, mutations_of

CHANGES = {
    "if a < b: return a": "if (a <= b): return a",
    "if a and b: return a": "if (b): return a",
    "return a[i, 2]": "return a[0, 2]",
    "total += a": "total = a",
    "return max(a, b)": "return min(a, b)",
    "return x.clamp(max=1.0)": "return (x)",
    "wait(a)": "pass",
    "return a + b": "return (a - b)",
    "return a * 2": "return (a)",
    "return not a": "return (a)",
    "return 0.5": "return 0.515",
}


def test_a_function_is_broken_in_one_place() -> None:
    for before, after in CHANGES.items():
        source = f'def f(a, b):\n    "ü"\n    {before}\n'
        changed = [each.applied(source) for each in mutations_of("f.py", source)]
        assert source.replace(before, after) in changed, before


def test_words_annotations_and_what_is_no_function_stay() -> None:
    source = """
LIMIT = 3
def f(a: Callable[[int], None] = 4) -> Tuple[a, b]:
    "Return 1."
    assert a < 5
    log.info("so many: %d", 6)
    x: Callable[[int], int]
    raise ValueError(f"{a + 1}")
"""
    assert mutations_of("f.py", source) == []


@pytest.mark.long
def test_a_seed_draws_the_same_mutations_of_all_kinds_again_and_each_is_python_and_changes_something() -> None:
    mutations = drawn("1", 200)
    assert mutations == drawn("1", 200)
    assert len({each.name for each in mutations}) == 200
    assert len({each.kind for each in mutations}) >= 12
    assert len({each.path for each in mutations}) > len(FILES) / 4
    assert [each.name for each in mutations if not changes_something(each)] == []


def changes_something(mutation: Mutation) -> bool:
    source = (ROOT / mutation.path).read_text()
    return ast.dump(ast.parse(mutation.applied(source))) != ast.dump(ast.parse(source))


def test_every_known_mutation_is_of_a_function_of_today_and_changes_something() -> None:
    mutations = known()
    assert len({each.kind for each in mutations}) == len(mutations) > 0
    assert [each.kind for each in mutations if not changes_something(each)] == []
    for each in mutations:
        nodes = ast.walk(ast.parse((ROOT / each.path).read_text()))
        named = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == each.function]
        assert any(node.lineno < each.start[0] <= (node.end_lineno or 0) for node in named), each.kind


@pytest.mark.long
def test_the_functions_that_a_test_calls_are_seen_on_its_ranks_too(tmp_path: Path) -> None:
    spread = "tests/test_gradient_norm.py::test_the_norm_does_not_depend_on_how_experts_are_spread"
    names = spread, "tests/test_wires.py::test_a_row_travels_as_its_width_and_four_bytes"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.reached", "-p", "no:cacheprovider", *names]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"DS_FSMOE_REACHED": str(tmp_path)}, check=True)
    (file,) = tmp_path.glob("*.jsonl")
    rows = {row["test"]: row["calls"] for row in map(json.loads, file.read_text().splitlines())}
    assert "ds_fsmoe/gradients/norm.py correct_norm" in rows[spread]
    assert "ds_fsmoe/layer/runtime.py pipeline" in rows[spread]
    assert rows[names[1]]
    assert "ds_fsmoe/gradients/norm.py correct_norm" not in rows[names[1]]

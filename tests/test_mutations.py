# SPDX-License-Identifier: Apache-2.0
"""The tool that breaks the package in one place at a time: what it changes, what it leaves alone, and what it runs."""

from __future__ import annotations

import ast

import pytest

from tests.sources import FILES, ROOT
from tools.mutations import drawn, mutations_of, nearest

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


@pytest.mark.parametrize("before", CHANGES)
def test_a_function_is_broken_in_one_place(before: str) -> None:
    source = f'def f(a, b):\n    "ü"\n    {before}\n'
    changed = [each.applied(source) for each in mutations_of("f.py", source)]
    assert f'def f(a, b):\n    "ü"\n    {CHANGES[before]}\n' in changed


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
    for each in mutations:
        source = (ROOT / each.path).read_text()
        assert ast.dump(ast.parse(each.applied(source))) != ast.dump(ast.parse(source)), each.name


def test_the_files_nearest_to_a_module_are_run_first() -> None:
    files = nearest("ds_fsmoe/planning/cost.py", "fit")
    assert "tests/planning/test_cost.py" in files[:4]
    assert not any(each.startswith("tests/benchmarks") for each in files)

# SPDX-License-Identifier: Apache-2.0
"""What runs only at night has a sample in the gates; and the row that a night ends with."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.nightly import counted, row

TESTS = Path(__file__).resolve().parent
# File -> why all of it is slow.
WITHOUT = {"benchmarks/test_bench_smoke.py": "benchmarks of a minute and more each, on a bed that root alone can make"}


def whole(source: str) -> tuple[int, int]:
    """How many test functions are slow as a whole, and how many are not."""
    tests = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]
    tests = [each for each in tests if each.name.startswith("test_")]
    slow = [each for each in tests if any(ast.unparse(mark) == "pytest.mark.slow" for mark in each.decorator_list)]
    return len(slow), len(tests) - len(slow)


def test_every_file_with_slow_tests_has_others_that_run_in_a_gate() -> None:
    counts = {file.relative_to(TESTS).as_posix(): whole(file.read_text()) for file in TESTS.rglob("test_*.py")}
    assert len(counts) > 200
    assert {name for name, (slow, others) in counts.items() if slow and not others} == set(WITHOUT)


def test_a_function_that_is_slow_as_a_whole_is_known_from_a_sampled_one() -> None:
    slow = "@pytest.mark.slow\ndef test_a(): ...\n"
    sampled = "@sampled('x', [1, 2], kept=[0])\ndef test_b(x): ...\n"
    assert whole(slow) == (1, 0)
    assert whole(slow + sampled) == (1, 1)


def test_the_row_of_a_night_counts_what_failed_and_names_its_files(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>')
    found = {"test_a.py": counted(report), "test_b.py": counted(tmp_path / "missing.xml")}
    assert found["test_b.py"] == {"tests": 0, "failures": 0, "errors": 1, "skipped": 0}
    found["test_c.py"] = {"tests": 4, "failures": 0, "errors": 0, "skipped": 0}
    assert row("abc", found).endswith(" | 5 | 3 | 1 | test_a.py, test_b.py |")

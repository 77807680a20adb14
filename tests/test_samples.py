# SPDX-License-Identifier: Apache-2.0
"""What runs only at night has a sample in the gates, drawn anew each day; and the row that a night ends with."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import samples
from tests.samples import SEED, draw, sampled
from tools.nightly import counted, row

TESTS = Path(__file__).resolve().parent


def slow_functions(file: Path) -> list[str]:
    """Return the test functions of a file that are slow as a whole."""
    text = file.read_text()
    tree = ast.parse(text if "@pytest.mark.slow" in text else "")
    tests = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    return [each.name for each in tests if "pytest.mark.slow" in map(ast.unparse, each.decorator_list)]


def test_no_function_runs_at_night_alone() -> None:
    found = {file.relative_to(TESTS).as_posix(): slow_functions(file) for file in TESTS.rglob("test_*.py")}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_every_file_of_tests_is_in_the_table_of_laws_and_no_other() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", (TESTS / "README.md").read_text()))
    files = {file.relative_to(TESTS).as_posix() for file in TESTS.rglob("test_*.py")}
    assert files - named == set()
    assert {name for name in named if not (TESTS / name).exists()} == {"tests/samples.py"}


def indices(mark: pytest.MarkDecorator) -> list[int]:
    """Return which values of a sample run."""
    return [index for index, each in enumerate(mark.args[1]) if not hasattr(each, "marks")]


def of_day(monkeypatch: pytest.MonkeyPatch, day: str) -> list[int]:
    monkeypatch.setenv(SEED, day)
    return indices(sampled("x", range(100, 120), kept=(3, -1), drawn=2))


def test_a_sample_keeps_what_it_has_to_and_draws_others_anew_each_day(monkeypatch: pytest.MonkeyPatch) -> None:
    days = [of_day(monkeypatch, f"day {number}") for number in range(40)]
    assert all(len(each) == 4 and {3, 19} <= set(each) for each in days)
    assert days == [of_day(monkeypatch, f"day {number}") for number in range(40)], "a seed draws the same again"
    assert set().union(*days) == set(range(20)), "of 40 days each value has one"
    assert indices(sampled("x", [1, 2], drawn=5)) == [0, 1], "all where there are few"
    assert sorted(draw("a", [1, 2], 5)) == [1, 2]
    with pytest.raises(IndexError):
        sampled("x", [1, 2], kept=[2])


class Item:
    """A test with marks."""

    def __init__(self, name: str, *marks: pytest.Mark) -> None:
        self.nodeid, self.marks = name, list(marks)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((each for each in self.marks if each.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def test_of_a_daily_group_so_many_in_a_file_are_long_and_all_others_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set()
    for number in range(30):
        monkeypatch.setenv(SEED, f"day {number}")
        mark = pytest.mark.daily("group", 2).mark
        items = [Item(f"{file}.py::test_{each}", mark) for file in "xy" for each in "abcde"]
        other, slow = Item("x.py::other"), Item("x.py::slow", mark, pytest.mark.slow.mark)
        samples.draw_daily([*items, other, slow])
        long = {each.nodeid for each in items if each.get_closest_marker("long")}
        assert sorted(each[0] for each in long) == ["x", "x", "y", "y"]
        assert all(each.nodeid in long or each.get_closest_marker("slow") for each in items)
        assert other.marks == []
        assert not slow.get_closest_marker("long")
        drawn |= long
    assert len(drawn) == 10


def test_the_row_of_a_night_counts_what_failed_and_names_its_files(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>')
    found = {"test_a.py": counted(report), "test_b.py": counted(tmp_path / "missing.xml")}
    assert found["test_b.py"] == {"tests": 0, "failures": 0, "errors": 1, "skipped": 0}
    found["test_c.py"] = {"tests": 4, "failures": 0, "errors": 0, "skipped": 0}
    assert row("abc", found).endswith(" | 5 | 3 | 1 | test_a.py, test_b.py |")

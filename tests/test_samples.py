# SPDX-License-Identifier: Apache-2.0
"""What runs only at night has a sample in the gates, drawn anew each day; what a missing package skips fails in CI; and
the row that a night ends with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import samples
from tests.samples import SEED, draw, sampled
from tests.waiting import LIMIT_S
from tools.nightly import counted, row

TESTS = Path(__file__).resolve().parent


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


def of_pytest(file: Path) -> str:
    """What a run with our hooks says."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    command += ["--rootdir", str(file.parent), str(file)]
    run = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return run.stdout + run.stderr


class Item:
    """A test with marks."""

    def __init__(self, name: str, *marks: pytest.Mark) -> None:
        self.nodeid, self.marks = name, list(marks)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((each for each in self.marks if each.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def test_of_a_daily_group_so_many_of_all_files_are_long_and_the_others_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = set()
    for number in range(60):
        monkeypatch.setenv(SEED, f"day {number}")
        mark = pytest.mark.daily("group", 2).mark
        items = [Item(f"{file}.py::test_{each}", mark) for file in "xy" for each in "abcde"]
        other, slow = Item("x.py::other"), Item("x.py::slow", mark, pytest.mark.slow.mark)
        samples.draw_daily([*items, other, slow])
        long = {each.nodeid for each in items if each.get_closest_marker("long")}
        assert len(long) == 2
        assert all(each.nodeid in long or each.get_closest_marker("slow") for each in items)
        assert other.marks == []
        assert not slow.get_closest_marker("long")
        drawn |= long
    assert len(drawn) == 10


def test_a_function_of_which_no_case_runs_by_day_is_refused(tmp_path: Path) -> None:
    slow, file = pytest.mark.slow.mark, tmp_path / "test_x.py"
    items = [Item("f::a[1]", slow), Item("f::a[2]"), Item("f::b[1]", slow), Item("f::c", slow), Item("g::a")]
    assert samples.at_night_alone(items) == ["f::b", "f::c"]
    file.write_text("import pytest\n@pytest.mark.slow\ndef test_one(): pass\n")
    assert "by day no case of these runs: test_x.py::test_one" in of_pytest(file)


def test_a_package_that_is_missing_fails_a_run_that_expects_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "test_x.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    monkeypatch.delenv("DS_FSMOE_EXPECT_ALL", raising=False)
    assert "1 skipped" in of_pytest(file)
    monkeypatch.setenv("DS_FSMOE_EXPECT_ALL", "1")
    assert "1 error" in of_pytest(file)


def test_the_row_of_a_night_counts_what_failed_and_names_its_files(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>')
    found = {"test_a.py": counted(report), "test_b.py": counted(tmp_path / "missing.xml")}
    assert found["test_b.py"] == {"tests": 0, "failures": 0, "errors": 1, "skipped": 0}
    found["test_c.py"] = {"tests": 4, "failures": 0, "errors": 0, "skipped": 0}
    assert row("abc", found).endswith(" | 5 | 3 | 1 | test_a.py, test_b.py |")

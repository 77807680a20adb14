# SPDX-License-Identifier: Apache-2.0
"""The first run on a GPU, with a run of pytest and a benchmark in the place of the real ones: what its report says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import bench_gpu, first_gpu
from benchmarks.gpu.first_gpu import REPORT, read_tests, run_tests
from tests.fake_clock import FakeClock
from tests.waiting import LIMIT_S

ABOUT = {"devices": "a GPU | of sorts", "driver": "1.2.3", "torch": "2.13.0", "NCCL": "2.29.3"}
XML = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest">
<testcase classname="tests.test_gpu_ops" name="rows[cuda]" time="1.5"/>
<testcase classname="tests.test_gpu_ops" name="slots[cuda]" time="0.25"><failure message="assert 1 == 2">line 1
line 2
E   assert 1 == 2</failure></testcase>
<testcase classname="tests.test_gpu_ops" name="sanitizer" time="0"><skipped message="no compute-sanitizer"/></testcase>
<testcase classname="tests.test_gpu_engine" name="two" time="0.0"><skipped message="needs 2 CUDA devices"/></testcase>
<testcase classname="tests.test_gpu_engine" name="three" time="0.0"><skipped message="needs 2 CUDA devices"/></testcase>
<testcase classname="tests.test_gpu_lanes" name="seeds" time="9"><error message="">out of memory</error></testcase>
</testsuite></testsuites>"""
FINE = '<testsuite><testcase classname="tests.test_gpu_ops" name="rows" time="1"/></testsuite>'


def pretended(xml: str, unfinished: str = "") -> Callable[[Path], str]:
    """A run of pytest that leaves this."""

    def run(file: Path) -> str:
        if xml:
            file.write_text(xml)
        return unfinished

    return run


def reported(folder: Path, tests: Callable[[Path], str], benchmark: Callable[[], int]) -> tuple[int, str]:
    status = first_gpu.first_gpu(folder, benchmark, True, tests, lambda: ABOUT, FakeClock(tick_ns=10**9))
    return status, (folder / REPORT).read_text()


def tables() -> int:
    print("preset  predicted ms  measured\nfsmoe          1.000     1.100")
    return 0


def test_the_report_has_the_machine_every_group_of_tests_with_reasons_and_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = reported(tmp_path / "results", pretended(XML), tables)
    assert status == 1
    for line in (
        "| devices | a GPU \\| of sorts |",
        "| driver | 1.2.3 |",
        "| NCCL | 2.29.3 |",
        "1 passed, 2 failed, 3 skipped, in 1 s.",
        "| test_gpu_ops | 1 | 1 | 1 | 1.8 | no compute-sanitizer (1) |",
        "| test_gpu_engine | 0 | 0 | 2 | 0.0 | needs 2 CUDA devices (2) |",
        "| test_gpu_lanes | 0 | 1 | 0 | 9.0 |  |",
        "### test_gpu_ops: slots[cuda]",
        "E   assert 1 == 2",
        "out of memory",
        "Exit status 0.",
        "fsmoe          1.000     1.100",
    ):
        assert line in text.splitlines()
    printed = capsys.readouterr().out
    assert "fsmoe          1.000     1.100" in printed
    assert printed.endswith(f"the report is {tmp_path / 'results' / REPORT}\n")


def test_all_is_well_only_if_tests_and_benchmark_are(tmp_path: Path) -> None:
    assert reported(tmp_path, pretended(FINE), tables)[0] == 0
    assert reported(tmp_path, pretended(FINE), lambda: 1)[0] == 1
    assert reported(tmp_path, pretended(XML), tables)[0] == 1
    assert reported(tmp_path, pretended(FINE, "exit status 3"), tables)[0] == 1


def test_tests_that_do_not_come_to_an_end_and_a_benchmark_that_fails_are_told(tmp_path: Path) -> None:
    ended = "exit status -11, at test_x.py::test_y"

    def fails() -> int:
        print("so far")
        # By now the tests have been told, should this be the end.
        assert (
            "**They did not come to an end: exit status -11, at test_x.py::test_y.**" in (tmp_path / REPORT).read_text()
        )
        raise torch.OutOfMemoryError("too little")

    status, text = reported(tmp_path, pretended("", ended), fails)
    assert status == 1
    assert f"**They did not come to an end: {ended}.**" in text
    assert "Exit status 1. It failed: OutOfMemoryError: too little" in text
    assert "so far" in text
    # What is left of an earlier run is not taken for one of this.
    assert reported(tmp_path, pretended(FINE), tables)[0] == 0
    assert "what came of them cannot be read" in reported(tmp_path, pretended(""), tables)[1]
    assert "what came of them cannot be read" in reported(tmp_path, pretended(XML[:300]), tables)[1]
    assert "there were none" in reported(tmp_path, pretended("<testsuite/>"), tables)[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_gpu, "run_tests", lambda _: pytest.fail("tests were started"))
    folder = tmp_path / "results"
    assert bench_gpu.main(["--first-gpu", "--results", str(folder)]) == 2
    assert "there is no CUDA device here, or it was not asked for, so nothing was started" in capsys.readouterr().err
    assert not folder.exists()


def test_with_a_gpu_the_benchmark_is_run_with_the_other_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    main = bench_gpu.main
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_gpu, "main", lambda arguments, host: asked.append(arguments) or 0)
    monkeypatch.setattr(bench_gpu, "first_gpu", lambda folder, run, there: run() or (folder, there) != (tmp_path, True))
    assert main(["--quick", "--first-gpu", "--results", str(tmp_path)]) == 0
    assert asked == [["--quick", "--results", str(tmp_path)]]


class Process:
    """Stands for a run of pytest."""

    def __init__(self, says: str, status: int | None) -> None:
        self.says, self.status, self.killed = says, status, False

    def __call__(self, command: list[str], stdout: object, **_: object) -> Process:
        self.command = command
        stdout.write(self.says)  # type: ignore[attr-defined]
        return self

    def wait(self, limit_s: float = 0.0) -> int:
        if self.status is None and not self.killed:
            raise subprocess.TimeoutExpired("pytest", limit_s)
        return -9 if self.status is None else self.status

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("says", "status", "expected"),
    [
        ("tests/a.py::test_b PASSED\n1 passed\n", 0, ""),
        ("tests/a.py::test_b FAILED\n", 1, ""),
        ("tests/a.py::test_b PASSED\ntests/a.py::test_c ", -11, "exit status -11, at tests/a.py::test_c"),
        ("collecting\n", None, "ended after 900 s, before the first"),
    ],
)
def test_where_a_run_of_the_tests_ended_is_said(
    says: str, status: int | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(says, status)
    monkeypatch.setattr(subprocess, "Popen", process)
    assert run_tests(tmp_path / "tests.xml") == expected
    assert process.command[:5] == [sys.executable, "-m", "pytest", "-v", "-m"]
    assert process.command[5] == "gpu"
    assert process.killed == (status is None)


@pytest.mark.slow
def test_the_real_pytest_leaves_what_is_read(tmp_path: Path) -> None:
    """Of this file's own tests one, and of those that need a GPU one that is skipped or run."""
    xml = tmp_path / "tests.xml"
    names = ["tests/test_first_gpu.py::test_all_is_well_only_if_tests_and_benchmark_are"]
    names += ["tests/test_gpu_engine.py::test_engines_of_ranks_that_set_no_device_are_each_on_their_own"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(xml), *names]
    subprocess.run(command, cwd=first_gpu.ROOT, check=True, capture_output=True, timeout=LIMIT_S)
    groups = read_tests(xml)
    assert (groups["test_first_gpu"].passed, groups["test_first_gpu"].failed) == (1, [])
    if torch.cuda.device_count() < 2:
        ((reason, count),) = groups["test_gpu_engine"].skipped.items()
        assert reason.startswith("needs 2 CUDA devices: there is ")
        assert count == 1

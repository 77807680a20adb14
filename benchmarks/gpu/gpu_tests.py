# SPDX-License-Identifier: Apache-2.0
"""The tests that are marked for a GPU, one process for each file; what fails beside others is run once more alone.

A run of all files would end in collection where a package is missing. The stages ``sanitize`` and ``crash`` run single
tests, each in a process of its own.
"""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from benchmarks.gpu.checks import ROOT, Checks, end, start, tail

MARKS = re.compile(r"NEEDS_GPU|ON_DEVICE|mark\.gpu|lane_cases|gpu_cases")
SINGLE = {
    "sanitize": ("tests/test_gpu_sanitizer.py",),
    "crash": ("tests/test_gpu_layer.py", "tests/test_gpu_one_rank.py"),
}
"""Stage -> files whose tests it runs one by one."""
FIRST = ("test_gpu_ops", "test_gpu_one_rank", "test_gpu_ranks", "test_bench_gpu", "test_gpu_lanes")
"""Those that take long."""
BESIDE, MOST_ALONE, RESERVE_S = 6, 12, 8.0


class Pytest:
    """A run of pytest on a file or a test."""

    def __init__(self, checks: Checks, test: str) -> None:
        name = re.sub(r"\W+", "_", test.removeprefix("tests/"))[-90:]
        self.test, self.xml, self.log = test, checks.folder / f"{name}.xml", checks.folder / f"{name}.txt"
        marks = "gpu" if checks.is_cuda else "not slow and not long"
        options = ["-q", "-m", marks, "-p", "no:cacheprovider", "--junitxml", str(self.xml)]
        self.process = start(["-X", "faulthandler", "-m", "pytest", *options, test], self.log)

    def outcomes(self) -> dict[str, tuple[str, str]]:
        """Return for each test what came of it, and what it said; for all where the run was cut off."""
        try:
            cases = list(ElementTree.parse(self.xml).getroot().iter("testcase"))
        except (OSError, ElementTree.ParseError):
            cases = []
        found = {}
        for case in cases:
            problem = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
            status = "ok" if problem is None else "skipped" if problem.tag == "skipped" else "error"
            said = "" if problem is None else f"{problem.get('message', '')}\n{problem.text or ''}"
            found[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = status, said
        # 1: some have failed; 5: there is none of these marks.
        if self.process.returncode not in (0, 1, 5):
            found[self.test] = "error", f"{tail(self.log)}\nexit status {self.process.returncode}"
        return found


def run_tests(checks: Checks, tests: Sequence[str], beside: int) -> None:
    """Run files or tests, so many beside each other, and then alone what has failed."""
    left, running, failed = list(tests), list[Pytest](), list[str]()
    while left or running:
        while left and len(running) < beside and checks.left_s() > 2 * RESERVE_S:
            running.append(Pytest(checks, left.pop(0)))
        if not running:
            break
        time.sleep(0.2)
        for each in [each for each in running if each.process.poll() is not None or checks.left_s() < RESERVE_S]:
            running.remove(each)
            end(each.process, 0.0)
            for name, (status, said) in each.outcomes().items():
                checks.note(name, status, said)
                failed += [name] if status == "error" else []
    for test in left:
        checks.note(test, "skipped", "no time left")
    for name in failed[:MOST_ALONE] if len(tests) > 1 else ():
        if "::" in name and checks.left_s() > 2 * RESERVE_S:
            alone = Pytest(checks, name)
            end(alone.process, checks.left_s() - RESERVE_S)
            if alone.outcomes().get(name, ("", ""))[0] == "ok":
                checks.note(name, "ok", "alone; it failed beside others")


def single(checks: Checks, files: Sequence[str]) -> list[str]:
    """Return the tests of files, by pytest's own list."""
    log = checks.folder / "tests.txt"
    end(start(["-m", "pytest", "-q", "--collect-only", "-m", "gpu", *files], log), checks.left_s() / 4)
    return [each for each in tail(log, 100_000).splitlines() if "::" in each]


def run(checks: Checks) -> None:
    stage = checks.folder.name
    if checks.only is not None:
        run_tests(checks, [each for each in checks.only if "::" in each], 1)
    elif not checks.is_cuda:
        run_tests(checks, SINGLE.get(stage, ("tests/test_gpu_ops.py",)), 1)
    elif stage in SINGLE:
        run_tests(checks, single(checks, SINGLE[stage]), BESIDE)
    else:
        files = [each for each in (ROOT / "tests").rglob("test_*.py") if MARKS.search(each.read_text("utf-8"))]
        files.sort(key=lambda each: (FIRST.index(each.stem) if each.stem in FIRST else len(FIRST), each.stem))
        names = [each.relative_to(ROOT).as_posix() for each in files]
        run_tests(checks, [each for each in names if each not in SINGLE["sanitize"]], BESIDE)

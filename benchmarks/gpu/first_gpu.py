# SPDX-License-Identifier: Apache-2.0
"""The first run on a GPU: the tests that need one, then the benchmark, and one report of both.

``python -m benchmarks.gpu.bench_gpu --first-gpu``. Nothing of it has been run on a GPU yet: the report is what there is
to send to whoever mends what it finds.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import made_with
from ds_fsmoe.files.whole_files import write_whole
from ds_fsmoe.observing.clock import HOST, Clock

ROOT = Path(__file__).resolve().parents[2]
REPORT = "first_gpu.md"
TESTS_LIMIT_S = 900.0
"""Three minutes are what they should take, compiling included."""
_MOST_LINES = 12
"""Of what a test that failed has said."""


@dataclass
class Group:
    """The tests of one file."""

    passed: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    """(name, what it said)."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> how many."""
    took_s: float = 0.0


def run_tests(xml: Path) -> str:
    """Run the tests that are marked for a GPU; returns why they did not come to an end, and in which test, or ""."""
    output = xml.with_suffix(".txt")
    print(f"the tests for a GPU are under way, and what they print is in {output}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-m",
        "gpu",
        "--ignore",
        "tests/planning",
        "-p",
        "no:cacheprovider",
    ]
    with output.open("w") as opened:
        process = subprocess.Popen(
            [*command, "--junitxml", str(xml.resolve()), "tests"], cwd=ROOT, stdout=opened, stderr=subprocess.STDOUT
        )
        try:
            status, why = process.wait(TESTS_LIMIT_S), ""
        except subprocess.TimeoutExpired:
            process.kill()
            status, why = process.wait(), f"ended after {TESTS_LIMIT_S:.0f} s"
    # 1: some have failed, which the file says.
    if status in (0, 1) and not why:
        return ""
    begun = [line.strip() for line in output.read_text().splitlines() if "::" in line]
    return f"{why or f'exit status {status}'}, {f'at {begun[-1]}' if begun else 'before the first'}"


def read_tests(xml: Path) -> dict[str, Group]:
    """What came of the tests, file by file.

    Raises:
        OSError, ElementTree.ParseError: there is no such file, or it is cut off.
    """
    groups: dict[str, Group] = {}
    for case in ElementTree.parse(xml).getroot().iter("testcase"):
        group = groups.setdefault(case.get("classname", "").removeprefix("tests."), Group())
        group.took_s += float(case.get("time", 0.0))
        problems = [each for each in case if each.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if problems:
            said = (problems[0].text or problems[0].get("message") or "").strip()
            group.failed.append((case.get("name", ""), said))
        elif skipped is not None:
            reason = skipped.get("message", "")
            group.skipped[reason] = group.skipped.get(reason, 0) + 1
        else:
            group.passed += 1
    return groups


def machine() -> dict[str, str]:
    """What it runs on and with."""
    import torch

    found = dict(made_with(PACKAGES))
    found["devices"] = ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    found |= {"driver": _driver(), "CUDA of torch": str(torch.version.cuda)}
    with contextlib.suppress(AttributeError, RuntimeError):
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"
    return ", ".join(dict.fromkeys(done.stdout.split()))


class _Tee(io.StringIO):
    """Keeps what is printed, and prints it."""

    def __init__(self) -> None:
        super().__init__()
        self._shown = sys.stdout

    def write(self, text: str) -> int:
        self._shown.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._shown.flush()


def first_gpu(
    results: Path,
    benchmark: Callable[[], int],
    is_there: bool,
    tests: Callable[[Path], str] = run_tests,
    about: Callable[[], Mapping[str, str]] = machine,
    host: Clock = HOST,
) -> int:
    """Run the tests, then the benchmark, and write a report of both.

    Args:
        results: a folder; the report is in it.
        benchmark: prints its tables, and returns an exit status.
        is_there: whether there is a CUDA device.
        tests: runs the tests and leaves what came of them in a file; see :func:`run_tests`.
        about: see :func:`machine`.
        host: the clock of the CPU.

    Returns:
        0; 1 if anything failed, which the report says; 2, before anything has begun, where there is no GPU.
    """
    if not is_there:
        why = "there is no CUDA device here, or it was not asked for, so nothing was started"
        print(f"bench_gpu --first-gpu: {why}", file=sys.stderr)
        return 2
    results.mkdir(parents=True, exist_ok=True)
    xml, began_s = results / "first_gpu_tests.xml", host.monotonic()
    xml.unlink(missing_ok=True)
    unfinished = tests(xml)
    try:
        groups = read_tests(xml)
    except (OSError, ElementTree.ParseError) as error:
        groups, unfinished = {}, unfinished or f"what came of them cannot be read: {error}"
    if not groups:
        unfinished = unfinished or "there were none"
    head = [*_table(("what", "is"), about().items()), "", "## Tests", ""]
    head += _of_tests(groups, unfinished, host.monotonic() - began_s)
    # Should the benchmark take the process with it, the tests have been told.
    _write(results, head, "", "It did not come to an end.")
    printed, failure = _Tee(), ""
    try:
        with contextlib.redirect_stdout(printed):
            status = benchmark()
    except Exception as error:  # what the tests have found is not to be lost for it
        status, failure = 1, f" It failed: {type(error).__name__}: {error}"
    _write(results, head, printed.getvalue(), f"Exit status {status}.{failure}")
    print(f"the report is {results / REPORT}")
    return 1 if unfinished or status or any(group.failed for group in groups.values()) else 0


def _write(results: Path, head: Sequence[str], printed: str, outcome: str) -> None:
    lines = ["# First run on a GPU", "", *head, "", "## Benchmark", "", outcome, "", "```", printed.strip(), "```", ""]
    write_whole(results / REPORT, "\n".join(lines))


def _of_tests(groups: Mapping[str, Group], unfinished: str, took_s: float) -> list[str]:
    passed, failed, skipped = (
        sum(group.passed for group in groups.values()),
        sum(len(group.failed) for group in groups.values()),
        sum(sum(group.skipped.values()) for group in groups.values()),
    )
    lines = [f"{passed} passed, {failed} failed, {skipped} skipped, in {took_s:.0f} s."]
    if unfinished:
        lines += ["", f"**They did not come to an end: {unfinished}.**"]
    rows = [
        (name, each.passed, len(each.failed), sum(each.skipped.values()), f"{each.took_s:.1f}", _reasons(each))
        for name, each in groups.items()
    ]
    lines += ["", *_table(("tests", "passed", "failed", "skipped", "seconds", "why skipped"), rows)]
    for name, group in groups.items():
        for test, said in group.failed:
            # The end says what is wrong.
            lines += ["", f"### {name}: {test}", "", "```", *said.splitlines()[-_MOST_LINES:], "```"]
    return lines


def _reasons(group: Group) -> str:
    return "; ".join(f"{reason} ({count})" for reason, count in group.skipped.items())


def _table(head: Sequence[str], rows: Any) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]

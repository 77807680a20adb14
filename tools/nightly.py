# SPDX-License-Identifier: Apache-2.0
"""Runs every test, the slow ones too, file by file; a second run at the same commit goes on where the first stopped.

Ends with a row for ``benchmarks/LOG.md``. Arguments are pytest's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".nightly"
COUNTS = "tests", "failures", "errors", "skipped"


def counted(report: Path) -> dict[str, int]:
    """Return the counts of a report of pytest's; an error where there is none."""
    if not report.exists():
        return {"tests": 0, "failures": 0, "errors": 1, "skipped": 0}
    suites = ET.parse(report).getroot().iter("testsuite")
    totals = Counter[str]()
    for suite in suites:
        totals.update({each: int(suite.get(each, 0)) for each in COUNTS})
    return {each: totals[each] for each in COUNTS}


def row(commit: str, found: dict[str, dict[str, int]]) -> str:
    """Return the row of a run."""
    total = {each: sum(of_file[each] for of_file in found.values()) for each in COUNTS}
    failed = total["failures"] + total["errors"]
    wrong = ", ".join(name for name, each in found.items() if each["failures"] + each["errors"]) or "none"
    versions = ", ".join(f"{each} {version(each)}" for each in ("torch", "deepspeed", "transformers"))
    passed = total["tests"] - failed - total["skipped"]
    return f"| {date.today()} | {commit} | {versions} | {passed} | {failed} | {total['skipped']} | {wrong} |"


def main(arguments: list[str]) -> int:
    """Run what has not been run yet at this commit; return the status of the process."""
    said = ("git", "describe", "--always", "--dirty")
    commit = subprocess.run(said, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    FOLDER.mkdir(exist_ok=True)
    state, report = FOLDER / f"{commit}.json", FOLDER / "report.xml"
    found: dict[str, dict[str, int]] = json.loads(state.read_text()) if state.exists() else {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file.name in found or file.parent.name == "planning":
            continue
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments, str(file)]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status == 2:  # by hand
            return status
        found[file.name] = counted(report)
        state.write_text(json.dumps(found, indent=1))
    print(row(commit, found))
    return int(any(each["failures"] + each["errors"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

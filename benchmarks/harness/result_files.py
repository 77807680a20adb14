# SPDX-License-Identifier: Apache-2.0
"""The CSV files under ``benchmarks/results``: what every row says about how it was made, and rows that never get lost.

Imports neither torch nor DeepSpeed, so that benchmarks of the planner can use it.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ds_fsmoe.versions import VERSION

RESULTS = Path(__file__).resolve().parents[1] / "results"
BED_VARIABLE = "FSMOE_BED"
"""Of the environment of ranks in a bed: what it is like."""


def made_with(packages: Sequence[str]) -> dict[str, str]:
    """The first columns of every file of results: when, from what, on what; "" for a package that is not there."""
    versions = {}
    for name in packages:
        versions[name] = ""
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "hardware": hardware(),
        "python": platform.python_version(),
        **versions,
        "ds_fsmoe": VERSION,
    }


def commit(root: Path = RESULTS.parents[1]) -> str:
    """Short name of the commit, with +dirty if files differ from it, results aside; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        asked = ["git", "-C", str(root), *arguments]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Rows that were just appended must not make the next ones look as if they came from other code.
        changed = git("status", "--porcelain", "--untracked-files=all", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware() -> str:
    """Processor x cores that this process may use, the bed it runs in, and the GPU if this process has used one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    name = f"{name} x{len(os.sched_getaffinity(0))}"
    bed = os.environ.get(BED_VARIABLE)
    name = f"{name}, {bed}" if bed else name
    torch = sys.modules.get("torch")
    return f"{name}, {torch.cuda.get_device_name()}" if torch and torch.cuda.is_initialized() else name


def check_columns(file: Path, columns: Sequence[str], added: Sequence[str] = ()) -> None:
    """Raises ValueError if a file is there and has other columns than these, those ``added`` of late aside."""
    if not file.exists() or not file.stat().st_size:
        return
    with file.open(newline="") as opened:
        found = next(csv.reader(opened))
    if found in (list(columns), [each for each in columns if each not in added]):
        return
    lacking, extra = [c for c in columns if c not in found], [c for c in found if c not in columns]
    differ = f"it lacks {lacking} and has {extra} instead" if lacking or extra else "they stand in another order"
    raise ValueError(f"{file} has other columns: {differ}. Move it away, and a new one will be made")


def append_rows(
    file: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], added: Sequence[str] = ()
) -> None:
    """Rows at the end of a CSV file, made with its header if need be. One write, so a kill leaves whole lines.

    Args:
        file: is made if need be.
        columns: of the file, in their order.
        rows: what is appended.
        added: columns that were added of late: a file without them gets them first, empty in its rows.

    Raises:
        ValueError: the file has other columns, or a row has; nothing is written then.
    """
    for row in rows:
        if set(row) != set(columns):
            raise ValueError(f"a row for {file} has other columns: {sorted(set(row) ^ set(columns))} differ")
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        # Two benchmarks that start together must not both write the header.
        fcntl.flock(opened, fcntl.LOCK_EX)
        check_columns(file, columns, added)
        written = _widened(file, columns)
        if not written:
            writer.writeheader()
        elif not written.endswith(b"\n"):
            # An editor's doing, or a full disk's: the first row must not continue that line.
            text.write("\r\n")
        writer.writerows(rows)
        os.write(opened.fileno(), text.getvalue().encode())


def _widened(file: Path, columns: Sequence[str]) -> bytes:
    """What a file holds once it has these columns, empty in rows that lack them. Called under its lock."""
    written = file.read_bytes()
    if not written or next(csv.reader(io.StringIO(written.decode().splitlines()[0]))) == list(columns):
        return written
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(csv.DictReader(io.StringIO(written.decode(), newline="")))
    widened = text.getvalue().encode()
    # In place: whoever waits for the lock has this very file open. What a kill would tear lies beside it meanwhile.
    kept = file.with_suffix(".before")
    kept.write_bytes(written)
    with file.open("r+b") as opened:
        opened.write(widened)
    kept.unlink()
    return widened

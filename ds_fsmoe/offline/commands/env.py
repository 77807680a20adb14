# SPDX-License-Identifier: Apache-2.0
"""Shows installed and supported versions, the registered parts, ops, links and locks: ``ds_fsmoe env``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ds_fsmoe.files.whole_files import check_folders
from ds_fsmoe.measuring.hardware import link_lines
from ds_fsmoe.terminal.screen import print_marked
from ds_fsmoe.terminal.tables import print_table
from ds_fsmoe.versions import RUN, SUPPORTED, VERSION

HELP = "print versions, supported ranges, parts, ops, links and locks"

Row = tuple[str, str, str, str]

_DEEPSPEED_REPORT_S = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--brief", action="store_true", help="skip DeepSpeed's own report, which is slow")
    parser.add_argument("--json", type=Path, metavar="FILE", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report. Return 1 if an installed version is unsupported, or something prevents a run."""
    check_folders(args.json)
    rows = package_rows()
    _show(("package", "version", "", ""), rows)
    parts: list[tuple[str, str]] = []
    sections: dict[str, list[Row]] = {}
    if importlib.util.find_spec("torch") is not None:
        from ds_fsmoe import registry
        from ds_fsmoe.ops import report

        parts = [(kind, ", ".join(registry.known(kind))) for kind in ("gate", "order", "alltoall", "expert")]
        _show(("part", "names"), parts)
        sections = {
            "op": report.op_rows(),
            "built with": report.compiler_rows(),
            "lock": report.lock_rows(),
            "machine": report.machine_rows(),
        }
    sections["link"] = [(*line.partition(": ")[::2], "", "") for line in link_lines(ask_nvidia_smi=True)]
    for head, of_section in sections.items():
        _show((head, "found", "", ""), of_section)
    if args.json is not None:
        names = ("name", "found", "state", "note")
        packages = [dict(zip(("package", "version", "state", "note"), row, strict=True)) for row in rows]
        found = {head: [dict(zip(names, row, strict=True)) for row in each] for head, each in sections.items()}
        args.json.write_text(json.dumps({"packages": packages, "parts": dict(parts), **found}, indent=1) + "\n")
    if not args.brief and _installed("deepspeed") is not None:
        # After ours, as it builds and imports much before it prints anything.
        print("DeepSpeed's own report follows; it takes up to a minute, and --brief leaves it out", flush=True)
        print_marked(deepspeed_report())
    # What is not there may not be wanted: planning needs neither torch nor deepspeed.
    all_rows = [*rows, *(row for each in sections.values() for row in each)]
    return 1 if any(row[2] == "[FAIL]" for row in all_rows) else 0


def package_rows() -> list[Row]:
    """Return the installed packages, compared with the supported versions."""
    rows = [("ds_fsmoe", VERSION, "[OKAY]", "")]
    rows.append(_version_row("python", platform.python_version()))
    rows += [_version_row(name, _installed(name)) for name in ("torch", "deepspeed")]
    for name, purpose in (
        ("numpy", ""),
        ("scipy", ""),
        ("pydantic", ""),
        *((name, "needed for pictures and pages of runs") for name in ("altair", "jinja2", "vl-convert-python")),
        ("transformers", "needed for Hugging Face models"),
        *((name, "its scripts run as they are") for name in ("accelerate", "trl")),
        ("peft", "adapters"),
    ):
        found = _installed(name)
        rows.append((name, found or "not installed", "[OKAY]" if found else "[NO]", purpose))
    return rows


def deepspeed_report() -> str:
    """Return the output of ``ds_report``, without colours. It runs in its own process, as importing DeepSpeed may
    fail.
    """
    command = [sys.executable, "-m", "deepspeed.env_report"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEEPSPEED_REPORT_S, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return f"DeepSpeed's own report: [FAIL] {last}"
    except subprocess.TimeoutExpired:
        return f"DeepSpeed's own report: [FAIL] not done after {_DEEPSPEED_REPORT_S} s"
    return re.sub(r"\033\[\d*m", "", done.stdout)


def _show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_table(heads, rows)
    print(flush=True)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _version_row(name: str, found: str | None) -> Row:
    run = dict.fromkeys(pair[("python", "torch").index(name)] for pair in RUN) if name in ("python", "torch") else {}
    works = f"works with {SUPPORTED[name]}" + (f", tested with {', '.join(run)}" if run else "")
    if found is None:
        return name, "not installed", "[NO]", works
    # A laptop that plans has no packaging library; without it the range is shown and left unjudged.
    if importlib.util.find_spec("packaging") is None:
        return name, found, "[OKAY]", works
    from ds_fsmoe.engine.compat import in_range, is_newer_torch

    if is_newer_torch(name, found):
        works += "; this one is newer than the tested ones"
    return name, found, "[OKAY]" if in_range(name, found) or is_newer_torch(name, found) else "[FAIL]", works

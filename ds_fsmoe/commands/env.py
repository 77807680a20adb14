# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe env``: what is installed, what is supported, which parts are on the shelf."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ds_fsmoe.commands.tables import check_folders, print_table
from ds_fsmoe.versions import SUPPORTED, TESTED, VERSION

HELP = "what is installed, what is supported, which parts are on the shelf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the result goes."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same, for programs")


def run(args: argparse.Namespace) -> int:
    """Print it. Returns 1 if something installed is not supported."""
    check_folders(args.json)
    rows = [("ds_fsmoe", VERSION, "[OKAY]", "")]
    rows.append(_version_row("python", platform.python_version()))
    rows += [_version_row(name, _installed(name)) for name in ("torch", "deepspeed")]
    for name, purpose in (
        ("numpy", ""),
        ("scipy", ""),
        ("matplotlib", "needed for pictures"),
        ("pydantic", "needed for training"),
    ):
        found = _installed(name)
        rows.append((name, found or "not installed", "[OKAY]" if found else "[NO]", purpose))
    print_table(("package", "version", "", ""), rows)
    parts: list[tuple[str, str]] = []
    if importlib.util.find_spec("torch") is not None:
        from ds_fsmoe import registry

        print()
        parts = [(kind, ", ".join(registry.known(kind))) for kind in ("gate", "order", "alltoall", "expert")]
        print_table(("part", "on the shelf"), parts)
    if args.json is not None:
        packages = [dict(zip(("package", "version", "state", "note"), row, strict=True)) for row in rows]
        args.json.write_text(json.dumps({"packages": packages, "parts": dict(parts)}, indent=1) + "\n")
    # What is not there may not be wanted: planning needs neither torch nor deepspeed.
    return 1 if any(row[2] == "[FAIL]" for row in rows) else 0


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _version_row(name: str, found: str | None) -> tuple[str, str, str, str]:
    works = f"works with {SUPPORTED[name]}" + (f", tested with {', '.join(TESTED[name])}" if name in TESTED else "")
    if found is None:
        return name, "not installed", "[NO]", works
    # A laptop that plans has no packaging library; without it the range is shown and left unjudged.
    if importlib.util.find_spec("packaging") is None:
        return name, found, "[OKAY]", works
    from ds_fsmoe.compat import in_range

    return name, found, "[OKAY]" if in_range(name, found) else "[FAIL]", works

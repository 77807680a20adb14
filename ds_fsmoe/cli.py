# SPDX-License-Identifier: Apache-2.0
"""The console script ``ds_fsmoe``. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from ds_fsmoe.versions import SUPPORTED, TESTED, VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 if all is well, 1 if the command found something that is not.
    """
    parser = argparse.ArgumentParser(prog="ds_fsmoe", description="Training of Mixture-of-Experts models, scheduled.")
    parser.add_argument("--version", action="version", version=f"ds_fsmoe {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    env = commands.add_parser("env", help="what is installed, what is supported, which parts are on the shelf")
    env.set_defaults(run=_env)
    return parser.parse_args(arguments).run()


def _env() -> int:
    rows = [("ds_fsmoe", VERSION, "[OKAY]", "")]
    rows.append(_version_row("python", platform.python_version()))
    rows += [_version_row(name, _installed(name)) for name in ("torch", "deepspeed")]
    for name, purpose in (("numpy", ""), ("scipy", ""), ("pydantic", "needed for training")):
        found = _installed(name)
        rows.append((name, found or "not installed", "[OKAY]" if found else "[NO]", purpose))
    _print_table(("package", "version", "", ""), rows)
    if importlib.util.find_spec("torch") is not None:
        from ds_fsmoe import registry

        print()
        parts = [(kind, ", ".join(registry.known(kind))) for kind in ("gate", "order", "alltoall", "expert")]
        _print_table(("part", "on the shelf"), parts)
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


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(str(row[column])) for row in [heads, *rows]) for column in range(len(heads))]
    for row in [heads, ["-" * width for width in widths], *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

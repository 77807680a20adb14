# SPDX-License-Identifier: Apache-2.0
"""The sources of the package, each parsed once."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "ds_fsmoe").rglob("*.py"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT / "ds_fsmoe"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())

# SPDX-License-Identifier: Apache-2.0
"""Says which public names of ds_fsmoe are missing in docs/api.md, or have no docstring. Reads the source only.

python tools/check_docs.py
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ds_fsmoe"


def public_names() -> list[str]:
    """``ds_fsmoe.__all__``, as it is written."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise SystemExit("ds_fsmoe/__init__.py: no list __all__ is written there")


def has_docstring(name: str) -> bool:
    """Whether the place that a public name comes from says what it is. Values say it in the text behind them."""
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _is_documented(node.module or "", alias.name)
    return False


def _is_documented(module: str, name: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) is not None
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(ast.unparse, targets):
                return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(node, ast.ImportFrom) and name in [each.asname or each.name for each in node.names]:
            original = next(each.name for each in node.names if name == (each.asname or each.name))
            return _is_documented(node.module or "", original)
    return False


def problems(api: str | None = None) -> list[str]:
    """What is missing, one sentence each.

    Args:
        api: the text of the reference; left out, that of docs/api.md.
    """
    text = (ROOT / "docs" / "api.md").read_text() if api is None else api
    shown = re.findall(r"^::: ds_fsmoe\.(\S+)$", text, flags=re.MULTILINE)
    names = public_names()
    found = [f"docs/api.md: ds_fsmoe.{each} is public and missing" for each in names if each not in shown]
    found += [f"docs/api.md: ds_fsmoe.{each} is not public" for each in shown if each not in names]
    found += [f"docs/api.md: ds_fsmoe.{each} is there twice" for each in sorted(set(shown)) if shown.count(each) > 1]
    return found + [f"ds_fsmoe.{each} has no docstring" for each in names if not has_docstring(each)]


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or None)

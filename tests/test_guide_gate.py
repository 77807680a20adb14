# SPDX-License-Identifier: Apache-2.0
"""A gate that is added as its guide says, to a copy of the checkout, passes the tests that the page names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "extend.md").read_text()
GUIDE = GUIDE.split("## Add a gate")[1].split("## Add an all-to-all")[0]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "site", "build", "dist", "*.egg-info")


def blocks_of_code() -> tuple[str, str]:
    """Return the gate's file and the branch of its formula."""
    gate, formula = re.findall(r"(?ms)^ *```(?:python)?\n(.*?)^ *```$", GUIDE)
    return textwrap.dedent(gate), textwrap.dedent(formula)


def run(checkout: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the guide in a checkout, with this environment's Python."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    words = [sys.executable, *command.split()[1:]]
    return subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_gate_of_the_guide_is_added_as_printed(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_COPIED)
    gate, formula = blocks_of_code()
    (name,) = re.findall(r'@register_gate\("(\w+)"\)', gate)
    (checkout / "ds_fsmoe" / "components" / "gates" / f"{name}.py").write_text(gate)

    formulas = checkout / "tests" / "gate_formulas.py"
    before, found, after = formulas.read_text().partition("    else:\n        total = sum(")
    assert found, "the branch is softmax"
    formulas.write_text(before + textwrap.indent(formula, "    ") + found + after)

    table = checkout / "docs" / "gates-and-alltoalls.md"
    row = next(line for line in table.read_text().splitlines() if line.startswith("| `switch` |"))
    table.write_text(table.read_text().replace(row, f"{row}\n| `{name}` | a gate of the guide | none |"))
    configs = checkout / "ds_configs"
    text = (configs / "gate_mixtral.json").read_text()
    (configs / f"gate_{name}.json").write_text(text.replace('"mixtral"', f'"{name}"'))
    readme = configs / "README.md"
    row = f"| `gate_{name}.json` | the `{name}` gate |"
    readme.write_text(readme.read_text().replace("| `gate_switch.json`", f"{row}\n| `gate_switch.json`"))

    commands = re.findall(r"`(python -m [^`]+)`", GUIDE)
    assert len(commands) == 3
    for command in commands:
        done = run(checkout, " ".join(command.split()))
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"

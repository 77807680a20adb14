# SPDX-License-Identifier: Apache-2.0
"""What a user writes against the public names is type-checked: what is right passes, what is wrong is reported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "typed_user_script.py"
# What the package stands on is not looked into: it takes minutes, and its types are not ours.
CONFIG = """
[mypy]
python_version = 3.11
follow_imports = silent
check_untyped_defs = True
warn_unused_ignores = True
"""
OTHERS = ("torch", "deepspeed", "pydantic", "pydantic_core", "numpy", "scipy", "safetensors", "rich", "packaging")


@pytest.mark.long
def test_mistakes_in_a_users_script_are_reported_and_nothing_else_is(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    skipped = (f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = True\n" for name in OTHERS)
    config.write_text(CONFIG + "".join(skipped))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "--no-error-summary", "--hide-error-context", str(SCRIPT)], cwd=ROOT, capture_output=True, text=True
    )
    reported = {(int(line), code) for line, code in re.findall(r"script\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)}
    expected = {
        (number, found[1])
        for number, line in enumerate(SCRIPT.read_text().splitlines(), start=1)
        if (found := re.search(r"# wrong: ([\w-]+)$", line))
    }
    assert len(expected) > 15
    assert reported == expected, done.stdout + done.stderr

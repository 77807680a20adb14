# SPDX-License-Identifier: Apache-2.0
"""A planner rule that is added as docs/extend.md says, to a copy of the checkout, is obeyed by every plan."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.test_guide_gate import NOT_COPIED, ROOT, run

GUIDE = (ROOT / "docs" / "extend.md").read_text()
GUIDE = GUIDE.split("## Add a planner rule")[1]
OBEYED = """
import sys
sys.path.insert(0, ".")
from tests.planning.test_rules import found_by, search, ways_of

found = [each.order for plan in found_by(search("best")) for each in ways_of(plan)]
print(sorted({order.degree for order in found if order.links == "shared"}))
"""


@pytest.mark.long
def test_the_rule_of_the_guide_is_added_as_printed(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_COPIED)
    (checkout / "obeyed.py").write_text(OBEYED)
    before = run(checkout, "python obeyed.py")
    assert before.stdout.strip() == "[1, 2, 3, 4]", before.stderr
    (code,) = re.findall(r"(?ms)^```\n(.*?)^```$", GUIDE)
    (name,) = re.findall(r"def (\w+)", code)
    rules = checkout / "ds_fsmoe" / "planning" / "decide" / "rules.py"
    ahead, found, behind = rules.read_text().partition("RULES: list[Rule] = [")
    assert found
    rules.write_text(f"{ahead}{code}\n\n{found}{name}, {behind}")
    assert run(checkout, "python obeyed.py").stdout.strip() == "[1, 2]"
    listed = checkout / "tests" / "planning" / "test_rules.py"
    text = listed.read_text()
    assert text.count('== ["has_slots"') == 1
    listed.write_text(text.replace('== ["has_slots"', f'== ["{name}", "has_slots"'))
    (command,) = re.findall(r"`(python -m pytest [^`]+)`", GUIDE)
    done = run(checkout, " ".join(command.split()))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

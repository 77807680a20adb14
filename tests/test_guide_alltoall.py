# SPDX-License-Identifier: Apache-2.0
"""An all-to-all that is added as docs/extend.md says, to a copy of the checkout, passes the tests named there."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.test_guide_gate import NOT_COPIED, ROOT, run

GUIDE = (ROOT / "docs" / "extend.md").read_text()
GUIDE = GUIDE.split("## Add an all-to-all")[1].split("## Add a task kind")[0]


@pytest.mark.long
def test_the_all_to_all_of_the_guide_is_added_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_COPIED)
    (code,) = re.findall(r"(?ms)^ *```python\n(.*?)^ *```$", GUIDE)
    (name,) = re.findall(r'@register_alltoall\("(\w+)"\)', code)
    (checkout / "ds_fsmoe" / "components" / "alltoalls" / f"{name}.py").write_text(textwrap.dedent(code))
    page = checkout / "docs" / "gates-and-alltoalls.md"
    row = "| `alltoall` | "
    assert page.read_text().count(row) == 1
    page.write_text(page.read_text().replace(row, f"{row}`{name}` goes in rounds; "))

    laws, measured = (" ".join(each.split()) for each in re.findall(r"`(python -m pytest [^`]+)`", GUIDE))
    # Of the laws those on few ranks; all that says what the autotuner measures is slow.
    for command, marks in ((laws, "-m 'not slow and not long'"), (measured, "")):
        monkeypatch.setenv("PYTEST_ADDOPTS", marks)
        done = run(checkout, command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"

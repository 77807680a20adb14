# SPDX-License-Identifier: Apache-2.0
"""A kind of task that is added as its guide says, to a copy of the checkout, is planned, measured and run."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.test_guide_gate import NOT_COPIED, ROOT, run

GUIDE = (ROOT / "docs" / "extend.md").read_text()
GUIDE = GUIDE.split("## Add a task kind")[1].split("## Add a planner rule")[0]
STAGES = '"A2A_IN inter, SPREAD intra inner, EXPERT'
PLACES = [
    ("ds_fsmoe/planning/schedule.py", 'SPREAD = "SPREAD"\n', 0),
    ("ds_fsmoe/planning/workload.py", "        behind = sends(COLLECT, intra", 8),
    (
        "ds_fsmoe/planning/workload.py",
        "        costs |= dict.fromkeys((SPREAD, COLLECT), inside.among(at.per_node))\n",
        8,
    ),
    ("ds_fsmoe/planning/job/measured.py", 'GATE, ORDER = "gate", "order and back"\n', 0),
    ("ds_fsmoe/planning/job/measured.py", "        names[EXPERT] = anew if backward else FORWARD\n", 8),
    ("ds_fsmoe/measuring/profiler.py", "        return (*experts, *((QUANTISED, DEQUANTISED)", 8),
    ("ds_fsmoe/measuring/profiler.py", "    flops = 2.0 * ranks * subject.num_weights\n", 4),
    ("ds_fsmoe/measuring/profiler.py", '        FORWARD: (forward, flops, "flop"),\n', 8),
    ("ds_fsmoe/execution/phase.py", "        if SPREAD in kinds:\n", 8),
    ("ds_fsmoe/execution/phase.py", "    def weight_gradients(self) -> torch.Tensor | None:\n", 4),
]
"""The file of each block of code of the guide, what it is written ahead of (of several, the last), how far indented."""
IMPORTED = {
    "ds_fsmoe/planning/workload.py": ("from ds_fsmoe.planning.schedule import (\n", "    UNPACK,\n"),
    "ds_fsmoe/planning/job/measured.py": ("from ds_fsmoe.planning.schedule import (\n", "    UNPACK,\n"),
    "ds_fsmoe/measuring/profiler.py": ("from ds_fsmoe.planning.job.measured import (\n", "    UNPACKED,\n"),
    "ds_fsmoe/execution/phase.py": ("from ds_fsmoe.planning.schedule import (\n", "    UNPACK,\n"),
}


def ahead_of(file: Path, place: str, text: str) -> None:
    """Write text ahead of the last place in a file."""
    before, found, after = file.read_text().rpartition(place)
    assert found, f"{file}: {place}"
    file.write_text(before + text + found + after)


def changed(file: Path, old: str, new: str) -> None:
    """Change what is once in a file."""
    assert file.read_text().count(old) == 1, f"{file}: {old}"
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.long
def test_the_kind_of_the_guide_is_added_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-m 'not slow and not long'")
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_COPIED)
    code = [textwrap.dedent(each) for each in re.findall(r"(?ms)^ *```\n(.*?)^ *```$", GUIDE)]
    for (name, place, indent), block in zip(PLACES, code, strict=True):
        after = "\n" if block.startswith("def ") else ""
        ahead_of(checkout / name, place, textwrap.indent(block, " " * indent) + after)
    for name, (place, imported) in IMPORTED.items():
        changed(checkout / name, place, place + imported)
    profiler = checkout / "ds_fsmoe" / "measuring" / "profiler.py"
    changed(profiler, "return (*experts, *(", "return (*experts, *own, *(")
    stages = checkout / "tests" / "planning" / "test_stages.py"
    changed(stages, STAGES, STAGES.replace("EXPERT", "UNPACK compute inner, EXPERT"))
    # On narrow wires it lies between what makes rows wide again and the experts.
    changed(stages, "DEQUANTISE_SPREAD intra inner beside 0", "DEQUANTISE_SPREAD intra inner, UNPACK compute inner")

    assert len({name for name, *_ in PLACES}) == 5
    commands = re.findall(r"`(python -m pytest [^`]+)`", GUIDE)
    assert len(commands) == 2
    for command in commands:
        done = run(checkout, " ".join(command.split()))
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

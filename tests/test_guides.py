# SPDX-License-Identifier: Apache-2.0
"""What docs/extend.md has added, to a copy of the checkout and as printed, passes the tests that the page names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.pages import part
from tests.scripts import ROOT

PAGE = "docs/extend.md"
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "site", "build", "dist", "*.egg-info")


def run(checkout: Path, *commands: str, marks: str = "-m 'not slow and not long'") -> str:
    """Run commands of a guide in a checkout, with this environment's Python; return what the last one printed."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTEST_ADDOPTS": marks}
    for command in commands:
        words = [sys.executable, *command.split()[1:]]
        done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


def put_ahead(file: Path, place: str, text: str) -> None:
    """Write text ahead of the last place in a file."""
    before, found, after = file.read_text().rpartition(place)
    assert found, f"{file}: {place}"
    file.write_text(before + text + found + after)


def change(file: Path, old: str, new: str) -> None:
    """Change what is once in a file."""
    assert file.read_text().count(old) == 1, f"{file}: {old}"
    file.write_text(file.read_text().replace(old, new))


def commands(guide: str, number: int) -> list[str]:
    """Return the commands of a guide, of which there are so many."""
    found = [" ".join(each.split()) for each in re.findall(r"`(python -m pytest [^`]+)`", guide)]
    assert len(found) == number
    return found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout."""
    return Path(shutil.copytree(ROOT, tmp_path / "checkout", ignore=NOT_COPIED))


@pytest.mark.daily("pages", 1)
def test_a_gate_is_added_as_printed(checkout: Path) -> None:
    guide = part(PAGE, "Add a gate")
    gate, formula = (textwrap.dedent(each) for each in re.findall(r"(?ms)^ *```(?:python)?\n(.*?)^ *```$", guide))
    (name,) = re.findall(r'@register_gate\("(\w+)"\)', gate)
    (checkout / "ds_fsmoe" / "components" / "gates" / f"{name}.py").write_text(gate)
    # The branch behind it is softmax.
    branch = "    else:\n        total = sum("
    put_ahead(checkout / "tests" / "gate_formulas.py", branch, textwrap.indent(formula, "    "))

    table = checkout / "docs" / "gates-and-alltoalls.md"
    row = next(line for line in table.read_text().splitlines() if line.startswith("| `switch` |"))
    change(table, row, f"{row}\n| `{name}` | a gate of the guide | none |")
    configs = checkout / "ds_configs"
    text = (configs / "gate_mixtral.json").read_text()
    (configs / f"gate_{name}.json").write_text(text.replace('"mixtral"', f'"{name}"'))
    put_ahead(configs / "README.md", "| `gate_switch.json`", f"| `gate_{name}.json` | the `{name}` gate |\n")

    laws, pages = commands(guide, 2)
    run(checkout, laws, "python -m tools.config_page", pages)


@pytest.mark.daily("pages", 1)
def test_an_all_to_all_is_added_as_printed(checkout: Path) -> None:
    guide = part(PAGE, "Add an all-to-all")
    (code,) = re.findall(r"(?ms)^ *```python\n(.*?)^ *```$", guide)
    (name,) = re.findall(r'@register_alltoall\("(\w+)"\)', code)
    (checkout / "ds_fsmoe" / "components" / "alltoalls" / f"{name}.py").write_text(textwrap.dedent(code))
    row = "| `alltoall` | "
    change(checkout / "docs" / "gates-and-alltoalls.md", row, f"{row}`{name}` goes in rounds; ")

    laws, measured = commands(guide, 2)
    run(checkout, laws)
    run(checkout, measured, marks="")  # all that says what the autotuner measures is slow


# ---- a kind of task


STAGES = '"A2A_IN inter, SPREAD intra inner, EXPERT'
PLACES = [
    ("planning/schedule.py", 'SPREAD = "SPREAD"\n', 0),
    ("planning/workload.py", "        behind = sends(COLLECT, intra", 8),
    ("planning/workload.py", "        costs |= dict.fromkeys((SPREAD, COLLECT), inside.among(at.per_node))\n", 8),
    ("planning/job/measured.py", 'GATE, ORDER = "gate", "order and back"\n', 0),
    ("planning/job/measured.py", "        names[EXPERT] = anew if backward else FORWARD\n", 8),
    ("measuring/profiler.py", "        return (*experts, *((QUANTISED, DEQUANTISED)", 8),
    ("measuring/profiler.py", "    flops = 2.0 * ranks * subject.num_weights\n", 4),
    ("measuring/profiler.py", '        FORWARD: (forward, flops, "flop"),\n', 8),
    ("execution/phase.py", "        if SPREAD in kinds:\n", 8),
    ("execution/phase.py", "    def weight_gradients(self) -> torch.Tensor | None:\n", 4),
]
"""The file of each block of code of the guide, what it is written ahead of (of several, the last), how far indented."""
IMPORTED = {
    "planning/workload.py": ("planning.schedule", "UNPACK"),
    "planning/job/measured.py": ("planning.schedule", "UNPACK"),
    "measuring/profiler.py": ("planning.job.measured", "UNPACKED"),
    "execution/phase.py": ("planning.schedule", "UNPACK"),
}


@pytest.mark.daily("pages", 1)
def test_a_kind_of_task_is_added_as_printed(checkout: Path) -> None:
    guide, package = part(PAGE, "Add a task kind"), checkout / "ds_fsmoe"
    code = [textwrap.dedent(each) for each in re.findall(r"(?ms)^ *```\n(.*?)^ *```$", guide)]
    for (name, place, indent), block in zip(PLACES, code, strict=True):
        after = "\n" if block.startswith("def ") else ""
        put_ahead(package / name, place, textwrap.indent(block, " " * indent) + after)
    for name, (module, imported) in IMPORTED.items():
        place = f"from ds_fsmoe.{module} import (\n"
        change(package / name, place, f"{place}    {imported},\n")
    profiler = package / "measuring" / "profiler.py"
    change(profiler, "return (*experts, *(", "return (*experts, *own, *(")
    stages = checkout / "tests" / "planning" / "test_stages.py"
    change(stages, STAGES, STAGES.replace("EXPERT", "UNPACK compute inner, EXPERT"))
    # On narrow wires it lies between what makes rows wide again and the experts.
    change(stages, "DEQUANTISE_SPREAD intra inner beside 0", "DEQUANTISE_SPREAD intra inner, UNPACK compute inner")

    assert len({name for name, *_ in PLACES}) == 5
    run(checkout, *commands(guide, 2))


# ---- a rule


OBEYED = """
import sys
sys.path.insert(0, ".")
from tests.planning.test_rules import found_by, search, ways_of

found = [each.order for plan in found_by(search("best")) for each in ways_of(plan)]
print(sorted({order.degree for order in found if order.links == "shared"}))
"""


@pytest.mark.daily("pages", 1)
def test_a_rule_is_added_as_printed_and_every_plan_obeys_it(checkout: Path) -> None:
    (checkout / "obeyed.py").write_text(OBEYED)
    assert run(checkout, "python obeyed.py") == "[1, 2, 3, 4]"
    guide = part(PAGE, "Add a planner rule")
    (code,) = re.findall(r"(?ms)^```\n(.*?)^```$", guide)
    (name,) = re.findall(r"def (\w+)", code)
    begin = "RULES: list[Rule] = ["
    change(checkout / "ds_fsmoe" / "planning" / "decide" / "rules.py", begin, f"{code}\n\n{begin}{name}, ")
    assert run(checkout, "python obeyed.py") == "[1, 2]"
    listed = checkout / "tests" / "planning" / "test_rules.py"
    change(listed, '== ["has_slots"', f'== ["{name}", "has_slots"')
    run(checkout, *commands(guide, 1))

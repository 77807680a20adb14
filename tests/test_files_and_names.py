# SPDX-License-Identifier: Apache-2.0
"""A folder has few files, a file is one idea, and a public name stands for one thing."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "ds_fsmoe"
MOST_FILES, MOST_LINES = 20, 600

# Folder -> how many files it still has. A number may only go down.
MORE_FILES: dict[str, int] = {"planning": 73, "checkpoint_files": 23, "commands": 23}

# What the files of a family share as their interface: each command, each form of the ops, each way to start.
OF_A_FAMILY: dict[str, str] = {
    **dict.fromkeys(("add_arguments", "run", "main"), "commands"),
    **dict.fromkeys(
        (
            "add_rows",
            "arrange",
            "gated",
            "gated_backward",
            "gather_rows",
            "number_rows",
            "register_formulas",
            "restore",
            "restore_backward",
            "take_slots",
            "top_k_slots",
        ),
        "ops: compiled, of torch's operators, and the loop that is the oracle",
    ),
}
# Still twice, and no family. A name may only go.
TWICE = {
    "Block",
    "Choice",
    "Fit",
    "Gain",
    "Index",
    "LayerLoad",
    "Loads",
    "Part",
    "Phase",
    "Piece",
    "Rows",
    "Source",
    "Stage",
    "StepTimes",
    "Traced",
    "Way",
    "choices_of",
    "config_of",
    "describe",
    "fits",
    "headline",
    "index_of",
    "is_number",
    "joined",
    "live_groups",
    "merged",
    "moe_work",
    "named",
    "names",
    "obstacle_to",
    "parts_of",
    "read_file",
    "rows_of",
    "schema",
}


def test_a_folder_has_few_files() -> None:
    found = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    assert {folder: n for folder, n in found.items() if n > MORE_FILES.get(folder, MOST_FILES)} == {}


def test_a_file_is_of_a_length_that_is_read_in_one_go() -> None:
    lengths = {path.relative_to(PACKAGE).as_posix(): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_a_public_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in OF_A_FAMILY.keys() | TWICE} == {}

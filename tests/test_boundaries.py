# SPDX-License-Identifier: Apache-2.0
"""Which room of the house may import what, read from the source; and that importing the package stays light.

Imports inside functions count, those for type checkers only do not.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ds_fsmoe"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# Room -> what its files may import besides the standard library and their own room.
ROOMS: dict[str, tuple[str, ...]] = {
    "planning": ("numpy", "scipy"),
    "commands": (
        "tqdm",
        "ds_fsmoe.planning",
        "ds_fsmoe.reporting",
        "ds_fsmoe.registry",
        "ds_fsmoe.compat",
        "ds_fsmoe.given",
        "ds_fsmoe.versions",
        "ds_fsmoe.whole_files",
    ),
    "ops": ("torch",),
    "components": ("torch", "ds_fsmoe.ops", "ds_fsmoe.registry"),
    "runtime": (
        "torch",
        "numpy",
        "ds_fsmoe.launch_order",
        "ds_fsmoe.planning",
        "ds_fsmoe.ops",
        "ds_fsmoe.shapes",
        "ds_fsmoe.whole_files",
    ),
    "telemetry": (
        "torch",
        "ds_fsmoe.components",
        "ds_fsmoe.planning",
        "ds_fsmoe.reporting.run_files",
        "ds_fsmoe.runtime",
        "ds_fsmoe.versions",
    ),
    "reporting": ("ds_fsmoe.planning", "ds_fsmoe.runtime.trace_files", "ds_fsmoe.shapes", "ds_fsmoe.whole_files"),
    "saving": ("torch", "numpy", "safetensors", "ds_fsmoe.versions", "ds_fsmoe.whole_files"),
}
# The files that may import DeepSpeed, each with its reason.
DEEPSPEED: dict[str, str] = {
    "layer.py": "subclasses DeepSpeed's MoE modules",
    "container.py": "knows DeepSpeed's module of experts from others",
    "engine.py": "subclasses DeepSpeed's engines",
    "door.py": "stands in for DeepSpeed's initialize",
    "reduction.py": "takes the reduction of gradients over from DeepSpeed's engine and optimizers",
    "reduction_stages.py": "likewise: the methods it replaces",
    "gradient_norm.py": "clips where DeepSpeed's optimizers would clip by another norm",
    "checkpoint_ranks.py": "stands in for the barriers of DeepSpeed's saving",
    "checkpoint_saving.py": "asks DeepSpeed's groups for the rank whose file holds the states of an optimizer",
    "checkpoint_reading.py": "stands in for DeepSpeed's reading of files",
    "optimizer_pieces.py": "looks into DeepSpeed's optimizers, each kind by its own names",
    "profile_job.py": "starts torch.distributed as training does",
    "compat.py": "holds and checks every private name of DeepSpeed",
    "run_record.py": "finds the layers of DeepSpeed's own engine",
    "telemetry/stock_trace.py": "watches DeepSpeed's own layers and collectives",
    "runtime/groups.py": "makes process groups where DeepSpeed looks for them",
}
# (file, imported module) -> why the rule of its room does not hold there.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("runtime/groups.py", "deepspeed"): DEEPSPEED["runtime/groups.py"],
    ("telemetry/stock_trace.py", "deepspeed"): DEEPSPEED["telemetry/stock_trace.py"],
    ("commands/env.py", "ds_fsmoe.ops"): "says of each op whether it can be built, where there is a torch",
    ("commands/env.py", "ds_fsmoe.runtime.link_facts"): "says what is known of the links; needs no torch",
    ("commands/convert.py", "ds_fsmoe.saving"): "reads and writes checkpoints, where there is a torch",
    ("commands/profile.py", "ds_fsmoe.profile_job"): "measures, which takes all that training takes",
    ("planning/draw.py", "matplotlib"): "draws, when it is asked to; all else there plans without",
}
# What must stay importable by someone who has no torch: to plan, to read configs, to be told what is missing.
WITHOUT_TORCH = (
    "__init__.py",
    "__main__.py",
    "blocks.py",
    "cli.py",
    "config.py",
    "given.py",
    "launch_order.py",
    "registry.py",
    "run.py",
    "versions.py",
    "shapes.py",
    "whole_files.py",
)

# In code as a string.
READS_A_CLOCK = re.compile(r"(?m)(^|[;:])\s*(import [^\n;]*\btime\b|from time import|import timeit)|\btime\.[a-z_]+\(")


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def imports_of(source: str, module: str, is_package: bool) -> set[str]:
    """Dotted names a file imports, wherever in it: ``from a import b`` counts as ``a`` and as ``a.b``."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: None if is_package else -1]
                parent = package[: len(package) - (node.level - 1)]
                base = ".".join([*parent, *([node.module] if node.module else [])])
            found.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found.update(each.value for each in node.args[:1] if isinstance(each, ast.Constant))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def imports(file: Path) -> set[str]:
    parts = ["ds_fsmoe", *file.with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    return imports_of((PACKAGE / file).read_text(), ".".join(parts[:-1] if is_package else parts), is_package)


def allowed(file: Path, module: str) -> bool:
    if module.split(".")[0] in sys.stdlib_module_names:
        return True
    rooms = [room for path, room in EXCEPTIONS if path == file.as_posix()]
    rooms += [*ROOMS[file.parts[0]], f"ds_fsmoe.{file.parts[0]}"]
    # `from ds_fsmoe.ops import reference` is seen as ds_fsmoe.ops.reference too; `ds_fsmoe` alone is a light parent.
    return module == "ds_fsmoe" or any(within(module, room) for room in rooms)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = [file for file in FILES if file.parts[0] == room]
    if room in ("components", "ops"):
        assert len(files) > 3
    wrong = {f"{file} imports {module}" for file in files for module in imports(file) if not allowed(file, module)}
    assert not wrong


def test_every_folder_of_the_package_is_a_room_with_a_rule() -> None:
    assert {file.parts[0] for file in FILES if len(file.parts) > 1} <= set(ROOMS)


def test_deepspeed_is_imported_only_where_it_may_be() -> None:
    users = {file.as_posix() for file in FILES for module in imports(file) if within(module, "deepspeed")}
    assert users <= set(DEEPSPEED)
    assert {"layer.py", "engine.py", "compat.py"} <= users


def test_components_and_runtime_do_not_import_each_other() -> None:
    for one, other in (("components", "runtime"), ("runtime", "components")):
        for file in FILES:
            if file.parts[0] == one:
                assert not any(within(module, f"ds_fsmoe.{other}") for module in imports(file)), file


def test_files_for_people_without_torch_do_not_import_it_themselves() -> None:
    for name in WITHOUT_TORCH:
        heavy = {module for module in imports(Path(name)) if within(module, "torch") or within(module, "deepspeed")}
        assert not heavy, name


def test_no_exception_outlives_its_reason() -> None:
    for name, module in EXCEPTIONS:
        if (PACKAGE / name).exists():
            assert any(within(each, module) for each in imports(Path(name))), f"{name} no longer imports {module}"


def test_the_reader_of_imports_sees_every_kind_of_import() -> None:
    source = """
from __future__ import annotations
import importlib
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import scipy
else:
    import numpy as np
from . import alltoall
from ..ops.rows import gather_rows
def late():
    import torch.distributed as dist
    importlib.import_module("deepspeed.moe")
"""
    inside_a_module = imports_of(source, "ds_fsmoe.components.order", is_package=False)
    assert {"numpy", "torch.distributed", "deepspeed.moe"} <= inside_a_module
    assert {"ds_fsmoe.components.alltoall", "ds_fsmoe.ops.rows"} <= inside_a_module
    assert "scipy" not in inside_a_module
    assert "ds_fsmoe.components.orders.alltoall" in imports_of(source, "ds_fsmoe.components.orders", is_package=True)


def test_no_code_that_tests_hand_to_other_processes_reads_a_clock() -> None:
    """Ruff sees to what tests import (``tests/ruff.toml``), but does not look into strings."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.strip()!r}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and READS_A_CLOCK.search(node.value)
    ]
    assert found == []


def test_the_search_for_clocks_in_strings_sees_every_kind_of_reading() -> None:
    for code in ("import @", "import os, @\n", "x = 1; import @", "from @ import sleep", "if x: @.sleep(3)"):
        assert READS_A_CLOCK.search(code.replace("@", "time")), code
    for code in ("from time to time", "import datetime", "the time. (Or so.)", "timedelta(seconds=1)"):
        assert not READS_A_CLOCK.search(code), code


# ---- importing stays light


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


BLOCK_HEAVY_MODULES = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "deepspeed"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
"""


def test_importing_and_listing_the_package_loads_neither_torch_nor_deepspeed() -> None:
    heavy = "[name for name in ('torch', 'deepspeed', 'numpy', 'pydantic') if name in sys.modules]"
    result = python(f"import sys, ds_fsmoe; print(len(dir(ds_fsmoe)) > 20, {heavy})")
    assert result.stdout.strip() == "True []", result.stderr


def test_reading_a_config_loads_neither_torch_nor_deepspeed() -> None:
    heavy = "[name for name in ('torch', 'deepspeed') if name in sys.modules]"
    read = "from ds_fsmoe import ConfigError; from ds_fsmoe.config import read_block; read_block({'fsmoe': {}})"
    result = python(f"import sys; {read}; print({heavy})")
    assert result.stdout.strip() == "[]", result.stderr


def test_the_package_imports_where_torch_cannot_be_imported() -> None:
    lines = [
        BLOCK_HEAVY_MODULES,
        "import ds_fsmoe, ds_fsmoe.cli, ds_fsmoe.config, ds_fsmoe.registry",
        "print(ds_fsmoe.__version__, len(dir(ds_fsmoe)))",
        "try: ds_fsmoe.MOELayer",
        "except ImportError as error: print(error)",
    ]
    result = python("\n".join(lines))
    import ds_fsmoe

    expected = [f"{ds_fsmoe.__version__} {len(ds_fsmoe.__all__)}", "torch is blocked"]
    assert result.stdout.splitlines() == expected, result.stderr


def test_planning_imports_where_torch_cannot_be_imported() -> None:
    modules = [".".join(["ds_fsmoe", *file.with_suffix("").parts]) for file in FILES if file.parts[0] == "planning"]
    names = [module.removesuffix(".__init__") for module in modules]
    result = python("\n".join([BLOCK_HEAVY_MODULES, *(f"import {name}" for name in names), "print('done')"]))
    assert result.stdout.strip() == "done", result.stderr


def test_every_public_name_is_listed_once() -> None:
    import ds_fsmoe

    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    typed = [alias.name for node in for_checkers.body for alias in node.names]
    assert sorted([*typed, "__version__"]) == sorted(ds_fsmoe.__all__)
    assert dir(ds_fsmoe) == sorted(set(ds_fsmoe.__all__))
    with pytest.raises(AttributeError, match="module 'ds_fsmoe' has no attribute 'MoeLayer'"):
        ds_fsmoe.MoeLayer  # noqa: B018


def test_every_public_name_leads_somewhere() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    import ds_fsmoe

    assert all(getattr(ds_fsmoe, name) is not None for name in ds_fsmoe.__all__)


# ---- files


def test_files_of_the_package_can_be_read_in_one_sitting() -> None:
    lengths = {file.as_posix(): len((PACKAGE / file).read_text().splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_every_source_file_states_its_license() -> None:
    folders = ("ds_fsmoe", "op_builder", "csrc", "tests", "benchmarks", "examples", "tools")
    suffixes = (".py", ".cpp", ".cu", ".cuh", ".h", ".sh")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    assert len(files) > 40
    without = [
        path.relative_to(ROOT).as_posix()
        for path in [ROOT / "setup.py", *files]
        # An empty __init__.py holds nothing to license. A script's first line belongs to the shell.
        if path.read_text().strip()
        and not any("SPDX-License-Identifier: Apache-2.0" in line for line in path.read_text().splitlines()[:2])
    ]
    assert without == []

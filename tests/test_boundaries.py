# SPDX-License-Identifier: Apache-2.0
"""Which folder of the package may import what, read from the source; and that importing the package stays light.

Imports inside functions count, those for type checkers only do not.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sources import ROOT, tree

PACKAGE = ROOT / "ds_fsmoe"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# Folder -> what its files may import besides the standard library and their own folder, with ".a" for "ds_fsmoe.a". The
# folder "." is the top level, and an import "." all of the package.
FOLDERS: dict[str, str] = {
    ".": (
        "torch pydantic pydantic_core .checks.missing_engine .config.imported_later .distributed.launch_order "
        ".engine .terminal .versions"
    ),
    "terminal": "rich",
    "planning": "numpy scipy pydantic .shapes .terminal .untrusted",
    "planning/decide": "numpy scipy .planning .untrusted",
    "planning/job": ".planning .untrusted",
    "planning/lina": "numpy .terminal",
    "files": "pydantic .planning .shapes .untrusted",
    "routes": "numpy .files .untrusted",
    "config": "pydantic pydantic_core .planning .registry .shapes .untrusted",
    "ops": "torch",
    "components": "torch .components .distributed.waits .ops",
    "components/alltoalls": "torch .components .registry",
    "components/experts": "torch .components .registry",
    "components/gates": "torch .components .ops .registry",
    "components/hooks": "torch .components",
    "components/orders": "torch .components .ops .registry",
    "components/expert_compute": "torch .components .ops",
    "distributed": "torch .planning",
    "execution": "torch numpy .distributed .planning",
    "observing": "torch .components .config .distributed .execution .files .planning .terminal .untrusted",
    "telemetry": "torch .components .distributed .execution .files .observing .planning .routes .versions",
    "checks": "torch .components .config .distributed .execution .log .observing .planning",
    "checkpoint_files": (
        "torch numpy pydantic safetensors transformers huggingface_hub .files .shapes .untrusted .versions"
    ),
    "layer": (
        "torch numpy .checkpoint_files .checks .components .config .distributed .execution .files .log "
        ".observing .ops .planning .registry .telemetry"
    ),
    "gradients": "torch numpy .config .distributed .execution .layer .log .measuring .observing .planning",
    "measuring": (
        "torch .config .distributed .execution .files .log .observing .planning .terminal .untrusted .versions"
    ),
    "tuning": (
        "torch numpy .checks .components .config .distributed .execution .files .layer .log .measuring "
        ".observing .planning .registry .telemetry .terminal"
    ),
    "checkpoint": (
        "torch numpy .checkpoint_files .components .config .distributed .execution .files .layer .log "
        ".planning .registry .telemetry .terminal"
    ),
    "placement": (
        "torch numpy .checkpoint .checkpoint_files .components .config .distributed .files .layer .log "
        ".observing .planning .untrusted"
    ),
    "two_batch": "torch greenlet .execution .layer .log",
    "engine": "torch numpy packaging .",
    "offline": "",
    "offline/models": "numpy .planning .untrusted",
    "offline/report": "altair jinja2 numpy scipy vl_convert .config.words .files .planning .routes .terminal",
    "offline/plan": "numpy .files .offline.models .offline.report .planning .routes .shapes .terminal .untrusted",
    "offline/commands": (
        ".engine.command_line .engine.compat .files .offline .planning .registry .terminal .untrusted .versions"
    ),
}
# The files that may import DeepSpeed, by folder: they stand in for what it does, or look into what it has.
DEEPSPEED: dict[str, str] = {
    "layer": "stock_layer",
    "engine": (
        "compat engine entry_points expert_tensors inference marked_experts optimizer_groups own_experts restore_model "
        "saving_engine set_up shard_experts telemetry"
    ),
    "gradients": "norm reduction updated_parameters zero_stages",
    "checkpoint": "loading optimizer_states ranks saving",
    "measuring": "profile_job",
    "telemetry": "flops stock_trace",
    "distributed": "groups partitioned",
}
# (file, imported module) -> why the rule of its folder does not hold there.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("offline/commands/env.py", "ds_fsmoe.ops"): "says of each op whether it can be built, where there is a torch",
    ("offline/commands/env.py", "ds_fsmoe.measuring.hardware"): "says what is known of the links; needs no torch",
    ("offline/commands/convert.py", "ds_fsmoe.checkpoint_files"): "reads and writes checkpoints, if there is a torch",
    ("offline/commands/profile.py", "ds_fsmoe.measuring.profile_job"): "measures, which takes all that training takes",
    ("offline/plan/model.py", "transformers"): "looks the configuration of a model up by its name, when asked to",
    ("offline/plan/draw.py", "altair"): "draws, when it is asked to; all else there plans without",
    ("offline/plan/draw.py", "vl_convert"): "writes what altair has described",
}
# What must stay importable by someone who has no torch: to plan, to read configs, to be told what is missing.
WITHOUT_TORCH = (
    *("planning", "planning/decide", "planning/job", "planning/lina", "config", "files", "routes", "terminal"),
    *("offline", "offline/commands", "offline/models", "offline/plan", "offline/report"),
    *("__init__.py", "__main__.py", "cli.py", "env_entry_point.py", "registry.py", "run.py", "shapes.py"),
    *("untrusted.py", "versions.py"),
    *("engine/__init__.py", "engine/command_line.py", "distributed/__init__.py", "distributed/launch_order.py"),
)
# Layers of folders that import each other, files at the top level counting as folders. It may not grow.
MOST_LAYERS = 12

# Folder -> the most statements (ast.stmt) that its files may have. A number may go up only in a commit whose message
# says what was deleted for it.
STATEMENTS: dict[str, int] = {
    ".": 553,
    "checkpoint": 1384,
    "checkpoint_files": 1894,
    "checks": 476,
    "components": 3431,
    "config": 762,
    "distributed": 803,
    "engine": 4341,
    "execution": 2456,
    "files": 679,
    "gradients": 1728,
    "layer": 3203,
    "measuring": 1307,
    "observing": 1299,
    "offline": 6514,
    "ops": 736,
    "placement": 676,
    "planning": 5246,
    "routes": 471,
    "telemetry": 893,
    "terminal": 208,
    "tuning": 2232,
    "two_batch": 640,
}

MOST_FILES = 20
"""Of a folder."""

# In code as a string; and, of a file, whether it is worth to be parsed.
MAY_READ_A_CLOCK = re.compile(r"import [^\n;]*\btime\b|from time import|import timeit|\btime\.[a-z_]+\(")
READS_A_CLOCK = re.compile(r"(?m)(^|[;:])\s*(import [^\n;]*\btime\b|from time import|import timeit)|\btime\.[a-z_]+\(")


def module_of(file: Path) -> str:
    return ".".join(["ds_fsmoe", *file.with_suffix("").parts]).removesuffix(".__init__")


def within(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def imports_of(source: ast.Module, module: str, is_package: bool, at_import: bool = False) -> set[str]:
    """Dotted names that a file imports: ``from a import b`` counts as ``a`` and as ``a.b``; all but those in functions
    if only those ``at_import`` are asked for."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if at_import and isinstance(node, ast.FunctionDef):
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

    visit(source)
    return found


@functools.cache
def imports(file: Path) -> set[str]:
    return imports_of(tree(PACKAGE / file), module_of(file), file.name == "__init__.py")


def allowed(file: Path, module: str) -> bool:
    if module.split(".")[0] in sys.stdlib_module_names or module == "ds_fsmoe":
        return True
    folder, name = file.parent.as_posix(), file.as_posix()
    if within(module, "deepspeed"):
        return file.stem in DEEPSPEED.get(folder, "").split()
    words = [f"ds_fsmoe{each}".rstrip(".") if each.startswith(".") else each for each in FOLDERS[folder].split()]
    if any(within(module, each) for each in (*words, *(each for path, each in EXCEPTIONS if path == name))):
        return True
    if folder == ".":
        return not (PACKAGE / Path(*module.split(".")[1:2])).is_dir() and within(module, "ds_fsmoe")
    own, inside = module_of(Path(folder)), (each for each in FOLDERS if each.startswith(f"{folder}/"))
    return within(module, own) and not any(within(module, module_of(Path(each))) for each in inside)


def test_a_folder_imports_only_what_it_may() -> None:
    assert {file.parent.as_posix() for file in FILES} == set(FOLDERS)
    assert [f"{file} imports {module}" for file in FILES for module in imports(file) if not allowed(file, module)] == []


def test_every_folder_says_what_it_is_for_and_has_its_place_on_the_map() -> None:
    """The tree of folders in the README or in a page of ``docs/``."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    maps = [found for page in pages for found in re.findall(r"(?ms)^```\nds_fsmoe/\n(.*?)^```", page.read_text())]
    assert len(maps) == 1
    for folder in set(FOLDERS) - {"."}:
        assert ast.get_docstring(tree(PACKAGE / folder / "__init__.py")), folder
        assert re.search(rf"(?m)^  ([a-z_/]+ )*{folder}/ ", maps[0]), f"{folder}/ has no line on the map"


def top(module: str) -> str:
    """The folder of a module, folders in folders taken together: a folder, or a file at the top level."""
    return ".".join(module.split(".")[:2])


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_of(file): file for file in FILES}
    at_import = {
        name: {
            each
            for each in imports_of(tree(PACKAGE / file), name, file.name == "__init__.py", at_import=True)
            if each in modules and each != name and not name.startswith(f"{each}.")
        }
        for name, file in modules.items()
    }
    graphlib.TopologicalSorter(at_import).prepare()  # raises CycleError with the circle


def test_folders_import_each_other_in_no_circle_and_in_no_more_layers() -> None:
    modules = {module_of(file) for file in FILES}
    arrows: dict[str, set[str]] = {top(module): set() for module in modules}
    for file in FILES:
        here = top(module_of(file))
        arrows[here] |= {top(each) for each in imports(file) & modules} - {here, "ds_fsmoe"}
    height: dict[str, int] = {}
    for folder in graphlib.TopologicalSorter(arrows).static_order():  # raises CycleError with the circle
        height[folder] = 1 + max((height[each] for each in arrows.get(folder, ())), default=0)
    assert max(height.values()) <= MOST_LAYERS


def test_no_exception_outlives_its_reason() -> None:
    for name, module in EXCEPTIONS:
        assert any(within(each, module) for each in imports(Path(name))), f"{name} no longer imports {module}"
    for folder, names in DEEPSPEED.items():
        for name in names.split():
            assert any(within(each, "deepspeed") for each in imports(Path(folder, f"{name}.py"))), f"{folder}/{name}"


def test_the_reader_of_imports_sees_every_kind_of_import() -> None:
    code = """
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
    source = ast.parse(code)
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
        if MAY_READ_A_CLOCK.search(text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and READS_A_CLOCK.search(node.value)
    ]
    assert found == []
    for code in ("import @", "import os, @\n", "x = 1; import @", "from @ import sleep", "if x: @.sleep(3)"):
        for each in (READS_A_CLOCK, MAY_READ_A_CLOCK):
            assert each.search(code.replace("@", "time")), code
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


def test_importing_the_package_and_reading_a_config_loads_neither_torch_nor_deepspeed() -> None:
    lines = [
        "import sys, ds_fsmoe",
        "names = 'torch', 'deepspeed', 'numpy', 'pydantic', 'rich'",
        "print(len(dir(ds_fsmoe)) > 20, [name for name in names if name in sys.modules])",
        "from ds_fsmoe.config.reading import read_block",
        "read_block({'fsmoe': {'enabled': False}})",
        "print([name for name in names[:2] if name in sys.modules])",
    ]
    result = python("\n".join(lines))
    assert result.stdout.splitlines() == ["True []", "[]"], result.stderr


def test_all_that_needs_no_torch_imports_where_there_is_none() -> None:
    files = [file for file in FILES if {file.as_posix(), file.parent.as_posix()} & set(WITHOUT_TORCH)]
    assert len(files) > 100
    imported = {(file.as_posix(), each.split(".")[0]) for file in files for each in imports(file)}
    assert [name for name, module in imported if module in ("torch", "deepspeed")] == [], "not even in functions"
    names = [module_of(file) for file in files if file.name != "__main__.py"]
    lines = [
        BLOCK_HEAVY_MODULES,
        *(f"import {name}" for name in names),
        "print(ds_fsmoe.__version__, len(dir(ds_fsmoe)))",
        "try: ds_fsmoe.MOELayer",
        "except ImportError as error: print(error)",
    ]
    result = python("\n".join(lines))
    import ds_fsmoe

    expected = [f"{ds_fsmoe.__version__} {len(ds_fsmoe.__all__)}", "torch is blocked"]
    assert result.stdout.splitlines() == expected, result.stderr


def test_every_public_name_is_listed_once_and_leads_somewhere() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    import ds_fsmoe

    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    typed = [alias.name for node in for_checkers.body for alias in node.names]
    of_before = "BFloat16Wire"  # a name of version 0.2.0: it works, and ``import *`` leaves it out
    assert sorted([*typed, "__version__"]) == sorted([*ds_fsmoe.__all__, of_before])
    assert dir(ds_fsmoe) == sorted(set(ds_fsmoe.__all__))
    assert all(getattr(ds_fsmoe, name) is not None for name in ds_fsmoe.__all__)
    with pytest.raises(AttributeError, match="module 'ds_fsmoe' has no attribute 'MoeLayer'"):
        ds_fsmoe.MoeLayer  # noqa: B018


# ---- files


def test_every_source_file_states_its_license() -> None:
    folders = ("ds_fsmoe", "op_builder", "csrc", "tests", "benchmarks", "examples", "tools")
    suffixes = (".py", ".cpp", ".cu", ".cuh", ".h", ".sh")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    assert len(files) > 40
    texts = {path: path.read_text() for path in [ROOT / "setup.py", *files]}
    # An empty __init__.py holds nothing to license. A script's first line belongs to the shell.
    license_ = "SPDX-License-Identifier: Apache-2.0"
    assert [
        path for path, text in texts.items() if text.strip() and license_ not in "".join(text.splitlines()[:2])
    ] == []


def test_files_can_be_read_in_one_sitting_folders_looked_over_and_neither_has_more_than_it_had() -> None:
    found = dict.fromkeys(STATEMENTS, 0)
    for file in FILES:
        folder = file.parts[0] if len(file.parts) > 1 else "."
        nodes = ast.walk(tree(PACKAGE / file))
        found[folder] = found.get(folder, 0) + sum(isinstance(node, ast.stmt) for node in nodes)
    assert {name: number for name, number in found.items() if number > STATEMENTS.get(name, 0)} == {}
    counts = Counter(file.parent.as_posix() for file in FILES)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}
    lengths = {file.as_posix(): len((PACKAGE / file).read_text().splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


# What the files of a family share as its interface: commands, and the forms of the ops.
INTERFACE = (
    *("add_arguments", "main", "run", "add_rows", "arrange", "gated", "gated_backward", "gather_rows", "number_rows"),
    *("restore", "restore_backward", "take_slots", "top_k_slots"),
)


def test_a_public_name_is_defined_once() -> None:
    nodes = (node for file in FILES for node in tree(PACKAGE / file).body)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef))
    twice = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert twice - set(INTERFACE) == set()

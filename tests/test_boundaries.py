# SPDX-License-Identifier: Apache-2.0
"""Which room may import which, and that planning on a laptop without torch stays possible."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ds_fsmoe"
STANDARD = set(sys.stdlib_module_names)

# Room -> what its files may import besides the standard library and the room itself.
ROOMS: dict[str, set[str]] = {
    "planning": {"numpy", "scipy"},
    "ops": {"torch"},
    "components": {"torch", "ds_fsmoe.ops", "ds_fsmoe.registry"},
    "runtime": {"torch", "numpy", "ds_fsmoe.planning", "ds_fsmoe.ops"},
}
# DeepSpeed is met in few places, so that an upgrade is a matter of reading few files.
DEEPSPEED_ALLOWED = {"layer.py", "engine.py", "compat.py", "runtime/groups.py"}
# Needed to plan, or to say what is wrong where torch is missing.
TORCHLESS = [
    "__init__.py",
    "__main__.py",
    "cli.py",
    "config.py",
    "preflight.py",
    "registry.py",
    "versions.py",
    "run.py",
]


def imports_of(file: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, except for type checkers only."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the room they come from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(file.read_text()))


def within(name: str, allowed: set[str]) -> bool:
    return any(name == each or name.startswith(each + ".") for each in allowed)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = ROOMS[room] | {f"ds_fsmoe.{room}"} | STANDARD | {"__future__"}
    for file in sorted((PACKAGE / room).rglob("*.py")):
        extra = {"deepspeed"} if str(file.relative_to(PACKAGE)) in DEEPSPEED_ALLOWED else set()
        for name in imports_of(file):
            assert within(name, allowed | extra), f"{file.relative_to(ROOT)} imports {name}"


def test_deepspeed_is_imported_in_few_places() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        if str(file.relative_to(PACKAGE)) not in DEEPSPEED_ALLOWED:
            assert not any(within(name, {"deepspeed"}) for name in imports_of(file)), file


def test_files_that_run_without_torch_do_not_import_it() -> None:
    for name in TORCHLESS:
        assert not any(within(each, {"torch", "deepspeed"}) for each in imports_of(PACKAGE / name)), name


def test_nothing_imports_the_top_of_the_house() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        below = file.parent != PACKAGE
        names = set(imports_of(file))
        if below:
            top = {f"ds_fsmoe.{name}" for name in ("engine", "layer", "moe_layer", "config", "preflight", "cli", "run")}
            assert not any(within(name, top) for name in names), file
        if file.name not in ("__init__.py", "run.py"):
            assert not any(within(name, {"ds_fsmoe.engine"}) for name in names), file


def test_the_op_builders_never_pass_for_deepspeeds_own() -> None:
    """DeepSpeed imports a top-level op_builder and looks for this name to learn whether it runs from its own source."""
    for file in (ROOT / "op_builder").rglob("*.py"):
        assigned = [node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)]
        assert "__deepspeed__" not in assigned


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCK_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "deepspeed", "pydantic", "packaging"):
            raise ModuleNotFoundError(f"{name} is not on this laptop", name=name)
sys.meta_path.insert(0, Refuse())
"""


def test_importing_the_package_loads_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, ds_fsmoe; dir(ds_fsmoe); print([m for m in ('torch', 'deepspeed', 'numpy') if m in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_the_package_imports_on_a_laptop_without_torch() -> None:
    code = BLOCK_TORCH + "import ds_fsmoe, ds_fsmoe.cli, ds_fsmoe.registry; print(ds_fsmoe.__version__)"
    assert run_python(code).strip() == "0.1.0"


def test_every_public_name_exists() -> None:
    code = "import ds_fsmoe\nfor name in ds_fsmoe.__all__: getattr(ds_fsmoe, name)\nprint(len(ds_fsmoe.__all__))"
    assert int(run_python(code).splitlines()[-1]) > 20
    import ds_fsmoe

    assert set(ds_fsmoe.__all__) == {*ds_fsmoe._MODULE_OF_NAME, "__version__"}


def test_deepspeed_imports_with_the_repository_on_the_path() -> None:
    assert run_python("import deepspeed, op_builder; print(op_builder.__file__)").strip().endswith("__init__.py")


def test_every_source_file_carries_its_license_and_can_be_read_in_a_sitting() -> None:
    folders = ["ds_fsmoe", "op_builder", "csrc", "tests", "benchmarks", "examples"]
    files = [
        each for name in folders for each in (ROOT / name).rglob("*") if each.suffix in (".py", ".cpp", ".h", ".cu")
    ]
    assert len(files) > 40
    for file in files:
        text = file.read_text()
        if text:
            assert "SPDX-License-Identifier: Apache-2.0" in text.splitlines()[0], file
        assert len(text.splitlines()) <= 400, file

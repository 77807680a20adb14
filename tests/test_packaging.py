# SPDX-License-Identifier: Apache-2.0
"""What ends up in the installed package, and that every form of installation finds the op builders."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.samples import sampled

pytestmark = pytest.mark.long

pytest.importorskip("setuptools")
requirements = pytest.importorskip("packaging.requirements")
specifiers = pytest.importorskip("packaging.specifiers")

REPOSITORY = Path(__file__).resolve().parents[1]
VERSIONS = runpy.run_path(str(REPOSITORY / "ds_fsmoe" / "versions.py"))
SITE_PACKAGES = sysconfig.get_path("purelib")
ENTRY_POINT = REPOSITORY / "ds_fsmoe" / "ds_fsmoe_entry_point.pth"
"""Read by each interpreter that starts, from where it lies beside the package."""

FIND_BUILDERS = """
import sys
import ds_fsmoe
from ds_fsmoe.ops import loading
package = loading.import_op_builder()
assert package.__name__ == "ds_fsmoe.ops.op_builder"
assert "deepspeed" not in sys.modules
assert "op_builder" not in sys.modules
builder = package.builders("cpu")["fsmoe_cpu"]
print(loading.__file__)
for source in builder.sources():
    print(builder.deepspeed_src_path(source))
"""


def copy_of_the_repository(target: Path) -> Path:
    """A copy to build in: setuptools leaves build/ and *.egg-info/ behind, and reads stale ones."""
    target.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "CHANGELOG.md", "README.md"):
        if (REPOSITORY / name).is_file():
            shutil.copy(REPOSITORY / name, target)
    (target / "tools").mkdir()
    shutil.copy(REPOSITORY / "tools" / "package_page.py", target / "tools")
    for name in ("ds_fsmoe", "op_builder", "csrc"):
        shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return target


def run(command: list[str], folder: Path, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, to such a status."""
    result = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"DS_BUILD_FSMOE": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result


def build_wheel(source: Path, target: Path, **environment: str) -> Path:
    """Builds with the setuptools of this environment, so that nothing is downloaded."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-q", "-w", str(target)]
    run(["-m", "pip", "wheel", *options, str(source)], source, **environment)
    (wheel,) = target.glob("*.whl")
    return wheel


def run_python(script: str, path: list[Path | str], folder: Path, **environment: str) -> list[str]:
    """Runs a script outside the checkout. Without the site module, so that no other installation of ours is found."""
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "DS_ACCELERATOR": "cpu"}
    return run(["-S", "-c", script], folder, **environment).stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    # A sitecustomize that hides torch and DeepSpeed: packaging must not need them.
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = sys.modules['deepspeed'] = None\n")
    source = copy_of_the_repository(folder / "source")
    with zipfile.ZipFile(build_wheel(source, folder / "out", PYTHONPATH=str(hidden))) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_a_wheel_holds_one_package_with_all_its_files_its_builders_and_their_sources_and_nothing_compiled(
    wheel: zipfile.ZipFile,
) -> None:
    packaged, info = set(wheel.namelist()), f"ds_fsmoe-{VERSIONS['VERSION']}.dist-info"
    for folder, suffixes, above in (
        ("op_builder", {".py"}, "ds_fsmoe/ops/"),
        ("csrc", {".cpp", ".h", ".cu", ".cuh"}, "ds_fsmoe/ops/"),
        ("ds_fsmoe", {".py", ".pyi", ".typed"}, ""),
    ):
        files = [each for each in (REPOSITORY / folder).rglob("*") if each.suffix in suffixes]
        assert {each.suffix for each in files} == suffixes
        assert {f"{above}{each.relative_to(REPOSITORY).as_posix()}" for each in files} - packaged == set()
    assert {name.split("/")[0] for name in packaged} == {"ds_fsmoe", info, ENTRY_POINT.name}
    assert wheel.read(ENTRY_POINT.name) == ENTRY_POINT.read_bytes()
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    assert not [name for name in packaged if name.endswith(".so")]
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    assert b"ds_fsmoe = ds_fsmoe.cli:main" in wheel.read(f"{info}/entry_points.txt")


def test_only_numpy_pydantic_scipy_and_rich_are_needed_to_plan_and_versions_are_those_of_the_one_table(
    metadata: Message,
) -> None:
    found = [requirements.Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    needed = {each.name: str(each.specifier) for each in found if each.marker is None}
    assert set(needed) == {"numpy", "pydantic", "rich", "scipy"}
    assert needed["pydantic"] == ">=2.8", "FailFast is of 2.8"
    extras = {str(each.marker) for each in found if each.marker is not None}
    assert extras == {f'extra == "{name}"' for name in ("train", "hf", "plot", "mpi", "dev", "dev-planning")}
    supported = {name: specifiers.SpecifierSet(text) for name, text in VERSIONS["SUPPORTED"].items()}
    assert specifiers.SpecifierSet(metadata["Requires-Python"]) == supported["python"]
    ranges = {each.name: each.specifier for each in found if "train" in str(each.marker)}
    # A bound above would put an older torch in the place of a newer one.
    assert {each.operator for each in ranges["torch"]} == {">="}
    assert str(ranges["torch"]) in str(supported["torch"]).split(",")
    assert ranges["deepspeed"] == supported["deepspeed"]


def test_the_metadata_says_what_the_package_is_and_which_pythons_have_been_tried(metadata: Message) -> None:
    assert metadata["Name"].replace("-", "_") == "ds_fsmoe"
    assert (metadata["Version"], metadata["License-Expression"]) == (VERSIONS["VERSION"], "Apache-2.0")
    said = {key: metadata.get_all(key, []) for key in ("Author", "Keywords", "Project-URL", "Summary")}
    assert all(said.values()), said
    pythons = {f"Programming Language :: Python :: {each}" for each, _ in VERSIONS["RUN"]}
    classifiers = set(metadata.get_all("Classifier", []))
    assert pythons == {each for each in classifiers if re.fullmatch(r".*Python :: \d\.\d+", each)}
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= classifiers
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# ds_fsmoe\n")
    assert all(re.fullmatch(r"\w+, https://[\w./-]+", url) for url in said["Project-URL"])


def test_the_installed_form_finds_its_builders(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    wheel.extractall(tmp_path / "site")
    script = FIND_BUILDERS.replace('assert "deepspeed" not in sys.modules\n', "")
    files = run_python(script, [tmp_path / "site", SITE_PACKAGES], tmp_path)
    assert files[-1] == str(tmp_path / "site/ds_fsmoe/ops/csrc/cpu/slots.cpp")
    assert Path(files[-1]).is_file()


@sampled("mode", ["lenient", "strict", "compat"], kept=[0])
def test_every_editable_form_finds_its_builders(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    source = copy_of_the_repository(tmp_path / "source")
    settings = {"editable_mode": mode}
    build = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r}, {settings!r})"
    run(["-c", build], source)
    (editable,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(editable).extractall(tmp_path / "site")
    assert (tmp_path / "site" / ENTRY_POINT.name).read_bytes() == ENTRY_POINT.read_bytes()
    activate = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
    files = run_python(activate + FIND_BUILDERS, [tmp_path / "site", SITE_PACKAGES], tmp_path)
    assert Path(files[-1]).resolve() == source / "csrc/cpu/slots.cpp"


def test_a_second_checkout_builds_its_own_ops_whatever_checkout_is_installed(tmp_path: Path) -> None:
    """An editable installation answers for the builders by a finder, whichever package has been imported."""
    pytest.importorskip("deepspeed")
    second = copy_of_the_repository(tmp_path / "second")
    installed = f"""
import importlib.machinery, importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "ds_fsmoe.ops.op_builder":
            folder = {str(REPOSITORY / "op_builder")!r}
            return importlib.util.spec_from_file_location(
                name, folder + "/__init__.py", submodule_search_locations=[folder]
            )

sys.meta_path.append(Finder)
"""
    script = installed + FIND_BUILDERS + "print(builder.lock_path().parent.name)\n"
    names = set()
    for checkout in (REPOSITORY, second):
        *files, name = run_python(script, [checkout, SITE_PACKAGES], tmp_path)
        assert files[0] == str(checkout / "ds_fsmoe/ops/loading.py")
        assert files[-1] == str(checkout / "csrc/cpu/slots.cpp")
        names.add(name)
    assert len(names) == 2, "they would build over one another"


@pytest.mark.daily("commands", 1)
def test_a_wheel_built_with_ops_needs_no_build_to_run_them(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    source = copy_of_the_repository(tmp_path / "source")
    archive = build_wheel(source, tmp_path / "out", DS_BUILD_FSMOE="1", MAX_JOBS="1")
    zipfile.ZipFile(archive).extractall(tmp_path / "site")
    extensions = tmp_path / "torch_extensions"
    script = (
        "import torch; from ds_fsmoe.ops import load_ops\n"
        "ops = load_ops('required', 'cpu')\n"
        "print(ops.name, ops.gather_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 2, 0])).tolist())\n"
        "ops = load_ops('auto', 'cpu')\n"
        "slots_KS = ops.top_k_slots(torch.tensor([[0.1, 0.9]] * 2), 1, 1).slots_KS\n"
        "x_NM = ops.arrange(torch.tensor([[1.0], [2.0]]), slots_KS, 2)\n"
        "print(ops.name, x_NM.tolist(), ops.restore(x_NM, slots_KS, torch.ones(1, 2)).tolist())\n"
    )
    path = [tmp_path / "site", SITE_PACKAGES]
    output = run_python(script, path, tmp_path, TORCH_EXTENSIONS_DIR=str(extensions), CXX="false")
    assert output[-2:] == ["compiled [[2.0], [0.0], [1.0]]", "compiled [[0.0], [1.0]] [[1.0], [0.0]]"]
    assert not extensions.exists()


def test_building_ops_into_a_wheel_without_torch_says_what_to_install(tmp_path: Path) -> None:
    source = copy_of_the_repository(tmp_path / "source")
    script = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_path('setup.py')"
    assert "--no-build-isolation" in run(["-c", script], source, 1, DS_BUILD_FSMOE="1").stderr

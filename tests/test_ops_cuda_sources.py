# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources: every kernel file compiles with nvcc alone, for each generation of GPUs, without a GPU or torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.samples import sampled

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER, INCLUDES = REPOSITORY / "csrc" / "cuda", REPOSITORY / "csrc" / "includes"
KERNELS = sorted(FOLDER.rglob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_100", "sm_120", "sm_90")
# Of a thread: with 64, four blocks of 256 fit on a multiprocessor.
MAX_REGISTERS = 64


def nvcc_for(architecture: str) -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on the PATH: the kernels cannot be compiled here")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, timeout=60).stdout.split()
    if architecture not in known:
        pytest.skip(f"this nvcc does not know {architecture}")
    return nvcc


@sampled("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_every_kernel_compiles_within_its_budget_of_registers(kernel: Path, architecture: str, tmp_path: Path) -> None:
    command = [nvcc_for(architecture), "-std=c++17", "-O3", "--fmad=false", f"-arch={architecture}"]
    command += [f"-I{FOLDER}", f"-I{INCLUDES}"]
    strict = ["-Werror=all-warnings", "-Xptxas", "-v"]
    output = tmp_path / "kernel.o"
    run = [*command, *strict, "-c", str(kernel), "-o", str(output)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert output.stat().st_size > 0
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) >= len(re.findall(r"__global__", kernel.read_text()))
    assert max(registers) <= MAX_REGISTERS, said
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill \w+)", said)) == {"0"}, said


def checked_syntax(source: Path, standard: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a C++ compiler says of a file of bindings, with torch's headers and CUDA's."""
    torch = pytest.importorskip("torch")
    from torch.utils import cpp_extension

    compiler, nvcc = os.environ.get("CXX", "c++"), shutil.which("nvcc")
    if shutil.which(compiler) is None or nvcc is None:
        pytest.skip(f"no {compiler} or no nvcc on the PATH: the bindings need a compiler and CUDA's headers")
    asked = subprocess.run([nvcc, "--dryrun", "-c", "none.cu"], capture_output=True, text=True, timeout=60).stderr
    top = re.search(r"^#\$ TOP=(.+)$", asked, re.MULTILINE)
    headers = Path(top[1], "include") if top else Path("no such folder")
    if not (headers / "cuda_runtime_api.h").is_file():
        pytest.skip(f"CUDA's headers are not in {headers}")
    # The one header that torch's build for the CPU leaves out: how torch itself was built, all macros of it optional.
    left_out = folder / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    left_out.parent.mkdir(parents=True, exist_ok=True)
    left_out.touch()
    theirs = [*cpp_extension.include_paths(), str(headers), *([] if torch.version.cuda else [str(folder)])]
    command = [compiler, f"-std={standard}", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{FOLDER}", f"-I{INCLUDES}"]
    for each in theirs:
        command += ["-isystem", each]
    return subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=600)


@pytest.mark.daily("bindings by torch's headers", 1)
@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_the_bindings_are_right_by_torchs_headers(standard: str, tmp_path: Path) -> None:
    done = checked_syntax(FOLDER / "bindings.cpp", standard, tmp_path)
    if standard == "c++17" and "C++20" in done.stderr:
        pytest.skip("this torch wants C++20")
    assert done.returncode == 0, done.stderr


def test_there_are_kernels_and_the_builder_names_them_all() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    from ds_fsmoe.ops import loading

    builder = loading.import_op_builder().builders("cuda")["fsmoe_cuda"]
    named = {source for source in builder.sources() if source.endswith(".cu")}
    assert named == {kernel.relative_to(REPOSITORY).as_posix() for kernel in KERNELS}
    assert len(named) >= 2
    for device_type in ("cpu", "cuda"):
        for builder in loading.import_op_builder().builders(device_type).values():
            assert all((REPOSITORY / source).is_file() for source in builder.sources())


def test_kernels_know_nothing_of_torch() -> None:
    files = [path for path in FOLDER.iterdir() if path.suffix in (".cu", ".cuh", ".h")]
    assert len(files) >= 4
    for file in files:
        assert not re.search(r"#include\s*<(torch|ATen|c10)/", file.read_text()), file.name

# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources: every kernel file compiles with nvcc alone, for each generation of GPUs, without a GPU or torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.samples import sampled

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "csrc" / "cuda"
KERNELS = sorted(FOLDER.rglob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_90")


@sampled("architecture", ARCHITECTURES, kept=[-1])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_every_kernel_file_compiles(kernel: Path, architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on the PATH: the kernels cannot be compiled here")
    command = [
        nvcc,
        "-std=c++17",
        "-O3",
        "--fmad=false",
        f"-arch={architecture}",
        "-Werror=all-warnings",
        f"-I{FOLDER}",
    ]
    output = tmp_path / "kernel.o"
    done = subprocess.run([*command, "-c", str(kernel), "-o", str(output)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert output.stat().st_size > 0


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

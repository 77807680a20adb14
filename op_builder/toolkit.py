# SPDX-License-Identifier: Apache-2.0
"""The CUDA toolkit that ops are built with: which one, whether it fits torch, and what it can compile for.

Builds and ``ds_fsmoe env`` both ask here, so that they say the same. Imports nothing of DeepSpeed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

Release = tuple[int, int]


def nvcc_path() -> Path | None:
    """The ``nvcc`` that torch's build tools start: that of CUDA_HOME, or of the toolkit on the PATH."""
    from torch.utils import cpp_extension

    return Path(cpp_extension.CUDA_HOME, "bin", "nvcc") if cpp_extension.CUDA_HOME else None


def release() -> Release:
    """Major and minor release of the toolkit.

    Raises:
        RuntimeError: there is none, or its ``nvcc`` does not say.
    """
    path = nvcc_path()
    if path is None:
        raise RuntimeError("no CUDA toolkit: nvcc is not on the PATH, and CUDA_HOME is not set")
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{path} does not run: {error}; install the toolkit, or name it in CUDA_HOME") from error
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found is None:
        raise RuntimeError(f"{path} does not say its release: {said.strip()!r}")
    return int(found[1]), int(found[2])


def mismatch(toolkit: Release, for_torch: str) -> str | None:
    """Why ops that this toolkit compiles would not fit a torch that is built with CUDA ``for_torch``, if so.

    Releases of one major go together in either order: CUDA's minor version compatibility. Those of two do not: torch's
    build tools refuse them too, whatever DS_SKIP_CUDA_CHECK says.
    """
    major = for_torch.split(".")[0]
    if str(toolkit[0]) == major:
        return None
    return (
        f"nvcc is of CUDA {toolkit[0]}.{toolkit[1]}, torch is built with CUDA {for_torch}: "
        f"ops need an nvcc of CUDA {major}"
    )


def obstacle(for_torch: str) -> str | None:
    """What stands in the way of building for a torch that is built with CUDA ``for_torch``; None if nothing does."""
    try:
        return mismatch(release(), for_torch)
    except RuntimeError as error:
        return str(error)


def wheel_architectures(toolkit: Release) -> str:
    """What a wheel is compiled for, unless TORCH_CUDA_ARCH_LIST says otherwise; as PTX for whatever comes later."""
    return "8.0;9.0;10.0+PTX" if toolkit >= (12, 8) else "8.0;9.0+PTX"

# SPDX-License-Identifier: Apache-2.0
"""What every builder of ours adds to DeepSpeed's: our own source tree, our own wheel, reasons, and locks that time out.

DeepSpeed's builders resolve source files inside DeepSpeed's installation and look for prebuilt libraries in
DeepSpeed's own table. Both have to point here instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from . import SOURCE_ROOT, SOURCE_TAG, architectures, locks, toolkit

if TYPE_CHECKING:
    from setuptools import Extension


# "2.13.0+cpu" -> "2_13_0_cpu": fit for a macro and for a module name.
TORCH_TAG = re.sub(r"\W", "_", torch.__version__)


def macros() -> list[str]:
    """Flags that say for which torch is built. The first is for the build cache: torch rebuilds when the command line
    changes, but does not watch its own headers, so without it a torch upgrade would load yesterday's library."""
    with torch.enable_grad():
        at_limit = torch.ones((), device="cpu", requires_grad=True)
        at_limit.clamp(max=1.0).backward()
    return [f"-DFSMOE_TORCH_{TORCH_TAG}", f"-DFSMOE_CLAMP_PASSES_LIMIT={int(at_limit.grad)}"]


class FSMoEBuilder(OpBuilder):
    """What builders for all device types have in common. A subclass gives ``NAME`` and ``sources()``.

    ``NAME`` must start with ``fsmoe_``: DeepSpeed caches loaded ops of the whole process by name.
    """

    BUILD_VAR: ClassVar[str] = "DS_BUILD_FSMOE"
    NAME: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(name=f"{self.NAME}_{SOURCE_TAG}")

    def sources(self) -> list[str]:
        """Source files, relative to the folder that holds ``csrc/``."""
        raise NotImplementedError(f"{type(self).__name__} must list its source files")

    def include_paths(self) -> list[str]:
        return ["csrc/includes"]

    def obstacles(self) -> list[str]:
        """What stands in the way of building this op here, a sentence each; empty if nothing does."""
        found = []
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(compiler) is None:
            found.append(f"no C++ compiler: {compiler!r} is not on the PATH; install one, or name it in CXX")
        if shutil.which("ninja") is None:
            found.append("ninja is not on the PATH: pip install ninja")
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            found.append("Python.h is missing: install the development files of this Python")
        return found

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op is there, or can be built. If not, ``error_log`` says why; with ``verbose`` it is printed."""
        reasons = [] if self.is_prebuilt() else self.obstacles()
        if reasons:
            self.error_log = "; ".join(reasons)
            if verbose:
                self.warning(self.error_log)
        return not reasons

    def absolute_name(self) -> str:
        """Import path of the library in a wheel. It carries torch's version: one built for another is not found."""
        return f"ds_fsmoe.ops.{self.NAME}_torch_{TORCH_TAG}"

    def deepspeed_src_path(self, code_path: str) -> str:
        return str(SOURCE_ROOT / code_path)

    def is_prebuilt(self) -> bool:
        """Whether the installed package brings this op compiled for the running torch."""
        return importlib.util.find_spec(self.absolute_name()) is not None

    def is_built(self) -> bool:
        """Whether it has been built just in time before; an older one is built again when it is loaded."""
        return self.lock_path().with_name(f"{self.name}.so").is_file()

    def will_compile(self) -> bool:
        """Whether :meth:`load` is going to take its time."""
        return self.name not in OpBuilder._loaded_ops and not self.is_prebuilt() and not self.is_built()

    def lock_path(self) -> Path:
        """The file torch holds while it builds this op just in time. A build that was killed leaves it behind."""
        return locks.extensions_folder() / self.name / "lock"

    def builder(self) -> Extension:
        """The extension to compile into a wheel, for ``setup.py``."""
        extension = super().builder()
        # DeepSpeed's CPU builder leaves them out, its CUDA builder does not.
        extension.extra_link_args = self.extra_ldflags()
        return extension

    def load(self, verbose: bool = False) -> ModuleType:
        """Loads the op: from this process, else from the installed package, else by building it.

        Raises:
            RuntimeError: the build failed, or another process has held the build lock for too long.
        """
        if self.name not in OpBuilder._loaded_ops:
            if not self.is_prebuilt():
                return self.jit_load(verbose)
            OpBuilder._loaded_ops[self.name] = importlib.import_module(self.absolute_name())
        return OpBuilder._loaded_ops[self.name]

    def jit_load(self, verbose: bool = True) -> ModuleType:
        if reasons := self.obstacles():
            raise RuntimeError("; ".join(reasons))
        self._wait_for_lock()
        with locks.building(self.lock_path()):
            return super().jit_load(verbose)

    def _wait_for_lock(self) -> None:
        if (lock := locks.wait_for(self.lock_path())) is not None:
            raise RuntimeError(
                f"the build lock {lock.path} is {lock.age}; a build that was killed leaves such a file. If no other "
                f"process is building {self.name} now, delete it and start again"
            )


class CPUBuilder(FSMoEBuilder, CPUOpBuilder):
    """A C++ op for the CPU."""

    def cxx_args(self) -> list[str]:
        # No -march=native: a wheel or a build cache on a shared file system must also run on the other machines. Loops
        # that gain from wider vectors choose when they run; without contraction to fused multiply-adds they all give
        # the same bits.
        return ["-O3", "-ffp-contract=off", "-fopenmp", *macros()]

    def extra_ldflags(self) -> list[str]:
        return ["-fopenmp"]


class CUDABuilder(FSMoEBuilder, CUDAOpBuilder):
    """A CUDA op: kernels in ``.cu`` files that know nothing of torch, bindings in ``.cpp`` files."""

    def obstacles(self) -> list[str]:
        found = super().obstacles()
        if torch.version.hip is not None:
            return [*found, "this torch is built for ROCm; there are kernels for CUDA only"]
        if torch.version.cuda is None:
            return [*found, f"this torch ({torch.__version__}) is built without CUDA"]
        if not self._for_wheel() and not torch.cuda.is_available():
            found.append("torch finds no CUDA device")
        if reason := toolkit.obstacle(torch.version.cuda):
            found.append(reason)
        return found or self._of_architectures()

    def _of_architectures(self) -> list[str]:
        """What is wrong with TORCH_CUDA_ARCH_LIST. A wheel may be for other cards than those of this machine."""
        asked = architectures.asked()
        try:
            made = self._architecture_flags(self._for_wheel())
        except architectures.ArchitectureError as error:
            return [str(error)]
        reason = None if self._for_wheel() or not asked else architectures.unfit(asked, made)
        return [] if reason is None else [reason]

    def _architecture_flags(self, for_wheel: bool) -> list[str]:
        asked = architectures.asked()
        if for_wheel and not asked:
            asked = toolkit.wheel_architectures(toolkit.release())
        return architectures.flags(asked)

    def builder(self) -> Extension:
        """The extension to compile into a wheel, if there are no obstacles.

        DeepSpeed has a list of releases that go together, and looks into it here: it ends at CUDA 12.
        """
        skip = os.environ.get("DS_SKIP_CUDA_CHECK")
        os.environ["DS_SKIP_CUDA_CHECK"] = "1"
        try:
            return super().builder()
        finally:
            os.environ.pop("DS_SKIP_CUDA_CHECK")
            if skip is not None:
                os.environ["DS_SKIP_CUDA_CHECK"] = skip

    def _for_wheel(self) -> bool:
        return os.environ.get(self.BUILD_VAR, "0") == "1"

    def cxx_args(self) -> list[str]:
        return ["-O3", *macros()]

    def nvcc_args(self) -> list[str]:
        # Not DeepSpeed's --use_fast_math: sums must have the same bits as the reference, denormals included. With flags
        # that name architectures torch adds none of its own.
        arguments = ["-O3", "--fmad=false", *macros()]
        return arguments + self._architecture_flags(for_wheel=not self.jit_mode)

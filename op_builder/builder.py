# SPDX-License-Identifier: Apache-2.0
"""What every builder of ours adds to DeepSpeed's: our own source tree, our own wheel, and locks that time out.

DeepSpeed's builders resolve source files inside DeepSpeed's installation and look for prebuilt libraries in
DeepSpeed's own table. Both have to point here instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from . import SOURCE_ROOT

if TYPE_CHECKING:
    from setuptools import Extension

STALE_LOCK_S = 600.0
_LOCK_POLL_S = 0.5

# "2.13.0+cpu" -> "2_13_0_cpu": fit for a macro and for a module name.
TORCH_TAG = re.sub(r"\W", "_", torch.__version__)


class CPUBuilder(CPUOpBuilder):
    """A C++ op for the CPU. A subclass gives ``NAME`` and ``sources()``.

    ``NAME`` must start with ``fsmoe_``: DeepSpeed caches loaded ops of the whole process by name.
    """

    BUILD_VAR: ClassVar[str] = "DS_BUILD_FSMOE"
    NAME: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def sources(self) -> list[str]:
        """Source files, relative to the folder that holds ``csrc/``."""
        raise NotImplementedError(f"{type(self).__name__} must list its source files")

    def include_paths(self) -> list[str]:
        return ["csrc/includes"]

    def cxx_args(self) -> list[str]:
        # No -march=native: these ops are bound by memory, and a wheel or a build cache on a shared file system must
        # also run on the other machines. The macro is for the build cache: torch rebuilds when the command line
        # changes, but does not watch its own headers, so without it a torch upgrade would load yesterday's library.
        return ["-O3", "-fopenmp", f"-DFSMOE_TORCH_{TORCH_TAG}"]

    def extra_ldflags(self) -> list[str]:
        return ["-fopenmp"]

    def absolute_name(self) -> str:
        """Import path of the library in a wheel. It carries torch's version: one built for another is not found."""
        return f"ds_fsmoe.ops.{self.NAME}_torch_{TORCH_TAG}"

    def deepspeed_src_path(self, code_path: str) -> str:
        return str(SOURCE_ROOT / code_path)

    def is_prebuilt(self) -> bool:
        """Whether the installed package brings this op compiled for the running torch."""
        return importlib.util.find_spec(self.absolute_name()) is not None

    def lock_path(self) -> Path:
        """The file torch holds while it builds this op just in time. A build that was killed leaves it behind."""
        from torch.utils.cpp_extension import _get_build_directory

        return Path(_get_build_directory(self.name, verbose=False)) / "lock"

    def builder(self) -> Extension:
        """The extension to compile into a wheel, for ``setup.py``."""
        extension = super().builder()
        extension.extra_link_args += self.extra_ldflags()  # DeepSpeed's CPU builder leaves them out
        return extension

    def load(self, verbose: bool = False) -> ModuleType:
        """Loads the op: from this process, else from the installed package, else by building it.

        Raises:
            RuntimeError: the build failed, or another process has held the build lock for ``STALE_LOCK_S`` seconds.
        """
        if self.name not in OpBuilder._loaded_ops:
            if not self.is_prebuilt():
                return self.jit_load(verbose)
            OpBuilder._loaded_ops[self.name] = importlib.import_module(self.absolute_name())
        return OpBuilder._loaded_ops[self.name]

    def jit_load(self, verbose: bool = True) -> ModuleType:
        self._wait_for_lock()
        return super().jit_load(verbose)

    def _wait_for_lock(self) -> None:
        # torch waits for this file without a limit and without a word, so we do the waiting.
        lock = self.lock_path()
        while True:
            try:
                age_s = time.time() - os.stat(lock).st_mtime
            except FileNotFoundError:
                return
            if age_s > STALE_LOCK_S:
                raise RuntimeError(
                    f"the build lock {lock} is {age_s:.0f} s old; a build that was killed leaves such a file. "
                    f"If no other process is building {self.name} now, delete it and start again"
                )
            time.sleep(_LOCK_POLL_S)

# SPDX-License-Identifier: Apache-2.0
"""Where ops are built just in time, and the locks that are held there.

torch makes a file named ``lock`` in an op's folder while it builds it. A build that was killed leaves the file behind,
and everyone who wants that op waits for it: for ever, and without a word.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

STALE_LOCK_S = 600.0
"""A lock that is older is taken for a left-over: no op takes that long to build."""


@dataclass(frozen=True)
class Lock:
    """The lock of one op's folder."""

    path: Path
    age_s: float
    """Below 0 if it is dated in the future: the clock of the machine that made it is ahead, or was then."""

    @property
    def is_stale(self) -> bool:
        """Whether its date is further from now than ``STALE_LOCK_S``, in either direction."""
        return abs(self.age_s) > STALE_LOCK_S

    @property
    def age(self) -> str:
        """In words."""
        return f"{self.age_s:.0f} s old" if self.age_s >= 0 else f"dated {-self.age_s:.0f} s in the future"


def extensions_folder() -> Path:
    """Where torch builds ops just in time; it has a folder for each. Nothing is made by asking."""
    if (folder := os.environ.get("TORCH_EXTENSIONS_DIR")) is not None:
        return Path(folder)
    from torch.utils.cpp_extension import get_default_build_root

    if torch.version.hip is not None:
        built_for = f"rocm{torch.version.hip.replace('.', '')}"
    else:
        built_for = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{built_for}"


def find_lock(path: Path) -> Lock | None:
    """The lock at a path, if it is held."""
    try:
        return Lock(path, time.time() - os.stat(path).st_mtime)
    except FileNotFoundError:
        return None


def held_locks(folder: Path) -> list[Lock]:
    """All locks below :func:`extensions_folder`, of anybody's ops, by name of the op."""
    found = [find_lock(path) for path in sorted(folder.glob("*/lock"))]
    return [lock for lock in found if lock is not None]

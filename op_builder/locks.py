# SPDX-License-Identifier: Apache-2.0
"""Where ops are built just in time, and the locks that are held there.

torch makes a file named ``lock`` in an op's folder while it builds it. A build that was killed leaves the file behind,
and everyone who wants that op waits for it: for ever, and without a word.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STALE_LOCK_S = 600.0
"""A lock that is older is taken for a left-over: no op takes that long to build."""
_POLL_S = 0.5
_LOG = logging.getLogger("ds_fsmoe")


@dataclass(frozen=True)
class Lock:
    """The lock of one op's folder."""

    path: Path
    age_s: float
    """Below 0 if it is dated in the future: the clock of the machine that made it is ahead, or was then."""
    watched_s: float = 0.0
    """For how long it has been waited for here. It bounds the wait where the date is of a clock that is ahead."""

    @property
    def is_stale(self) -> bool:
        """Whether its date is further from now than ``STALE_LOCK_S`` in either direction, or it was watched so long."""
        return max(abs(self.age_s), self.watched_s) > STALE_LOCK_S

    @property
    def age(self) -> str:
        """In words."""
        words = f"{self.age_s:.0f} s old" if self.age_s >= 0 else f"dated {-self.age_s:.0f} s in the future"
        if self.watched_s > STALE_LOCK_S >= abs(self.age_s):
            words += f", and it was there for the {self.watched_s:.0f} s that were waited"
        return words


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


def find_lock(path: Path, clock: Any = time) -> Lock | None:
    """The lock at a path, if it is held."""
    try:
        return Lock(path, clock.time() - os.stat(path).st_mtime)
    except FileNotFoundError:
        return None


def wait_for(path: Path, clock: Any = time) -> Lock | None:
    """Wait until nobody holds the lock at a path: ``None``; or until it is stale: that lock.

    torch waits for it without a limit and without a word.

    Args:
        path: the lock.
        clock: what tells the time and sleeps, with the functions of the module ``time``.
    """
    start_s, is_told = clock.monotonic(), False
    while (found := find_lock(path, clock)) is not None:
        lock = Lock(path, found.age_s, clock.monotonic() - start_s)
        if lock.is_stale:
            return lock
        if not is_told:
            _LOG.info("the build lock %s is %s: waiting for the process that builds there", path, lock.age)
            is_told = True
        clock.sleep(_POLL_S)
    return None


def held_locks(folder: Path) -> list[Lock]:
    """All locks below :func:`extensions_folder`, of anybody's ops, by name of the op."""
    found = [find_lock(path) for path in sorted(folder.glob("*/lock"))]
    return [lock for lock in found if lock is not None]

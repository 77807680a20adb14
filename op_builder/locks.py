# SPDX-License-Identifier: Apache-2.0
"""Where ops are built just in time, and the locks that are held there.

torch makes a file named ``lock`` in an op's folder while it builds it. Up to 2.13 the file is the lock: a build that
was killed leaves it behind, and everyone who wants that op waits for it, for ever and without a word. So who builds an
op of ours holds a file of ours as well, which the system lets go of when the process ends. From 2.14 on torch locks its
file in this way, and leaves it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STALE_LOCK_S = 600.0
"""A lock that is older is taken for a left-over: no op takes that long to build."""
_POLL_S = 0.5
_WARN_AFTER_S = 5.0
_BUILDER = "fsmoe_builder"
"""The file beside a lock that the process which builds holds; it has the name of its machine."""
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
    """The lock at a path, if somebody may hold it."""
    try:
        found = Lock(path, clock.time() - os.stat(path).st_mtime)
    except FileNotFoundError:
        return None
    if not _file_is_the_lock():
        # It stays from build to build: its date says nothing of this one.
        return Lock(path, 0.0) if _is_locked(path) else None
    return found if _may_be_held(path) else None


def _file_is_the_lock() -> bool:
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileBaton")


def _may_be_held(path: Path) -> bool:
    builder = path.with_name(_BUILDER)
    try:
        # A file system may keep what another machine locks to itself.
        return builder.read_text() != socket.gethostname() or _is_locked(builder)
    except FileNotFoundError:
        return True


def _is_locked(path: Path) -> bool:
    """Whether a process holds the file at a path."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.contextmanager
def building(path: Path) -> Iterator[None]:
    """Hold a file beside the lock at a path meanwhile, so that others can tell whether this process still builds.

    Args:
        path: the lock. If nobody holds it any more, it is taken away first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opened without being emptied: another process may hold it, and has its name there.
    with open(path.with_name(_BUILDER), "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Somebody builds; torch waits for them.
            yield
            return
        was_here = _read(file) == socket.gethostname()
        if was_here and _file_is_the_lock():
            path.unlink(missing_ok=True)
        file.seek(0)
        file.truncate()
        file.write(socket.gethostname())
        file.flush()
        yield


def _read(file: Any) -> str:
    file.seek(0)
    return file.read()


def wait_for(path: Path, clock: Any = time) -> Lock | None:
    """Wait until nobody holds the lock at a path: ``None``; or until it is stale: that lock.

    torch waits for it without a limit and without a word.

    Args:
        path: the lock.
        clock: what tells the time and sleeps, with the functions of the module ``time``.
    """
    start_s, told = clock.monotonic(), logging.NOTSET
    while (found := find_lock(path, clock)) is not None:
        lock = Lock(path, found.age_s, clock.monotonic() - start_s)
        if lock.is_stale:
            return lock
        level = logging.WARNING if lock.watched_s >= _WARN_AFTER_S else logging.INFO
        if level > told:
            _LOG.log(level, "the build lock %s is %s: waiting for the process that builds there", path, lock.age)
            told = level
        clock.sleep(_POLL_S)
    return None


def held_locks(folder: Path) -> list[Lock]:
    """All locks below :func:`extensions_folder`, of anybody's ops, by name of the op."""
    found = [find_lock(path) for path in sorted(folder.glob("*/lock"))]
    return [lock for lock in found if lock is not None]

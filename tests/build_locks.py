# SPDX-License-Identifier: Apache-2.0
"""Locks of builds as torch makes them: a file that is there, and from torch 2.14 on one that a process has locked."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from torch.utils import cpp_extension

FILE_IS_THE_LOCK = hasattr(cpp_extension, "FileBaton")
"""Whether the file of a lock is the lock; otherwise it stays when the lock is let go."""
_held: list[IO[str]] = []


def hold_lock(lock: Path) -> None:
    """Hold a lock of a build from now on in this process."""
    lock.touch()
    _held.append(lock.open())
    fcntl.flock(_held[-1], fcntl.LOCK_EX)

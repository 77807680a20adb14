# SPDX-License-Identifier: Apache-2.0
"""Tells which process writes a checkpoint, and whether it is alive, by a locked file in the unfinished folder.

The system releases a lock when its process ends for any reason. Where a file system has no locks, the file
says which process it was, and on the same host that can be looked up.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

OWNER = "fsmoe_owner.json"

Life = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True)
class Owner:
    """The owner of an unfinished checkpoint, as its file describes it.

    Attributes:
        token: the token of the save.
        host: the host that its process runs on.
        process: the process number there.
        life: whether that process is alive.
    """

    token: str
    host: str
    process: int
    life: Life

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class Ownership:
    """Holds the lock of a folder, from its creation until :meth:`release` or the end of this process.

    Args:
        folder: a new folder.
        token: the token of the save.

    Raises:
        OSError: the file system refuses.
    """

    def __init__(self, folder: Path, token: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._opened: int | None = os.open(folder / OWNER, flags, 0o666)
        try:
            is_locked = _lock(self._opened, fcntl.LOCK_EX)
            said = {"token": token, "host": socket.gethostname(), "process": os.getpid(), "is_locked": is_locked}
            os.write(self._opened, json.dumps(said).encode())
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Release the folder to others; only the first call has an effect."""
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None


def owner_of(folder: Path) -> Owner | None:
    """Return who has written, or writes, an unfinished checkpoint; ``None`` if nothing in the folder tells."""
    try:
        opened = os.open(folder / OWNER, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        said = json.loads(os.read(opened, 4096))
        token, host, process = str(said["token"]), str(said["host"]), int(said["process"])
        life = _life_by_lock(opened) if said["is_locked"] is True else _life_by_number(host, process)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        os.close(opened)
    return Owner(token, host, process, life)


def _lock(opened: int, kind: int) -> bool:
    try:
        fcntl.flock(opened, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _life_by_lock(opened: int) -> Life:
    # Closing the file gives the lock back.
    return "dead" if _lock(opened, fcntl.LOCK_SH) else "alive"


def _life_by_number(host: str, process: int) -> Life:
    if host != socket.gethostname() or process <= 0:
        return "unknown"
    with suppress(PermissionError):  # it is there, and somebody else's
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return "dead"
    return "alive"

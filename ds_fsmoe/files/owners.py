# SPDX-License-Identifier: Apache-2.0
"""Tells which process writes in a folder, and whether it is alive, by a locked file: of an unfinished checkpoint, of a
run's record, of recorded routing.

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
"""The file in an unfinished checkpoint."""
OF_RECORD, OF_ROUTING, OF_COMPARISON = (f".fsmoe_{each}_owner.json" for each in ("record", "routing", "comparison"))
"""The files in folders that jobs write in one after another."""
ONE_EACH = "give each job a folder of its own, and destroy() an engine before the next one writes there"

Life = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True)
class Owner:
    """The owner of a folder, as its file describes it.

    Attributes:
        token: the token of the save; empty where nothing is saved.
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


class OwnedError(Exception):
    """Raised when a folder has an owner already; the message says which."""


class Ownership:
    """Holds the lock of a folder, from its creation until :meth:`release` or the end of this process.

    Args:
        folder: a folder that is there.
        token: the token of the save.
        name: the name of the file in a folder that outlives its owners, of which one that is dead, or has released the
            folder, is replaced. By default the folder is new.

    Raises:
        OSError: the file system refuses.
        OwnedError: the folder has an owner that lives, or of which that is not known.
    """

    def __init__(self, folder: Path, token: str = "", name: str | None = None) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._process = os.getpid()
        self._is_kept = name is not None
        self._opened: int | None = None
        flags |= 0 if self._is_kept else os.O_EXCL
        self._opened = os.open(folder / (name or OWNER), flags, 0o666)
        try:
            is_locked = _lock(self._opened, fcntl.LOCK_EX)
            if name is not None and not is_locked:
                _refuse(owner_of(folder, name))
            os.ftruncate(self._opened, 0)
            said = {"token": token, "host": socket.gethostname(), "process": os.getpid(), "is_locked": is_locked}
            os.write(self._opened, json.dumps(said).encode())
        except BaseException:
            self._close()
            raise

    def release(self) -> None:
        """Release the folder to others; only the first call has an effect, and none in a forked process."""
        if self._opened is not None and os.getpid() == self._process:
            if self._is_kept:
                # Not removed: another one may have opened it meanwhile.
                os.ftruncate(self._opened, 0)
            self._close()

    def __del__(self) -> None:
        # Of an engine that was dropped. A save is held until it ends, or its process does.
        if self._is_kept:
            self._close()

    def _close(self) -> None:
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None


def _refuse(owner: Owner | None) -> None:
    if owner is not None and owner.life != "dead":
        here = owner.process == os.getpid() and owner.host == socket.gethostname()
        said = "writes there" if owner.life == "alive" else "may be writing there"
        raise OwnedError(f"{owner}{' (this one)' if here else ''} {said}")


def owner_of(folder: Path, name: str = OWNER) -> Owner | None:
    """Return who has written, or writes, in a folder; ``None`` if nothing in the folder tells."""
    try:
        opened = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
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

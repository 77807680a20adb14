# SPDX-License-Identifier: Apache-2.0
"""Writes files with guessable names in folders that other users can write to: without following links or opening pipes.

All writers of the package call it; :mod:`ds_fsmoe.untrusted` reads such files. A file appears completely or not at all,
under a temporary name that no user can have replaced by a link.

A lock file shows which process writes in a folder, and whether it is alive. Unfinished checkpoints, records of runs and
recorded routing have one. The system releases a lock when its process ends for any reason. On a file system without
locks, the file names the process, and on the same host its state can be checked.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ds_fsmoe.untrusted import check_regular, no_file, opener

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_PART = ".part"
# Nothing here takes so long to write: a part of that age was left behind by a process that was killed.
_LEFT_BEHIND_S = 3600.0
# With these a file system says that it cannot sync a folder, not that something was lost.
_NOT_FOR_FOLDERS = {
    *(errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
    *(errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR),
}


def write_whole(path: Path, text: str) -> None:
    """Write a text file completely or not at all, for concurrent readers and after a crash.

    Raises:
        OSError: it cannot be written, or its place has something other than a file, which stays.
    """
    with new_file(path) as file:
        file.write(text)


@contextmanager
def new_file(path: Path, mode: str = "w", errors: str = "strict") -> Iterator[IO]:
    """Open a file to write to, which moves to its place if the block succeeds. It replaces a link at this place.

    Args:
        path: the place of the file.
        mode: either ``"w"`` for text, in UTF-8, or ``"wb"``.
        errors: the handling of text that UTF-8 cannot encode.

    Raises:
        OSError: it cannot be written, or its place has something other than a file, which stays.
    """
    _check_place(path)
    stem = f".{path.name[:200]}."
    _clear(path.parent, stem)
    # A name of its own each time: of another host, process and thread, too.
    unfinished = path.with_name(f"{stem}{secrets.token_hex(8)}{_PART}")
    text = {} if "b" in mode else {"encoding": "utf-8", "errors": errors}
    try:
        with open(unfinished, mode, opener=opener(_NEW), **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _clear(folder: Path, stem: str) -> None:
    """Remove the parts of a file that killed processes left behind."""
    for left in folder.glob(f"{glob.escape(stem)}{'?' * 16}{_PART}"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > _LEFT_BEHIND_S:
                left.unlink()


def create(path: Path) -> IO[bytes]:
    """Open a new file of bytes to write to, whose path must be free.

    Raises:
        OSError: it cannot be written, or the path exists.
    """
    return open(path, "xb", opener=opener(_NEW))


def append_to(path: Path, text: str) -> None:
    """Append to a text file, which is created if there is none.

    Raises:
        OSError: it cannot be written, or is no regular file.
    """
    with open(path, "a", encoding="utf-8", opener=opener(_APPENDING)) as file:
        check_regular(path, file.fileno())
        file.write(text)


def check_folders(*paths: Path | None) -> None:
    """Check, before the work, that the results can be written.

    Raises:
        ValueError: the folder of a path does not exist.
    """
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: no folder {path.resolve().parent}")


def _check_place(path: Path) -> None:
    with suppress(FileNotFoundError):
        kind = path.lstat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind)):
            raise no_file(path)


def to_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, would survive a loss of power.

    Raises:
        OSError: the written data are lost. A folder that its file system cannot sync is no error.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if not path.is_symlink() and not (path.is_dir() and error.errno in _NOT_FOR_FOLDERS):
            raise


# ---- who writes in a folder

OWNER = "fsmoe_owner.json"
"""The file in an unfinished checkpoint."""
OF_RECORD, OF_ROUTING, OF_COMPARISON, OF_TUNE = (
    f".fsmoe_{each}_owner.json" for each in ("record", "routing", "comparison", "tune")
)
"""The files in folders that jobs write in one after another."""
ONE_EACH = "use a folder per job, and destroy() an engine before the next one writes there"

Life = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True)
class Owner:
    """Represents the owner of a folder, from its lock file.

    Attributes:
        token: the token of the save; empty without a save.
        host: the host that its process runs on.
        process: the process number there.
        life: the state of that process.
    """

    token: str
    host: str
    process: int
    life: Life

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class OwnedError(Exception):
    """Says that a folder has an owner already; the message names it."""


class Ownership:
    """Holds the lock of a folder, from its creation until :meth:`release` or the end of this process.

    Args:
        folder: an existing folder.
        token: the token of the save.
        name: the name of the lock file in a folder that outlives its owners. An owner that is dead, or has released the
            folder, is replaced. By default the folder is new.

    Raises:
        OSError: the file system refuses.
        OwnedError: the folder has an owner that is alive, or whose state is unknown.
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
        """Release the folder to other processes; only the first call has an effect, and none in a forked process."""
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
    """Return the process that has written, or writes, in a folder; ``None`` if the folder has no such file."""
    try:
        opened = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        said = json.loads(os.read(opened, 4096))
        token, host, process = str(said["token"]), str(said["host"]), int(said["process"])
        if said["is_locked"] is True:
            life: Life = "dead" if _lock(opened, fcntl.LOCK_SH) else "alive"  # closing the file gives the lock back
        else:
            life = _life_by_number(host, process)
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


def _life_by_number(host: str, process: int) -> Life:
    if host != socket.gethostname() or process <= 0:
        return "unknown"
    with suppress(PermissionError):  # it is there, and somebody else's
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return "dead"
    return "alive"

# SPDX-License-Identifier: Apache-2.0
"""Writes files with guessable names in folders that others can write to: follows no links and waits at no pipes.

A file appears whole or not at all, under a name where nobody could have put a link. How such files are read says
:mod:`ds_fsmoe.untrusted`.
"""

from __future__ import annotations

import glob
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ds_fsmoe.untrusted import check_regular, no_file, opener

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_PART = ".part"
# Nothing here takes so long to write: a part of that age was left behind by a process that was killed.
_LEFT_BEHIND_S = 3600.0


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that nobody ever sees only a part of it: neither a reader nor somebody after a crash.

    Raises:
        OSError: it cannot be written, or its place is taken by something other than a file; what was there stays.
    """
    with new_file(path) as file:
        file.write(text)


@contextmanager
def new_file(path: Path, mode: str = "w", errors: str = "strict") -> Iterator[IO]:
    """Open a file to write to, which moves to its place if the block succeeds. It replaces a link that is there.

    Args:
        path: the place of the file.
        mode: either ``"w"`` for text, in UTF-8, or ``"wb"``.
        errors: how text that UTF-8 cannot encode is handled.

    Raises:
        OSError: it cannot be written, or its place is taken by something other than a file; what was there stays.
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
    """Remove the parts of a file that processes left behind when they were killed."""
    for left in folder.glob(f"{glob.escape(stem)}{'?' * 16}{_PART}"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > _LEFT_BEHIND_S:
                left.unlink()


def create(path: Path) -> IO[bytes]:
    """Open a file of bytes to write to, which must not be there.

    Raises:
        OSError: it cannot be written, or there is something.
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
    """Check, before the work is done, that the results can be written.

    Raises:
        ValueError: the folder of a path does not exist.
    """
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.resolve().parent}")


def _check_place(path: Path) -> None:
    with suppress(FileNotFoundError):
        kind = path.lstat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind)):
            raise no_file(path)

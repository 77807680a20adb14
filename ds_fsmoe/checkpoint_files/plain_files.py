# SPDX-License-Identifier: Apache-2.0
"""Tells which files on disk may be opened, and when a file has really been written."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
# With these a file system says that it cannot sync a folder, not that something was lost.
_NOT_FOR_FOLDERS = {
    *(errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
    *(errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR),
}


def problem_of(path: Path, folder: Path) -> str | None:
    """Return why a file must not be opened, in words; ``None`` if it may be.

    Opening a FIFO or a device may wait forever, and a link may lead to any file of the user.

    Args:
        path: the file.
        folder: the folder that it has to be in, also after all links are followed.
    """
    try:
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) and path.parent == folder:
            return None  # no link: where it leads does not have to be looked for
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return f"{path} is a folder"
        if not stat.S_ISREG(mode):
            return f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')} and no regular file"
        real = path.resolve()
        if not real.is_relative_to(folder.resolve()):
            return f"{path} is a link to {real}, which is outside of {folder}"
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is missing"
    except (OSError, RuntimeError) as error:  # the latter for links that lead in a circle
        return f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
    return None


def to_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, would survive a loss of power.

    Raises:
        OSError: what was written is lost. A folder that its file system cannot sync is no error.
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

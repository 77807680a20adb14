# SPDX-License-Identifier: Apache-2.0
"""Reads untrusted files: regular ones only, up to a size; bounds the sizes that they may name, and
suggests the nearest choice for a misspelt one.

Readers of files of runs, clusters, plans and checkpoints call it. The bounds are above any real model or cluster.
Without them a few bytes could use up all memory, or a day.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any, Literal

MOST_LAYERS = 1_000
"""The most layers of a model that a file may name."""
MOST_EXPERTS = 65_536
"""The most experts of a layer."""
MOST_WIDTH = 1 << 20
"""The greatest width of a model, of an expert, or of all heads."""
MOST_PARAMETERS = 10**15
"""The most parameters of a model."""
MOST_POSITIONS = 1 << 30
"""The most positions of a sample, and the most tokens of a vocabulary."""
MOST_RANKS = 1 << 20
"""The most ranks of a job, and the most GPUs of a cluster."""
MOST_BYTES = 64 << 20
"""The most bytes of a file that describes something: a model, a cluster, a placement."""
MOST_RUN_BYTES = 1 << 30
"""The most bytes of a file that grows with the steps of a run."""

NAMES_OF_BEFORE: Mapping[str, Mapping[str, Literal["node_deduplicated"]]] = {
    "alltoall": {"once_per_node": "node_deduplicated"}
}
"""Kind of part -> name of a part in version 0.2.0 -> its name today. ``ds_fsmoe/registry.py`` keeps these names."""

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
_MARGIN_BYTES = 1 << 20
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def suggested(value: Any, choices: Collection[str], listed: str = "", before: Mapping[str, str] = {}) -> str:
    """Return the choice that is nearest to a wrong value, as a question; if none is near, which choices there are.

    Args:
        value: what was written.
        choices: what may be written.
        listed: how the choices are described; ``""``: by their names.
        before: name of a choice in version 0.2.0 -> its name today.
    """
    found = difflib.get_close_matches(value, [*choices, *before], n=1) if isinstance(value, str) else []
    return (
        f"did you mean {before.get(found[0], found[0])!r}?"
        if found
        else listed or f"the choices are {', '.join(choices)}"
    )


def open_regular(path: Path, *, follow_links: bool = True) -> IO[bytes]:
    """Open a regular file to read its bytes; refuse anything else, such as a pipe or a device.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    flags = _READING | (0 if follow_links else os.O_NOFOLLOW)
    file = open(path, "rb", opener=opener(flags))  # noqa: SIM115 - the caller closes it
    try:
        check_regular(path, file.fileno())
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, *, follow_links: bool = True, most_bytes: int = MOST_RUN_BYTES) -> str:
    """Return the text of a regular file, in UTF-8; refuse anything else, such as a pipe or a device.

    Args:
        path: the file.
        follow_links: whether the file may be a link.
        most_bytes: the largest size of the file.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
        UnicodeDecodeError: it is not UTF-8 text.
    """
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        # As much more as may have been appended since; never more, and no memory for what is not there.
        found = file.read(size + _MARGIN_BYTES) if size <= most_bytes else b""
    if max(size, len(found)) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes >> 20} MiB", str(path))
    return found.decode("utf-8").replace("\r\n", "\n")


def read_json(path: Path, *, follow_links: bool = True, most_bytes: int = MOST_BYTES) -> Any:
    """Return the JSON content of a regular file.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
        ValueError: it is not JSON, or is nested too deeply to be read.
    """
    return parsed(read_regular(path, follow_links=follow_links, most_bytes=most_bytes))


def parsed(text: str) -> Any:
    """Return the JSON content of a text.

    Raises:
        ValueError: it is not JSON, or is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def opener(flags: int) -> Callable[[str, int], int]:
    """Return a function that opens a file with these flags, and whose error names a link that it does not follow."""

    def opened(path: str, _: int) -> int:
        try:
            return os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "is a link, and is not followed", str(path)) from None
            raise

    return opened


def check_regular(path: Path, number: int) -> None:
    """Check that an open file is a regular one.

    Raises:
        OSError: it is no regular file.
    """
    if not stat.S_ISREG(os.fstat(number).st_mode):
        raise no_file(path)


def no_file(path: Path) -> OSError:
    """Return the error for a path that is no regular file."""
    return OSError(errno.EINVAL, "is not a regular file", str(path))


def problem_of(path: Path, folder: Path) -> str | None:
    """Return the reason why a file must not be opened, in words; ``None`` if it may be.

    Opening a FIFO or a device may wait forever, and a link may lead to any file of the user.

    Args:
        path: the file.
        folder: the folder that must contain it, also after all links are followed.
    """
    try:
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) and path.parent == folder:
            return None  # no link: where it leads does not have to be looked for
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return f"{path} is a folder"
        if not stat.S_ISREG(mode):
            return f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file"
        real = path.resolve()
        if not real.is_relative_to(folder.resolve()):
            return f"{path} is a link to {real}, outside of {folder}"
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is missing"
    except (OSError, RuntimeError) as error:  # the latter for links that lead in a circle
        return f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
    return None

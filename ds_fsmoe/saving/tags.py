# SPDX-License-Identifier: Apache-2.0
"""A tag is there whole or not at all, whenever a process is killed: written beside its place, and then put there.

::

    folder/step100          published; ``latest`` names it
    folder/step200.saving   being written, or left behind by a save that was killed
    folder/step100.before   what stood at a tag's place, for as long as it takes to put the new one there

Renaming a folder is one step of the file system. Only between two of them is there a moment at which a tag is saved
over and has no folder; :func:`recover` sets that right.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ds_fsmoe.whole_files import write_whole

SAVING, BEFORE = ".saving", ".before"
LATEST = "latest"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or cannot be trusted; the message names the file."""


def unfinished_name(tag: str) -> str:
    """Where a tag is written to."""
    return f"{tag}{SAVING}"


def clear(folder: Path, tag: str) -> None:
    """Before a save: remove what one that was killed has left, and put back what it had taken away."""
    recover(folder, tag)
    shutil.rmtree(folder / unfinished_name(tag), ignore_errors=True)


def publish(folder: Path, tag: str, known: Collection[str] = ()) -> None:
    """What was written becomes the tag, in place of one of that name.

    Args:
        folder: of all tags.
        tag: which.
        known: files of the one in whose place it comes, if that is known: others in its folder are somebody's own, and
            move along.

    Raises:
        OSError: the file system refuses.
    """
    place, new, old = folder / tag, folder / unfinished_name(tag), folder / f"{tag}{BEFORE}"
    for each in (*new.rglob("*"), new):
        _to_disk(each)
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    new.rename(place)
    _to_disk(folder)
    for each in old.iterdir() if known and old.is_dir() else ():
        if each.name not in known and not (place / each.name).exists():
            each.rename(place / each.name)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path, tag: str) -> bool:
    """Put a tag back that a killed save had taken away.

    Returns:
        Whether that was needed.
    """
    place, old = folder / tag, folder / f"{tag}{BEFORE}"
    if place.exists() or not old.exists():
        return False
    old.rename(place)
    return True


def point(folder: Path, tag: str) -> None:
    """Let ``latest`` name a tag, in one step."""
    write_whole(folder / LATEST, tag)
    _to_disk(folder)


def latest(folder: Path) -> str | None:
    """What ``latest`` names; ``None`` if there is no such file.

    Raises:
        CheckpointError: the file is empty.
    """
    try:
        tag = (folder / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    if not tag:
        known = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir())) or "none"
        raise CheckpointError(f"{folder / LATEST} is empty: name a tag; there are: {known}")
    return tag


def _to_disk(path: Path) -> None:
    # Some file systems cannot do that with a folder.
    with suppress(OSError):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def check_there(folder: Path) -> None:
    """Refuse to load from a folder that is not there, as nobody can have saved in it. One without ``latest`` is left to
    DeepSpeed, which warns: a job that goes on by itself may be started for the first time.

    Raises:
        CheckpointError: it is not there.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: there is no such folder, so no checkpoint to go on from; to begin a run, call load_checkpoint "
            "only where the folder is there, or make it first"
        )

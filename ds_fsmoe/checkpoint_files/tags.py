# SPDX-License-Identifier: Apache-2.0
"""Handles the names of checkpoints: those for new saves, those of unfinished saves, and the one in ``latest``.

Every module of checkpoints calls it, and raises its :class:`CheckpointError`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

from ds_fsmoe.files.whole_files import to_disk, write_whole
from ds_fsmoe.untrusted import problem_of

SAVING, BEFORE = ".saving", ".before"
LATEST = "latest"
# A file of such a name is in the folder of all tags, or will be.
_TAKEN = (LATEST, f"{LATEST}{SAVING}", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py")
_UNFINISHED = re.compile(rf"\.[0-9a-f]{{8}}({re.escape(SAVING)}|{re.escape(BEFORE)})$")
_MOST_BYTES = 4096
_NO_TAGS = "none"


class CheckpointError(RuntimeError):
    """Says that a checkpoint cannot be written, or cannot be trusted; the message names the file."""


def is_inside(tag: str) -> bool:
    """Return True if a tag names something in the folder of all tags."""
    path = PurePath(tag)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in tag


def check_new(folder: str | Path, tag: str) -> None:
    """Check that a checkpoint can be saved under a tag, and found again.

    Raises:
        CheckpointError: it cannot be saved or found.
    """
    problem = None
    parts = PurePath(tag).parts
    if not is_inside(tag):
        problem = f"must be the name of a folder in {folder}"
    elif tag != tag.strip() or len(tag.splitlines()) > 1:
        problem = f"must be one line without blanks at its ends, or {LATEST} could not name it"
    elif tag.encode(errors="ignore").decode() != tag:
        problem = "must be a name that UTF-8 can write"
    elif parts[0] in _TAKEN or any(map(_UNFINISHED.search, parts)):
        problem = f"that name is reserved for other files in {folder}; choose another"
    if problem is not None:
        raise CheckpointError(f"save_checkpoint: tag {tag!r}: {problem}")


def point(folder: Path, tag: str) -> None:
    """Make ``latest`` name a tag, in one step.

    Raises:
        OSError: the file system refuses.
    """
    write_whole(folder / LATEST, tag)
    to_disk(folder)


def latest(folder: Path) -> str | None:
    """Return the tag in ``latest``, or ``None`` if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, is empty, or names something outside of the folder.
    """
    path = folder / LATEST
    if not os.path.lexists(path):
        return None
    if (problem := problem_of(path, folder)) is not None:
        raise CheckpointError(problem)
    try:
        with path.open("rb") as opened:
            text = opened.read(_MOST_BYTES + 1)
        tag = text.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if len(text) > _MOST_BYTES:
        raise CheckpointError(f"{path} has more than {_MOST_BYTES} bytes, and should hold the name of a tag")
    if not tag:
        raise CheckpointError(f"{path} is empty: name a tag; there are: {known_tags(folder)}")
    if not is_inside(tag):
        raise CheckpointError(f"{path} names {tag!r}, which is not a folder in {folder}")
    return tag


def latest_there(folder: Path) -> str:
    """Return the tag in ``latest``; refuse a folder without this file, where DeepSpeed only warns and trains from
    scratch.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    tag = latest(folder)
    if tag is None:
        raise CheckpointError(f"{folder}: no tag was given, and the folder has no {LATEST} file; {found_in(folder)}")
    return tag


def found_in(folder: Path) -> str:
    """Return the content of a folder without the wanted checkpoint, and advice, for messages."""
    if any(folder.glob("*mp_rank_*_model_states.pt")):
        own = folder.absolute()
        return f"this is the folder of one checkpoint: call load_checkpoint({str(own.parent)!r}, tag={own.name!r})"
    known = known_tags(folder)
    if known != _NO_TAGS:
        return f"there are: {known}"
    what = "there is no checkpoint in this folder" if folder.is_dir() else "there is no such folder"
    return f"{what}; to start a new run, call load_checkpoint only if {folder / LATEST} exists"


def known_tags(folder: Path) -> str:
    """Return the names of the existing folders, for messages."""
    names = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    return ", ".join(each for each in names if not _UNFINISHED.search(each)) or _NO_TAGS

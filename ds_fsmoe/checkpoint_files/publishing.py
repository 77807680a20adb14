# SPDX-License-Identifier: Apache-2.0
"""Publishes a tag completely or not at all, even if a process is killed: it is written under another name, then moved.

Saving and ``convert`` call it.

::

    folder/step100                    published; ``latest`` names it
    folder/step200.6f2a90c1.saving    being written, or left behind by a save that was killed
    folder/step100.6f2a90c1.before    the earlier folder of a tag, while the new one is moved to its place

The eight digits belong to one save, so that two jobs never write into one folder. Renaming a folder is one step of the
file system. Between two of them there is a moment at which a tag that is overwritten has no folder; :func:`recover`
repairs that, unless the save is still in progress.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ds_fsmoe.checkpoint_files import manifest as manifests
from ds_fsmoe.checkpoint_files.tags import BEFORE, SAVING, CheckpointError
from ds_fsmoe.files.whole_files import OWNER, Owner, Ownership, owner_of, to_disk
from ds_fsmoe.untrusted import MOST_RUN_BYTES, problem_of

logger = logging.getLogger("ds_fsmoe")

# How long a tag may have no folder before a save that may be in progress counts as killed.
_ATTEMPTS, _BETWEEN_ATTEMPTS_S = 40, 0.05
_TRIES = 3


class Publication:
    """Publishes one save of one tag, in the process that leads it.

    Args:
        folder: the folder of all tags.
        tag: a name, or a path in the folder.
        token: eight hexadecimal digits, unique to this save.

    Attributes:
        unfinished: the folder that the tag is written to.
    """

    def __init__(self, folder: Path, tag: str, token: str) -> None:
        self._folder, self._tag, self._token = folder, tag, token
        self._place = folder / tag
        self._before = folder / f"{tag}.{token}{BEFORE}"
        self._ownership: Ownership | None = None
        self._replaces = ""
        self.unfinished = folder / f"{tag}.{token}{SAVING}"

    def begin(self) -> None:
        """Make a folder for this save alone, and remove the remains of killed saves of this tag.

        Raises:
            CheckpointError: the tag's place has something other than a folder.
            OSError: the file system refuses.
        """
        if self._place.is_symlink() or (self._place.exists() and not self._place.is_dir()):
            kind = "link" if self._place.is_symlink() else "file"
            raise CheckpointError(f"{self._place} is a {kind}: remove it, or choose another tag")
        self._place.parent.mkdir(parents=True, exist_ok=True)
        recover(self._folder, self._tag)
        _clear(self._folder, self._tag)
        self._replaces = state_of(self._place)
        try:
            self.unfinished.mkdir()
        except FileExistsError as error:
            raise CheckpointError(
                f"{self.unfinished} was made by another rank of this job: the nodes share this file system, so "
                "remove checkpoint.use_node_local_storage"
            ) from error
        try:
            self._ownership = Ownership(self.unfinished, self._token)
        except OSError:
            shutil.rmtree(self.unfinished, ignore_errors=True)
            raise

    def sync(self, done: Collection[Path] = ()) -> None:
        """Wait until all written files are on disk.

        Args:
            done: the files that are already on disk.

        Raises:
            OSError: a part of it is lost.
        """
        for each in {self.unfinished, *self.unfinished.rglob("*")}.difference(done):
            to_disk(each)

    def publish(self) -> None:
        """Move the written files to the tag's place. Other files in an existing folder stay in it.

        Raises:
            CheckpointError: another job has saved this tag, or removed the written files, since :meth:`begin`.
            OSError: the file system refuses.
        """
        owner = owner_of(self.unfinished)
        if owner is None or owner.token != self._token:
            raise CheckpointError(
                f"{self.unfinished} was removed or taken by another job while it was written: use "
                "another folder for each job"
            )
        self._check_place(self._place)
        replaces = os.path.lexists(self._place)
        try:
            self._swap(replaces)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise self._taken() from error
            raise
        to_disk(self._place.parent)
        if replaces:
            _finish(self._before, self._place)
        with suppress(OSError):
            (self._place / OWNER).unlink()
        self.end()

    def abandon(self) -> None:
        """Remove only the written files; called after an error."""
        if self._ownership is not None:
            owner = owner_of(self.unfinished)
            if owner is not None and owner.token == self._token:
                shutil.rmtree(self.unfinished, ignore_errors=True)
        self.end()

    def end(self) -> None:
        """Release the folder to other jobs."""
        if self._ownership is not None:
            self._ownership.release()

    def _swap(self, replaces: bool) -> None:
        if replaces:
            self._place.rename(self._before)
        try:
            if replaces:
                self._check_place(self._before)
            self.unfinished.rename(self._place)
        except (OSError, CheckpointError):
            with suppress(OSError):  # not over what another job has put there
                if replaces and not os.path.lexists(self._place):
                    self._before.rename(self._place)
            raise

    def _check_place(self, found_at: Path) -> None:
        if state_of(found_at) != self._replaces:
            raise self._taken()

    def _taken(self) -> CheckpointError:
        return CheckpointError(
            f"another job has saved {self._place} since this save began: two jobs that run at a time need folders or "
            "tags of their own"
        )


def recover(folder: Path, tag: str) -> bool:
    """Restore a tag that a killed save had moved away. It waits for a save in progress.

    Args:
        folder: the folder of all tags.
        tag: the tag; one outside of the folder is unchanged.

    Returns:
        True if a tag was restored.

    Raises:
        CheckpointError: a save is in progress and makes no progress.
        OSError: the file system refuses.
    """
    place = folder / tag
    if not place.parent.resolve().is_relative_to(folder.resolve()):
        return False
    for look in range(_ATTEMPTS):
        left = [] if os.path.lexists(place) else _leftovers(place, BEFORE)
        if not left:
            return False
        before, owner = left[-1]
        if owner is None or owner.life == "dead" or look == _ATTEMPTS - 1:
            if owner is not None and owner.life == "alive":
                raise CheckpointError(
                    f"{place} is being overwritten by {owner}, which does not finish: end it, then load again"
                )
            try:
                before.rename(place)
            except OSError:
                if os.path.lexists(place) or not before.exists():
                    return False  # another process was faster
                raise
            return True
        time.sleep(_BETWEEN_ATTEMPTS_S)
    return False


def _clear(folder: Path, tag: str) -> None:
    """Remove the remains of killed saves of a tag."""
    place = folder / tag
    for unfinished, owner in _leftovers(place, SAVING):
        if owner is not None and owner.life == "dead":
            shutil.rmtree(unfinished, ignore_errors=True)
        elif owner is not None:
            is_known = (
                "is writing it" if owner.life == "alive" else "may be writing it; if it was killed, remove the folder"
            )
            logger.warning("%s is kept: %s %s", unfinished, owner, is_known)
    for before, owner in _leftovers(place, BEFORE):
        if place.is_dir() and (owner is None or owner.life == "dead"):
            _finish(before, place)


def _leftovers(place: Path, ending: str) -> list[tuple[Path, Owner | None]]:
    """Return (folder, process that saves or has saved) for the unfinished saves of a tag, in the order of their
    changes; ``None`` for an unknown process."""
    pattern = re.compile(rf"{re.escape(place.name)}\.([0-9a-f]{{8}}){re.escape(ending)}")
    found = []
    for each in place.parent.iterdir() if place.parent.is_dir() else ():
        match = pattern.fullmatch(each.name)
        with suppress(OSError):  # removed since
            if match is not None and each.is_dir() and not each.is_symlink():
                found.append((each.stat().st_ctime_ns, each, match[1]))
    return [(each, _saver(place, token)) for _, each, token in sorted(found)]


def _saver(place: Path, token: str) -> Owner | None:
    """Return the process that has saved a tag under a token; ``None`` if it is unknown."""
    for each in (place.parent / f"{place.name}.{token}{SAVING}", place):
        owner = owner_of(each)
        if owner is not None and owner.token == token:
            return owner
    return None


def state_of(place: Path) -> str:
    """Return a value that stays the same until the tag is saved again."""
    try:
        path = place / manifests.NAME
        if problem_of(path, place) is None and path.stat().st_size <= MOST_RUN_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        return f"folder {place.stat().st_ino}"
    except FileNotFoundError:
        return "nothing"


def _finish(before: Path, place: Path) -> None:
    """Remove the old folder of a tag; move files that no save has written to the new one."""
    known: set[str] = set()
    with suppress(CheckpointError):
        manifest = manifests.read_manifest(before)
        known = set() if manifest is None else {manifests.NAME, *manifest.files}
    problem: OSError | None = None
    for _ in range(_TRIES):
        try:
            _move_along(before, place, known, "")
            before.rmdir()
        except OSError as error:
            problem = error
            if not isinstance(error, FileNotFoundError):  # else another process may be at it, too
                break
    if before.exists():
        logger.warning("%s was overwritten, and some of its old files are still in %s: %s", place, before, problem)


def _move_along(old: Path, new: Path, known: Collection[str], prefix: str) -> None:
    for each in sorted(old.iterdir()):
        name, target = f"{prefix}{each.name}", new / each.name
        is_there = os.path.lexists(target)
        if each.is_dir() and not each.is_symlink():
            if not is_there and not any(other.startswith(f"{name}/") for other in known):
                each.rename(target)
                continue
            target.mkdir(exist_ok=True)
            _move_along(each, target, known, f"{name}/")
            each.rmdir()
            if not is_there and not any(target.iterdir()):
                target.rmdir()  # all that was in it was known
        elif name in known or is_there or (not prefix and name.startswith(manifests.OURS)):
            each.unlink()
        else:
            each.rename(target)

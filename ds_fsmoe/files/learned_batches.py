# SPDX-License-Identifier: Apache-2.0
"""Keeps what a job's batches were like, and which ``ep_size`` follows from that, for the next start of the same job:
one JSON file for each job, in the user's cache folder.

Only the first rank reads and writes. ``ds_fsmoe remembered`` lists the files and removes them. It needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_fsmoe.files.whole_files import write_whole
from ds_fsmoe.untrusted import MOST_POSITIONS, read_json

_FORMAT = 1
"""The version of these files; one with another number is from another version of the package."""

Job = Mapping[str, Any]
"""What the numbers hold for, in JSON's types: shapes, ranks, hosts, ZeRO stage and batch."""


@dataclass(frozen=True)
class LearnedBatches:
    """Holds what was learned from the batches of a run."""

    tokens: int
    """The tokens of a micro-batch of a rank, with padding, on average."""
    ep_size: int
    """The size that the next start is to use."""
    runner_up: int | None = None
    """The second size by the prediction; ``None``: there is no other."""
    runner_up_costs: float | None = None
    """How many times as long a step is predicted to take with it."""


class UselessLearnedError(ValueError):
    """Reports a file that is not used. The message has the reason, after the file's name."""


def folder() -> Path:
    """Return the folder of these files: ``ds_fsmoe/batches`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_fsmoe" / "batches"


def file_of(job: Job) -> Path:
    """Return the file of a job.

    Raises:
        RuntimeError: see :func:`folder`.
    """
    name = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{name}.json"


def remember(job: Job, learned: LearnedBatches) -> None:
    """Write the file of a job, whole or not at all.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    path = file_of(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"format": _FORMAT, "job": job, "learned": asdict(learned)}, indent=1) + "\n")


def remembered(job: Job) -> LearnedBatches | None:
    """Return what was learned from the last run of a job; ``None``: nothing.

    Raises:
        UselessLearnedError: its file is damaged, of another version, or of another job.
    """
    try:
        path = file_of(job)
        if not path.exists():
            return None
    except (OSError, RuntimeError):  # no home folder, or none that this user may look into
        return None
    found, learned = read_learned(path)
    if found != json.loads(json.dumps(job)):
        raise UselessLearnedError(f"{path}: is of another job")
    return learned


def read_learned(path: Path) -> tuple[dict[str, Any], LearnedBatches]:
    """Return the job of a file, and what was learned from it.

    Raises:
        UselessLearnedError: it is damaged, or of another version.
    """
    try:
        data = read_json(path, follow_links=False)
        if data["format"] != _FORMAT:
            raise UselessLearnedError(f"{path}: has format {data['format']!r}, and this version reads {_FORMAT}")
        job, learned = data["job"], LearnedBatches(**data["learned"])
        costs = learned.runner_up_costs
        counts = [learned.tokens, learned.ep_size, *([] if learned.runner_up is None else [learned.runner_up])]
        if not isinstance(job, dict) or not all(type(each) is int and 0 < each <= MOST_POSITIONS for each in counts):
            raise UselessLearnedError(f"{path}: must have a job and counts of 1 to {MOST_POSITIONS}, not {counts}")
        is_number = type(costs) in (int, float) and 0 < costs < float("inf")
        if (costs is None) != (learned.runner_up is None) or not (costs is None or is_number):
            raise UselessLearnedError(f"{path}: runner_up_costs = {costs!r}: must be a number above 0")
    except UselessLearnedError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UselessLearnedError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    return job, learned


def all_files() -> Iterator[Path]:
    """Yield the files of all jobs, by name; none where there is no folder."""
    try:
        yield from sorted(folder().glob("*.json"))
    except (OSError, RuntimeError):
        return

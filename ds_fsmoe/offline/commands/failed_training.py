# SPDX-License-Identifier: Apache-2.0
"""Finds why a training failed, in what it has left: the error of the rank that died, not what others saw of that."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ds_fsmoe.untrusted import read_regular

_BEGIN = "Traceback (most recent call last):"
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_PREFIX = re.compile(r"\[(?:rank|default)?(\d+)\]: ?")
"""The prefix that torch and its launchers put before each line of a rank."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SEEN_OF_OTHERS = re.compile(
    r"closed by peer|reset by peer|remote worker|broken pipe|ChildFailedError|SignalException|CalledProcessError"
    r"|KeyboardInterrupt|NCCL communicator was aborted|ncclRemoteError|ncclSystemError|unhandled system error"
    r"|DistStoreError|wait timeout|Timed out waiting|recvValue failed|failed to recv|Application timeout|SystemExit",
    re.IGNORECASE,
)
"""Errors that a rank has because another one is gone."""
_MOST_LINES = 24


@dataclass(frozen=True)
class FirstError:
    """Why a training failed."""

    of: str
    """The rank, if it is known, and where this was found."""
    lines: tuple[str, ...]
    """The end of its traceback."""


def first_error(log: Path, reports: Path, since_s: float) -> FirstError | None:
    """Return the first error of a rank that is no consequence of another's end; or else the first of all.

    Args:
        log: what the training has printed.
        reports: the folder with what ranks of ours leave when they end by an error.
        since_s: the time before which reports are of earlier jobs.
    """
    text = log.read_text(errors="replace")
    found = [(f"rank {rank}, in {log}" if rank else str(log), lines) for rank, lines in _errors(text.splitlines())]
    for file in sorted(reports.glob("rank*.txt"), key=lambda each: each.stat().st_mtime):
        if file.stat().st_mtime >= since_s:
            try:
                errors = _errors(read_regular(file).splitlines())
            except (OSError, ValueError):
                continue
            found += [(f"rank {file.stem.removeprefix('rank')}, in {file}", lines) for _, lines in errors]
    causes = [each for each in found if not _SEEN_OF_OTHERS.search(each[1][-1])] or found
    return FirstError(causes[0][0], tuple(causes[0][1][-_MOST_LINES:])) if causes else None


def _errors(lines: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return (rank, lines) of each traceback, in the order of their ends, of a chain the last; "": of no known rank."""
    done: list[tuple[str, list[str]]] = []
    # Ranks without a prefix write into each other's tracebacks: as many errors are awaited as tracebacks have begun.
    open_of: dict[str, list[str]] = {}
    awaited: dict[str, int] = {}
    for each in lines:
        line = _COLOUR.sub("", each)
        match = _PREFIX.match(line)
        rank, line = (match[1], line[match.end() :]) if match else ("", line)
        if line.startswith(_BEGIN):
            open_of.setdefault(rank, []).append(line)
            awaited[rank] = awaited.get(rank, 0) + 1
        elif awaited.get(rank):
            open_of[rank].append(line)
            if line and not line[0].isspace():
                done.append((rank, list(open_of[rank])))
                awaited[rank] -= 1
                if not awaited[rank]:
                    del open_of[rank]
        elif line.startswith(_CHAINED):
            last = max((place for place, (of, _) in enumerate(done) if of == rank), default=None)
            if last is not None:
                del done[last]
    return done

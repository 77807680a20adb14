# SPDX-License-Identifier: Apache-2.0
"""Sees from outside which waits of DeepSpeed's own last: its code pays nothing for that, and is not changed.

A watchdog looks at the stacks of all threads every second. A thread waits in the same collective as before if it is at
the same place, and no group of the process has begun a collective since.
"""

from __future__ import annotations

import linecache
import re
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting

_TORCH = f"{Path(torch.__file__).parent}/"
_COLLECTIVES = f"{_TORCH}distributed/"
_FOR_A_RESULT = re.compile(r"\.(wait|synchronize|item|tolist)\b")
# They pass a call on; who has made it is further out.
_PASSING_ON = "comm/", "accelerator/", "utils/"
# Collectives say nothing of messages between stages, so a stage that waits for many would look like one that hangs.
_BETWEEN_STAGES = "runtime/pipe/p2p.py"
# Here others wait while one rank is in the script's own code.
_IN_THE_SCRIPT = "GatheredParameters.__exit__", "GatheredParameters._exit"


class DeepSpeedsWaits:
    """Marks each wait of DeepSpeed's as :class:`~ds_fsmoe.distributed.waits.waiting`, as long as it is seen."""

    def __init__(self) -> None:
        self._marked: dict[int, tuple[Any, waiting]] = {}
        """Thread -> the wait that it was in at the last look, and its mark."""

    def look(self) -> None:
        """Mark the waits that threads are in now, and no others."""
        found = _waits_now() if world_size_now() > 1 else {}
        for thread, (before, mark) in list(self._marked.items()):
            if thread not in found or found[thread][0] != before:
                del self._marked[thread]
                mark.__exit__(None, None, None)
        marked = {each.thread for each in waiting.now()}
        for thread, (wait, place) in found.items():
            if thread not in marked:
                mark = waiting("DeepSpeed's", place)
                mark.__enter__()
                mark.thread = thread
                self._marked[thread] = wait, mark

    def close(self) -> None:
        """Take the marks away."""
        for _, mark in self._marked.values():
            mark.__exit__(None, None, None)
        self._marked.clear()


def _waits_now() -> dict[int, tuple[Any, str]]:
    """Return, for each thread in a wait of DeepSpeed's, what tells it from another wait, and its place in words."""
    folder = f"{Path(sys.modules['deepspeed'].__file__ or '').parent}/" if "deepspeed" in sys.modules else ""
    places = {thread: _place(frame, folder) for thread, frame in sys._current_frames().items() if folder}
    found = {thread: place for thread, place in places.items() if place is not None}
    begun = _collectives_begun() if found else None
    return {} if begun is None else {thread: ((at, begun), words) for thread, (at, words) in found.items()}


def _place(frame: FrameType | None, folder: str) -> tuple[Any, str] | None:
    """Return where a thread waits, if it does so for DeepSpeed.

    Args:
        frame: the innermost frame of the thread.
        folder: where DeepSpeed is installed.
    """
    frames: list[tuple[int, int]] = []
    is_wait = False
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        is_wait |= frame.f_code.co_filename.startswith(_COLLECTIVES)
        frames.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(folder):
        return None
    while frame is not None and frame.f_code.co_filename.removeprefix(folder).startswith(_PASSING_ON):
        is_wait = is_wait or _waits_for_a_result(frame)
        frames.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    if frame is None or not (is_wait or _waits_for_a_result(frame)):
        return None
    code, name = frame.f_code, frame.f_code.co_filename.removeprefix(folder)
    is_the_scripts = name == code.co_filename or code.co_qualname in _IN_THE_SCRIPT
    if is_the_scripts or name == _BETWEEN_STAGES or _is_made(frame, folder):
        return None
    frames.append((id(frame), frame.f_lasti))
    return tuple(frames), f"{code.co_qualname} ({name}:{frame.f_lineno})"


def _is_made(frame: FrameType | None, folder: str) -> bool:
    """Return whether an engine is being made: a rank may load a model meanwhile."""
    while frame is not None and frame.f_code.co_filename != f"{folder}__init__.py":
        frame = frame.f_back
    return frame is not None


def _waits_for_a_result(frame: FrameType) -> bool:
    """Return whether the text of the call that a frame is in says so."""
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    first, last, begin, end = positions
    if first is None or last is None:
        return False
    lines = [linecache.getline(frame.f_code.co_filename, each) for each in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return _FOR_A_RESULT.search("".join(lines)) is not None


def _collectives_begun() -> tuple[int, ...] | None:
    """Return how many collectives each group of this process has begun; ``None`` where a group does not say."""
    # A group may be made or ended meanwhile.
    with suppress(RuntimeError):
        return tuple(each._get_sequence_number_for_group() for each in list(dist.distributed_c10d._world.pg_map))
    return None

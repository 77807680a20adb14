# SPDX-License-Identifier: Apache-2.0
"""Exchanges the state of ranks when one of them waits for long: through the job's store, not by collectives.

The watchdog calls it. In normal running nothing is sent. A rank that waits for long asks, and each rank writes a
description of itself.
"""

from __future__ import annotations

import gc
import linecache
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.distributed import waits
from ds_fsmoe.distributed.topology import rank_now, world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.observing.clock import Clock

# ---- Finds long waits in DeepSpeed's code by looking at thread stacks; that code is not changed
#
# A watchdog reads the stacks of all threads every second. A thread waits in the same collective as before if it is
# at the same place, and no group of the process has begun a collective since.


_TORCH = f"{Path(torch.__file__).parent}/"
_COLLECTIVES = f"{_TORCH}distributed/"
_ASKING = str(Path(__file__).parents[1] / "layer" / "expert_shard.py")
"""The file of our wrapper between torch and its caller (``ask_in_collectives``); skipped like torch's own frames."""
_FOR_A_RESULT = re.compile(r"\.(wait|synchronize|item|tolist)\b")
# They pass a call on; who has made it is further out.
_PASSING_ON = "comm/", "accelerator/", "utils/"
# Collectives say nothing of messages between stages, so a stage that waits for many would look like one that hangs.
_BETWEEN_STAGES = "runtime/pipe/p2p.py"
# Other ranks wait here while one rank runs the user's code, so this is no hang.
_IN_THE_SCRIPT = "GatheredParameters.__exit__", "GatheredParameters._exit"


class DeepSpeedsWaits:
    """Marks each wait of DeepSpeed's as :class:`~ds_fsmoe.distributed.waits.waiting`, while it lasts."""

    def __init__(self) -> None:
        self._marked: dict[int, tuple[Any, waiting]] = {}
        """Thread -> the wait that it was in at the last look, and its mark."""

    def mark_current(self) -> None:
        """Mark exactly the waits that threads are in now."""
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
        """Remove the marks."""
        for _, mark in self._marked.values():
            mark.__exit__(None, None, None)
        self._marked.clear()


def _waits_now() -> dict[int, tuple[Any, str]]:
    """Return, for each thread in a wait of DeepSpeed's, an identity of the wait, and its place in words."""
    folder = f"{Path(sys.modules['deepspeed'].__file__ or '').parent}/" if "deepspeed" in sys.modules else ""
    with _no_collection():
        places = {thread: _place(frame, folder) for thread, frame in sys._current_frames().items() if folder}
    found = {thread: place for thread, place in places.items() if place is not None}
    begun = _collectives_begun() if found else None
    return {} if begun is None else {thread: ((at, begun), words) for thread, (at, words) in found.items()}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running while frames of other threads are read.

    In Python 3.11 a collection may begin while the object of a frame is made. If another thread runs meanwhile and
    leaves that frame, the object has no code, and reading it ends the process by a segmentation fault.
    """
    is_held = sys.version_info < (3, 12) and gc.isenabled()
    if is_held:
        gc.disable()
    try:
        yield
    finally:
        if is_held:
            gc.enable()


def _place(frame: FrameType | None, folder: str) -> tuple[Any, str] | None:
    """Return (identity, place) of the DeepSpeed call in which a thread waits for other ranks or the device; ``None`` if
    it does not.

    Args:
        frame: the innermost frame of the thread.
        folder: the folder of DeepSpeed.
    """
    frames: list[tuple[int, int]] = []
    is_wait = False
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _ASKING)):
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
    """Return True if an engine is being made: a rank may load a model at that time."""
    while frame is not None and frame.f_code.co_filename != f"{folder}__init__.py":
        frame = frame.f_back
    return frame is not None


def _waits_for_a_result(frame: FrameType) -> bool:
    """Return True if the source of the call in a frame waits for a result."""
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    first, last, begin, end = positions
    if first is None or last is None:
        return False
    lines = [linecache.getline(frame.f_code.co_filename, each) for each in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return _FOR_A_RESULT.search("".join(lines)) is not None


def _collectives_begun() -> tuple[int, ...] | None:
    """Return the number of collectives that each group of this process has begun; ``None`` if a group does not count
    them."""
    # A group may be made or ended meanwhile.
    with suppress(RuntimeError):
        return tuple(each._get_sequence_number_for_group() for each in list(dist.distributed_c10d._world.pg_map))
    return None


# ---- Tells the ranks of a job what each does when one of them waits for long: through the job's store, not by
# collectives


_ASKED, _HANG = "fsmoe/watchdog/asked", "fsmoe/watchdog/hang"
_PACKAGES = str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<"
"""Path prefixes of this package, of Python's library, and of code without a file."""


class PeerReports:
    """Asks the other ranks, and answers them, for one watchdog.

    A store that does not answer blocks only a separate thread.

    Args:
        host: the clock for waiting.
        limit_s: the limit of the wait for the store, in seconds.
        every: the number of checks between requests to the store while no rank asks.
    """

    def __init__(self, host: Clock, limit_s: float, every: int) -> None:
        self._host, self._limit_s, self._every = host, limit_s, every
        self._num_checks, self._is_asked = 0, False
        self._store: Any = None
        self._asking: threading.Thread | None = None
        self._has_asked = False
        self._reported_hang: str | None = None

    def check(self, is_long: bool) -> str | None:
        """Return a hang that another rank reports, only the first time it is seen. First ask or answer the other ranks.

        Args:
            is_long: whether this rank waits for long.
        """

        self._num_checks += 1
        if not (is_long or self._has_asked or self._is_asked) and self._num_checks % self._every:
            return None

        def look(store: Any) -> str | None:
            if is_long:
                store.set(_ASKED, str(rank_now()))
            elif self._has_asked:
                store.delete_key(_ASKED)
            self._has_asked = is_long
            self._is_asked = is_long or store.check([_ASKED])
            if self._is_asked:
                # "w": works with files and waits for no rank; "-": any other state. A description follows.
                is_at_work = waits.working.now() and not waits.waiting.now()
                store.set(_key(rank_now()), ("w" if is_at_work else "-") + describe_this_rank())
            return store.get(_HANG).decode() if store.check([_HANG]) else None

        before, self._reported_hang = self._reported_hang, self._in_time(look) or self._reported_hang
        return None if self._reported_hang == before else self._reported_hang

    def report_hang(self, reason: str) -> None:
        """Send the other ranks the hang of this rank."""

        def tell(store: Any) -> None:
            self._reported_hang = f"rank {rank_now()}: {reason}"
            store.set(_HANG, self._reported_hang)

        self._in_time(tell)

    def states(self) -> list[tuple[str, bool]]:
        """Return for each other rank its description of itself, and True if it works with files and waits for no
        rank."""

        def read(store: Any) -> list[tuple[str, bool]]:
            others = [each for each in range(world_size_now()) if each != rank_now()]
            found = []
            for rank in others:
                text = store.get(_key(rank)).decode() if store.check([_key(rank)]) else "-has not answered"
                found.append((f"rank {rank}: {text[1:]}", text[0] == "w"))
            return found

        return self._in_time(read) or []

    def _in_time(self, act: Callable[[Any], Any]) -> Any:
        """Return the store's result; ``None`` if it does not answer within the limit."""
        if world_size_now() == 1 or (self._asking is not None and self._asking.is_alive()):
            return None
        found: list[Any] = []

        def ask() -> None:
            try:
                self._store = self._store or _own_store()
                found.append(act(self._store))
            except Exception:  # whatever became of the store, and of the rank that has it
                self._store = None

        self._asking = threading.Thread(target=ask, name="fsmoe-store", daemon=True)
        self._asking.start()
        self._host.join(self._asking, self._limit_s)
        return found[0] if found else None


def _own_store() -> Any:
    """Return the job's store by a separate connection: the main thread's might be blocked by a collective."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def _key(rank: int) -> str:
    return f"fsmoe/watchdog/rank{rank}"


def describe_this_rank() -> str:
    """Return a description of this rank in one line: its waits, its last forward, and the place of its main thread."""
    places: list[str] = []
    with _no_collection():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and len(places) < 2:
            # The innermost, and then the innermost of the script.
            name = frame.f_code.co_filename
            if not places or not (name.startswith(_PACKAGES) or "site-packages" in name):
                places.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
    return f"{waits.describe_waits()}; now at {', called from '.join(places)}"

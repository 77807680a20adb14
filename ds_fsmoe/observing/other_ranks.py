# SPDX-License-Identifier: Apache-2.0
"""Tells the ranks of a job what each does when one of them waits for long: through the job's store, not by collectives.

Nothing is sent as long as no rank waits for long. Then that rank asks, and each writes what it says of itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_fsmoe.distributed import waits
from ds_fsmoe.distributed.topology import rank_now, world_size_now
from ds_fsmoe.observing.clock import Clock

_ASKED, _HANG = "fsmoe/watchdog/asked", "fsmoe/watchdog/hang"
_PACKAGES = str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<"
"""What paths of our code, of Python's own and of none begin with."""


class OtherRanks:
    """Asks the other ranks, and answers them, for one watchdog.

    A store that does not answer holds up a thread of its own, and nothing else.

    Args:
        host: the clock by which that is waited for.
        limit_s: how long.
        every: so many looks apart the store is asked, as long as nobody asks.
    """

    def __init__(self, host: Clock, limit_s: float, every: int) -> None:
        self._host, self._limit_s, self._every = host, limit_s, every
        self._num_looks, self._is_asked = 0, False
        self._store: Any = None
        self._asking: threading.Thread | None = None
        self._has_asked = False
        self._told_of: str | None = None

    def look(self, is_long: bool) -> str | None:
        """Ask or answer; return what another rank reports as a hang, once.

        Args:
            is_long: whether this rank waits for long.
        """

        self._num_looks += 1
        if not (is_long or self._has_asked or self._is_asked) and self._num_looks % self._every:
            return None

        def look(store: Any) -> str | None:
            if is_long:
                store.set(_ASKED, str(rank_now()))
            elif self._has_asked:
                store.delete_key(_ASKED)
            self._has_asked = is_long
            self._is_asked = is_long or store.check([_ASKED])
            if self._is_asked:
                is_at_work = waits.working.now() and not waits.waiting.now()
                store.set(_key(rank_now()), ("w" if is_at_work else "-") + said())
            return store.get(_HANG).decode() if store.check([_HANG]) else None

        before, self._told_of = self._told_of, self._in_time(look) or self._told_of
        return None if self._told_of == before else self._told_of

    def tell(self, reason: str) -> None:
        """Tell the others that this rank reports a hang."""

        def tell(store: Any) -> None:
            self._told_of = f"rank {rank_now()}: {reason}"
            store.set(_HANG, self._told_of)

        self._in_time(tell)

    def states(self) -> list[tuple[str, bool]]:
        """Return for each other rank what it said of itself when it was asked, and whether it is at work with files,
        waiting for nobody."""

        def read(store: Any) -> list[tuple[str, bool]]:
            others = [each for each in range(world_size_now()) if each != rank_now()]
            found = []
            for rank in others:
                text = store.get(_key(rank)).decode() if store.check([_key(rank)]) else "-has not answered"
                found.append((f"rank {rank}: {text[1:]}", text[0] == "w"))
            return found

        return self._in_time(read) or []

    def _in_time(self, act: Callable[[Any], Any]) -> Any:
        """Return what comes of the store in time; ``None`` where it does not answer."""
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
    """Return the job's store by a connection of our own: on the main thread's it might wait behind a collective."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def _key(rank: int) -> str:
    return f"fsmoe/watchdog/rank{rank}"


def said() -> str:
    """Return what this rank says of itself, in a line: its waits, its last forward, and where its main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places: list[str] = []
    while frame is not None and len(places) < 2:
        # The innermost, and then the innermost of the script.
        name = frame.f_code.co_filename
        if not places or not (name.startswith(_PACKAGES) or "site-packages" in name):
            places.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return f"{waits.said()}; now at {', called from '.join(places)}"

# SPDX-License-Identifier: Apache-2.0
"""Records the present waits of this process, their start and its last action, for a watchdog in any thread.

A collective whose other ranks never arrive reports nothing. Our collectives that block the host outside of lanes are
marked by :class:`waiting`. It costs a few microseconds and no lock. ``observing/watchdog.py`` reads the marks.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

_T = TypeVar("_T")


class _Mark:
    """Represents an operation that is running in a thread."""

    __slots__ = ("_what", "since_s", "thread")
    _in_progress: ClassVar[dict[int, Any]]

    def __init__(self, *what: str) -> None:
        """Initialize a mark.

        Args:
            what: the operation in words, and its object, such as the path of a layer.
        """
        self._what = what

    def __enter__(self) -> None:
        self.since_s = time.monotonic()
        self.thread = threading.get_ident()
        self._in_progress[id(self)] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._in_progress[id(self)]

    @property
    def what(self) -> str:
        """Return the operation in words."""
        return " ".join(self._what)

    @classmethod
    def now(cls) -> list[Self]:
        """Return the marks of running operations, the oldest first."""
        return list(cls._in_progress.values())


class waiting(_Mark):
    """Marks one collective in which this rank waits for others: ``with waiting("the counts of", path): ...``."""

    __slots__ = ()
    _in_progress: ClassVar[dict[int, Any]] = {}


class working(_Mark):
    """Marks work with files, in which a rank may keep others waiting for long: a wait inside it is not reported as a
    hang."""

    __slots__ = ()
    _in_progress: ClassVar[dict[int, Any]] = {}


def at_work(what: str) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Return a decorator that marks a function as work with files, see :class:`working`."""

    def marked(function: Callable[..., _T]) -> Callable[..., _T]:
        @functools.wraps(function)
        def at_work(*args: Any, **kwargs: Any) -> _T:
            with working(what):
                return function(*args, **kwargs)

        return at_work

    return marked


class _Last:
    """Holds the last action of this process."""

    forward: tuple[object, float] | None = None
    step: int | None = None


def forward_begins(forward: object) -> None:
    """Record that the forward of a layer begins.

    Args:
        forward: the forward, which is turned into text on request.
    """
    _Last.forward = forward, time.monotonic()


def at_step(number: int) -> None:
    """Record that optimizer step ``number`` begins or continues."""
    _Last.step = number


def is_patient(wait: _Mark) -> bool:
    """Return True if a wait may be long, since other ranks may be working with files."""
    return any(each.thread == wait.thread for each in working.now())


def describe_waits() -> str:
    """Return the present waits and the last action of this process, as one line."""
    parts = [f"waits for other ranks in {each.what}, {_since(each.since_s)}" for each in waiting.now()]
    parts = parts or ["is in no wait of ds_fsmoe"]
    parts += [f"is {each.what}, {_since(each.since_s)}" for each in working.now()]
    last = _Last.forward
    parts.append("has run no forward" if last is None else f"last forward: {last[0]}, {_since(last[1])}")
    return "; ".join([*parts, *([] if _Last.step is None else [f"at step {_Last.step}"])])


def _since(since_s: float) -> str:
    passed_s = time.monotonic() - since_s
    return f"since {datetime.now() - timedelta(seconds=passed_s):%H:%M:%S} ({passed_s:.1f} s)"

# SPDX-License-Identifier: Apache-2.0
"""Listens for the end of this process: an error that nobody catches, and SIGTERM, also while it is in a collective."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Protocol

TERMINATED_STATUS = 128 + signal.SIGTERM
"""The exit status, as shells count, of a process that got SIGTERM while stuck outside of Python."""

# How long the main thread has to end the process itself, once SIGTERM has been reported.
_MAIN_LIMIT_S = 1.0


class Listener(Protocol):
    """Is told when the process ends."""

    limit_s: float
    """The most seconds that :meth:`terminated` takes."""

    def failed(self, error: BaseException) -> None:
        """React to an error that nobody has caught."""

    def terminated(self) -> None:
        """React to SIGTERM."""


_hooks: _Hooks | None = None


def attend(listener: Listener) -> None:
    """Tell a listener when the process ends."""
    global _hooks
    if _hooks is None:
        _hooks = _Hooks()
    _hooks.listeners.append(listener)
    _hooks.take_sigterm()


def attending() -> tuple[Listener, ...]:
    """Return the listeners that are told."""
    return () if _hooks is None else tuple(_hooks.listeners)


def leave(listener: Listener) -> None:
    """Stop telling a listener; the last one to leave restores what was taken over."""
    global _hooks
    if _hooks is not None and listener in _hooks.listeners:
        _hooks.listeners.remove(listener)
        # Elsewhere they stay, pass everything on, and serve the next listener.
        if not _hooks.listeners and _in_main_thread():
            _hooks.give_back()
            _hooks = None


def _forget_in_child() -> None:
    """Forget the listeners in a forked process, such as a data loader: its errors and its SIGTERM are its own.

    It has our pipe too, so that without this its SIGTERM would look like one of this process.
    """
    global _hooks
    if _hooks is not None:
        _hooks.listeners.clear()
        _hooks.give_back(in_child=True)
        _hooks = None


os.register_at_fork(after_in_child=_forget_in_child)


class _Hooks:
    """Takes over ``sys.excepthook`` and SIGTERM for all listeners of the process. Other code may take them over from us
    meanwhile and call ours; so ours keep working after the end, and only pass on."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self._old_excepthook = sys.excepthook
        self._old_sigterm: Any = None
        self._pipe: tuple[int, int] | None = None
        self._is_reported = False
        sys.excepthook = self._on_error

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):  # ending it by hand is no error
            for listener in tuple(self.listeners):
                listener.failed(error)
        self._old_excepthook(kind, error, trace)

    def take_sigterm(self) -> None:
        """Take over SIGTERM. Python's handlers run in the main thread, and not while it sits in a collective. But the
        interpreter also writes the signal's number into a pipe at once, and a thread waits for that."""
        if self._pipe is not None or not _in_main_thread():
            return
        old = signal.getsignal(signal.SIGTERM)
        if old is None or old is signal.SIG_IGN:
            return
        if (taken := signal.set_wakeup_fd(-1)) != -1:
            signal.set_wakeup_fd(taken)
            return
        out, into = os.pipe()
        os.set_blocking(into, False)
        signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        self._pipe, self._old_sigterm = (out, into), old
        signal.signal(signal.SIGTERM, self._on_sigterm)
        threading.Thread(target=self._await_sigterm, args=(out,), name="fsmoe-sigterm", daemon=True).start()

    def _await_sigterm(self, out: int) -> None:
        while 0 not in (numbers := os.read(out, 64)):
            if signal.SIGTERM not in numbers or self._is_reported:
                continue
            for listener in tuple(self.listeners):
                listener.terminated()
            self._is_reported = True
            if self._old_sigterm is signal.SIG_DFL:
                # The main thread does it by the signal itself, so that others see what it was; if it can.
                time.sleep(_MAIN_LIMIT_S)
                os._exit(TERMINATED_STATUS)
        os.close(out)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self.listeners and self._pipe is not None:
            with suppress(OSError):  # someone else may have the interpreter's pipe by now
                os.write(self._pipe[1], bytes([number]))
            until_s = time.monotonic() + sum(each.limit_s for each in self.listeners) + _MAIN_LIMIT_S
            # No lock: this has interrupted the main thread anywhere, in the same place too.
            while not self._is_reported and time.monotonic() < until_s:
                time.sleep(0.01)
        if callable(self._old_sigterm):
            self._old_sigterm(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def give_back(self, in_child: bool = False) -> None:
        """Restore what is still ours; in the main thread."""
        if sys.excepthook == self._on_error:
            sys.excepthook = self._old_excepthook
        if self._pipe is None:
            return
        (out, into), self._pipe = self._pipe, None
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._old_sigterm)
        taken = signal.set_wakeup_fd(-1)
        if taken not in (-1, into):
            signal.set_wakeup_fd(taken)
        if in_child:
            os.close(out)  # the thread is the parent's, and so is the other end
        else:
            os.write(into, bytes([0]))
        os.close(into)


def _in_main_thread() -> bool:
    """Return whether this is the main thread, where signals can be taken over and restored."""
    return threading.current_thread() is threading.main_thread()

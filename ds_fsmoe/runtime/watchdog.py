# SPDX-License-Identifier: Apache-2.0
"""Says what each rank was doing when a job goes wrong: it hangs, it fails, or it is told to end.

A collective whose other ranks never come says nothing, and only one rank in a job knows the task in which it waits. So
each rank leaves a report in a file of its own, by default ``fsmoe_reports/rank3.txt`` under the folder that was current
when training began: the last task of the schedule that each lane began and finished, and the stacks of all threads.
Nothing is written as long as nothing goes wrong.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.runtime.lanes import Lanes

logger = logging.getLogger("ds_fsmoe")

HANG_STATUS = 86
"""With this a process ends that hangs; no signal, shell or launcher uses it."""
TERMINATED_STATUS = 128 + signal.SIGTERM
"""With this, as shells count, one ends that was told to with SIGTERM and is stuck outside of Python."""

# A disk or a driver that does not answer may not keep a process from ending. Launchers kill 30 s after SIGTERM.
_REPORT_LIMIT_S = 10.0
# How long the main thread has to end the process itself, once SIGTERM has been reported.
_MAIN_LIMIT_S = 1.0
# A job that goes on after errors does not fill the disk: this many reports in a file, then it begins anew.
_MAX_REPORTS = 8
# Whatever an error's message holds.
_TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}

_Progress = dict[Lane, tuple[str, str]]


def report_file(folder: Path | str = "fsmoe_reports") -> Path:
    """This rank's file in a folder; a relative one is under the current folder."""
    return Path(folder).absolute() / f"rank{_rank()}.txt"


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", 0))


def end_process(file: Path | None) -> None:
    """End this process now, also if its threads sit in collectives: no Python or C++ code of theirs runs any more."""
    os._exit(HANG_STATUS)


class Watchdog:
    """Watches lanes from a thread of its own, and reports.

    - A hang: a run is under way and no task has begun or finished for ``hang_timeout_s``. Between runs the clock stands
      still, however long data are loaded or code is compiled, and so it does for a process that is stopped or gets no
      time. A rank that waits for a slower one looks the same, so the time has to be above what ranks may be apart.
      After the report ``on_hang`` ends the process, and with that the launcher ends the job.
    - An error: one that nobody catches, through ``sys.excepthook``; one of a run, where :meth:`failed` is told.
    - SIGTERM, also while the main thread sits in a collective: then what was there before goes on, be it a handler
      or the end of the process. It is left alone where it is ignored, or where an event loop looks after signals; and
      it is taken over only by a watchdog that is made in the main thread.

    The lanes know nothing of this and pay nothing for it: it looks every second, or four times per
    ``hang_timeout_s``, and does not keep them alive. What it cannot see is a thread that never lets the interpreter's
    lock go.
    """

    def __init__(
        self,
        lanes: Lanes,
        hang_timeout_s: float,
        file: Path | None = None,
        on_hang: Callable[[Path | None], None] = end_process,
        first_use_s: float = 900.0,
    ) -> None:
        """
        Args:
            lanes: to watch.
            hang_timeout_s: without a task that begins or finishes, this long is a hang.
            file: of the reports; by default :func:`report_file`. One that is there is replaced by the first report. If
                another watchdog of this process has it, the name is followed by a number.
            on_hang: is called, from the watchdog's thread, with the file, or ``None`` if it could not be written. If it
                returns, the next hang is reported once a task has begun or finished.
            first_use_s: it takes at least so long in the first run, which makes communicators and compiles kernels.
        """
        self.file = _own_file((report_file() if file is None else Path(file)).absolute())
        self._lanes = weakref.ref(lanes)
        self._hang_timeout_s = hang_timeout_s
        self._first_use_s = first_use_s
        self._on_hang = on_hang
        self._poll_s = min(1.0, hang_timeout_s / 4)
        self._rank = _rank()
        self._is_first_use = True
        self._labels: set[str] = set()
        self._seen_marks = _marks(lanes)
        self._seen_progress: _Progress | None = None
        self._answer: tuple[bool, _Progress] = False, {}
        self._asking: threading.Thread | None = None
        self._num_reports = 0
        self._writing = threading.Lock()
        self._closed = threading.Event()
        _attend(self)
        self._thread = threading.Thread(target=self._watch, name="fsmoe-watchdog", daemon=True)
        self._thread.start()

    def failed(self, error: BaseException) -> None:
        """Report an error of a run, whoever may catch it later; once per error. It gets a note with the file's name."""
        if self._closed.is_set() or any(str(self.file) in note for note in getattr(error, "__notes__", ())):
            return
        text = "".join(traceback.format_exception(error))
        if self._report(f"error: {type(error).__name__}: {error}", text) is not None:
            error.add_note(f"what this rank was doing: {self.file}")

    def close(self) -> None:
        """End the thread, and give back the hooks with the last watchdog of the process; once is enough."""
        self._closed.set()
        _leave(self)
        # When the interpreter is on its way out, such a thread does not run any more, not even to its end.
        if self._thread is not threading.current_thread() and not sys.is_finalizing():
            self._thread.join()

    # ---- the clock

    def _watch(self) -> None:
        still_s, last_s = 0.0, time.monotonic()
        while not self._closed.wait(self._poll_s):
            lanes = self._lanes()
            if lanes is None:
                _leave(self)
                return
            now_s = time.monotonic()
            # More has passed only if this process was stopped, or got no time, and then its tasks have waited for that.
            passed_s, last_s = min(now_s - last_s, 2 * self._poll_s), now_s
            still_s = still_s + passed_s if self._stands_still(lanes) else 0.0
            limit_s = max(self._hang_timeout_s, self._first_use_s if self._is_first_use else 0.0)
            if still_s >= limit_s:
                reason = (
                    f"hang: a run is under way, and for {still_s:.1f} s no task has begun or finished "
                    f"(fsmoe.debug.hang_timeout_s = {self._hang_timeout_s:g})"
                )
                self._on_hang(self._report(reason))
                still_s = float("-inf")  # until something moves
            del lanes  # not kept alive from here

    def _stands_still(self, lanes: Lanes) -> bool:
        """Whether a run is under way in which nothing has moved since this was asked last."""
        is_under_way, marks = lanes._is_running, _marks(lanes)
        is_same = all(new is old for new, old in zip(marks, self._seen_marks, strict=True))
        progress = None
        if is_same:  # where the host is seen to move, a device need not be asked
            is_behind, progress = self._ask(lanes)
            is_under_way = is_under_way or is_behind
        if self._is_first_use:
            self._labels.update(mark[0] for mark in marks if mark is not None)
            # Another label means that a run is over; so does one that nobody is in.
            self._is_first_use = len(self._labels) < 2 if is_under_way else not self._labels
        is_same = is_same and progress == self._seen_progress
        self._seen_marks, self._seen_progress = marks, progress
        return is_same and is_under_way

    def _ask(self, lanes: Lanes) -> tuple[bool, _Progress]:
        """Whether a device has yet to do what runs have given it, and how far each lane has come.

        On CUDA that is for the driver to say, which may keep one thread waiting while another waits in it. If it does
        not answer, it is behind, and the lanes are where they were.
        """
        if self._asking is None or not self._asking.is_alive():

            def ask() -> None:
                self._answer = _is_behind(lanes), lanes.progress()

            self._asking = threading.Thread(target=ask, name="fsmoe-progress", daemon=True)
            self._asking.start()
        self._asking.join(self._poll_s)
        return (True, self._answer[1]) if self._asking.is_alive() else self._answer

    # ---- the report

    def _report(self, reason: str, details: str = "") -> Path | None:
        """Write a report and log where it is; ``None`` if it could not be written, or not in time."""
        written: list[Path] = []

        def write() -> None:
            try:
                with self._writing:
                    self._write(reason, details)
                written.append(self.file)
                logger.error("rank %s: %s; what it was doing: %s", self._rank, reason, self.file)
            except OSError as error:
                logger.error("%s\nno report could be written: %s", self._head(reason), error)
            with suppress(OSError, ValueError):  # what is printed would be lost with the process
                sys.stdout.flush()

        thread = threading.Thread(target=write, name="fsmoe-report", daemon=True)
        thread.start()
        thread.join(_REPORT_LIMIT_S)
        return written[0] if written else None

    def _write(self, reason: str, details: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # A launcher may kill this process at any time: the file is there as a whole, or as it was.
        unfinished = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        goes_on = self._num_reports % _MAX_REPORTS and self.file.exists()
        earlier = self.file.read_text(**_TEXT) if goes_on else ""
        with unfinished.open("w", **_TEXT) as out:
            out.write(f"{earlier}{self._head(reason)}\n")
            if details:
                out.write(f"error:\n{details}\n")
            names = "\n".join(f"  0x{each.ident or 0:016x} {each.name}" for each in threading.enumerate())
            out.write(f"threads, this report's own among them:\n{names}\n\nstacks:\n")
            out.flush()
            faulthandler.dump_traceback(out, all_threads=True)
            out.write(f"{'=' * 120}\n")
        unfinished.replace(self.file)
        self._num_reports += 1

    def _head(self, reason: str) -> str:
        lanes = self._lanes()
        is_behind, progress = (False, {}) if lanes is None else self._ask(lanes)
        is_running = lanes is not None and lanes._is_running
        run = "under way" if is_running else "issued, not done" if is_behind else "none under way"
        rows = [("lane", "begun last", "finished last")]
        rows += [(lane, begun or "-", finished or "-") for lane, (begun, finished) in progress.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"ds_fsmoe: what rank {self._rank} was doing",
            f"time:   {datetime.now().astimezone().isoformat(timespec='milliseconds')}",
            f"host:   {socket.gethostname()}, process {os.getpid()}",
            f"reason: {reason}",
            f"run:    {run}",
            "",
            *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        ]
        if self._asking is not None and self._asking.is_alive():
            lines.append("(from before: the device's driver does not answer)")
        return "\n".join([*lines, ""])


def _marks(lanes: Lanes) -> list[tuple[str, Any] | None]:
    """What each lane began and finished last: other objects each time, also if a task of the same name is done again
    and again. Reading them asks no device."""
    return [at for mark in lanes._marks.values() for at in (mark.begun, mark.finished)]


def _is_behind(lanes: Lanes) -> bool:
    """Whether a device has yet to do what runs have given it. Without a device, a run is over when it is over."""
    is_behind = getattr(lanes, "is_behind", None)
    return is_behind is not None and is_behind()


# ---- the ends of the process


_hooks: _Hooks | None = None


def _attend(watchdog: Watchdog) -> None:
    """Tell a watchdog when the process ends."""
    global _hooks
    if _hooks is None:
        _hooks = _Hooks()
    _hooks.watchdogs.append(watchdog)
    _hooks.take_sigterm()


def _own_file(file: Path) -> Path:
    """That, or one beside it that no watchdog of this process has."""
    others = {each.file for each in _hooks.watchdogs} if _hooks is not None else set()
    names = (file, *(file.with_stem(f"{file.stem}_{number}") for number in range(2, len(others) + 2)))
    return next(each for each in names if each not in others)


def _leave(watchdog: Watchdog) -> None:
    global _hooks
    if _hooks is not None and watchdog in _hooks.watchdogs:
        _hooks.watchdogs.remove(watchdog)
        # Elsewhere they stay, pass everything on, and serve the next watchdog.
        if not _hooks.watchdogs and _in_main_thread():
            _hooks.give_back()
            _hooks = None


def _forget_in_child() -> None:
    """A forked process, such as a loader of data, is none of our ranks: its errors and its SIGTERM are its own.

    It has our pipe too, so that without this its SIGTERM would look like one of this process.
    """
    global _hooks
    if _hooks is not None:
        _hooks.watchdogs.clear()
        _hooks.give_back(in_child=True)
        _hooks = None


os.register_at_fork(after_in_child=_forget_in_child)


class _Hooks:
    """``sys.excepthook`` and SIGTERM, taken over for all watchdogs of the process. Someone else may take them over
    from us meanwhile and call ours; so ours go on working when they are over, and only pass on."""

    def __init__(self) -> None:
        self.watchdogs: list[Watchdog] = []
        self._old_excepthook = sys.excepthook
        self._old_sigterm: Any = None
        self._pipe: tuple[int, int] | None = None
        self._is_reported = False
        sys.excepthook = self._on_error

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):  # ending it by hand is no error
            for watchdog in tuple(self.watchdogs):
                watchdog.failed(error)
        self._old_excepthook(kind, error, trace)

    def take_sigterm(self) -> None:
        """Python's handlers run in the main thread, and not while it sits in a collective. But the interpreter also
        writes the signal's number into a pipe at once, and a thread waits for that."""
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
            for watchdog in tuple(self.watchdogs):
                watchdog._report("SIGTERM")
            self._is_reported = True
            if self._old_sigterm is signal.SIG_DFL:
                # The main thread does it by the signal itself, so that others see what it was; if it can.
                time.sleep(_MAIN_LIMIT_S)
                os._exit(TERMINATED_STATUS)
        os.close(out)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self.watchdogs and self._pipe is not None:
            with suppress(OSError):  # someone else may have the interpreter's pipe by now
                os.write(self._pipe[1], bytes([number]))
            limit_s = time.monotonic() + _REPORT_LIMIT_S + _MAIN_LIMIT_S
            # No lock: this has interrupted the main thread anywhere, in the same place too.
            while not self._is_reported and time.monotonic() < limit_s:
                time.sleep(0.01)
        if callable(self._old_sigterm):
            self._old_sigterm(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def give_back(self, in_child: bool = False) -> None:
        """Put back what is still ours; in the main thread."""
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
    """Where signals can be taken over, and put back."""
    return threading.current_thread() is threading.main_thread()

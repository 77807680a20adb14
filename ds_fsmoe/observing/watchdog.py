# SPDX-License-Identifier: Apache-2.0
"""Reports the state of each rank when a job hangs, fails, or receives SIGTERM.

The runtime of layers makes one for each engine. A collective whose other ranks never arrive reports nothing. Each rank
knows only its own task. So each rank writes a report to its own file, by default ``fsmoe_reports/rank3.txt`` under the
folder that was current when training began. It has the last task of the schedule that each lane began and finished, and
the stacks of all threads. Nothing is written in a normal run. Callbacks then save other data before the process ends.
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
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from ds_fsmoe.distributed import waits
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.execution.lanes import Lanes
from ds_fsmoe.files.whole_files import new_file
from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.observing.other_ranks import DeepSpeedsWaits, PeerReports, describe_this_rank
from ds_fsmoe.planning.schedule import Lane
from ds_fsmoe.terminal.tables import Table
from ds_fsmoe.untrusted import read_regular

# ---- Listens for the end of this process: an uncaught error, and SIGTERM, also while it is in a
# collective


TERMINATED_STATUS = 128 + signal.SIGTERM
"""The exit status, as shells count, of a process that got SIGTERM while stuck outside of Python."""

# How long the main thread has to end the process itself, once SIGTERM has been reported.
_MAIN_LIMIT_S = 1.0


_hooks: _Hooks | None = None


def attend(listener: Watchdog) -> None:
    """Register a listener for the end of the process."""
    global _hooks
    if _hooks is None:
        _hooks = _Hooks()
    _hooks.listeners.append(listener)
    _hooks.take_sigterm()


def stop_attending(listener: Watchdog) -> None:
    """Remove a listener; the last removal restores the hooks of the process."""
    global _hooks
    if _hooks is not None and listener in _hooks.listeners:
        _hooks.listeners.remove(listener)
        # Elsewhere they stay, pass everything on, and serve the next listener.
        if not _hooks.listeners and _in_main_thread():
            _hooks.give_back()
            _hooks = None


def _forget_in_child() -> None:
    """Remove the listeners in a forked process, such as a data loader: its errors and its SIGTERM are its own.

    It shares our pipe, so its SIGTERM would otherwise look like one of this process.
    """
    global _hooks
    if _hooks is not None:
        _hooks.listeners.clear()
        _hooks.give_back(in_child=True)
        _hooks = None


os.register_at_fork(after_in_child=_forget_in_child)


class _Hooks:
    """Replaces ``sys.excepthook`` and SIGTERM for all listeners of the process.

    Other code may replace them later and call ours; so ours keep working after the end, and only pass on.
    """

    def __init__(self) -> None:
        self.listeners: list[Watchdog] = []
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
        """Install our handler of SIGTERM. Python's handlers run in the main thread, but not while it waits in a
        collective. The interpreter also writes the signal's number into a pipe at once, and a thread waits for that."""
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
        """Restore the hooks that are still ours; in the main thread."""
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
    """Return True in the main thread, where signals can be replaced and restored."""
    return threading.current_thread() is threading.main_thread()


# ---- Reports the state of each rank when a job hangs, fails, or receives SIGTERM


__all__ = ["HANG_STATUS", "TERMINATED_STATUS", "Watchdog", "end_process", "report_file"]

logger = logging.getLogger("ds_fsmoe")

HANG_STATUS = 86
"""The exit status of a process that hangs; no signal, shell or launcher uses it."""

# A disk or a driver that does not answer may not keep a process from ending. Launchers kill 30 s after SIGTERM.
_REPORT_LIMIT_S = 10.0
_AT_END_LIMIT_S = 5.0
# A job that continues after errors does not fill the disk: after this many reports a file begins again.
_MAX_REPORTS = 8
# Of a job of a thousand ranks it should still be read.
_MOST_RANKS = 32

_Progress = dict[Lane, tuple[str, str]]


def report_file(folder: Path | str = "fsmoe_reports") -> Path:
    """Return this rank's file in a folder; a relative folder is under the current one."""
    return Path(folder).absolute() / f"rank{_rank()}.txt"


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", 0))


def end_process(file: Path | None) -> None:
    """End this process now, even if its threads wait in collectives: none of their Python or C++ code runs any more."""
    os._exit(HANG_STATUS)


class Watchdog:
    """Watches lanes, and the waits of this process outside of them, from a separate thread, and reports.

    - A hang: a run is active and no task has begun or finished for ``hang_timeout_s``; or one wait for other ranks
      (:mod:`~ds_fsmoe.distributed.waits`), ours or DeepSpeed's, has lasted for that long. Loading data and compiling
      code do not count, nor does time in which the process is stopped. A rank that waits for a slower one looks the
      same, so the timeout has to exceed the difference between ranks. After the report ``on_hang`` ends the process,
      and the launcher then ends the job. A wait for ranks that work with files is only reported.
    - A hang of another rank, which its watchdog reports through the job's store; this process continues.
    - An uncaught error is observed through ``sys.excepthook``; an error of a run is passed to :meth:`failed`.
    - SIGTERM, also while the main thread waits in a collective: then the earlier handler runs, or the process ends. It
      stays as it is if it is ignored or an event loop handles signals. Only a watchdog that is made in the main thread
      handles it.

    After a report each of ``at_end`` is called with its reason, to save data that would be lost with the process. They
    run in a separate thread and have 5 s in total, so that a second hang does not keep the process alive. After an
    error the job may also continue.

    This costs the lanes nothing: the watchdog checks every second, or four times per ``hang_timeout_s``, and does not
    keep them alive. It cannot observe a thread that never releases the interpreter's lock.
    """

    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(
        self,
        lanes: Lanes,
        hang_timeout_s: float,
        file: Path | None = None,
        on_hang: Callable[[Path | None], None] = end_process,
        first_use_s: float = 900.0,
        host: Clock = HOST,
    ) -> None:
        """Initialize a watchdog and start its thread.

        Args:
            lanes: the lanes to watch.
            hang_timeout_s: a run in which no task begins or finishes for this many seconds hangs.
            file: the file of reports; by default :func:`report_file`. The first report replaces an existing file. If
                another watchdog of this process has it, the name is followed by a number.
            on_hang: called from the watchdog's thread, with the file, or ``None`` if it could not be written. If it
                returns, the next hang is reported once a task has begun or finished.
            first_use_s: the least timeout in seconds in the first run, which makes communicators and compiles kernels.
            host: the clock for checks and waits.
        """
        self.file = _own_file((report_file() if file is None else Path(file)).absolute())
        self.at_end: list[Callable[[str], None]] = []
        self._lanes = weakref.ref(lanes)
        self._host = host
        self._hang_timeout_s = hang_timeout_s
        self._first_use_s = first_use_s
        self._on_hang = on_hang
        self._poll_s = min(1.0, hang_timeout_s / 4)
        self._rank = _rank()
        self._is_first_use = True
        self._labels: set[str] = set()
        self._last_marks = _marks(lanes)
        self._last_progress: _Progress | None = None
        self._answer: tuple[bool, _Progress] = False, {}
        self._asking: threading.Thread | None = None
        self._others = PeerReports(host, self._poll_s, max(1, int(hang_timeout_s / 8 / self._poll_s)))
        self._states: list[str] = []
        self._deepspeeds = DeepSpeedsWaits()
        self._waited: dict[int, tuple[waits.waiting, float]] = {}
        self._patient_in: waits.waiting | None = None
        self._num_reports = 0
        self._writing = threading.Lock()
        self._closed = threading.Event()
        attend(self)
        # Where lanes are dropped: most often in the main thread, which alone can give SIGTERM back.
        weakref.finalize(lanes, stop_attending, self).atexit = False
        self._thread = threading.Thread(target=self._watch, name="fsmoe-watchdog", daemon=True)
        self._thread.start()

    def failed(self, error: BaseException) -> None:
        """Report an error of a run, even if it is caught later; once per error. The error gets a note with the file's
        name."""
        if self._closed.is_set() or any(str(self.file) in note for note in getattr(error, "__notes__", ())):
            return
        text = "".join(traceback.format_exception(error))
        if self._report_and_save(f"error: {type(error).__name__}: {error}", text) is not None:
            error.add_note(f"stacks and tasks of this rank: {self.file}")

    def terminated(self) -> None:
        """Report SIGTERM."""
        self._report_and_save("SIGTERM")

    @property
    def limit_s(self) -> float:
        """Return the maximum of seconds that :meth:`terminated` takes."""
        return _REPORT_LIMIT_S + _AT_END_LIMIT_S

    def close(self) -> None:
        """End the thread, and with the last watchdog of the process restore the hooks; one call is enough."""
        self._closed.set()
        # When the interpreter is on its way out, modules may be empty already, and such a thread does not run any more,
        # not even to its end.
        if self._is_finalizing():
            return
        stop_attending(self)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ---- the clock

    def _watch(self) -> None:
        with closing(self._deepspeeds):
            self._run()

    def _run(self) -> None:
        still_s, last_s = 0.0, self._host.monotonic()
        while not self._host.wait(self._closed, self._poll_s):
            lanes = self._lanes()
            if lanes is None:
                stop_attending(self)
                return
            now_s = self._host.monotonic()
            # More has passed only if this process was stopped, or got no time, and then its tasks have waited for that.
            passed_s, last_s = min(now_s - last_s, 2 * self._poll_s), now_s
            still_s = still_s + passed_s if self._stands_still(lanes) else 0.0
            limit_s = max(self._hang_timeout_s, self._first_use_s if self._is_first_use else 0.0)
            wait, waited_s = self._longest_wait(passed_s)
            told = self._others.check(max(still_s, waited_s) >= 0.5 * limit_s)
            if still_s >= limit_s:
                self._hangs(f"a run is under way, and for {still_s:.1f} s no task has begun or finished")
                still_s = float("-inf")  # until something moves
            elif wait is not None and waited_s >= limit_s:
                self._waited[id(wait)] = wait, self._hangs(f"waits for other ranks in {wait.what}", wait)
            elif told is not None:
                self._report_and_save(f"another rank hangs: {told}")
            del lanes  # not kept alive from here

    def _longest_wait(self, passed_s: float) -> tuple[waits.waiting | None, float]:
        """Return the longest present wait outside of lanes, and its seconds."""
        self._deepspeeds.mark_current()
        before = self._waited
        self._waited = {}
        for each in waits.waiting.now():
            known, waited_s = before.get(id(each), (None, 0.0))
            self._waited[id(each)] = each, waited_s + passed_s if known is each else 0.0
        return max(self._waited.values(), key=lambda each: each[1], default=(None, 0.0))

    def _hangs(self, what: str, wait: waits.waiting | None = None) -> float:
        """Report a hang and end the process, unless it is a wait for ranks that work with files.

        Returns:
            The seconds that such a wait counts from now on; minus infinity if it is reported only once.
        """
        reason = f"hang: {what} (fsmoe.debug.hang_timeout_s = {self._hang_timeout_s:g})"
        states = self._others.states()
        self._states = [text for text, _ in states[:_MOST_RANKS]]
        if len(states) > _MOST_RANKS:
            self._states.append(f"and {len(states) - _MOST_RANKS} more ranks")
        others_work = any(works for _, works in states) if states else wait is not None and waits.is_patient(wait)
        if wait is not None and others_work:
            if wait is not self._patient_in:
                self._patient_in = wait
                self._report_and_save(f"{reason}; files are written or read meanwhile, so it goes on waiting")
            return 0.0
        self._others.report_hang(reason)
        file = self._report_and_save(reason)
        if world_size_now() > 1:  # so that they hear of it while this rank's store is there
            self._host.wait(self._closed, 2 * self._poll_s)
        self._on_hang(file)
        return float("-inf")

    def _stands_still(self, lanes: Lanes) -> bool:
        """Return True if a run is active in which no task has moved since the last call."""
        is_under_way, marks = lanes._is_running, _marks(lanes)
        is_same = all(new is old for new, old in zip(marks, self._last_marks, strict=True))
        is_behind, progress = True, None
        if is_same:  # where the host is seen to move, a device need not be asked
            is_behind, progress = self._ask(lanes)
            is_under_way = is_under_way or is_behind
        if self._is_first_use:
            self._labels.update(mark[0] for mark in marks if mark is not None)
            # Another label means that a run is over; so does an idle lane.
            self._is_first_use = len(self._labels) < 2 if is_under_way else not self._labels
            self._is_first_use &= is_behind or not lanes._has_run
        is_same = is_same and progress == self._last_progress
        self._last_marks, self._last_progress = marks, progress
        return is_same and is_under_way

    def _ask(self, lanes: Lanes) -> tuple[bool, _Progress]:
        """Return (True if a device still has work of runs to do, the progress of each lane).

        On CUDA this asks the driver, which may block one thread while another waits in it. Without an answer, the
        device counts as behind and the lanes as unmoved.
        """
        if self._asking is None or not self._asking.is_alive():

            def ask() -> None:
                self._answer = _is_behind(lanes), lanes.progress()

            self._asking = threading.Thread(target=ask, name="fsmoe-progress", daemon=True)
            self._asking.start()
        self._host.join(self._asking, self._poll_s)
        return (True, self._answer[1]) if self._asking.is_alive() else self._answer

    # ---- the report

    def _report_and_save(self, reason: str, details: str = "") -> Path | None:
        """Write the report first, because it has the reason, then save other data; return the report's file."""
        file = self._report(reason, details)
        if self.at_end:
            thread = threading.Thread(target=self._save, args=(reason,), name="fsmoe-at-end", daemon=True)
            with suppress(RuntimeError):  # no more threads: then the process ends without
                thread.start()
                self._host.join(thread, _AT_END_LIMIT_S)
        return file

    def _save(self, reason: str) -> None:
        for each in tuple(self.at_end):
            try:
                each(reason)
            except BaseException:
                logger.exception("rank %s: not everything was saved at the end", self._rank)

    def _report(self, reason: str, details: str = "") -> Path | None:
        """Write a report and log its file; return ``None`` if it could not be written, or not in time."""
        written: list[Path] = []

        def write() -> None:
            try:
                with self._writing:
                    self._write(reason, details)
                written.append(self.file)
                more = "".join(
                    f"\n  {each}" for each in ((describe_this_rank(), *self._states) if self._states else ())
                )
                logger.error("rank %s: %s; stacks and tasks: %s%s", self._rank, reason, self.file, more)
            except OSError as error:
                logger.error("%s\nno report could be written: %s", self._head(reason), error)
            with suppress(OSError, ValueError):  # what is printed would be lost with the process
                sys.stdout.flush()

        thread = threading.Thread(target=write, name="fsmoe-report", daemon=True)
        thread.start()
        self._host.join(thread, _REPORT_LIMIT_S)
        return written[0] if written else None

    def _write(self, reason: str, details: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        goes_on = self._num_reports % _MAX_REPORTS and self.file.exists()
        earlier = read_regular(self.file, follow_links=False) if goes_on else ""
        # A launcher may kill this process at any time: the file is there as a whole, or as it was.
        with new_file(self.file, errors="backslashreplace") as out:
            out.write(f"{earlier}{self._head(reason)}\n")
            if details:
                out.write(f"error:\n{details}\n")
            names = "\n".join(f"  0x{each.ident or 0:016x} {each.name}" for each in threading.enumerate())
            out.write(f"threads, this report's own among them:\n{names}\n\nstacks:\n")
            out.flush()
            faulthandler.dump_traceback(out, all_threads=True)
            out.write(f"{'=' * 120}\n")
        self._num_reports += 1

    def _head(self, reason: str) -> str:
        lanes = self._lanes()
        is_behind, progress = (False, {}) if lanes is None else self._ask(lanes)
        is_running = lanes is not None and lanes._is_running
        run = "under way" if is_running else "issued, not done" if is_behind else "none under way"
        rows = [(lane, begun or "-", finished or "-") for lane, (begun, finished) in progress.items()]
        lines = [
            f"ds_fsmoe: what rank {self._rank} was doing",
            f"time:   {datetime.now().astimezone().isoformat(timespec='milliseconds')}",
            f"host:   {socket.gethostname()}, process {os.getpid()}",
            f"reason: {reason}",
            f"run:    {run}",
            f"rank:   {describe_this_rank()}",
            *(f"        {each}" for each in self._states),
            "",
            *Table(("lane", "begun last", "finished last"), rows, has_rule=False).lines(),
        ]
        if self._asking is not None and self._asking.is_alive():
            lines.append("(from before: the device's driver does not answer)")
        return "\n".join([*lines, ""])


def _marks(lanes: Lanes) -> list[tuple[str, Any] | None]:
    """Return each lane's last begun and last finished task, as new objects each time, also if a task's name repeats.
    Reading them needs no answer of the device."""
    return [at for mark in lanes._marks.values() for at in (mark.begun, mark.finished)]


def _is_behind(lanes: Lanes) -> bool:
    """Return True if a device still has work of runs to do. Without a device, a run is over when it returns."""
    is_behind = getattr(lanes, "is_behind", None)
    return is_behind is not None and is_behind()


def _own_file(file: Path) -> Path:
    """Return the file, or a file next to it that no watchdog of this process uses."""
    others = set() if _hooks is None else {each.file for each in tuple(_hooks.listeners)}
    names = (file, *(file.with_stem(f"{file.stem}_{number}") for number in range(2, len(others) + 2)))
    return next(each for each in names if each not in others)

# SPDX-License-Identifier: Apache-2.0
"""Lanes on the CPU: a thread per link, and the caller's thread computes.

``make_lanes`` creates them on a CPU; ``stream_lanes`` is the counterpart on CUDA.
"""

from __future__ import annotations

import threading
import weakref
from _thread import LockType
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import ClassVar

import torch

from ds_fsmoe.execution.lanes import Dependencies, LaneRun, Lanes, LaneWork, Mark, Step
from ds_fsmoe.planning.schedule import Lane

# ---- The state that torch keeps per thread and that a body relies on: copied from one thread to another
#
# It covers grad mode, inference mode, and autocast for the device types cpu and cuda. Not covered: dispatch and
# function modes (``torch.device`` as a context), hooks on saved tensors, and profilers, which apply to the caller's
# thread only.
#
# Random numbers: torch's CPU generator is shared by the whole process. A task on a link lane draws between the draws of
# the compute lane, in an order that differs from run to run. So reproducible code must draw on the compute lane, or
# from its own ``torch.Generator``.


_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ThreadState:
    """Holds the state of one thread at one moment."""

    is_grad_enabled: bool
    is_inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """The tuples (device type, enabled, dtype)."""
    caches_casts: bool

    @staticmethod
    def here() -> ThreadState:
        """Return the current state of the calling thread."""
        return ThreadState(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in _AUTOCAST_DEVICES
            ),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the state to the calling thread for the length of the block.

        This is for dedicated threads: only inference mode is undone, and the next block sets the rest again.
        """
        with torch.inference_mode() if self.is_inference else nullcontext():
            torch.set_grad_enabled(self.is_grad_enabled)  # after inference mode, which turns it off
            for device, is_enabled, dtype in self.autocast:
                torch.set_autocast_enabled(device, is_enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(self.caches_casts)
            # The cache of casts belongs to all threads, and the end of an outermost autocast block clears it: a block
            # inside a body must not count as outermost while the caller is in one.
            torch.autocast_increment_nesting()
            try:
                yield
            finally:
                torch.autocast_decrement_nesting()


# ---- Lanes


@dataclass(eq=False)
class _Part:
    """Holds some tasks of a lane, started together."""

    steps: tuple[Step, ...]
    is_walked: bool = False


# A worker's queue: work with the lock that it releases afterwards, or ``None`` to end.
_Jobs = SimpleQueue[tuple[Callable[[], None], LockType] | None]


class ThreadLanes(Lanes):
    """Runs each link on a persistent thread, made by the first run that needs it; COMPUTE is the caller's thread.

    So autograd, random numbers and user code run in their own thread. Bodies on the links run under the caller's
    thread-local state (see :class:`ThreadState`).

    A run first passes each link its tasks, then runs the COMPUTE tasks in the caller's thread. A task that needs one on
    another lane sleeps until that one is done. A task only needs earlier ones, and every lane keeps the order of the
    list. So the earliest task that is not done can always run, and no deadlock is possible.

    After an error every lane skips the rest of its list, so that all waiting lanes continue. ``run`` waits for tasks
    that are running. For a collective whose other ranks never come, this takes until the collective's timeout. A
    KeyboardInterrupt ends that wait too; the link's thread is then free when its task is over.
    """

    overlap: ClassVar[Mapping[Lane, str]] = {
        Lane.COMPUTE: "the caller's thread; overlaps with both links wherever it releases the interpreter's lock, as "
        "torch's operations do",
        Lane.INTRA: "a thread; overlaps with COMPUTE and INTER while it waits in a collective",
        Lane.INTER: "a thread; overlaps with COMPUTE and INTRA while it waits in a collective",
    }

    def __init__(self) -> None:
        super().__init__()
        self._workers: dict[Lane, _Worker] = {}

    def _run_of(self, dependencies: Dependencies, work: LaneWork) -> LaneRun:
        return _ThreadRun(self, dependencies, work)

    def worker(self, lane: Lane) -> _Worker:
        """Return the thread of a link."""
        if lane not in self._workers:
            self._workers[lane] = _Worker(lane)
        return self._workers[lane]

    def close(self) -> None:
        super().close()
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()


class _ThreadRun(LaneRun):
    """Represents one run: it has a lock per dependency, which is released when that is fulfilled."""

    _lanes: ThreadLanes

    def __init__(self, lanes: ThreadLanes, dependencies: Dependencies, work: LaneWork) -> None:
        super().__init__(lanes)
        self._by_lane = dependencies.by_lane
        self._links = dependencies.links
        self._work = work
        self._at = dict.fromkeys(Lane, 0)
        """The number of tasks that each lane has received."""
        self._handed: list[LockType] = []
        """Locks that can be acquired when the links have finished their tasks."""
        self.errors: list[BaseException] = []
        self._failed = False
        # A bare lock is the cheapest thing to wait for: an Event costs ten times as much, mostly to create.
        self._locks = [_locked_lock() for _ in range(dependencies.count)]

    def _go(self, stop: int | None) -> None:
        own = self._next_part(Lane.COMPUTE, stop)
        parts = {lane: self._next_part(lane, stop) for lane in self._links}
        parts = {lane: part for lane, part in parts.items() if part.steps}
        try:
            self._hand_over(parts)
            self._walk(own, Lane.COMPUTE)
        except BaseException as error:  # a KeyboardInterrupt outside of a body
            self._interrupt(error, own, parts)
        if self.errors:
            self._join()

    def _join(self) -> None:
        try:
            for done in self._handed:
                done.acquire()
            self._handed = []
        except BaseException as error:  # as above
            self._interrupt(error, _Part(()), dict.fromkeys(self._links, _Part(())))
            for done in self._handed:
                done.acquire()
        if self.errors:
            first, *others = self.errors
            for other in others:
                first.add_note(f"meanwhile: {other!r}, {'; '.join(getattr(other, '__notes__', []))}")
            try:
                raise first
            finally:
                # The error's traceback refers to this frame and that of the body: no cycle may keep their tensors
                # alive.
                self.errors.clear()
                del first, others

    def _interrupt(self, error: BaseException, own: _Part, parts: Mapping[Lane, _Part]) -> None:
        """End the run after an error outside of a body; raise it if another error came before."""
        earlier = self.errors[:1]
        self.fail(error)
        self._open_all(own)
        # Once more: the error may have come in between. A part runs only once, and the wait for the last part of a
        # lane is a wait for all.
        self._handed = []
        self._hand_over(parts)
        if earlier:
            raise error from earlier[0]

    def abandon(self) -> None:
        self._failed = True
        for done in self._handed:
            done.acquire()
        self._handed.clear()

    def _next_part(self, lane: Lane, stop: int | None) -> _Part:
        """Return the tasks of a lane that it has not received, before index ``stop``."""
        steps, first = self._by_lane[lane], self._at[lane]
        last = len(steps) if stop is None else bisect_left(steps, stop, first, key=lambda step: step.index)
        self._at[lane] = last
        return _Part(steps[first:last])

    def _hand_over(self, parts: Mapping[Lane, _Part]) -> None:
        """Pass the links their tasks."""
        state = ThreadState.here() if parts else None
        for lane, part in parts.items():
            self._handed.append(self._lanes.worker(lane).start(partial(self._walk, part, lane, state)))

    def _walk(self, part: _Part, lane: Lane, state: ThreadState | None = None) -> None:
        """Run tasks of a lane in order, in the calling thread; after an error anywhere, skip the rest.

        Only the first call for a part has an effect.
        """
        if part.is_walked:
            return
        part.is_walked = True
        mark = self._lanes._marks[lane]
        try:
            if state is None:
                self._do(part.steps, mark)
            else:
                with state.applied():
                    self._do(part.steps, mark)
        except BaseException as error:
            self.fail(error)
            self._open_all(part)

    def _do(self, steps: tuple[Step, ...], mark: Mark) -> None:
        locks, work = self._locks, self._work
        for step in steps:
            for number in step.needs:
                locks[number].acquire()
            if not self._failed:
                try:
                    work.do(step, mark)
                except BaseException as error:
                    self.fail(error)
            for number in step.feeds:
                locks[number].release()

    def fail(self, error: BaseException) -> None:
        """Record the error, so that no further task begins."""
        self.errors.append(error)
        self._failed = True

    def _open_all(self, part: _Part) -> None:
        """Release the locks of all dependencies on tasks that have stopped early."""
        for step in part.steps:
            for number in step.feeds:
                # Released already, or released and acquired, after which no lane waits for it.
                with suppress(RuntimeError):
                    self._locks[number].release()


def _locked_lock() -> LockType:
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Worker:
    """Runs jobs in order in a thread. It ends when it is stopped or no longer referenced."""

    def __init__(self, lane: Lane) -> None:
        self._jobs: _Jobs = SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)
        # The thread refers to the queue only; otherwise it would keep this object alive.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=f"fsmoe-{lane}", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None]) -> LockType:
        """Queue some work, which must not raise, and return a lock that can be acquired when it is done."""
        done = _locked_lock()
        self._jobs.put((work, done))
        return done

    def stop(self) -> None:
        """End the thread. Does not wait for a body that a second KeyboardInterrupt left behind."""
        self._jobs.put(None)
        self._thread.join(timeout=5)


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        work, done = job
        work()
        del job, work  # otherwise this thread would keep the run, and the tensors of its bodies, until the next one
        done.release()

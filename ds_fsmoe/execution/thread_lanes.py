# SPDX-License-Identifier: Apache-2.0
"""Lanes on the CPU: a thread per link, and the caller's thread computes."""

from __future__ import annotations

import threading
import weakref
from _thread import LockType
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import ClassVar

from ds_fsmoe.execution.dependencies import Dependencies, Step
from ds_fsmoe.execution.lanes import Lanes, Mark, Work
from ds_fsmoe.execution.thread_state import ThreadState
from ds_fsmoe.planning.schedule import Lane

# What a worker is handed: work, and the lock it releases after that; or the word to end.
_Jobs = SimpleQueue[tuple[Callable[[], None], LockType] | None]


class ThreadLanes(Lanes):
    """A persistent thread per link lane, made by the first run that needs it; COMPUTE is the caller's thread.

    Autograd, random numbers and user code thus see their own thread. Bodies on the links run under the caller's
    thread-local state (see :mod:`~ds_fsmoe.execution.thread_state`, also for care with random numbers).

    A run first hands each link its tasks, then does the COMPUTE tasks in the caller's thread; a task that needs one on
    another lane sleeps until that one is done. A task only needs earlier ones and every lane keeps the order of the
    list, so the earliest task that is not done can always run: no order of events leads to a deadlock.

    After an error every lane goes on through its list without doing the tasks, so that all waiters are released, and
    ``run`` waits for the tasks that are running: for a collective whose other ranks never come, this takes until the
    collective's timeout. A KeyboardInterrupt ends that wait too; the link's thread is then free when its task is over.
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

    def _execute(self, crossings: Dependencies, work: Work) -> None:
        run = _Run(crossings, work)
        try:
            handed = self._hand_over(run, crossings.links)
            run.walk(Lane.COMPUTE, self._marks[Lane.COMPUTE])
            for done in handed:
                done.acquire()
        except BaseException as error:  # a KeyboardInterrupt outside of a body
            earlier = run.errors[:1]
            run.fail(error)
            run.let_go(Lane.COMPUTE)
            # Once more: it may have come in between. A lane that has been walked is not walked again.
            handed = self._hand_over(run, crossings.links)
            if earlier:
                raise error from earlier[0]
            for done in handed:
                done.acquire()
        if run.errors:
            first, *others = run.errors
            for other in others:
                first.add_note(f"meanwhile: {other!r}, {'; '.join(getattr(other, '__notes__', []))}")
            try:
                raise first
            finally:
                # The error's traceback holds this frame and that of the body: no cycle may keep their tensors alive.
                run.errors.clear()
                del first, others

    def _hand_over(self, run: _Run, links: tuple[Lane, ...]) -> list[LockType]:
        """Give the links their tasks and return locks that can be acquired when the links have finished."""
        state = ThreadState.here() if links else None
        handed = []
        for lane in links:
            if lane not in self._workers:
                self._workers[lane] = _Worker(lane)
            handed.append(self._workers[lane].start(partial(run.walk, lane, self._marks[lane], state)))
        return handed

    def close(self) -> None:
        super().close()
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()


class _Run:
    """One run: it has a lock per crossing, held until the crossing is open."""

    def __init__(self, crossings: Dependencies, work: Work) -> None:
        self._steps = crossings.by_lane
        self._work = work
        self.errors: list[BaseException] = []
        self._failed = False
        self._walked: set[Lane] = set()
        # A bare lock is the cheapest thing to wait for: an Event is ten times as dear, most of it in the making.
        self._locks = [_held_lock() for _ in range(crossings.count)]

    def walk(self, lane: Lane, mark: Mark, state: ThreadState | None = None) -> None:
        """Do a lane's tasks in order, in the calling thread; after an error anywhere, skip the rest.

        Only the first call for a lane does anything.
        """
        if lane in self._walked:
            return
        self._walked.add(lane)
        try:
            if state is None:
                self._walk(self._steps[lane], mark)
            else:
                with state.applied():
                    self._walk(self._steps[lane], mark)
        except BaseException as error:
            self.fail(error)
            self.let_go(lane)

    def _walk(self, steps: tuple[Step, ...], mark: Mark) -> None:
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
        """Record the error; no task begins from now on."""
        self.errors.append(error)
        self._failed = True

    def let_go(self, lane: Lane) -> None:
        """Open all crossings from a lane that has stopped early."""
        for step in self._steps[lane]:
            for number in step.feeds:
                # Open already; or opened and passed, then nobody will ever wait for it again.
                with suppress(RuntimeError):
                    self._locks[number].release()


def _held_lock() -> LockType:
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Worker:
    """A thread that does the work it is given, in order. It ends when it is stopped or no longer referenced."""

    def __init__(self, lane: Lane) -> None:
        self._jobs: _Jobs = SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)
        # The thread knows the queue only, or it would keep this object alive.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=f"fsmoe-{lane}", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None]) -> LockType:
        """Hand over some work, which must not raise, and return a lock that can be acquired when it is done."""
        done = _held_lock()
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
        del job, work  # or this thread would keep the run, and the tensors of its bodies, until the next one
        done.release()

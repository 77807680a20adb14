# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of messages concurrently with the caller: those between nodes on one lane, those inside nodes on
another.

Messages of several steps follow each other closely: while one is sent between nodes, the next is added up inside. The
order on each lane follows from the order of the messages alone, so it is the same on every rank. The reduction of
gradients and the gather of updated parameters call it.

Gradients and updated parameters share communicators, and gradients are sent in the lanes of layers as well. A rank may
still receive parameters that it has not read when its backward begins. Gradients are therefore sent after the gather
has ended: see :func:`end_gathers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.gradients.reduction_algorithms import Steps
from ds_fsmoe.planning.schedule import GRAD, GRAD_GATHER

_gathers: list[Callable[[], None]] = []
"""What waits for the messages of updated parameters, of all engines: those of a process share communicators."""


def begin_gather(waits: Sequence[Callable[[], None]]) -> None:
    """Register messages of updated parameters that have begun.

    Args:
        waits: the result of :meth:`BackgroundLane.start` for each.
    """
    _gathers.extend(waits)


def end_gathers() -> None:
    """Wait for all updated parameters, read or unread by this rank: the caller sends on their communicators next.

    On a CPU all messages have ended then. On a GPU the host has issued them, and the current stream comes after them;
    so does each stream that waits for it before it sends.
    """
    while _gathers:
        _gathers.pop(0)()


class BackgroundLane(ABC):
    """Runs messages concurrently with the caller."""

    def __init__(self) -> None:
        self._running: list[Callable[[], None]] = []

    def start(self, steps: Steps) -> Callable[[], None]:
        """Begin a message; return a function that waits for its end, to be called in the same thread."""
        done = [self._now()]

        def give(kind: str) -> None:
            done.append(self._give(kind == GRAD, steps[kind], done[-1]))

        first, *others = steps
        give(first)
        # The last step of the message before came behind this one's first.
        self.flush()
        for kind in others:
            if kind == GRAD_GATHER:
                self._running.append(lambda: give(GRAD_GATHER))
            else:
                give(kind)

        def wait() -> None:
            self.flush()
            with waiting("messages on the background lane"):
                self._await(done[-1])

        return wait

    def flush(self) -> None:
        """Send the lanes the steps that waited for the next message."""
        held, self._running = self._running, []
        for give in held:
            give()

    @abstractmethod
    def _now(self) -> Any:
        """Return an event for the work of the caller so far."""

    @abstractmethod
    def _give(self, between: bool, step: Callable[[], None], after: Any) -> Any:
        """Add a step to a lane, after the steps already there, and return its handle; the step needs an earlier one."""

    @abstractmethod
    def _await(self, done: Any) -> None:
        """Wait for a step."""

    @abstractmethod
    def close(self) -> None:
        """End the lanes."""


class BackgroundThreads(BackgroundLane):
    """Runs steps on two threads, for collectives of a CPU."""

    def __init__(self) -> None:
        super().__init__()
        # A thread begins with its first step.
        self._lanes = {
            between: ThreadPoolExecutor(1, thread_name_prefix=f"fsmoe-gradients-{name}")
            for between, name in ((True, "inter"), (False, "intra"))
        }

    def _now(self) -> None:
        return None

    def _give(self, between: bool, step: Callable[[], None], after: Future[None] | None) -> Future[None]:
        def run() -> None:
            if after is not None:
                after.result()
            with torch.no_grad():
                step()

        return self._lanes[between].submit(run)

    def _await(self, done: Future[None]) -> None:
        done.result()

    def close(self) -> None:
        """End the threads, after their remaining steps."""
        for lane in self._lanes.values():
            lane.shutdown()


class BackgroundStreams(BackgroundLane):
    """Runs steps on two streams of a GPU: the caller's stream waits for a message, and the host does not."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._streams = {between: torch.cuda.Stream(device) for between in (False, True)}

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _give(self, between: bool, step: Callable[[], None], after: torch.cuda.Event) -> torch.cuda.Event:
        stream = self._streams[between]
        stream.wait_event(after)
        with torch.cuda.stream(stream), torch.no_grad():
            step()
            return self._now()

    def _await(self, done: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(done)

    def close(self) -> None:
        """Leave the streams to torch."""


def make_background_lane(device: torch.device) -> BackgroundLane:
    """Return the lane that runs the messages of a device's buffers."""
    return BackgroundStreams(device) if device.type == "cuda" else BackgroundThreads()

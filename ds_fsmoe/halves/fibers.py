# SPDX-License-Identifier: Apache-2.0
"""Runs the calls of one half of a batch, one after another, in a stack of their own that can be left and entered again.

A call of a layer pauses deep inside of a block, in code that knows nothing of it. Both halves are run by one thread, so
they share what torch keeps per thread: modes, streams, and the numbers by which a backward knows what is younger. What
Python keeps in context variables each half has to itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from ds_fsmoe.execution.call import Half

Call = Callable[[Any], Any]
"""Maps what the call before returned to what the next one gets."""


class Fiber:
    """The calls of one half.

    Args:
        value: what the first call gets.
        is_last_in_backward: see :class:`~ds_fsmoe.execution.call.Half`.
        begin: called first of all, inside of the half's own context.
    """

    def __init__(self, value: Any, is_last_in_backward: bool, begin: Callable[[], None]) -> None:
        self.value = value
        """The value that the last call returned."""
        self.is_paused = False
        """True while a call pauses."""
        self._calls: deque[Call] = deque()
        self._half = Half(self._pause, is_last_in_backward)
        self._begin = begin
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._stack = greenlet(self._run)
        self._stack.gr_context = copy_context()

    def add(self, call: Call) -> None:
        """Let this be called after all that have been added before."""
        self._calls.append(call)

    def resume(self) -> None:
        """Go on until a call pauses, or all have returned.

        Raises:
            BaseException: what a call has raised; there is nothing to go on with then.
        """
        self._stack.parent = getcurrent()
        self._stack.switch()

    def close(self) -> None:
        """Leave the calls that have not returned, as if they had raised an error, and forget the rest."""
        self._calls.clear()
        if self._stack:
            self._stack.throw()

    def _run(self) -> None:
        self._begin()
        with self._half.running():
            while True:
                while self._calls:
                    self.value = self._calls.popleft()(self.value)
                self._stack.parent.switch()

    @contextmanager
    def saving(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
        """Let autograd save tensors by these functions meanwhile, in this half alone: torch keeps them per thread.

        Args:
            pack, unpack: see :class:`torch.autograd.graph.saved_tensors_hooks`.
        """
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        try:
            with self._hooks:
                yield
        finally:
            self._hooks = None

    def _pause(self) -> None:
        self.is_paused = True
        hooks = self._hooks
        if hooks is not None:
            hooks.__exit__()
        try:
            self._stack.parent.switch()
        finally:
            self.is_paused = False
            if hooks is not None:
                hooks.__enter__()


def run_in_turns(fibers: Sequence[Fiber]) -> None:
    """Run all calls of fibers to their ends, each until it pauses, and close them.

    Raises:
        BaseException: what a call has raised; the others are given up.
    """
    try:
        for fiber in fibers:
            fiber.resume()
        while any(fiber.is_paused for fiber in fibers):
            for fiber in fibers:
                if fiber.is_paused:
                    fiber.resume()
    finally:
        for fiber in fibers:
            fiber.close()

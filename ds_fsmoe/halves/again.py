# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of a block that is run by halves: in the backward both halves run again, in turns.

What autograd would save of a block is not kept. When the backward first needs any of it, the block's forward runs once
more for both halves, so that the tokens of one travel while the other computes, and what it saves then is used. Layers
route as they did the first time. The forward is run to its end on every rank: a rank that stopped when all was there
could leave out a collective that others wait in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ds_fsmoe.halves.arguments import NUM_HALVES, Rest
from ds_fsmoe.halves.fibers import Fiber, run_in_turns
from ds_fsmoe.layer.recomputed import Tape


class Again:
    """One block's forward of both halves, which may run once more.

    Args:
        forward: the block's.
        rests: for each half, its arguments but the first.
    """

    def __init__(self, forward: Callable[..., Any], rests: Sequence[Rest]) -> None:
        self._forward = forward
        self._rests = rests
        self._given: list[torch.Tensor] = []
        self._tapes = [Tape() for _ in range(NUM_HALVES)]
        self._saved: list[list[weakref.ref[_Saved]]] = [[] for _ in range(NUM_HALVES)]
        self._num_again = [0] * NUM_HALVES
        self._autocasts: list[Callable[[], Any]] = []
        self._has_run_again = False

    def run(self, half: int, fiber: Fiber, x_BLM: torch.Tensor) -> Any:
        """Run the forward of a half and return what it returns. The first half comes first.

        Args:
            half: its number.
            fiber: in which it runs.
            x_BLM: the first argument.
        """
        self._given.append(x_BLM)
        self._autocasts = self._autocasts or _autocasts_now(x_BLM.device.type)
        args, kwargs = self._rests[half]
        with self._tapes[half].recording(), fiber.saving(partial(self._leave_out, half), _Saved.read):
            return self._forward(x_BLM, *args, **kwargs)

    def run_again(self) -> None:
        """Run the forward of both halves in turns, and fill in what was left out. Collective as the forward is.

        Raises:
            RuntimeError: it saved other tensors than the first time.
        """
        if self._has_run_again:
            raise RuntimeError("a checkpointed block has run again, and what is needed now was not saved by it")
        self._has_run_again = True
        with torch.enable_grad(), _all_of(self._autocasts):
            fibers = []
            for half, given in enumerate(self._given):
                x_BLM = given.detach().requires_grad_(given.requires_grad)
                fibers.append(Fiber(x_BLM, is_last_in_backward=half == 0, begin=lambda: None))
                fibers[half].add(partial(self._once_more, half, fibers[half]))
            run_in_turns(fibers)
        counts = [len(each) for each in self._saved]
        if counts != self._num_again:
            raise RuntimeError(
                f"a checkpointed block saved {counts} tensors of its halves, and {self._num_again} when it ran again: "
                "its forward has to do the same each time"
            )
        self._given, self._saved, self._rests = [], [], ()

    def _once_more(self, half: int, fiber: Fiber, x_BLM: torch.Tensor) -> None:
        args, kwargs = self._rests[half]
        with self._tapes[half].replaying(), fiber.saving(partial(self._fill_in, half), _no_backward):
            self._forward(x_BLM, *args, **kwargs)

    def _leave_out(self, half: int, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(self)
        self._saved[half].append(weakref.ref(saved))
        return saved

    def _fill_in(self, half: int, tensor: torch.Tensor) -> None:
        place = self._num_again[half]
        self._num_again[half] += 1
        saved = self._saved[half][place]() if place < len(self._saved[half]) else None
        if saved is not None:
            saved.tensor = tensor.detach()


class _Saved:
    """Stands for a tensor that autograd saved; it goes, with the tensor, when autograd needs it no longer."""

    def __init__(self, of: Again) -> None:
        self._of = of
        self.tensor: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """Return the tensor, computed again if need be."""
        if self.tensor is None:
            self._of.run_again()
        assert self.tensor is not None
        return self.tensor


def _no_backward(_: object) -> torch.Tensor:
    raise RuntimeError("a forward that runs again has no backward of its own")


def _autocasts_now(device_type: str) -> list[Callable[[], Any]]:
    """Return makers of contexts in which autocasting is as it is now, on the device and on the CPU."""
    return [
        partial(
            torch.autocast,
            each,
            dtype=torch.get_autocast_dtype(each),
            enabled=torch.is_autocast_enabled(each),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for each in dict.fromkeys((device_type, "cpu"))
    ]


@contextmanager
def _all_of(makers: Sequence[Callable[[], Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for make in makers:
            stack.enter_context(make())
        yield

# SPDX-License-Identifier: Apache-2.0
"""One forward of a chain of blocks by two halves of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ds_fsmoe.halves.arguments import joined
from ds_fsmoe.halves.fibers import Fiber

Forward = Callable[..., Any]


class HalvesRun:
    """Runs blocks for both halves in turns.

    Each half computes up to the next layer with experts and sends its tokens there; when both have, the experts of the
    first half compute, and then those of the second. So each half's tokens travel while the other half computes.

    Args:
        halves: what the first block is called with, for each half.
        begin: called in each half's own context ahead of everything, with the half's number.
    """

    def __init__(self, halves: tuple[torch.Tensor, torch.Tensor], begin: Callable[[int], None]) -> None:
        self._has_gradients = torch.is_grad_enabled()
        self._fibers = [
            # The backward goes from the youngest to the oldest: the first half comes last.
            Fiber(value, is_last_in_backward=number == 0, begin=partial(begin, number))
            for number, value in enumerate(halves)
        ]

    def add(self, forward: Forward, rests: Sequence[tuple[tuple, dict[str, Any]]]) -> None:
        """Let a block be called with what the one before it returns.

        Args:
            forward: its forward.
            rests: for each half, its other arguments.
        """
        for fiber, (args, kwargs) in zip(self._fibers, rests, strict=True):
            fiber.add(partial(_call, forward, args, kwargs))

    def advance(self) -> None:
        """Run both halves through the layer of the block that was added last, up to the experts' results on their way
        back."""
        with self._closing():
            for fiber in self._fibers:
                fiber.resume()
            for fiber in self._fibers:
                if fiber.is_paused:
                    fiber.resume()

    def complete(self) -> Any:
        """Run both halves to their ends and return what the last block returned, of the whole batch."""
        with self._closing(), torch.set_grad_enabled(self._has_gradients):
            for fiber in self._fibers:
                fiber.resume()
            found = joined(*(fiber.value for fiber in self._fibers))
        self.close()
        return found

    def close(self) -> None:
        """Give up what has not been run."""
        for fiber in self._fibers:
            fiber.close()

    def _closing(self) -> _Closing:
        return _Closing(self)


class _Closing:
    """Gives a run up if an error leaves it."""

    def __init__(self, run: HalvesRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, *about: Any) -> None:
        if kind is not None:
            self._run.close()


def _call(forward: Forward, args: tuple, kwargs: dict[str, Any], value: Any) -> Any:
    first = value[0] if isinstance(value, tuple) else value
    return forward(first, *args, **kwargs)

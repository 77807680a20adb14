# SPDX-License-Identifier: Apache-2.0
"""One forward of a chain of blocks by two halves of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_fsmoe.halves.again import Again
from ds_fsmoe.halves.arguments import Rest, joined_halves, sizes_of_halves
from ds_fsmoe.halves.collected import Collected
from ds_fsmoe.halves.fibers import Fiber

Forward = Callable[..., Any]


class HalvesRun:
    """Runs blocks for both halves in turns.

    Each half computes up to the next layer with experts and sends its tokens there; when both have, the experts of the
    first half compute, and then those of the second. So each half's tokens travel while the other half computes.

    Args:
        x_BLM: what the first block is called with.
    """

    def __init__(self, x_BLM: torch.Tensor) -> None:
        self.batch = len(x_BLM)
        """The samples of both halves, B."""
        self._has_gradients = torch.is_grad_enabled()
        self._collected = Collected()
        self._fibers = [
            # The backward goes from the youngest to the oldest: the first half comes last.
            Fiber(half, is_last_in_backward=number == 0, begin=partial(self._collected.begin, number))
            for number, half in enumerate(x_BLM.split(sizes_of_halves(self.batch)))
        ]

    def add(self, forward: Forward, rests: Sequence[Rest], runs_again: bool = False) -> None:
        """Let a block be called with what the one before it returns.

        Args:
            forward: its forward.
            rests: for each half, its other arguments.
            runs_again: whether its activations are not kept, and it runs again in the backward.
        """
        again = Again(forward, rests) if runs_again else None
        for half, (fiber, (args, kwargs)) in enumerate(zip(self._fibers, rests, strict=True)):
            if again is None:
                fiber.add(partial(_call, forward, args, kwargs))
            else:
                fiber.add(partial(_call, partial(again.run, half, fiber), (), {}))

    def advance(self) -> None:
        """Run both halves through the layer of the block that was added last, up to the experts' results on their way
        back."""
        with self._given_up_if_it_fails():
            for fiber in self._fibers:
                fiber.resume()
            for fiber in self._fibers:
                if fiber.is_paused:
                    fiber.resume()

    def complete(self) -> Any:
        """Run both halves to their ends and return what the last block returned, of the whole batch."""
        with self._given_up_if_it_fails(), torch.set_grad_enabled(self._has_gradients):
            for fiber in self._fibers:
                fiber.resume()
            found = joined_halves(*(fiber.value for fiber in self._fibers))
        self.close()
        self._collected.end()
        return found

    def close(self) -> None:
        """Give up what has not been run."""
        for fiber in self._fibers:
            fiber.close()

    @contextmanager
    def _given_up_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _call(forward: Forward, args: tuple, kwargs: dict[str, Any], value: Any) -> Any:
    first = value[0] if isinstance(value, tuple) else value
    return forward(first, *args, **kwargs)

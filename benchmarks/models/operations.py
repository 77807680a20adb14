# SPDX-License-Identifier: Apache-2.0
"""What a step spends its time on, by operation, as in the paper's Table 2: for any engine, stock DeepSpeed's too.

Collectives are timed where everybody calls them, in ``torch.distributed``; attention, experts and the rest of an MoE
layer by hooks of their modules, forwards and backwards. Each moment counts once, for the innermost of them. On a CPU
a collective returns when it is done; where a call only starts it, its time is not seen here.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch.distributed as dist
from torch import nn

COLLECTIVES = {
    "all_to_all_single": "all-to-all",
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
}
COMMUNICATION = tuple(dict.fromkeys(COLLECTIVES.values()))
OTHER = "other"
"""What is in none of the modules asked about: the loss, and the optimizer."""


class Operations:
    """Adds up the time of each operation while :meth:`watched`.

    Attributes:
        times_s: (phase, operation) -> seconds, where phase is "forward", "backward" or "step".
    """

    def __init__(self) -> None:
        self.times_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._phase, self._open, self._since_s = "step", [OTHER], 0.0

    @contextmanager
    def watched(self, operation_of: dict[nn.Module, str]) -> Iterator[None]:
        """Time collectives, and these modules under these names."""
        handles = [handle for module, name in operation_of.items() for handle in self._hooks(module, name)]
        backend = deepspeed.comm.comm.cdb
        places: list[tuple[Any, str, str]] = [(dist, name, operation) for name, operation in COLLECTIVES.items()]
        # Two that DeepSpeed has looked up beforehand.
        places += [
            (backend, "all_gather_function", "all-gather"),
            (backend, "reduce_scatter_function", "reduce-scatter"),
        ]
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        for (owner, name, function), (_, _, operation) in zip(kept, places, strict=True):
            setattr(owner, name, self._timed(function, operation))
        try:
            yield
        finally:
            for owner, name, function in kept:
                setattr(owner, name, function)
            for handle in handles:
                handle.remove()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens as part of this phase."""
        self._phase, self._open, self._since_s = name, [OTHER], time.perf_counter()
        yield
        self._count()

    def of(self, operation: str) -> float:
        """Return the seconds of an operation in all phases."""
        return sum(time_s for (_, name), time_s in self.times_s.items() if name == operation)

    def _count(self) -> None:
        now_s = time.perf_counter()
        self.times_s[self._phase, self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    def _enter(self, operation: str) -> None:
        self._count()
        self._open.append(operation)

    def _leave(self, operation: str) -> None:
        self._count()
        # A module whose input needs no gradient has no end of its backward: it ends with the one around it.
        if operation in self._open:
            while self._open.pop() != operation:
                pass

    def _hooks(self, module: nn.Module, name: str) -> tuple[Any, ...]:
        return (
            module.register_forward_pre_hook(lambda *_: self._enter(name)),
            module.register_forward_hook(lambda *_: self._leave(name)),
            module.register_full_backward_pre_hook(lambda *_: self._enter(name)),
            module.register_full_backward_hook(lambda *_: self._leave(name)),
        )

    def _timed(self, collective: Callable[..., Any], operation: str) -> Callable[..., Any]:
        @functools.wraps(collective)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(operation)
            try:
                return collective(*args, **kwargs)
            finally:
                self._leave(operation)

        return timed

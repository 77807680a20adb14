# SPDX-License-Identifier: Apache-2.0
"""Records the experts that tokens choose, concurrently with training: it waits neither for the device nor for the disk.

``ds_fsmoe/engine/routing_data.py`` makes it. A layer's choices are converted to a small dtype on the device, copied to
the host without waiting, and written by a thread.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.components.routing import Routing, RoutingBase
from ds_fsmoe.execution.device_tables import HostCopy
from ds_fsmoe.files.whole_files import Ownership
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.routes.written import Choices, Part, RankFacts, part_file, parts_of

logger = logging.getLogger("ds_fsmoe")

_MOST_WAITING = 4096
"""Choices that wait to be written; with more than that the training waits for the disk."""
_CHECK_EVERY_S = 1.0
"""The time after which a thread that has nothing to write looks whether its recorder is still there."""
_SMALL, _MIDDLE = 255, 32_767


class RoutingRecorder:
    """Records the choices of this rank.

    Args:
        folder: the folder to record in.
        facts: the ranks and layers.
        numbers: label -> the number of a layer among those of ``facts``.
        with_weights: whether to record weights as well.
        every: the number of steps from one recorded step to the next.
        step: the number of the next optimizer step.
        owner: the ownership of the folder, released when all choices are written.
    """

    def __init__(
        self,
        folder: Path,
        facts: RankFacts,
        numbers: Mapping[str, int],
        *,
        with_weights: bool = False,
        every: int = 1,
        step: int = 0,
        owner: Ownership | None = None,
    ) -> None:
        self._owner = owner
        self._facts, self._numbers, self._with_weights, self._every = facts, numbers, with_weights, every
        self._step = step
        self._calls: dict[str, int] = {}
        self.is_paused = False
        """Whether the forward that is under way has no batch, and is counted only."""
        self._writer = _Writer(folder, facts, weakref.ref(self))

    def watch(self, call: LayerCall) -> None:
        """Record the choices of a call in training: an instrument."""
        if not call.is_training or in_backward():
            return
        micro_batch = self._calls.get(call.label, 0)
        self._calls[call.label] = micro_batch + 1
        if self.is_paused or self._step % self._every:
            return
        call.add_routing_callback(partial(self._record, (self._step, micro_batch, self._numbers[call.label])))

    def _record(self, key: tuple[int, int, int], routing: RoutingBase) -> None:
        if isinstance(routing, Routing):
            num_experts = self._facts.layers[key[2]].num_experts
            weights_KS = routing.weights_KS.detach() if self._with_weights else None
            self._writer.put(key, _small(routing.chosen().t(), num_experts), weights_KS)

    def at_step(self, step: int) -> None:
        """Start, or continue, optimizer step ``step``."""
        if step != self._step:
            self._step = step
            self._calls.clear()
            self._writer.flush()

    def close(self) -> None:
        """Write all recorded choices."""
        self._writer.close()
        if self._owner is not None:
            self._owner.release()


def _small(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return a copy in a small dtype. Weightless classes that some routers have besides experts count above E."""
    most = num_experts + 1
    dtype = torch.uint8 if most < _SMALL else torch.int16 if most < _MIDDLE else torch.int32
    return index.to(dtype, copy=True)


class _Writer:
    """Writes choices in a separate thread, which ends with the recorder."""

    def __init__(self, folder: Path, facts: RankFacts, recorder: weakref.ref[RoutingRecorder]) -> None:
        self._folder, self._facts, self._recorder = folder, facts, recorder
        self._waiting: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._part: Part | None = None
        self._is_broken = False

    def put(self, key: tuple[int, int, int], indices: torch.Tensor, weights_KS: torch.Tensor | None) -> None:
        if self._is_broken:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ds_fsmoe routing", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        weights = None if weights_KS is None else weights_KS.t().to(torch.float16)
        self._waiting.put((key, HostCopy(indices), None if weights is None else HostCopy(weights)))

    def flush(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)

    def close(self) -> None:
        # A forked process has no such thread, and may find the queue locked for ever by that of its parent.
        if self._thread is not None and self._thread.is_alive():
            self._waiting.put(...)
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)

    def _next(self) -> Any:
        """Return the next item; the end marker if the engine was released without an end."""
        while True:
            try:
                return self._waiting.get(timeout=_CHECK_EVERY_S)
            except queue.Empty:
                if self._recorder() is None:
                    atexit.unregister(self.close)
                    return ...

    def _work(self) -> None:
        while (item := self._next()) is not ...:
            if self._is_broken:
                continue
            try:
                if item is None:
                    self._part is None or self._part.flush()
                else:
                    self._write(*item)
            except Exception as error:
                self._is_broken = True
                logger.error(
                    "fsmoe.routing.record = %r: rank %d cannot write, so its routing is no longer recorded: %s: %s",
                    *(str(self._folder), self._facts.rank, type(error).__name__, error),
                )
        if self._part is not None:
            with suppress(OSError):
                self._part.close()

    def _write(self, key: tuple[int, int, int], indices: Any, weights: Any) -> None:
        if self._part is None:
            self._part = self._begin(step=key[0])
        arrays = [None if each is None else each.wait().numpy() for each in (indices, weights)]
        self._part.add(*key, Choices(*arrays))

    def _begin(self, step: int) -> Part:
        """Begin a file. A job that starts at its first step replaces the folder's content; one that continues adds to
        it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        rank, world_size = self._facts.rank, self._facts.world_size
        mine = [(part, path) for each, part, path in parts_of(self._folder) if each == rank]
        left = [path for each, _, path in parts_of(self._folder) if rank == 0 and each >= world_size]
        if step == 0:
            for path in [*(path for _, path in mine), *left]:
                path.unlink(missing_ok=True)
            mine = []
        return Part(part_file(self._folder, rank, 1 + max((part for part, _ in mine), default=-1)), self._facts)

# SPDX-License-Identifier: Apache-2.0
"""Logs a line for each optimizer step of an engine, DeepSpeed's own or ours: its loss, the times of its parts, the
tokens of this rank, and memory.

The engine's own methods are wrapped, so that stock and ours are measured in the same way. Times are those
of this rank, from stamp to stamp: the host's clock on a CPU, events on CUDA, which are read when lines are written.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.files.runs import append_lines
from ds_fsmoe.observing.spans import clock_of

logger = logging.getLogger("ds_fsmoe")

PARTS = {"forward": "forward_ms", "backward": "backward_ms", "step": "optimizer_ms"}
"""Maps an engine's method -> its line's name for the time in it, over all micro batches of a step."""
ON_DEVICE, OF_PROCESS = "allocated on the device", "resident in the process"
"""What is said of memory, by the kind of device."""


class TokenCount:
    """Counts the tokens that come to a layer in training, of this rank; those computed again in a backward once.

    Args:
        layer: the layer; its input has a token in each row.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._num_tokens = 0
        self.is_paused = False
        """Whether the forward that is under way has no batch."""
        self.hook = layer.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_paused or not layer.training or in_backward():
            return
        hidden = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if hidden is not None and hidden.dim() > 1:
            self._num_tokens += hidden.numel() // max(1, hidden.shape[-1])

    def take(self) -> int:
        """Return the tokens since the last call."""
        found, self._num_tokens = self._num_tokens, 0
        return found


def memory_reader(device: torch.device) -> tuple[str, Callable[[], tuple[int, int]]] | None:
    """Return what is read, and a function that returns bytes now and at most so far; ``None``: nothing can be read."""
    if device.type == "cuda":
        return ON_DEVICE, lambda: _on_cuda(device)
    statm = Path("/proc/self/statm")
    if device.type != "cpu" or not statm.is_file():
        return None
    page_bytes = os.sysconf("SC_PAGE_SIZE")

    def of_process() -> tuple[int, int]:
        now_bytes = int(statm.read_text().split()[1]) * page_bytes
        return now_bytes, max(now_bytes, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    return OF_PROCESS, of_process


def _on_cuda(device: torch.device) -> tuple[int, int]:
    # The allocator's own counters, on the host.
    found = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
    return int(found.get("current", 0)), int(found.get("peak", 0))


class StepLog:
    """Logs the optimizer steps of one engine.

    Args:
        engine: the complete engine.
        file: the file of lines; ``None``: this rank writes none.
        write_every: the number of steps between writes, so that the host seldom waits for the device.
        stop_after: the number of optimizer steps after which the process ends; 0: never.
        tokens: the count of tokens; ``None``: nothing counts them.
    """

    def __init__(
        self, engine: Any, file: Path | None, write_every: int, stop_after: int, tokens: TokenCount | None = None
    ) -> None:
        self._engine = weakref.ref(engine)
        self._file = file
        self._write_every = write_every
        self._stop_after = stop_after
        clock = clock_of(engine.device)
        self._stamp, self._elapsed_ms = clock.now, clock.elapsed_ms
        self._num_steps = 0
        self._open: list[tuple[str, Any, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._last: Any = self._stamp()
        self._waiting: list[dict[str, Any]] = []
        self._tokens = tokens
        self._memory = memory_reader(engine.device)
        self._tunes: Callable[[], bool] = lambda: False
        self._is_tuning = False
        self.at_stop: Callable[[], None] = lambda: None
        """The function that is called before the process ends because of ``stop_after``."""
        # Of its class: what an engine does not have it looks for in the user's model.
        if hasattr(type(engine), "train_batch"):
            _wrap(engine, "train_batch", self._train_batch)
        else:
            for method, part in PARTS.items():
                _wrap(engine, method, functools.partial(self._timed, part))

    def tell_tuning(self, tunes: Callable[[], bool]) -> None:
        """Mark steps in which something is measured or tried.

        Args:
            tunes: a function that tells it of the step that comes next.
        """
        self._tunes, self._is_tuning = tunes, tunes()

    def _timed(self, part: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        assert engine is not None  # which calls this
        steps = engine.global_steps
        if not engine.module.training and part == PARTS["forward"]:
            return method(*args, **kwargs)
        if part == PARTS["backward"]:
            self._note_loss(kwargs.get("loss", args[0] if args else None))
        begin = self._stamp()
        result = method(*args, **kwargs)
        self._open.append((part, begin, self._stamp()))
        if engine.global_steps != steps:
            self._step_is_over()
        return result

    def _train_batch(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self._note_loss(result)
        self._step_is_over()
        return result

    def _note_loss(self, loss: Any) -> None:
        if self._file is not None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()))

    def _step_is_over(self) -> None:
        engine = self._engine()
        # Its number says nothing: a checkpoint may have been loaded.
        self._num_steps += 1
        if self._file is not None:
            now = self._stamp()
            row = {"step": engine.global_steps, "samples": engine.global_samples, "unix_s": time.time()}
            row |= self._facts()
            self._waiting.append(row | {"stamps": (self._last, now), "parts": self._open, "losses": self._losses})
            self._last, self._open, self._losses = now, [], []
            if len(self._waiting) >= self._write_every:
                self.write()
        self._open, self._losses = [], []
        if self._stop_after and self._num_steps >= self._stop_after:
            self.write()
            self.at_stop()
            if self._file is not None:
                logger.info("fsmoe.record.stop_after = %d: the job ends here", self._stop_after)
            raise SystemExit(0)

    def _facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._tokens is not None:
            found["tokens_of_rank"] = self._tokens.take()
        if self._memory is not None:
            found["memory_bytes"], found["memory_peak_bytes"] = self._memory[1]()
        # As it was when the step began: the call that ends a trial comes ahead of this one.
        if self._is_tuning:
            found["is_tuning"] = True
        self._is_tuning = self._tunes()
        return found

    def write(self) -> None:
        """Write the lines that have not been written yet. This waits for the device."""
        rows, self._waiting = self._waiting, []
        if self._file is None or not rows:
            return
        with suppress(RuntimeError):  # a device that has failed
            lines = [self._line(**row) for row in rows]
            try:
                append_lines(self._file, lines)
            except OSError as error:
                logger.warning("%s: steps are not recorded any more: %s", self._file, error)
                self._file = None

    def _line(
        self,
        stamps: tuple[Any, Any],
        parts: Iterable[tuple[str, Any, Any]],
        losses: list[torch.Tensor],
        **row: Any,
    ) -> dict[str, Any]:
        times_ms: dict[str, float] = {}
        for part, begin, end in parts:
            times_ms[part] = times_ms.get(part, 0.0) + self._elapsed_ms(begin, end)
        # With everything between two steps in it, such as waiting for data.
        times_ms["step_ms"] = self._elapsed_ms(*stamps)
        loss = float(torch.stack([each.float().cpu() for each in losses]).mean()) if losses else None
        return row | {"loss": loss} | {name: round(value, 4) for name, value in times_ms.items()}


def _wrap(engine: Any, name: str, around: Callable[..., Any]) -> None:
    inner = getattr(engine, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    # On the object: DeepSpeed's class stays as it is, and other engines with it.
    setattr(engine, name, outer)

# SPDX-License-Identifier: Apache-2.0
"""Writes a run's folder for ``ds_fsmoe report``: rank 0 the facts and a line for each step, every rank its trace.

The engine makes it. A line has the loss, the times of the step's parts, the tokens of this rank, and memory. The
engine's own methods are wrapped, so that stock and ours are measured in the same way. Times are those of this rank,
from stamp to stamp: the host's clock on a CPU, events on CUDA, which are read when lines are written.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.components.gate import in_backward
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.files.hiding import command_of, text_of
from ds_fsmoe.files.runs import FORMAT, RUN, STEPS, STOCK, append_lines, clear_run, write_json
from ds_fsmoe.files.whole_files import Ownership
from ds_fsmoe.observing.spans import clock_of
from ds_fsmoe.versions import VERSION

logger = logging.getLogger("ds_fsmoe")

PARTS = {"forward": "forward_ms", "backward": "backward_ms", "step": "optimizer_ms"}
"""Maps an engine's method -> its line's name for the time in it, over all micro batches of a step."""
ON_DEVICE, OF_PROCESS = "allocated on the device", "resident in the process"
"""What is said of memory, by the kind of device."""


def end_process_groups() -> None:
    """End the process groups, if a script that was stopped has not: with those of gloo a process may abort at its exit
    (https://github.com/pytorch/pytorch/issues/190489).

    Threads of groups that the script still refers to go on. They need the interpreter's lock to free the last messages,
    and abort if they ask for it while the interpreter ends: they have time to do so here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.1)


class TokenCount:
    """Counts this rank's tokens that enter a layer in training; tokens recomputed in a backward count once.

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
    """Return the name of the measured memory, and a function that returns (bytes now, peak bytes); ``None`` if there is
    no measurement."""
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
        tokens: the count of tokens; ``None``: tokens are not counted.
        stop_after_settled: the number of steps with settled plans after which it ends; 0: never.
    """

    def __init__(
        self,
        engine: Any,
        file: Path | None,
        write_every: int,
        stop_after: int,
        tokens: TokenCount | None = None,
        stop_after_settled: int = 0,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._file = file
        self._write_every = write_every
        self._stops = {"stop_after": stop_after, "stop_after_settled": stop_after_settled}
        clock = clock_of(engine.device)
        self._stamp, self._elapsed_ms = clock.now, clock.elapsed_ms
        self._num_steps = self._num_settled = 0
        self._open: list[tuple[str, Any, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._last: Any = self._stamp()
        self._waiting: list[dict[str, Any]] = []
        self._tokens = tokens
        self._memory = memory_reader(engine.device)
        self._tunes: Callable[[], bool] = lambda: False
        self._is_tuning = False
        self._settles: Callable[[], bool] = lambda: True
        self._is_settled = True
        self.at_stop: Callable[[], None] = lambda: None
        """The function that is called before the process ends because of either."""
        # Of its class: what an engine does not have it looks for in the user's model.
        if hasattr(type(engine), "train_batch"):
            _wrap(engine, "train_batch", self._train_batch)
        else:
            for method, part in PARTS.items():
                _wrap(engine, method, functools.partial(self._timed, part))

    def mark_tuning(self, tunes: Callable[[], bool], settles: Callable[[], bool] = lambda: True) -> None:
        """Mark steps that measure or try a plan, and count those after them.

        Args:
            tunes: returns True if the next step does so.
            settles: returns True if plans are settled in the next step; the same on every rank.
        """
        self._tunes, self._is_tuning = tunes, tunes()
        self._settles, self._is_settled = settles, settles()

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
        # As it was when the step began: the call that ends a trial comes ahead of this one.
        self._num_settled += self._is_settled
        self._is_settled = self._settles()
        if self._file is not None:
            now = self._stamp()
            row = {"step": engine.global_steps, "samples": engine.global_samples, "unix_s": time.time()}
            row |= self._facts()
            self._waiting.append(row | {"stamps": (self._last, now), "parts": self._open, "losses": self._losses})
            self._last, self._open, self._losses = now, [], []
            if len(self._waiting) >= self._write_every:
                self.write()
        self._open, self._losses = [], []
        for (name, most), num_steps in zip(self._stops.items(), (self._num_steps, self._num_settled), strict=True):
            if 0 < most <= num_steps:
                self.write()
                self.at_stop()
                if self._file is not None:
                    logger.info("fsmoe.record.%s = %d: the job ends here", name, most)
                # At the exit, not here: what the script does on its way there may need them.
                atexit.register(end_process_groups)
                raise SystemExit(0)

    def _facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._tokens is not None:
            found["tokens_of_rank"] = self._tokens.take()
        if self._memory is not None:
            found["memory_bytes"], found["memory_peak_bytes"] = self._memory[1]()
        # As it was when the step began, too.
        if self._is_tuning:
            found["is_tuning"] = True
        self._is_tuning = self._tunes()
        return found

    def write(self) -> None:
        """Write the lines that are not written yet. This waits for the device."""
        rows, self._waiting = self._waiting, []
        if self._file is None or not rows:
            return
        with suppress(RuntimeError):  # a device that has failed
            lines = [self._line(**row) for row in rows]
            try:
                append_lines(self._file, lines)
            except OSError as error:
                logger.warning("%s: steps are no longer recorded: %s", self._file, error)
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


_WRITE_EVERY = 10
"""The number of steps between writes."""
_GIT_S = 5.0
"""The seconds after which a commit is given up: a repository on a slow disk is no reason to wait."""


class Record:
    """Records one run of one engine, DeepSpeed's own or ours.

    Args:
        engine: the complete engine.
        folder: a folder; an earlier run's files there are removed. ``None``: the record is not written, and only
            ``stop_after`` has an effect.
        stop_after: the number of optimizer steps after which the process ends; 0: never.
        rank: the rank of this process.
        facts: the facts of the run, for ``run.json``.
        first_layer: the module of the first MoE layer that tokens enter; ``None``: this rank has none.
        owner: the ownership of the folder, released when the record is closed.
        stop_after_settled: the number of steps with settled plans after which the process ends; 0: never.

    Raises:
        OSError: the folder is not writable.
    """

    def __init__(
        self,
        engine: Any,
        folder: Path | None,
        stop_after: int,
        rank: int,
        facts: Mapping[str, Any] | None = None,
        first_layer: nn.Module | None = None,
        owner: Ownership | None = None,
        stop_after_settled: int = 0,
    ) -> None:
        self._owner = owner
        self._process = os.getpid()
        self._folder = folder if rank == 0 else None
        self.is_open = True
        # Rank 0 alone writes, so only it checks.
        self._facts = {} if self._folder is None else _about(engine) | dict(facts or {})
        if self._folder is not None:
            clear_run(self._folder)
            write_json(self._folder / RUN, self._facts)
        file = None if self._folder is None else self._folder / STEPS
        # If reading a time needs no wait, a killed process leaves all its steps.
        self.tokens = None if file is None or first_layer is None else TokenCount(first_layer)
        """The count of tokens; ``None``: nothing counts them."""
        write_every = _WRITE_EVERY if engine.device.type == "cuda" else 1
        self.steps = StepLog(engine, file, write_every, stop_after, self.tokens, stop_after_settled)
        self.steps.at_stop = self.close
        # With the engine, even without a call of destroy; or with the process.
        self._end = weakref.finalize(engine, self._at_exit)

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to one of the files of :mod:`ds_fsmoe.files.runs`."""
        self._try(lambda folder: append_lines(folder / name, rows))

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write the whole content of one of these files; the last call counts."""
        self._try(lambda folder: write_json(folder / name, value))

    def close(self) -> None:
        """Write the remaining lines and the end of the run. A second call is ignored."""
        self._close({"ended": time.strftime("%Y-%m-%d %H:%M:%S")})

    def _at_exit(self) -> None:
        # What the interpreter has printed before it came to the end.
        error = getattr(sys, "last_value", None)
        if error is None:
            self.close()
        else:
            self._close({"failed": text_of(f"{type(error).__name__}: {error}"[:500])})

    def _close(self, how: Mapping[str, str]) -> None:
        if os.getpid() != self._process:  # a forked one, whose end is not that of the run
            return
        self._end.detach()
        self.steps.write()
        if self.tokens is not None:
            self.tokens.hook.remove()
        self._try(lambda folder: write_json(folder / RUN, self._facts | how))
        self._folder = None
        self.is_open = False
        if self._owner is not None:
            self._owner.release()

    def _try(self, write: Callable[[Path], None]) -> None:
        if self._folder is None:
            return
        try:
            write(self._folder)
        except OSError as error:
            # Training continues without its record.
            logger.warning("%s: the run is no longer recorded: %s", self._folder, error)
            self._folder = None


def _about(engine: Any) -> dict[str, Any]:
    facts = {
        "format": FORMAT,
        "schedule": STOCK,
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command_of(sys.orig_argv),
        "commit": commit_of(sys.argv[0]),
        "ds_fsmoe": VERSION,
        "deepspeed": version("deepspeed"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "device": _device_name(engine.device),
        "world_size": world_size_now(),
        "zero_stage": engine.zero_optimization_stage(),
        "dtype": str(next((each.dtype for each in engine.module.parameters()), "")).removeprefix("torch."),
    }
    memory = memory_reader(engine.device)
    if memory is not None:
        facts["memory"] = memory[0]
    with suppress(Exception):  # whatever a batch of this engine is
        facts["batch"] = {
            "micro_per_rank": engine.train_micro_batch_size_per_gpu(),
            "accumulation": engine.gradient_accumulation_steps(),
            "all": engine.train_batch_size(),
        }
        # The ranks of a model-parallel model get the same tokens, or none.
        facts["token_ranks"] = engine.seq_dp_world_size
    return facts


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or device.type


def commit_of(script: str) -> str | None:
    """Return the commit of a script's repository, and whether files differ from it; ``None`` without a repository or
    git."""
    folder = Path(script).resolve().parent if script and Path(script).is_file() else Path.cwd()
    with suppress(OSError, subprocess.SubprocessError):
        found = _git(folder, "rev-parse", "--verify", "HEAD")
        commit = found.stdout.strip()
        if found.returncode or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            return None
        is_clean = _git(folder, "diff", "--quiet", "HEAD", "--").returncode == 0
        return commit if is_clean else f"{commit}, with changes"
    return None


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_GIT_S,
        check=False,
    )

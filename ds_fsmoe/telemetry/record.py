# SPDX-License-Identifier: Apache-2.0
"""Writes a run's folder for ``ds_fsmoe report``: rank 0 what ran and what steps took, every rank its trace."""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.files.hiding import command_of, text_of
from ds_fsmoe.files.runs import (
    CLUSTER,
    COMPARED,
    FORMAT,
    MEASURED,
    PLACEMENT,
    PLANS,
    ROUTERS,
    RUN,
    STEPS,
    STOCK,
    append_lines,
    clear_run,
    write_json,
)
from ds_fsmoe.files.whole_files import Ownership
from ds_fsmoe.telemetry.routers import LayerLoad
from ds_fsmoe.telemetry.steps import StepLog, TokenCount, memory_reader
from ds_fsmoe.versions import VERSION

logger = logging.getLogger("ds_fsmoe")

_WRITE_EVERY = 10
"""The number of steps between writes."""
_GIT_S = 5.0
"""The seconds after which a commit is given up: a repository on a slow disk is no reason to wait."""


class Record:
    """Records one run of one engine, DeepSpeed's own or ours.

    Args:
        engine: the complete engine.
        folder: a folder; what an earlier run has left there is removed. ``None``: nothing is written, and the run only
            ends when it should.
        stop_after: the number of optimizer steps after which the process ends; 0: never.
        rank: the rank of this process.
        facts: what ran, for ``run.json``.
        first_layer: the module of the first MoE layer that tokens come to; ``None``: there is none on this rank.
        owner: the ownership of the folder, released when the record is closed.

    Raises:
        OSError: the folder cannot be written to.
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
    ) -> None:
        self._owner = owner
        self._process = os.getpid()
        self._folder = folder if rank == 0 else None
        self.is_open = True
        # Rank 0 alone writes; nobody else need look.
        self._facts = {} if self._folder is None else _about(engine) | dict(facts or {})
        if self._folder is not None:
            clear_run(self._folder)
            write_json(self._folder / RUN, self._facts)
        file = None if self._folder is None else self._folder / STEPS
        # Where reading a time makes nobody wait, a process that is killed leaves all its steps.
        counts = file is not None and first_layer is not None
        self.tokens = TokenCount(first_layer) if counts else None
        """The count of tokens; ``None``: nothing counts them."""
        self.steps = StepLog(engine, file, _WRITE_EVERY if engine.device.type == "cuda" else 1, stop_after, self.tokens)
        self.steps.at_stop = self.close
        # With the engine, even if nobody ends it; or with the process.
        self._end = weakref.finalize(engine, self._at_exit)

    def routers(self, step: int, loads: Mapping[str, LayerLoad]) -> None:
        """Record what routers did in a step."""
        layers = {
            name: {
                "tokens_E": load.tokens_E,
                "dropped_share": load.dropped_share,
                "aux_loss": load.aux_loss,
                "entropy": load.entropy,
            }
            for name, load in loads.items()
        }
        self._try(lambda folder: append_lines(folder / ROUTERS, [{"step": step, "layers": layers}]))

    def compared(self, row: Mapping[str, Any]) -> None:
        """Record a step that was compared with its prediction."""
        self._try(lambda folder: append_lines(folder / COMPARED, [row]))

    def placement(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record what was decided about the experts of each layer, a row for each."""
        self._try(lambda folder: append_lines(folder / PLACEMENT, rows))

    def plans(self, value: Mapping[str, Any]) -> None:
        """Record what was measured and decided; the last call counts."""
        self._try(lambda folder: write_json(folder / PLANS, value))

    def measured(self, value: Mapping[str, Any], cluster: Mapping[str, Any] | None = None) -> None:
        """Record what the layers are and what their tasks cost, and what collectives cost on the cluster."""
        self._try(lambda folder: write_json(folder / MEASURED, value))
        if cluster is not None:
            self._try(lambda folder: write_json(folder / CLUSTER, cluster))

    def close(self) -> None:
        """Write what is left, and that the run has ended. A second call does nothing."""
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
            # Training goes on without its record.
            logger.warning("%s: the run is not recorded any more: %s", self._folder, error)
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
        # The ranks of a model that is cut get the same tokens, or none.
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
    """Return the commit of the repository that holds a script, and whether files differ from it; ``None``: there is no
    repository, or no git."""
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

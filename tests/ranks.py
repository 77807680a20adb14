# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, each a fresh process with its own gloo process group, in a fraction of a second."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# A collective that waits longer than this fails its rank, and with it the test.
COLLECTIVE_TIMEOUT_S = 60

ROOT = Path(__file__).resolve().parents[1]
_ENVIRONMENT = dict(os.environ)  # before any test changes it


@functools.cache
def build_ops() -> None:
    """Compile the ops unless that has been done, before there are ranks that would run into their limits meanwhile.

    What goes wrong is for the ranks to say, or to do without.
    """
    if not _ops_are_built():
        print("compiling the ops, about a minute, once", file=sys.stderr, flush=True)
        command = [sys.executable, "-c", "from ds_fsmoe.ops import load_ops; load_ops('auto', 'cpu')"]
        environment = _ENVIRONMENT | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=900, check=False)


def _ops_are_built() -> bool:
    """As the build itself decides it: by dates of files. Imports no DeepSpeed, which takes seconds."""
    from ds_fsmoe.ops.loading import LIBRARIES, import_op_builder

    builders, name = import_op_builder(), LIBRARIES["cpu"]
    folder = importlib.import_module(f"{builders.__name__}.locks").extensions_folder()
    library = folder / name / f"{name}.so"
    sources = [each for each in (builders.SOURCE_ROOT / "csrc").rglob("*") if each.is_file()]
    return library.is_file() and library.stat().st_mtime >= max(each.stat().st_mtime for each in sources)


def run_on_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any, limit_s: float = 240) -> list:
    """``function(rank, world_size, *args)`` on every rank; returns what each returned, in rank order.

    Args:
        function: at the top level of a module, so that it can be sent to another process.
        world_size: number of ranks.
        folder: an empty folder of this call, for the ranks to meet in.
        args: anything that pickles.
        limit_s: after this long the ranks are ended and the test fails.

    Raises:
        RuntimeError: with the traceback of every rank that failed.
    """
    build_ops()
    context = multiprocessing.get_context("forkserver")
    # The fork server imports the slow modules once; every rank after that starts as a copy of it. The last two are
    # what torch and DeepSpeed import when the first optimizer is made: seconds for each rank.
    slow_modules = ["torch", "torch.distributed", "deepspeed", "ds_fsmoe.door"]
    slow_modules += ["pytest", "torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"]
    context.set_forkserver_preload(slow_modules)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=_be_rank, args=(function, rank, world_size, str(folder), args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + limit_s
    failed = False
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline and not failed:
        time.sleep(0.02)
        failed = any(process.exitcode not in (None, 0) for process in ranks)
    if failed:
        time.sleep(1.0)  # the others may be about to say why, too
    alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill() if process.is_alive() else None
        process.join()
    outcomes = [_read(folder / f"rank{rank}") for rank in range(world_size)]
    errors = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(outcomes) if text]
    if errors or alive or any(process.exitcode for process in ranks):
        codes = [process.exitcode for process in ranks]
        raise RuntimeError("\n".join([f"exit codes {codes}, still running when ended: {alive}", *errors]))
    return [result for _, result in outcomes]


def _read(file: Path) -> tuple[str | None, Any]:
    if not file.exists():
        return "left no result", None
    return pickle.loads(file.read_bytes())


def _be_rank(function: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "DS_ACCELERATOR": "cpu",
    }
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Compiled by DeepSpeed at its first process group, for a collective of inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    outcome: tuple[str | None, Any]
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        outcome = None, function(rank, world_size, *args)
        dist.destroy_process_group()
    except BaseException:
        outcome = traceback.format_exc(), None
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(outcome))
    # Not through the interpreter's own exit: engines of DeepSpeed take seconds to be torn down, and nothing is left.
    os._exit(1 if outcome[0] else 0)

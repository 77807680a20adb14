# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, each a fresh process with its own gloo process group, in a fraction of a second."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.built_ops import build_ops
from tests.waiting import LIMIT_S, until

# A collective that waits longer than this fails its rank, and with it the test.
COLLECTIVE_TIMEOUT_S = LIMIT_S

# The fork server imports these once; every rank after that starts as a copy of it. Each is one that ranks import in
# any case, some as late as with their first engine, optimizer or model.
PRELOADED = [
    *("torch", "torch.distributed", "deepspeed", "ds_fsmoe.engine.entry_points", "pytest", "torch._dynamo"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer", "deepspeed.comm.mori"),
    *("deepspeed.runtime.superoffload.superoffload_stage3", "torch._subclasses.schema_check_mode"),
    *("torch.profiler._cupti_monitor", "ds_fsmoe.execution.stream_lanes", "transformers.trainer", "peft"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")),
    "tests.loaded_ops",
]


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *args: Any,
    limit_s: float = 3 * LIMIT_S,
    grace_s: float = 5.0,
) -> list[Any]:
    """``function(rank, world_size, *args)`` on every rank; returns what each returned, in rank order.

    Args:
        function: at the top level of a module, so that it can be sent to another process.
        world_size: number of ranks.
        folder: an empty folder of this call, for what the ranks return.
        args: anything that pickles.
        limit_s: after this long the ranks are ended and the test fails. It bounds a hang.
        grace_s: once a rank has failed the others are ended after this long, if they have not ended by themselves.

    Raises:
        RuntimeError: with the traceback of every rank that failed.
    """
    import torch.distributed as dist

    build_ops()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Through files they would meet too, but look for each other every ten milliseconds, at every group that they make.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_be_rank, args=(function, rank, world_size, str(folder), store.port, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    with suppress(TimeoutError):
        until(lambda: _have_ended(ranks) or any(process.exitcode for process in ranks), limit_s)
        until(lambda: _have_ended(ranks), grace_s)  # the others may be about to say why, too
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


def _have_ended(ranks: list[Any]) -> bool:
    return not any(process.is_alive() for process in ranks)


def _read(file: Path) -> tuple[str | None, Any]:
    if not file.exists():
        return "left no result", None
    return pickle.loads(file.read_bytes())


def _be_rank(function: Callable[..., Any], rank: int, world_size: int, folder: str, port: int, args: tuple) -> None:
    # What the fork server has imported stays. DeepSpeed calls the collector several times for each engine of stage 3,
    # and it would look at all of that each time, and get a copy of its own of every page.
    gc.freeze()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "DS_ACCELERATOR": "cpu",
        "XDG_CACHE_HOME": f"{folder}/cache",  # the fork server has that of another test
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
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        # A rank that needs nobody may be through before the others have connected to it.
        dist.barrier()
        outcome = None, function(rank, world_size, *args)
        dist.destroy_process_group()
    except BaseException:
        outcome = traceback.format_exc(), None
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(outcome))
    # Not through the interpreter's own exit: engines of DeepSpeed take seconds to be torn down, and nothing is left.
    os._exit(1 if outcome[0] else 0)

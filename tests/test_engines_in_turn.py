# SPDX-License-Identifier: Apache-2.0
"""What is done again and again in one process leaves nothing behind: engines, and measuring and planning anew."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch
from tests.waiting import until

KINDS = [
    (Case(2, 0), {}),
    (Case(1, 1), {"schedule": "tutel", "pipeline_degree": {"forward": 2, "backward": 2}}),
    (Case(2, 2), {"overlap": False}),
    (Case(1, 0, "bf16", expert="gpt"), {"esp_size": 2, "trace": {"enabled": True, "start_step": 0, "num_steps": 1}}),
]


def held() -> dict[str, int]:
    """What this process has open."""
    # A thread that looked after SIGTERM has been told to end, and closes its pipe; nobody joins it.
    until(lambda: all(each.name != "fsmoe-sigterm" for each in threading.enumerate()))
    gc.collect()
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "threads of ours": sum(each.name.startswith("fsmoe") for each in threading.enumerate()),
    }


def make_use_and_destroy(rank: int, case: Case, block: dict[str, Any]) -> None:
    import ds_fsmoe

    model = SmallModel(case, rank)
    config = case.ds_config(fsmoe={"enabled": True, "ops": "reference", **block})
    engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    loss, _ = engine(*batch(0, rank, next(model.parameters()).dtype))
    engine.backward(loss)
    engine.step()
    engine.destroy()


def engines_in_turn(rank: int, world_size: int, rounds: int, folder: str) -> list[dict[str, int]]:
    os.chdir(folder)
    found = []
    for _ in range(rounds):
        for case, block in KINDS:
            make_use_and_destroy(rank, case, block)
        found.append(held())
        dist.barrier()  # a rank that leaves closes its ends of what the others count
    return found


@sampled("rounds", [3, 5], kept=[0])
def test_engines_in_turn_leave_no_file_descriptors_groups_or_threads(rounds: int, tmp_path: Path) -> None:
    for first, *others in run_on_ranks(engines_in_turn, 2, tmp_path, rounds, str(tmp_path)):
        assert first["threads of ours"] == 0
        assert others == [first] * (rounds - 1)


class Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _names = "arena ordblks smblks hblks in_maps_bytes usmblks fsmblks in_arenas_bytes free_bytes keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def in_use_bytes() -> int:
    """What native code has been given and has not given back, in all arenas. What glibc keeps besides, for each arena
    up to the most that was ever in use there, is no matter of ours: it stays within MALLOC_ARENA_MAX."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    found = mallinfo2()
    return found.in_maps_bytes + found.in_arenas_bytes


def tune_again_and_again(rank: int, world_size: int, times: int) -> list[int]:
    import ds_fsmoe

    hurry()
    case = Case(2, 0, k=2, expert="gpt")
    model = SmallModel(case, rank)
    block = {"enabled": True, "ops": "reference", "autotune": {"enabled": True, "trials": 0}}
    config = case.ds_config(fsmoe=block | {"pipeline_degree": {"max": 2}})
    engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    found, before = [], engine.fsmoe.autotune.result
    for _ in range(times):
        for step in range(4):  # the tuning is due ahead of the third
            loss, _ = engine(*batch(step, rank, torch.float32))
            engine.backward(loss)
            engine.step()
        result = engine.fsmoe.autotune.result
        assert result is not before
        assert result.num_measured > 0
        before = result
        found.append(in_use_bytes())
        engine.fsmoe.autotune.request_again("asked to")
    engine.destroy()
    return found


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or newer")
@pytest.mark.slow
@pytest.mark.parametrize("times", [4, 30])
def test_tuning_again_on_two_ranks_takes_no_more_native_memory(times: int, tmp_path: Path) -> None:
    for _, second, *others in run_on_ranks(tune_again_and_again, 2, tmp_path, times):
        assert max(others) - second < 2 * 2**20

# SPDX-License-Identifier: Apache-2.0
"""Engines that one process makes and destroys one after another leave nothing of themselves behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, batch

KINDS = [
    (Case(2, 0), {}),
    (Case(1, 1), {"schedule": "tutel", "pipeline_degree": {"forward": 2, "backward": 2}}),
    (Case(2, 2), {"overlap": False}),
    (Case(1, 0, "bf16", expert="gpt"), {"esp_size": 2, "trace": {"enabled": True, "start_step": 0, "num_steps": 1}}),
]


def held() -> dict[str, int]:
    """What this process has open."""
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


def test_twenty_engines_in_turn_leave_no_file_descriptors_groups_or_threads(tmp_path: Path) -> None:
    for first, *others in run_on_ranks(engines_in_turn, 2, tmp_path, 5, str(tmp_path)):
        assert first["threads of ours"] == 0
        assert others == [first] * 4

# SPDX-License-Identifier: Apache-2.0
"""A training script that sets no device, as most do not: some steps, and on which device it found things afterwards."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.small_model import Case, SmallModel, batch

STEPS = 4
"""Two in which layers are looked at, one ahead of which they are measured and planned, and one more."""


def devices_of(engine: Any) -> dict[str, list[str]]:
    """What is where."""
    from ds_fsmoe.execution.stream_lanes import StreamLanes

    lanes = engine.fsmoe.running.lanes
    found = {"parameters": {str(each.device) for each in engine.module.parameters()}}
    found["gradients"] = {str(each.grad.device) for each in engine.module.parameters() if each.grad is not None}
    if isinstance(lanes, StreamLanes):
        found["streams"] = {str(each.device) for each in lanes._links.values()}
    if torch.cuda.is_available():
        found["current"] = {f"cuda:{torch.cuda.current_device()}"}
    return {name: sorted(each) for name, each in found.items()}


def train(rank: int, world_size: int, stage: int, block: dict[str, Any]) -> dict[str, Any]:
    """Steps of a small model with experts on all ranks, and where things are."""
    import ds_fsmoe

    model = SmallModel(Case(ep_size=world_size, stage=stage, expert="gpt"), rank)
    config = Case(stage=stage).ds_config(fsmoe={"enabled": True, "ops": "reference", **block})
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    losses = []
    for step in range(STEPS):
        loss, _ = engine(*(each.to(engine.device) for each in batch(step, rank, torch.float32)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {"losses": losses, "devices": devices_of(engine), "lanes": type(engine.fsmoe.running.lanes).__name__}
    engine.destroy()
    return found


def main() -> None:
    """As a launcher starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    folder = parser.parse_args().folder
    import deepspeed
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    rank = dist.get_rank()
    # Measured and planned in the first, which is most of what there is to be done on a GPU.
    blocks = {0: {}, 2: {"autotune": {"enabled": False}}}
    found = [train(rank, dist.get_world_size(), stage, block) for stage, block in blocks.items()]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

# SPDX-License-Identifier: Apache-2.0
"""Engines on GPUs whose script sets no device: each rank's streams, parameters and gradients are on its own. The script
is run here on the CPU as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_fsmoe
from ds_fsmoe.execution.stream_lanes import StreamLanes
from tests.gpu_cases import BODY_ON_CPU
from tests.lane_cases import NEEDS_GPU, NEEDS_GPUS
from tests.python_path import python_path
from tests.small_model import Case, SmallModel, batch
from tests.waiting import LIMIT_S

STEPS = 4
"""Two in which layers are looked at, one ahead of which they are measured and planned, and one more."""


def devices_of(engine: Any) -> dict[str, list[str]]:
    """What is where."""
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


def main(folder: str) -> None:
    """Be a rank that a launcher has started, of a script that sets no device, as most do not."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    rank = dist.get_rank()
    # Measured and planned in the first, which is most of what there is to be done on a GPU.
    blocks = {0: {}, 2: {"autotune": {"enabled": False}}}
    found = [train(rank, dist.get_world_size(), stage, block) for stage, block in blocks.items()]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def launch(folder: Path, world_size: int, **variables: str) -> list[list[dict[str, Any]]]:
    """What each rank found, started by torchrun, which leaves it to the script on which device a rank is."""
    known = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment |= {"PYTHONPATH": python_path(), "PATH": path} | variables
    command = ["torchrun", "--standalone", "--nproc-per-node", str(world_size), "-m", __name__, str(folder)]
    options = {"capture_output": True, "text": True, "timeout": LIMIT_S, "check": False}
    done = subprocess.run(command, env=environment, cwd=folder, **options)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def check(of_ranks: list[list[dict[str, Any]]], lanes: str, device: str) -> None:
    """Each rank on a device of its own, or all on the CPU, and all of them with losses that fall."""
    for rank, stages in enumerate(of_ranks):
        here = device.format(rank=rank)
        for found in stages:
            assert found["lanes"] == lanes
            assert found["devices"]["parameters"] == [here]
            assert all(each in ([here], []) for each in found["devices"].values()), found["devices"]
            assert len(found["losses"]) == STEPS
            assert all(loss == loss and loss > 0 for loss in found["losses"])


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=NEEDS_GPU), pytest.param(2, marks=NEEDS_GPUS)])
def test_engines_of_ranks_that_set_no_device_are_each_on_their_own(world_size: int, tmp_path: Path) -> None:
    """DeepSpeed sets the device of a rank after it has asked us for our groups and streams."""
    check(launch(tmp_path, world_size), "StreamLanes", "cuda:{rank}")


@BODY_ON_CPU
def test_the_script_of_those_ranks_runs_on_the_cpu(tmp_path: Path) -> None:
    check(launch(tmp_path, 2, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"), "ThreadLanes", "cpu")


def test_a_stream_on_another_device_is_seen() -> None:
    def found(streams: str) -> dict[str, Any]:
        devices = {"parameters": ["cuda:0"], "streams": [streams]}
        return {"lanes": "StreamLanes", "devices": devices, "losses": [1.0] * STEPS}

    check([[found("cuda:0")]], "StreamLanes", "cuda:{rank}")
    with pytest.raises(AssertionError):
        check([[found("cuda:1")]], "StreamLanes", "cuda:{rank}")


if __name__ == "__main__":
    main(sys.argv[1])

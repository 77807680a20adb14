# SPDX-License-Identifier: Apache-2.0
"""Ranks that share one GPU, over NCCL where it takes them, and ranks whose script sets no device: streams, parameters
and gradients of each are on its own. What they do is done here on the CPU as well."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist

from tests.gpu_cases import BODY_ON_CPU
from tests.gpu_ranks import SEVERAL_RANKS, VARIABLES, nccl_version, run_ranks
from tests.gpu_training import train_small
from tests.lane_cases import NEEDS_GPU, NEEDS_GPUS
from tests.scripts import start
from tests.small_model import Case
from tests.waiting import LIMIT_S

COLLECTIVES = {"collectives": ("ok", "{}")}


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_train_as_stock_does(tmp_path: Path) -> None:
    version = nccl_version()
    if version < SEVERAL_RANKS:
        pytest.skip(f"NCCL {version} takes one rank on a GPU")
    found = run_ranks(tmp_path / "ranks", 2, "nccl", True, LIMIT_S, **VARIABLES)
    assert {name: each for name, each in found.items() if each[0] != "ok"} == {}
    assert COLLECTIVES.items() <= found.items()


@BODY_ON_CPU
def test_what_those_ranks_do_is_done_on_the_cpu_and_one_that_fails_is_told(tmp_path: Path) -> None:
    found = run_ranks(tmp_path / "ranks", 2, "gloo", True, LIMIT_S, DS_ACCELERATOR="cpu")
    assert {name: each for name, each in found.items() if each[0] != "ok"} == {}
    assert COLLECTIVES.items() <= found.items()
    assert len(found) == 3
    failed = run_ranks(tmp_path / "failed", 2, "no backend", True, LIMIT_S, DS_ACCELERATOR="cpu")
    assert list(failed) == ["end"]
    assert "no backend" in failed["end"][1]


# ---- ranks of a script that sets no device, as most do not

STEPS = 4
"""Two in which layers are looked at, one ahead of which they are measured and planned, and one more."""


def main(folder: str) -> None:
    """Be a rank that a launcher has started."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    rank, found = dist.get_rank(), []
    # Measured and planned in the first, which is most of what there is to be done on a GPU.
    for stage, autotune in ((0, {}), (2, False)):
        case = Case(dist.get_world_size(), stage, expert="gpt")
        trained = train_small(case, {"ops": "reference", "autotune": autotune}, STEPS, rank)
        found.append({name: trained[name] for name in ("losses", "devices", "lanes")})
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def launch(folder: Path, world_size: int, **variables: str) -> list[list[dict[str, Any]]]:
    """What each rank found, started by torchrun, which leaves it to the script on which device a rank is."""
    command = ["torchrun", "--standalone", "--nproc-per-node", str(world_size), "-m", __name__, str(folder)]
    start(folder, *command, **variables)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def check(of_ranks: list[list[dict[str, Any]]], lanes: str, device: str) -> None:
    """Each rank is on a device of its own, or all are on the CPU, with losses that are numbers."""
    for rank, stages in enumerate(of_ranks):
        here = device.format(rank=rank)
        assert stages[0]["devices"]["gradients"] == [here]
        for found in stages:
            assert found["lanes"] == lanes
            assert found["devices"]["parameters"] == [here]
            assert all(each in ([here], []) for each in found["devices"].values()), found["devices"]
            assert len(found["losses"]) == STEPS
            assert all(loss == loss and loss > 0 for loss in found["losses"])


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=NEEDS_GPU), pytest.param(2, marks=NEEDS_GPUS)])
def test_engines_of_ranks_that_set_no_device_are_each_on_their_own(world_size: int, tmp_path: Path) -> None:
    """DeepSpeed sets the device of a rank after it has asked us for our groups and streams."""
    check(launch(tmp_path, world_size, DS_ACCELERATOR="cuda"), "StreamLanes", "cuda:{rank}")


@BODY_ON_CPU
def test_the_script_of_those_ranks_runs_on_the_cpu(tmp_path: Path) -> None:
    check(launch(tmp_path, 2), "ThreadLanes", "cpu")


if __name__ == "__main__":
    main(sys.argv[1])

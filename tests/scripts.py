# SPDX-License-Identifier: Apache-2.0
"""Runs a script on two ranks: by DeepSpeed's launcher, or in a fraction of its time without it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_fsmoe.offline.commands.training_run import free_port
from tests.built_ops import build_ops
from tests.python_path import python_path
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = 2
Start = Callable[..., str]
"""``start(folder, script, *arguments, **variables)`` is what the script printed, on all ranks."""


def launch(folder: Path, *arguments: str, **variables: str) -> str:
    """What a job of two ranks printed, started in a folder by DeepSpeed's launcher."""
    build_ops()
    launcher = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(NUM_RANKS)]
    environment = (
        os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"} | variables
    )
    command = [*launcher, "--master_port", str(free_port()), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def on_ranks(folder: Path, script: str, *arguments: str, **variables: str) -> str:
    """The same without the launcher and in processes that have imported DeepSpeed already."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | variables
    ranks = folder / f"ranks{len(list(folder.glob('ranks*')))}"
    return "\n".join(run_on_ranks(be_script, NUM_RANKS, ranks, str(folder), script, arguments, variables))


def be_script(
    rank: int, world_size: int, folder: str, script: str, arguments: tuple[str, ...], variables: dict[str, str]
) -> str:
    """What a script printed that was run as the launcher runs it, in a process that is this rank already."""
    # The script makes its own. All ranks have one first: those that are still connecting would see this one leave.
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= variables
    os.chdir(folder)
    sys.argv = [script, f"--local_rank={rank}", *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    printed = Path(f"printed_by_rank{rank}").resolve()
    with printed.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    if not dist.is_initialized():
        # The one that run_on_ranks is about to end.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return printed.read_text()


START = pytest.mark.parametrize(
    "start", [on_ranks, pytest.param(launch, marks=pytest.mark.daily("by the launcher", 1))]
)

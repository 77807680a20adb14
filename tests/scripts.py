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
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NUM_RANKS = 2
Start = Callable[..., str]
"""``start(folder, script, *arguments, **variables)`` is what the script printed, on all ranks."""


def start(folder: Path, *command: str, **variables: str) -> str:
    """What a command printed that starts ranks, in a folder and as a user would give it."""
    build_ops()
    # None of the variables by which launchers tell ranks apart may come from outside.
    known = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    environment |= {"PATH": f"{BIN}:{os.environ['PATH']}"} | variables
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def launch(folder: Path, *arguments: str, **variables: str) -> str:
    """What a job of two ranks printed, started in a folder by DeepSpeed's launcher."""
    launcher = [sys.executable, str(BIN / "deepspeed"), "--num_accelerators", str(NUM_RANKS)]
    return start(folder, *launcher, "--master_port", str(free_port()), *arguments, **variables)


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
    "start", [on_ranks, pytest.param(launch, marks=pytest.mark.daily("by the launcher", 2))]
)

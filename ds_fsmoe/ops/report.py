# SPDX-License-Identifier: Apache-2.0
"""Reports obstacles to compiled ops and facts about the machine, as rows for ``ds_fsmoe env``.

A row is (name, finding, "[OKAY]" or "[NO]" or "[FAIL]" or "", note). The functions build and load nothing.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

import torch

from ds_fsmoe.ops.loading import LIBRARIES, import_op_builder

Row = tuple[str, str, str, str]

OKAY, NO, FAIL = "[OKAY]", "[NO]", "[FAIL]"

# Variables that launchers (DeepSpeed's, torchrun, Slurm) and users set.
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")


def op_rows() -> list[Row]:
    """Return a row for each library of ops: whether it is built or can be built, and the reason if not."""
    rows = []
    for device_type, name in LIBRARIES.items():
        try:
            builder = import_op_builder().builders(device_type)[name]
        except Exception as error:  # DeepSpeed is missing, or raises an error of any kind on import
            rows.append((name, "not built", NO, f"no builder: {type(error).__name__}: {error}"))
            continue
        if builder.is_prebuilt():
            rows.append((name, "in the installed package", OKAY, ""))
        elif builder.is_compatible():
            found = ("built", "") if builder.is_built() else ("not built yet", "will be when a run first asks for it")
            rows.append((name, found[0], OKAY, found[1]))
        else:
            rows.append((name, "cannot be built", NO, builder.error_log))
    return rows


def compiler_rows() -> list[Row]:
    """Return rows for the programs that build ops, and whether nvcc fits torch."""
    compiler = os.environ.get("CXX", "c++")
    rows = [_program("c++", compiler, r"(\d+\.\d+\.\d+)"), _program("ninja", "ninja", r"(\d+(?:\.\d+)+)")]
    try:
        import_op_builder()
        toolkit = importlib.import_module("ds_fsmoe.ops.op_builder.toolkit")
    except (ImportError, RuntimeError) as error:
        return [*rows, ("nvcc", "not looked for", NO, str(error))]
    nvcc = _program("nvcc", str(toolkit.nvcc_path() or "nvcc"), r"release (\d+\.\d+)")
    for_torch = torch.version.cuda
    if for_torch is None:
        note = "this torch is built without CUDA"
        return [*rows, (*nvcc[:2], NO if nvcc[2] == NO else "", note)]
    if nvcc[2] == OKAY and (reason := toolkit.obstacle(for_torch)):
        return [*rows, (*nvcc[:2], FAIL, reason)]
    note = f"torch is built with CUDA {for_torch}"
    return [*rows, (*nvcc[:3], note if nvcc[2] == OKAY else f"{nvcc[3]}; {note}")]


def lock_rows() -> list[Row]:
    """Return rows for the locks of running or killed builds, for which later builds wait."""
    try:
        import_op_builder()
        locks = importlib.import_module("ds_fsmoe.ops.op_builder.locks")
    except (ImportError, RuntimeError) as error:
        return [("locks", "not looked for", NO, str(error))]
    folder = locks.extensions_folder()
    rows = []
    for lock in locks.held_locks(folder):
        if lock.is_stale:
            rows.append((lock.path.parent.name, lock.age, FAIL, f"too old for a build in progress: delete {lock.path}"))
        else:
            rows.append((lock.path.parent.name, lock.age, OKAY, "being built"))
    return rows or [("locks", "none", OKAY, str(folder))]


def machine_rows(environment: Mapping[str, str] = os.environ) -> list[Row]:
    """Return rows for this machine, and for the job as the launcher's variables describe it. Launches nothing."""
    rows = [("host", socket.gethostname(), "", f"{len(os.sched_getaffinity(0))} CPU cores for this process")]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
        rows += [("GPUs", str(len(names)), OKAY, ", ".join(sorted(set(names))))]
    else:
        rows += [("GPUs", "none", NO, "torch finds no CUDA device")]
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        compiled = ".".join(map(str, torch.cuda.nccl.version()))
        rows.append(("NCCL", compiled, OKAY, "as torch was compiled; a job asks the library that is loaded"))
    else:
        rows.append(("NCCL", "none", NO, "this torch is built without it"))
    told = {name: environment[name] for name in _LAUNCHER if name in environment}
    ranks, here = told.get("WORLD_SIZE"), told.get("LOCAL_SIZE", environment.get("LOCAL_WORLD_SIZE"))
    if ranks is None:
        rows.append(("ranks", "1", "", "not started by a launcher"))
    elif ranks.isdigit() and here is not None and here.isdigit() and int(here) > 0:
        nodes = -(-int(ranks) // int(here))
        rows.append(("ranks", ranks, "", f"{here} on this node, so {nodes} node(s) if all have as many"))
    else:
        rows.append(("ranks", ranks, "", "how many of them are on this node is not said"))
    rows += [("variable", f"{name}={value}", "", "") for name, value in told.items()]
    return rows


def _program(name: str, command: str, version: str) -> Row:
    path = shutil.which(command)
    if path is None:
        return name, "not found", NO, f"{command!r} is not on the PATH"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return name, "does not run", NO, f"{path}: {error}"
    found = re.search(version, done.stdout)
    return name, found.group(1) if found else "of unknown version", OKAY, path

# SPDX-License-Identifier: Apache-2.0
"""Warns, when an engine is made, of what is known to go wrong or to cost speed in its surroundings."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ds_fsmoe.config.blocks import FSMoEBlock

_SHARES_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def launcher_warnings(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each thing that will prevent a restart."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    keeps_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get(_SHARES_STORE) != "1"
    if restarts.isdigit() and int(restarts) > 0 and keeps_store:
        return [
            f"torchrun is to restart this job up to {restarts} times and keeps its store meanwhile, in which processes "
            f"that are restarted find the addresses of those before them, and wait: set {_SHARES_STORE}=1"
        ]
    return []


def accelerate_warnings(world_size: int) -> list[str]:
    """Return a sentence where Accelerate has counted other processes than the job has; Trainer stands on it.

    Args:
        world_size: the number of ranks of the job.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    counted = getattr(state, "_shared_state", {}).get("num_processes")
    if counted in (None, world_size):
        return []
    return [
        f"Accelerate counts {counted} process(es), and this job has {world_size} ranks: it gives every rank the same "
        "data, as it does with DeepSpeed where there is no accelerator (examples/on_cpu is for trying that)"
    ]


def speed_warnings(
    ds_config: Mapping[str, Any],
    block: FSMoEBlock,
    device_type: str,
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return a sentence for each setting that silently costs speed.

    Args:
        ds_config: the whole DeepSpeed config.
        block: our block in it.
        device_type: "cpu" or "cuda".
        environment: the environment of this process.
    """
    logger = ds_config.get("comms_logger")
    degrees = block.pipeline_degree.forward, block.pipeline_degree.backward
    of_settings = {
        "comms_logger.enabled = true: DeepSpeed waits for the device around each of its own collectives, to time them; "
        "fsmoe.trace shows when collectives run without that": isinstance(logger, Mapping)
        and logger.get("enabled") is True,
        "wall_clock_breakdown = true: every layer waits for the device to read its timers, so links and experts "
        "overlap less; switch it off when you measure speed": ds_config.get("wall_clock_breakdown"),
    }
    of_block = {
        "fsmoe.overlap = false: one task runs after another, on one lane": not block.overlap,
        "fsmoe.debug.check_results = true: an all-reduce, and a wait for the device, before each step": (
            block.debug.check_results
        ),
        "fsmoe.debug.check_router = true: the host waits for the device in every layer's forward": (
            block.debug.check_router
        ),
        'fsmoe.autotune.enabled = false: nothing is measured, so num_chunks = "auto" is 1; gradients are still sent '
        "during the backward": block.schedule == "best" and "auto" in degrees and not block.autotune.enabled,
    }
    of_process = _of_environment(environment) if device_type == "cuda" else {}
    return [sentence for sentence, applies in (of_settings | of_process | of_block).items() if applies]


def _of_environment(environment: Mapping[str, str]) -> dict[str, bool]:
    """Return sentences on what CUDA, NCCL and torch read from the environment of a process, and whether they apply."""
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS = 1: kernels of all streams queue up in one line, so links and experts hardly "
        "overlap; leave it out, or use 8 or more, unless something else of the model needs it": (
            environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        ),
        "CUDA_LAUNCH_BLOCKING = 1: the host waits for every kernel, so no two streams work at a time and nothing "
        "overlaps; leave it out unless you are looking for the kernel that fails": (
            _is_set(environment.get("CUDA_LAUNCH_BLOCKING"))
        ),
        # The second name is an older one that torch still reads.
        **{
            f"{name} = {environment.get(name)}: the host waits for the end of every collective, so experts begin only "
            "when a link has gone idle and nothing overlaps; leave it out (TORCH_NCCL_ASYNC_ERROR_HANDLING, on by "
            "default, ends a job that hangs)": _is_set(environment.get(name))
            for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
        },
        "TORCH_DISTRIBUTED_DEBUG = DETAIL: before every collective all ranks compare its kind and shapes over gloo "
        "and the host waits for them, so it cannot run ahead of the device; use INFO, or leave it out, when ranks "
        "agree": environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL",
        "NCCL_LAUNCH_MODE = GROUP: collectives are launched together with those of the other GPUs of a process, "
        "which a process with one GPU does not have, and NCCL gave it up in 2.9: a launch may wait for others, and "
        "two links are no longer independent; leave it out": environment.get("NCCL_LAUNCH_MODE", "").upper() == "GROUP",
    }


def _is_set(value: str | None) -> bool:
    """Return whether a flag is set, as torch reads its environment."""
    return value is not None and value.strip().lower() in {"1", "y", "yes", "t", "true", "on"}

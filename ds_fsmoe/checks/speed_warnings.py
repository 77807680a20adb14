# SPDX-License-Identifier: Apache-2.0
"""Warns about settings that silently cost speed: once, when an engine is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ds_fsmoe.config.blocks import FSMoEBlock


def speed_warnings(
    ds_config: Mapping[str, Any],
    block: FSMoEBlock,
    device_type: str,
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return a sentence for each such setting.

    Args:
        ds_config: the whole DeepSpeed config.
        block: our block in it.
        device_type: "cpu" or "cuda".
        environment: the environment of this process.
    """
    found = []
    if _is_on(ds_config, "comms_logger"):
        found.append(
            "comms_logger.enabled = true: DeepSpeed waits for the device around each of its own collectives, to time "
            "them; fsmoe.trace shows when collectives run without that"
        )
    if ds_config.get("wall_clock_breakdown"):
        found.append(
            "wall_clock_breakdown = true: every layer waits for the device to read its timers, so links and experts "
            "overlap less; switch it off when you measure speed"
        )
    if device_type == "cuda":
        found += _of_environment(environment)
    if not block.overlap:
        found.append("fsmoe.overlap = false: one task runs after another, on one lane")
    if block.debug.check_results:
        found.append("fsmoe.debug.check_results = true: an all-reduce, and a wait for the device, before each step")
    if block.debug.check_router:
        found.append("fsmoe.debug.check_router = true: the host waits for the device in every layer's forward")
    cuts_by_itself = block.schedule == "best" and "auto" in (
        block.pipeline_degree.forward,
        block.pipeline_degree.backward,
    )
    if cuts_by_itself and not block.autotune.enabled:
        found.append(
            'fsmoe.autotune.enabled = false: nothing is measured, so num_chunks = "auto" is 1; gradients are still '
            "sent during the backward"
        )
    return found


def _of_environment(environment: Mapping[str, str]) -> list[str]:
    """Return sentences on what CUDA, NCCL and torch read from the environment of a process."""
    found = []
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append(
            "CUDA_DEVICE_MAX_CONNECTIONS = 1: kernels of all streams queue up in one line, so links and experts hardly "
            "overlap; leave it out, or use 8 or more, unless something else of the model needs it"
        )
    if _is_set(environment.get("CUDA_LAUNCH_BLOCKING")):
        found.append(
            "CUDA_LAUNCH_BLOCKING = 1: the host waits for every kernel, so no two streams work at a time and nothing "
            "overlaps; leave it out unless you are looking for the kernel that fails"
        )
    # The second name is an older one that torch still reads.
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if _is_set(environment.get(name)):
            found.append(
                f"{name} = {environment[name]}: the host waits for the end of every collective, so experts begin only "
                "when a link has gone idle and nothing overlaps; leave it out (TORCH_NCCL_ASYNC_ERROR_HANDLING, on by "
                "default, ends a job that hangs)"
            )
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found.append(
            "TORCH_DISTRIBUTED_DEBUG = DETAIL: before every collective all ranks compare its kind and shapes over gloo "
            "and the host waits for them, so it cannot run ahead of the device; use INFO, or leave it out, when ranks "
            "agree"
        )
    if environment.get("NCCL_LAUNCH_MODE", "").upper() == "GROUP":
        found.append(
            "NCCL_LAUNCH_MODE = GROUP: collectives are launched together with those of the other GPUs of a process, "
            "which a process with one GPU does not have, and NCCL gave it up in 2.9: a launch may wait for others, and "
            "two links are no longer independent; leave it out"
        )
    return found


def _is_set(value: str | None) -> bool:
    """Return whether a flag is set, as torch reads its environment."""
    return value is not None and value.strip().lower() in {"1", "y", "yes", "t", "true", "on"}


def _is_on(ds_config: Mapping[str, Any], name: str) -> bool:
    asked = ds_config.get(name)
    return isinstance(asked, Mapping) and asked.get("enabled") is True

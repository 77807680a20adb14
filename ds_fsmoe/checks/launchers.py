# SPDX-License-Identifier: Apache-2.0
"""Reads from the environment who started this process, and warns of what is known to go wrong there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

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

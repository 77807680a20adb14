# SPDX-License-Identifier: Apache-2.0
"""Asks NCCL to start collectives in the order in which they were issued, before its first communicator is made.

Two busy links are two busy communicators, and a GPU may start their collectives in any order. If only one fits on the
GPU, two ranks that have begun with different ones wait for each other for ever. From NCCL 2.26 on a variable makes the
GPU start them in the order of the host. This order is the same on every rank, and they still run concurrently. NCCL
reads the variable at its first use. So :func:`ask` is called when this package is imported, and by its entry points.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"
# What launchers set in the processes that they start.
_OF_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK",
    "SLURM_LOCALID",
)


def ask(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variable, unless it is set, or a process group exists already, which is too late."""
    # RCCL has the variable too, and versions in use crash over it.
    if VARIABLE not in environment and not _has_group() and not _is_rocm():
        environment[VARIABLE] = "1"


def ask_as_rank(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variable in a process that a launcher has started; in other processes an import changes nothing."""
    if any(name in environment for name in _OF_RANKS):
        ask(environment)


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    # While torch itself is being imported, its names are not there yet.
    is_initialized = getattr(distributed, "is_initialized", None)
    return is_initialized is not None and is_initialized()


def _is_rocm() -> bool:
    # Importing it takes a while, and most processes do without.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "rocm" in version("torch")
    except PackageNotFoundError:
        return False

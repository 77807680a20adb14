# SPDX-License-Identifier: Apache-2.0
"""Configures NCCL so that lanes can run at the same time; it has no effect on other backends.

Groups, runtime and measurements call it. A collective of NCCL is a kernel that stays on its GPU until those of all its
ranks have arrived. Lanes may overlap if kernels start in one order on all ranks (see ``launch_order.py``). Their
kernels leave processors to each other and to the experts if each communicator has few thread blocks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.launch_order import VARIABLE
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting

ORDERED_FROM = (2, 26)
"""The first NCCL version that starts kernels in the order of issue when asked to."""
# torch renamed them in 2.13, and warns about the names that 2.11 has.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# A tree for what is small, rings or switches for what is large: each connects when it is first used.
_WARM_BYTES = (0, 8 << 20)


def is_used(group: dist.ProcessGroup | None = None) -> bool:
    """Return True if a group's tensors on a GPU are sent by NCCL."""
    return "nccl" in str(dist.get_backend_config(group))


def facts() -> dict[str, str]:
    """Return torch's implementation of NCCL and NCCL's version; empty if NCCL is not used.

    torch 2.15 has another implementation than earlier versions, and an environment may choose between the two.
    """
    if world_size_now() == 1 or not is_used():
        return {}
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    return {"NCCL": f"{type(backend).__name__} {'.'.join(map(str, version()))}"}


def version() -> tuple[int, ...]:
    """Return the version of the loaded NCCL, which may differ from the one that torch was compiled with."""
    number = ctypes.c_int()
    # Nothing is loaded by asking: torch has loaded what it runs on.
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        if library.ncclGetVersion(ctypes.byref(number)) == 0:
            major = number.value // 10_000 or number.value // 1000
            return major, number.value // 100 % (100 if number.value >= 10_000 else 10), number.value % 100
    return torch.cuda.nccl.version()


def why_not_ordered(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the reason why a GPU may start this rank's collectives in another order than issued; ``None`` if it
    cannot."""
    if torch.version.hip is not None:
        return "RCCL does not guarantee the order of launches"
    found = version()
    if found[:2] < ORDERED_FROM:
        return f"NCCL {'.'.join(map(str, found))} has no {VARIABLE}: use {'.'.join(map(str, ORDERED_FROM))} or later"
    value = environment.get(VARIABLE)
    if value is None:
        return (
            f"the first process group was made before ds_fsmoe could set {VARIABLE}: import ds_fsmoe first, or "
            f"start the job with {VARIABLE}=1"
        )
    if not _is_on(value):
        return f"{VARIABLE} = {value} is set in the environment: set it to 1"
    return None


def _is_on(value: str) -> bool:
    """Return True if NCCL reads a value as on: a whole number other than 0."""
    try:
        return int(value, 0) != 0
    except ValueError:
        return False


def why_one_link() -> str | None:
    """Return the reason why the traffic of both links has to be sequential; ``None`` if lanes may overlap.

    Collective over all ranks of the job, with the same result on each: the reason of the first rank that has one.
    """
    if world_size_now() == 1 or not is_used():
        return None
    reasons = enumerate(on_every_rank(why_not_ordered()))
    return next((f"{each} (rank {rank})" for rank, each in reasons if each is not None), None)


def options(max_ctas: int | None, timeout: timedelta | None) -> Any:
    """Return options for ``dist.new_group``: the maximum of thread blocks of the new communicator's collectives.

    Args:
        max_ctas: the limit; ``None``: NCCL's own choice.
        timeout: the timeout of the group, so that torch sees no contradiction.

    Returns:
        The options, or ``None`` if NCCL is not used or there is no limit.
    """
    if max_ctas is None or not is_used():
        return None
    made = dist.ProcessGroupNCCL.Options()
    # Builds of torch with an NCCL older than 2.17 have no such thing.
    if (config := getattr(made, "config", None)) is None:
        return None
    config.max_ctas = max_ctas
    # A communicator split off another's would use its channels, and be as large as that one.
    if hasattr(config, "split_share"):
        config.split_share = 0
    if timeout is not None:
        made._timeout = timeout
    return made


def can_split() -> bool:
    """Return True if this rank's default group can be split: it is bound to a device, and its backend supports it."""
    world = dist.distributed_c10d._get_default_group()
    if not hasattr(dist, "split_group") or world.bound_device_id is None:
        return False
    return bool(world._get_backend(world.bound_device_id).supports_splitting)


def warm(group: dist.ProcessGroup) -> None:
    """Connect a communicator to its peers, for every kind of collective that uses it. Collective; the host waits.

    NCCL connects at first use, from the host, which then waits for the other ranks' hosts. Within a schedule that would
    come between running collectives of other communicators.
    """
    device = _device_of(group)
    with waiting("the connections of a communicator"):
        for num_bytes in _WARM_BYTES:
            whole = torch.zeros(max(1, num_bytes // (4 * group.size())) * group.size(), device=device)
            part = whole[: len(whole) // group.size()]
            dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
            _gather(torch.empty_like(whole), part, group=group)
            _scatter(torch.empty_like(part), whole, group=group)
            dist.all_reduce(whole, group=group)
        if is_used(group):
            torch.cuda.synchronize(device)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if is_used(group) else torch.device("cpu")

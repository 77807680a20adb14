# SPDX-License-Identifier: Apache-2.0
"""A process group that passes for NCCL: as many ranks as are asked for in one process, and a list of what they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed import comm as deepspeed_comm
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_fsmoe.distributed import nccl

COLLECTIVES = ("all_to_all_single", "all_reduce", "_gather", "_scatter")


class Options:
    """Stands for ``dist.ProcessGroupNCCL.Options``, whose config has what torch's binding of it has."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=-1, min_ctas=-1, split_share=-1)
        self._timeout: timedelta | None = None


@dataclass
class Pretended:
    """What has been asked of it."""

    made: list[tuple[str, tuple[int, ...], Options | None]] = field(default_factory=list)
    """(what it is for, ranks, options) of every communicator with this rank, in their order."""
    events: list[tuple[str, str]] = field(default_factory=list)
    """("make" or a collective, what the communicator is for)."""
    waits: int = 0
    """Of the host for the device."""


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """A default process group in which this process is one of many ranks; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        # DeepSpeed's, if it has taken notice of the group, forgets its own groups too.
        (deepspeed_comm if deepspeed_comm.is_initialized() else dist).destroy_process_group()


def pretend_nccl(
    patch: pytest.MonkeyPatch, version: tuple[int, int, int] = (2, 27, 5), reasons: tuple[str | None, ...] | None = None
) -> Pretended:
    """From now on the fake backend is NCCL's.

    Args:
        patch: takes it back.
        version: of it.
        reasons: what each rank has to say, where ranks exchange objects; ``None``: what this one says.
    """
    found, new_group = Pretended(), dist.new_group

    def make(ranks: list[int], pg_options: Options | None = None, group_desc: str = "", **others: Any) -> Any:
        group = new_group(ranks, group_desc=group_desc, **others)
        found.events.append(("make", group_desc))
        if dist.get_rank() in ranks:
            found.made.append((group_desc, tuple(ranks), pg_options))
        return group

    def exchange(held: list[Any], own: Any, group: Any = None) -> None:
        held[:] = [own] * len(held) if reasons is None else reasons

    def wait(*_: Any) -> None:
        found.waits += 1

    patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    patch.setattr(dist, "new_group", make)
    patch.setattr(dist, "all_gather_object", exchange)
    patch.setattr(torch.cuda.nccl, "version", lambda: version)
    patch.setattr(torch.cuda, "synchronize", wait)
    patch.setattr(nccl, "_WARM_BYTES", (0, 64))
    patch.setattr(nccl, "_device_of", lambda group: torch.device("cpu"))
    for name in COLLECTIVES:
        _record(patch, dist if hasattr(dist, name) else nccl, name, found)
    return found


def _record(patch: pytest.MonkeyPatch, module: Any, name: str, found: Pretended) -> None:
    def collective(*_: Any, group: Any, **__: Any) -> None:
        found.events.append((name, group.group_desc))

    patch.setattr(module, name, collective)

# SPDX-License-Identifier: Apache-2.0
"""All ranks of a benchmark: they start each step together, agree, and end together when one fails."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

# How long a rank that failed waits for the others to hear of it; they may be waiting for it inside their step.
FAILURE_WAIT_S = 10.0


class RunError(RuntimeError):
    """A run that ended early, on every rank: where, and why where this rank knows."""


class Ranks:
    """All ranks of the job, or this process alone if there is no process group. Small, always gloo, apart from theirs.

    A group of our own keeps the variants' collectives and ours from being taken for one another when a rank fails.
    """

    def __init__(self) -> None:
        dist = sys.modules.get("torch.distributed")
        self.group: Any = None
        self.rank, self.size = 0, 1
        if dist is not None and dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(backend="gloo")
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_cores = self._count_cores()

    def _count_cores(self) -> int:
        # By kernel, not by host name: the test bed gives every node a name of its own on one machine.
        kernel = Path("/proc/sys/kernel/random/boot_id")
        mine = (kernel.read_text() if kernel.exists() else platform.node(), tuple(os.sched_getaffinity(0)))
        found = [mine]
        if self.group is not None:
            import torch.distributed as dist

            found = [mine] * self.size
            dist.all_gather_object(found, mine, group=self.group)
        return len({(machine, core) for machine, cores in found for core in cores})

    def reduce(self, values: np.ndarray, operation: str, timeout_s: float | None = None) -> np.ndarray:
        """MAX or SUM of a float64 array over ranks; the shape is the same on all."""
        if self.group is None:
            return values
        import torch
        import torch.distributed as dist

        tensor = torch.from_numpy(values.copy())
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, operation)
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        self.group.allreduce([tensor], options).wait()
        return tensor.numpy()

    def agree(self, yes: bool) -> bool:
        """What rank 0 says, on all ranks."""
        return bool(self.reduce(np.array([float(yes and self.rank == 0)]), "MAX")[0])

    def check_alike(self, what: str, mine: str) -> None:
        """Check that all ranks have the same.

        Raises:
            RunError: on every rank, with what each has.
        """
        if self.group is None:
            return
        import torch.distributed as dist

        found: list[str] = [mine] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        if len(set(found)) > 1:
            raise RunError(f"{what} differs between ranks, and must not: {found}")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Leaves when all ranks are here. If the inside fails on one, the run ends on all.

        Raises:
            RunError: with ``what``, the rank that failed, and on that rank the reason.
        """
        try:
            yield
        except Exception as error:
            # The others may wait for us inside the step, and will hear of it only when this process has ended.
            with suppress(RuntimeError):
                self.reduce(np.array([self.rank + 1.0]), "MAX", timeout_s=FAILURE_WAIT_S)
            raise RunError(f"{what}, rank {self.rank}: {type(error).__name__}: {error}") from error
        try:
            failed = int(self.reduce(np.zeros(1), "MAX")[0])
        except RuntimeError as error:
            raise RunError(f"{what}: another rank is gone ({error})") from error
        if failed:
            raise RunError(f"{what}: rank {failed - 1} failed, and says why")

    def close(self) -> None:
        if self.group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self.group)

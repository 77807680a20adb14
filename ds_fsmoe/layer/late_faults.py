# SPDX-License-Identifier: Apache-2.0
"""Reports choices that are out of range where looking at them in the call would make the host wait for the device.

A layer that exchanges nothing counts such a choice as none and goes on. What the device has found travels to the host
behind the forward, and is looked at with the engine's step; without a step at the next call that finds it there,
``eval()``, ``train()`` or ``destroy()``. Several ranks share what forwards in training have found at their common
step, and raise together; in evaluation, where nothing is shared, each rank raises alone, as a call on a CPU does.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.captures import is_capturing
from ds_fsmoe.execution.counts_exchange import FAULTS, RoutingError
from ds_fsmoe.execution.host_copies import HostCopy


def refuse(path: str, fault: int, rank: int | None = None) -> None:
    """Refuse choices that are out of range.

    Args:
        path: the path of the layer.
        fault: see :data:`~ds_fsmoe.execution.counts_exchange.FAULTS`; 0: nothing is wrong.
        rank: the rank that made them; without it this one.

    Raises:
        RoutingError: something is.
    """
    if fault:
        if rank is None:
            rank = dist.get_rank() if world_size_now() > 1 else 0
        raise RoutingError(f"{path or 'an MoE layer'}: what the gate of rank {rank} returned: {FAULTS[fault]}")


_MOST = 256
"""The number of forwards of layers that may wait to be looked at."""


class LateFaults:
    """Holds what the layers of one engine have found and nobody has looked at yet."""

    def __init__(self) -> None:
        self._found: list[tuple[str, torch.Tensor, HostCopy]] = []
        self._paths: tuple[str, ...] = ()
        self._device = torch.device("cpu")
        self._kept: dict[str, torch.Tensor] = {}
        self._shared: list[HostCopy] = []

    @property
    def are_shared(self) -> bool:
        """Whether ranks share what forwards in training have found."""
        return bool(self._paths)

    def begin_sharing(self, paths: Iterable[str], device: torch.device) -> None:
        """Share from now on what forwards in training find.

        Args:
            paths: the paths of the layers, the same on every rank.
            device: the device of this rank.
        """
        self._paths, self._device = tuple(paths), device

    def add(self, path: str, fault: torch.Tensor, in_training: bool) -> None:
        """Keep what a forward has found, and look at what has arrived of earlier ones.

        Args:
            path: the path of the layer.
            fault: a scalar on the device.
            in_training: whether the layer is in training.

        Raises:
            RoutingError: an earlier forward had choices out of range.
        """
        if is_capturing():  # a graph would keep what this forward found, and nothing of its replays
            return
        if in_training and self.are_shared:
            self._keep(path, fault)
            return
        self._look_at_own(waits=len(self._found) >= _MOST)
        self._found.append((path, fault, HostCopy(fault)))

    def share(self) -> None:
        """Tell all ranks what was found since the last time. Collective where ranks share it.

        Only the device waits for it, in :meth:`look` the host.
        """
        if not self.are_shared:
            return
        for path, fault, _ in self._found:
            self._keep(path, fault)
        self._found.clear()
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        faults_L = torch.stack([self._kept.pop(each, none).long() for each in self._paths])
        # The largest of each layer names the rank it is of.
        codes_L = torch.where(faults_L > 0, faults_L * dist.get_world_size() + dist.get_rank(), 0)
        with waiting("choices out of range"):
            dist.all_reduce(codes_L, op=dist.ReduceOp.MAX)
        self._shared.append(HostCopy(codes_L))

    def look(self) -> None:
        """Look at what has been found, and wait for what has not arrived.

        Raises:
            RoutingError: a forward had choices out of range; if it was shared, on every rank.
        """
        shared, self._shared = self._shared, []
        for copy in shared:
            with waiting("choices out of range"):
                codes = copy.wait().tolist()
            for path, code in zip(self._paths, codes, strict=True):
                fault, rank = divmod(code, dist.get_world_size())
                refuse(path, fault, rank)
        self._look_at_own(waits=True)

    def look_at_all(self) -> None:
        """Look at what has been found and will not be shared any more, at the end of the engine.

        Raises:
            RoutingError: a forward of this rank had choices out of range.
        """
        self._found += [(path, fault, HostCopy(fault)) for path, fault in self._kept.items()]
        self._kept.clear()
        self.look()

    def _keep(self, path: str, fault: torch.Tensor) -> None:
        earlier = self._kept.get(path)
        self._kept[path] = fault if earlier is None else torch.maximum(earlier, fault)

    def _look_at_own(self, waits: bool) -> None:
        while self._found and (waits or self._found[0][2].has_arrived()):
            path, _, copy = self._found.pop(0)
            fault = int(copy.wait())
            if fault:
                self._found.clear()
                refuse(path, fault)

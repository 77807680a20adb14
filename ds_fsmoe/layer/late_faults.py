# SPDX-License-Identifier: Apache-2.0
"""Reports choices that are out of range where looking at them in the call would make the host wait for the device.

A layer that exchanges nothing counts such a choice as none and goes on. What the device has found travels to the host
behind the forward, and is looked at with the engine's step; without a step at the next call that finds it there,
``eval()``, ``train()`` or ``destroy()``. Only jobs of one rank do so: of several, one alone would raise.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.execution.counts_exchange import FAULTS, RoutingError
from ds_fsmoe.execution.host_copies import HostCopy


def refuse(path: str, fault: int) -> None:
    """Refuse choices of this rank that are out of range.

    Args:
        path: the path of the layer.
        fault: see :data:`~ds_fsmoe.execution.counts_exchange.FAULTS`; 0: nothing is wrong.

    Raises:
        RoutingError: something is.
    """
    if fault:
        rank = dist.get_rank() if world_size_now() > 1 else 0
        raise RoutingError(f"{path or 'an MoE layer'}: what the gate of rank {rank} returned: {FAULTS[fault]}")


_MOST = 256
"""As many forwards of layers may wait to be looked at."""


class LateFaults:
    """Holds what the layers of one engine have found and nobody has looked at yet."""

    def __init__(self) -> None:
        self._found: list[tuple[str, HostCopy]] = []

    def add(self, path: str, fault: torch.Tensor) -> None:
        """Keep what a forward has found, and look at what has arrived of earlier ones.

        Args:
            path: the path of the layer.
            fault: a scalar on the device.

        Raises:
            RoutingError: an earlier forward had choices out of range.
        """
        self.look(waits=len(self._found) >= _MOST)
        self._found.append((path, HostCopy(fault)))

    def look(self, waits: bool = True) -> None:
        """Look at what has been found.

        Args:
            waits: whether to wait for what has not arrived; otherwise it is kept.

        Raises:
            RoutingError: a forward had choices out of range.
        """
        while self._found and (waits or self._found[0][1].has_arrived()):
            path, copy = self._found.pop(0)
            fault = int(copy.wait())
            if fault:
                self._found.clear()
                refuse(path, fault)

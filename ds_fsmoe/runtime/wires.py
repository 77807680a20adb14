# SPDX-License-Identifier: Apache-2.0
"""How a chunk travels between ranks: plain functions on tensors, without autograd. Each belongs on one lane.

Letters: G ranks of an EP group, P of an ESP group, N = P * G the ranks that rows came from, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

# torch renamed it in 2.13, and warns about the name that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Wires:
    """The collectives of a layer's tokens. A group of one rank is ``None``: nothing is sent then."""

    exchange: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
    """The all-to-all: ``(x, group) -> y`` with block g of dimension 0 sent to rank g; its own inverse."""
    ep_group: dist.ProcessGroup | None
    esp_group: dist.ProcessGroup | None

    @property
    def num_exchanging(self) -> int:
        """G."""
        return 1 if self.ep_group is None else self.ep_group.size()

    @property
    def num_sharing(self) -> int:
        """P."""
        return 1 if self.esp_group is None else self.esp_group.size()

    def to_experts(self, x_EcM: torch.Tensor) -> torch.Tensor:
        """[E, c, M], contiguous, to [E, c, M]: dimension 0 then runs over the ranks the rows came from, then over e.

        The way back is the same exchange.
        """
        return x_EcM if self.ep_group is None else self.exchange(x_EcM, self.ep_group)

    def gather(self, x_GecM: torch.Tensor) -> torch.Tensor:
        """[G, e, c, M], contiguous, of each of P ranks to [P * G, e, c, M]."""
        if self.esp_group is None:
            return x_GecM
        num_sharing = self.esp_group.size()
        x_NecM = x_GecM.new_empty(num_sharing * x_GecM.shape[0], *x_GecM.shape[1:])
        _all_gather(x_NecM, x_GecM, group=self.esp_group)
        return x_NecM

    def reduce(self, y_NecM: torch.Tensor) -> torch.Tensor:
        """[P * G, e, c, M], contiguous: the sum over P ranks of the blocks [G, e, c, M] meant for this one."""
        if self.esp_group is None:
            return y_NecM
        num_sharing = self.esp_group.size()
        shape = (y_NecM.shape[0] // num_sharing, *y_NecM.shape[1:])
        if y_NecM.device.type != "cpu":
            y_GecM = y_NecM.new_empty(shape)
            dist.reduce_scatter_tensor(y_GecM, y_NecM, group=self.esp_group)
            return y_GecM
        # gloo's own is an all-reduce inside, and sends twice as much.
        parts = torch.empty_like(y_NecM)
        dist.all_to_all_single(parts, y_NecM, group=self.esp_group)
        return parts.view(num_sharing, *shape).sum(dim=0)

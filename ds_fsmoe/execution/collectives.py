# SPDX-License-Identifier: Apache-2.0
"""How a chunk travels between ranks: plain functions on tensors, without autograd. Each belongs on one lane.

Letters: G ranks of an EP group, P of an ESP group, N = P * G the ranks that rows came from, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE

# torch renamed them in 2.13, and warns about the names that 2.11 has.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


ReduceMethod = Literal["exchange", "backend"]
"""Of a reduce-scatter: an all-to-all and a sum on each rank, or what the backend calls so."""
REDUCE_METHODS: tuple[ReduceMethod, ...] = ("exchange", "backend")
Leg = Callable[[torch.Tensor], torch.Tensor]
"""A part of an all-to-all, along one kind of link: [blocks, ...], contiguous, to [blocks, ...]."""
_LEG_BEFORE = {A2A_IN: A2A_IN_NODE, A2A_OUT_NODE: A2A_OUT}
"""Second part -> first part."""


@dataclass(frozen=True)
class Collectives:
    """The collectives of a layer's tokens. A group of one rank is ``None``: nothing is sent then."""

    exchange: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
    """The all-to-all: ``(x, group) -> y`` with block g of dimension 0 sent to rank g; its own inverse."""
    ep_group: dist.ProcessGroup | None
    esp_group: dist.ProcessGroup | None
    legs: Mapping[str, Leg] = field(default_factory=dict)
    """Where the all-to-all is in two parts for two lanes: kind of task -> its part. A2A_IN_NODE and then A2A_IN are
    what ``exchange`` is, A2A_OUT and then A2A_OUT_NODE are it once more. The first takes a block for each of G ranks,
    the second gives a block from each; how many there are in between is their own affair."""
    reduces: tuple[tuple[float, ReduceMethod], ...] = ()
    """(from so many bytes on, how :meth:`reduce` is done), ascending; below the first, and where there is none, as is
    best on this kind of device."""

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

    def blocks(self, x_EcM: torch.Tensor) -> torch.Tensor:
        """[E, c, M], contiguous, as [G, e, c, M]: one block for each rank, or from each."""
        ranks = self.num_exchanging
        return x_EcM.view(ranks, x_EcM.shape[0] // ranks, *x_EcM.shape[1:])

    def ready(self, kind: str, x_EcM: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What a task of the all-to-all does with a chunk, to be called any number of times: for measuring it.

        Collective, as is every call of what it returns.

        Args:
            kind: A2A_IN, A2A_OUT, or, where there are legs, their kinds.
            x_EcM: [E, c, M], contiguous.
        """
        if kind not in self.legs:
            return lambda: self.to_experts(x_EcM)
        blocks, leg, before = self.blocks(x_EcM), self.legs[kind], _LEG_BEFORE.get(kind)
        given = blocks if before is None else self.legs[before](blocks)
        return lambda: leg(given)

    def gather(self, x_GecM: torch.Tensor) -> torch.Tensor:
        """[G, e, c, M], contiguous, of each of P ranks to [P * G, e, c, M]."""
        if self.esp_group is None:
            return x_GecM
        num_sharing = self.esp_group.size()
        x_NecM = x_GecM.new_empty(num_sharing * x_GecM.shape[0], *x_GecM.shape[1:])
        all_gather(x_NecM, x_GecM, group=self.esp_group)
        return x_NecM

    def reduce(self, y_NecM: torch.Tensor) -> torch.Tensor:
        """[P * G, e, c, M], contiguous: the sum over P ranks of the blocks [G, e, c, M] meant for this one."""
        if self.esp_group is None:
            return y_NecM
        num_sharing = self.esp_group.size()
        shape = (y_NecM.shape[0] // num_sharing, *y_NecM.shape[1:])
        if self.reduce_method(y_NecM) == "backend":
            y_GecM = y_NecM.new_empty(shape)
            _reduce_scatter(y_GecM, y_NecM, group=self.esp_group)
            return y_GecM
        parts = torch.empty_like(y_NecM)
        dist.all_to_all_single(parts, y_NecM, group=self.esp_group)
        return parts.view(num_sharing, *shape).sum(dim=0)

    def reduce_method(self, y_NecM: torch.Tensor) -> ReduceMethod:
        """How this one is reduced."""
        # gloo's own is an all-reduce inside, and sends twice as much.
        method: ReduceMethod = "exchange" if y_NecM.device.type == "cpu" else "backend"
        for from_bytes, name in self.reduces:
            if y_NecM.nbytes >= from_bytes:
                method = name
        return method

# SPDX-License-Identifier: Apache-2.0
"""The collectives that move a chunk between ranks: plain functions on tensors, without autograd, each for one lane.

Letters: G ranks of an EP group, P of an ESP group, N = P * G the ranks that rows came from, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from ds_fsmoe.execution.node_links import NodeLinks, exchange_sized
from ds_fsmoe.execution.row_sizes import ALONE, Block, ChunkSizes, PassedOn
from ds_fsmoe.execution.wires import FULL, Wires
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE

# torch renamed them in 2.13, and warns about the names that 2.11 has.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


ReduceMethod = Literal["exchange", "backend"]
"""How a reduce-scatter is done: as an all-to-all and a sum on each rank, or as the backend's own reduce-scatter."""
REDUCE_METHODS: tuple[ReduceMethod, ...] = ("exchange", "backend")
Leg = Callable[[torch.Tensor], torch.Tensor]
"""One part of an all-to-all, along one kind of link: it turns contiguous [blocks, ...] into [blocks, ...]."""
RowLeg = Callable[[torch.Tensor, ChunkSizes], torch.Tensor]
"""The same for rows: it turns [rows, ...] into [rows, ...]."""
RowExchange = Callable[[torch.Tensor, dist.ProcessGroup, ChunkSizes], torch.Tensor]
"""An all-to-all of rows, see :meth:`AllToAllBase.exchange_rows`."""
_LEG_BEFORE = {A2A_IN: A2A_IN_NODE, A2A_OUT_NODE: A2A_OUT}
"""Maps the second part to the first part (second -> first)."""


@dataclass(frozen=True)
class Collectives:
    """The collectives of a layer's tokens. A group of one rank is ``None``; then nothing is sent."""

    exchange: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
    """The all-to-all: ``(x, group) -> y`` sends block g of dimension 0 to rank g and is its own inverse."""
    ep_group: dist.ProcessGroup | None
    esp_group: dist.ProcessGroup | None
    legs: Mapping[str, Leg] = field(default_factory=dict)
    """The two parts of an all-to-all that is split over two lanes, as kind of task -> part. A2A_IN_NODE and then A2A_IN
    equal ``exchange``, and so do A2A_OUT and then A2A_OUT_NODE. The first part takes one block for each of G ranks, the
    second returns one block from each; the number of blocks in between is up to the parts."""
    reduces: tuple[tuple[float, ReduceMethod], ...] = ()
    """Pairs (from this many bytes on, how :meth:`reduce` is done), ascending. Below the first, or with no pairs, the
    method that is best on this kind of device is used."""

    exchange_rows: RowExchange | None = None
    """The all-to-all of rows; ``None``: the all-to-all is for slots only."""
    row_legs: Mapping[str, RowLeg] = field(default_factory=dict)
    """The same as :attr:`legs`, for rows."""
    block: Block = ALONE
    """The ranks that share the experts; they tell each other how many rows they send."""
    passes_on: PassedOn | None = None
    """Of which rows that rest on other ranks on their way those have to know how many they are."""
    nodes: NodeLinks | None = None
    """The two levels of the EP group, where each token crosses to a node once; rows of their own kind go there."""
    wires: Wires = FULL
    """The wires say in which format rows travel between the ranks of the EP group."""

    @property
    def num_exchanging(self) -> int:
        """The number of ranks in the EP group, G."""
        return 1 if self.ep_group is None else self.ep_group.size()

    @property
    def num_sharing(self) -> int:
        """The number of ranks in the ESP group, P."""
        return 1 if self.esp_group is None else self.esp_group.size()

    def to_experts(self, x_EcM: torch.Tensor) -> torch.Tensor:
        """Exchange [E, c, M], contiguous, to [E, c, M]: dimension 0 then runs over the source ranks, then over e.

        The way back is the same exchange.
        """
        return x_EcM if self.ep_group is None else self.exchange(x_EcM, self.ep_group)

    def blocks(self, x_EcM: torch.Tensor) -> torch.Tensor:
        """View contiguous [E, c, M] as [G, e, c, M]: one block for each rank, or from each rank."""
        ranks = self.num_exchanging
        return x_EcM.view(ranks, x_EcM.shape[0] // ranks, *x_EcM.shape[1:])

    def ready(self, kind: str, x_EcM: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what a task of the all-to-all does with a chunk, for measuring; it may be called any number of times.

        Collective, and so is every call of the returned function.

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
        """Gather contiguous [G, e, c, M] from each of P ranks into [P * G, e, c, M]."""
        if self.esp_group is None:
            return x_GecM
        num_sharing = self.esp_group.size()
        x_NecM = x_GecM.new_empty(num_sharing * x_GecM.shape[0], *x_GecM.shape[1:])
        all_gather(x_NecM, x_GecM, group=self.esp_group)
        return x_NecM

    def reduce(self, y_NecM: torch.Tensor) -> torch.Tensor:
        """Sum the blocks [G, e, c, M] meant for this rank over P ranks; the input is contiguous [P * G, e, c, M]."""
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

    def send_rows(self, x_RM: torch.Tensor, sizes: ChunkSizes) -> torch.Tensor:
        """Exchange the rows of a chunk, contiguous, those for rank 0 first; on the way back with ``sizes.back``."""
        if self.ep_group is None:
            return x_RM
        assert self.exchange_rows is not None
        return self.exchange_rows(x_RM, self.ep_group, sizes)

    def gather_rows(self, x_RM: torch.Tensor, sizes: ChunkSizes) -> torch.Tensor:
        """Gather the rows of each of P ranks, contiguous, not equally many: those of rank 0 first."""
        if self.esp_group is None:
            return x_RM
        num_sharing = self.num_sharing
        copies = torch.cat([x_RM] * num_sharing)
        return exchange_sized(copies, [len(x_RM)] * num_sharing, sizes.gathered, self.esp_group)

    def reduce_rows(self, y_RM: torch.Tensor, sizes: ChunkSizes) -> torch.Tensor:
        """Sum the rows meant for this rank over P ranks; the input is as :meth:`gather_rows` returns it."""
        if self.esp_group is None:
            return y_RM
        num_sharing, own = self.num_sharing, sizes.gathered[self.esp_group.rank()]
        parts = exchange_sized(y_RM, sizes.gathered, [own] * num_sharing, self.esp_group)
        return parts.view(num_sharing, own, *y_RM.shape[1:]).sum(dim=0)

    def reduce_method(self, y_NecM: torch.Tensor) -> ReduceMethod:
        """Return the method that reduces this tensor."""
        # gloo's own is an all-reduce inside, and sends twice as much.
        method: ReduceMethod = "exchange" if y_NecM.device.type == "cpu" else "backend"
        for from_bytes, name in self.reduces:
            if y_NecM.nbytes >= from_bytes:
                method = name
        return method

# SPDX-License-Identifier: Apache-2.0
"""The collectives that send a chunk between ranks: functions on tensors without autograd, each for one lane.

``ds_fsmoe.layer.parts`` creates one :class:`Collectives` per layer, and the bodies in ``phase`` call it. ``node_links``
has the exchanges of node-deduplicated dispatch.

Letters: G ranks of an EP group, P of an ESP group, N = P * G the ranks that rows came from, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from ds_fsmoe.execution.node_links import NodeLinks, exchange_sized
from ds_fsmoe.execution.row_sizes import ALONE, ChunkSizes, ForwardedRows, RowBlock
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE
from ds_fsmoe.planning.workload import NODE_DEDUPLICATED, AllToAll

# ---- Communication dtypes: the model's own, or bytes of 8-bit floating-point numbers with a scale for each row
#
# A row is sent as M bytes and the four of its scale, in one message with the others. The order of collectives and the
# number of rows do not change. The scale is the row's largest magnitude over the largest number of the format, so a
# row means the same in every chunk. Sums over ranks are computed in the layer's own dtype.
#
# Letters: R rows, M width.


CommDtype = Literal["model", "fp8"]
"""``"model"``: rows are sent in the layer's own dtype."""
FP8 = torch.float8_e4m3fn
"""Three bits of mantissa: with a scale for each row its range is enough for gradients too."""
_LARGEST = torch.finfo(FP8).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny
SCALE_BYTES = 4


@dataclass(frozen=True)
class CommDtypes:
    """Holds the communication dtypes of a layer. A gradient has the dtype of its rows' exchange in the forward."""

    dispatch: CommDtype = "model"
    """The dtype of rows to the experts, and of their gradients."""
    combine: CommDtype = "model"
    """The dtype of results to the tokens, and of their gradients."""

    def of(self, direction: Literal["forward", "backward"]) -> tuple[CommDtype, CommDtype]:
        """Return the dtypes of a phase's first and of its second all-to-all."""
        return (self.dispatch, self.combine) if direction == "forward" else (self.combine, self.dispatch)

    @property
    def narrow(self) -> tuple[bool, bool]:
        """Return whether rows are converted for dispatch, and for combine."""
        return self.dispatch != "model", self.combine != "model"

    def shares(self, width: int, element_bytes: int) -> tuple[float, float]:
        """Return the bytes of a row of this width in each communication dtype, relative to the layer's own dtype."""
        return _share(self.dispatch, width, element_bytes), _share(self.combine, width, element_bytes)


FULL = CommDtypes()
"""Rows are sent in the layer's own dtype in both all-to-alls."""


def _share(comm_dtype: CommDtype, width: int, element_bytes: int) -> float:
    return 1.0 if comm_dtype == "model" or not width else (width + SCALE_BYTES) / (width * element_bytes)


def quantized_rows(x_RM: torch.Tensor) -> torch.Tensor:
    """Return rows as bytes, [R, M + 4] uint8. A row with a nan or infinite element has no finite element afterwards."""
    rows_RM = x_RM.flatten(1).float()
    # A smaller scale would have too few bits; for a row of zeros any scale is right.
    scale_R1 = torch.linalg.vector_norm(rows_RM, torch.inf, dim=1, keepdim=True).div_(_LARGEST).clamp_(min=_LEAST_SCALE)
    bytes_RB = torch.empty(len(rows_RM), rows_RM.shape[1] + SCALE_BYTES, dtype=torch.uint8, device=x_RM.device)
    # A quotient may exceed the largest number by its last bit, and is rounded to that number.
    bytes_RB[:, :-SCALE_BYTES] = (rows_RM / scale_R1).to(FP8).view(torch.uint8)
    bytes_RB[:, -SCALE_BYTES:] = scale_R1.view(torch.uint8)
    return bytes_RB


def dequantized_rows(bytes_RB: torch.Tensor, dtype: torch.dtype, row_shape: torch.Size) -> torch.Tensor:
    """Return rows from :func:`quantized_rows` in a dtype, each in a shape."""
    # Copied so that scales are aligned as floats.
    scale_R1 = bytes_RB[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    rows_RM = bytes_RB[:, :-SCALE_BYTES].contiguous().view(FP8).float().mul_(scale_R1)
    return rows_RM.to(dtype).view(len(bytes_RB), *row_shape)


# ---- The collectives that send a chunk between ranks


# torch renamed them in 2.13, and warns about the names that 2.11 has.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


ReduceMethod = Literal["exchange", "backend"]
"""The method of a reduce-scatter: an all-to-all and a sum on each rank, or the backend's own reduce-scatter."""
REDUCE_METHODS: tuple[ReduceMethod, ...] = ("exchange", "backend")
Leg = Callable[[torch.Tensor], torch.Tensor]
"""One part of an all-to-all, along one kind of link: it turns contiguous [blocks, ...] into [blocks, ...]."""
RowLeg = Callable[[torch.Tensor, ChunkSizes], torch.Tensor]
"""The same for rows: it turns [rows, ...] into [rows, ...]."""
RowExchange = Callable[[torch.Tensor, dist.ProcessGroup, ChunkSizes], torch.Tensor]
"""An all-to-all of rows, see :meth:`AllToAllBase.exchange_rows`."""
_LEG_BEFORE = {A2A_IN: A2A_IN_NODE, A2A_OUT_NODE: A2A_OUT}
"""Second part of an all-to-all -> first part."""


@dataclass(frozen=True)
class Collectives:
    """Runs the collectives of a layer's tokens. A group of one rank is ``None``, and its collectives return their
    input."""

    exchange: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]
    """The all-to-all: ``(x, group) -> y`` sends block g of dimension 0 to rank g and is its own inverse."""
    ep_group: dist.ProcessGroup | None
    esp_group: dist.ProcessGroup | None
    legs: Mapping[str, Leg] = field(default_factory=dict)
    """The two parts of an all-to-all that is split over two lanes, as kind of task -> part. A2A_IN_NODE and then A2A_IN
    equal ``exchange``, and so do A2A_OUT and then A2A_OUT_NODE. The first part takes one block for each of G ranks, the
    second returns one block from each; the number of blocks in between depends on the algorithm."""
    reduces: tuple[tuple[float, ReduceMethod], ...] = ()
    """Pairs (from this many bytes on, method of :meth:`reduce`), ascending. Below the first, and without pairs, the
    best method of the kind of device is used."""

    exchange_rows: RowExchange | None = None
    """The all-to-all of rows; ``None``: the all-to-all is for slots only."""
    row_legs: Mapping[str, RowLeg] = field(default_factory=dict)
    """The same as :attr:`legs`, for rows."""
    block: RowBlock = ALONE
    """The ranks that share the experts; they exchange their numbers of rows."""
    forwarded: ForwardedRows | None = None
    """The rows that other ranks forward, whose counts these ranks need."""
    nodes: NodeLinks | None = None
    """The two levels of the EP group for node-deduplicated dispatch; else ``None``."""
    comm_dtypes: CommDtypes = FULL
    """The dtypes in which rows are sent between the ranks of the EP group."""
    why_flat: str = ""
    """The reason for the flat all-to-all where another was requested."""

    @property
    def planned(self) -> AllToAll:
        """Return the planner's name for the all-to-all."""
        if self.nodes is not None:
            return NODE_DEDUPLICATED
        return "2dh" if self.legs else "flat"

    @property
    def num_exchanging(self) -> int:
        """Return the number of ranks in the EP group, G."""
        return 1 if self.ep_group is None else self.ep_group.size()

    @property
    def num_sharing(self) -> int:
        """Return the number of ranks in the ESP group, P."""
        return 1 if self.esp_group is None else self.esp_group.size()

    def to_experts(self, x_EcM: torch.Tensor) -> torch.Tensor:
        """Exchange [E, c, M], contiguous, to [E, c, M]: dimension 0 then runs over the source ranks, then over e.

        Combine is the same exchange.
        """
        return x_EcM if self.ep_group is None else self.exchange(x_EcM, self.ep_group)

    def blocks(self, x_EcM: torch.Tensor) -> torch.Tensor:
        """Return contiguous [E, c, M] as a view [G, e, c, M]: one block for each rank, or from each rank."""
        ranks = self.num_exchanging
        return x_EcM.view(ranks, x_EcM.shape[0] // ranks, *x_EcM.shape[1:])

    def ready(self, kind: str, x_EcM: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that runs a task of the all-to-all on a chunk, for measurements. It may be called
        repeatedly.

        Collective, and so is every call of the returned function.

        Args:
            kind: A2A_IN, A2A_OUT, or, for an all-to-all in two parts, their kinds.
            x_EcM: [E, c, M], contiguous.
        """
        if kind not in self.legs:
            return lambda: self.to_experts(x_EcM)
        blocks, leg, before = self.blocks(x_EcM), self.legs[kind], _LEG_BEFORE.get(kind)
        given = blocks if before is None else self.legs[before](blocks)
        return lambda: leg(given)

    def gather(self, x_GecM: torch.Tensor) -> torch.Tensor:
        """Gather contiguous [G, e, c, M] from each of P ranks, and return [P * G, e, c, M]."""
        if self.esp_group is None:
            return x_GecM
        num_sharing = self.esp_group.size()
        x_NecM = x_GecM.new_empty(num_sharing * x_GecM.shape[0], *x_GecM.shape[1:])
        all_gather(x_NecM, x_GecM, group=self.esp_group)
        return x_NecM

    def reduce(self, y_NecM: torch.Tensor) -> torch.Tensor:
        """Sum the blocks [G, e, c, M] for this rank over P ranks; the input is contiguous [P * G, e, c, M]."""
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
        """Exchange the rows of a chunk, contiguous, those for rank 0 first; combine passes ``sizes.back``."""
        if self.ep_group is None:
            return x_RM
        return self.exchange_rows(x_RM, self.ep_group, sizes)

    def gather_rows(self, x_RM: torch.Tensor, sizes: ChunkSizes) -> torch.Tensor:
        """Gather the rows of each of P ranks, contiguous and of unequal number, those of rank 0 first."""
        if self.esp_group is None:
            return x_RM
        num_sharing = self.num_sharing
        copies = torch.cat([x_RM] * num_sharing)
        return exchange_sized(copies, [len(x_RM)] * num_sharing, sizes.gathered, self.esp_group)

    def reduce_rows(self, y_RM: torch.Tensor, sizes: ChunkSizes) -> torch.Tensor:
        """Sum the rows for this rank over P ranks; the input has the layout of :meth:`gather_rows`."""
        if self.esp_group is None:
            return y_RM
        num_sharing, own = self.num_sharing, sizes.gathered[self.esp_group.rank()]
        parts = exchange_sized(y_RM, sizes.gathered, [own] * num_sharing, self.esp_group)
        return parts.view(num_sharing, own, *y_RM.shape[1:]).sum(dim=0)

    def reduce_method(self, y_NecM: torch.Tensor) -> ReduceMethod:
        """Return the method that reduces this tensor."""
        # gloo's reduce-scatter is an all-reduce inside, and sends twice as much.
        method: ReduceMethod = "exchange" if y_NecM.device.type == "cpu" else "backend"
        for from_bytes, name in self.reduces:
            if y_NecM.nbytes >= from_bytes:
                method = name
        return method

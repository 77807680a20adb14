# SPDX-License-Identifier: Apache-2.0
"""Tells every rank that shares the experts of a layer how many rows the others send it.

Each rank tells each other one, in one exchange ahead of the first chunk, how many of its rows go to that one's experts
in each segment of the tokens (:mod:`~ds_fsmoe.execution.token_cuts`). With that a rank knows all sizes of both phases.
The host waits for these numbers once per call: what is received cannot be given memory otherwise.

Letters: E experts of all ranks, e experts on this rank, T segments, r chunks, G ranks of an EP group, P of an ESP
group, N = P * G the ranks that rows come from, B the same ranks in the order of their group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.host_copies import HostCopy
from ds_fsmoe.execution.row_orders import moves
from ds_fsmoe.execution.row_sizes import Block, ChunkSizes, PhaseSizes, RowSizes, expert_ends, sizes_of_phases
from ds_fsmoe.execution.same_forward import Forward, faults_of, headed
from ds_fsmoe.execution.token_cuts import TokenCuts

FAULTS = {
    1: "slots_KS must be in 0..num_experts * capacity, and is not everywhere",
    2: "counts_E must be at least the number of slots taken of each expert, and is less",
    3: "slots_KS must be in 0..num_experts * capacity, and counts_E at least the number of slots taken of each expert; "
    "neither holds",
}
"""Number of a fault -> what is wrong with a decision."""


class RoutingError(ValueError):
    """A gate's decision contradicts itself. Raised on every rank that shares the experts."""


def raise_fault(headers_N: np.ndarray, block: Block, name: str) -> None:
    """Raise what is wrong with the decision of a rank, if anything is.

    Args:
        headers_N: the header of each source: its fault and its forward.
        block: the ranks that share the experts.
        name: the layer's name.

    Raises:
        RoutingError: a decision contradicts itself.
        DisagreementError: ranks are in different forwards.
    """
    faults_N = faults_of(headers_N, block)
    if not faults_N.any():
        return
    source = int(np.flatnonzero(faults_N)[0])
    index = block.sources[source]
    rank = index if block.group is None else dist.get_global_rank(block.group, index)
    raise RoutingError(
        f"{name or 'an MoE layer'}: what the gate of rank {rank} returned: {FAULTS[int(faults_N[source])]}"
    )


@dataclass
class CountsExchange:
    """An exchange of counts, while it travels. Made by :meth:`begin`."""

    block: Block
    cuts: TokenCuts
    own_ET: torch.Tensor
    received_BX: torch.Tensor
    """[B, 1 + e * T + G * T] int64: of each rank its header, its rows for each expert here in each segment, and, only
    where an all-to-all passes rows on, its rows for each rank of its EP group."""
    work: Any
    name: str

    @classmethod
    def begin(
        cls,
        counts_ET: torch.Tensor,
        fault: torch.Tensor,
        block: Block,
        cuts: TokenCuts,
        passes_on: bool = False,
        name: str = "",
        forward: Forward | None = None,
    ) -> CountsExchange:
        """Begin the exchange. Collective over the block.

        Args:
            counts_ET: [E, T] int64, the rows of this rank for each expert in each segment.
            fault: scalar int64: 0, or what is wrong with the decision, see :data:`FAULTS`.
            block: the ranks that share the experts.
            cuts: the cuts of the tokens.
            passes_on: whether the all-to-all passes rows on over other ranks, which then have to know their sizes.
            name: the layer's name, for messages.
            forward: the forward, which has to be that of all ranks; ``None``: not known.
        """
        ranks, num_segments = block.num_exchanging, cuts.num_segments
        own_GX = counts_ET.reshape(ranks, -1)
        parts = [headed(fault, forward).expand(ranks, 1), own_GX]
        if passes_on:
            totals_GT = own_GX.view(ranks, -1, num_segments).sum(1)
            parts.append(totals_GT.reshape(1, -1).expand(ranks, -1))
        sent_BX = torch.cat(parts, dim=1)
        if (eps := [ep for ep, _ in block.places]) != list(range(ranks)):
            sent_BX = torch.stack([sent_BX[ep] for ep in eps])
        if block.group is None:
            return cls(block, cuts, counts_ET, sent_BX, None, name)
        received_BX = torch.empty_like(sent_BX)
        work = dist.all_to_all_single(received_BX, sent_BX, group=block.group, async_op=True)
        return cls(block, cuts, counts_ET, received_BX, work, name)

    def wait(self) -> RowSizes[PhaseSizes]:
        """Return the sizes of the call. The host waits here for the device.

        Raises:
            RoutingError: the decision of a rank contradicts itself.
            DisagreementError: ranks are in different forwards.
        """
        with waiting("the exchange of counts of", self.name):
            if self.work is not None:
                self.work.wait()
            received_NX = self.received_BX
            if self.block.sources != tuple(range(len(self.block.sources))):
                received_NX = torch.stack([received_NX[source] for source in self.block.sources])
            host = HostCopy(torch.cat([self.own_ET.reshape(-1), received_NX.reshape(-1)])).wait().numpy()
        num_local = self.own_ET.shape[0] // self.block.num_exchanging
        here = 1 + num_local * self.cuts.num_segments
        own_ET = host[: self.own_ET.numel()].reshape(self.own_ET.shape)
        host_NX = host[self.own_ET.numel() :].reshape(received_NX.shape)
        raise_fault(host_NX[:, 0], self.block, self.name)
        shape = len(host_NX), num_local, self.cuts.num_segments
        arrived_NeT = received_NX[:, 1:here].reshape(shape)
        counts = _Counts(self.block, self.cuts, own_ET, host_NX[:, 1:here].reshape(shape), host_NX[:, here:])
        return counts.sizes(self.own_ET, arrived_NeT)


@dataclass(frozen=True)
class _Counts:
    """The counts of a call on the host, from which all sizes follow."""

    block: Block
    cuts: TokenCuts
    own_ET: np.ndarray
    arrived_NeT: np.ndarray
    totals_NX: np.ndarray

    def sizes(self, own_ET: torch.Tensor, arrived_NeT: torch.Tensor) -> RowSizes[PhaseSizes]:
        """Return the sizes.

        Args:
            own_ET, arrived_NeT: the counts on the device.
        """
        phase = partial(self._phase, arrived_NeT)
        return sizes_of_phases(self.cuts, int(self.own_ET.sum()), phase, own_ET, arrived_NeT)

    def _phase(self, arrived_NeT: torch.Tensor, degree: int) -> PhaseSizes:
        ranks, sharing, cuts = self.block.num_exchanging, self.block.num_sharing, self.cuts
        first_of_chunks = [first for first, _ in cuts.chunks(degree)]

        def of_chunks(counts: np.ndarray) -> np.ndarray:
            return np.add.reduceat(counts, first_of_chunks, axis=-1)

        to_Gr = of_chunks(self.own_ET.reshape(ranks, -1, self.cuts.num_segments).sum(1))
        arrived_Ner = of_chunks(self.arrived_NeT)
        from_Nr = arrived_Ner.sum(1)
        own = slice(self.block.esp_index * ranks, (self.block.esp_index + 1) * ranks)
        gathered_Pr = from_Nr.reshape(sharing, ranks, degree).sum(1)
        between_rGG: list[Any] = [None] * degree
        if self.totals_NX.shape[1]:
            totals_GGT = self.totals_NX[own].reshape(ranks, ranks, -1)
            between_rGG = of_chunks(totals_GGT).transpose(2, 0, 1).tolist()
        parts = (to_Gr, from_Nr[own], gathered_Pr, arrived_Ner.sum(0))
        chunks = zip(*(each.T.tolist() for each in parts), between_rGG, strict=True)
        starts = (0, *np.cumsum(to_Gr.sum(0)).tolist())
        order = None
        if len(arrived_Ner) > 1 and (arrived_Ner.shape[1] > 1 or degree < cuts.num_segments):
            num_rows = int(from_Nr.sum())
            places = (degree, "by_source"), (degree, "by_expert")
            order = moves(arrived_NeT, cuts, *places, num_rows, of_chunk=True)
        ends = expert_ends(cuts, degree, arrived_NeT)
        return PhaseSizes(tuple(ChunkSizes(*each) for each in chunks), starts, order, ends)

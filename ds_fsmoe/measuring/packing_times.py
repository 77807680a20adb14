# SPDX-License-Identifier: Apache-2.0
"""Times the micro-ops of experts and of all-to-alls, with more and more experts on each rank, and packs by them.

The engine calls it when it is made, for the number of experts on each rank. Weights and rows are made up: by then there
is a model, and no batch yet. A micro-op has the bytes that are asked for; where that would take long, smaller ones are
timed, and a line through them gives its time.

Letters: E experts of all ranks, e of a rank, R rows, M width, H width of an expert, F = 2 * H where experts are gated,
I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.nn import functional

from ds_fsmoe.distributed.fail_together import from_first_rank
from ds_fsmoe.distributed.groups import passing_communicators
from ds_fsmoe.distributed.topology import Layout
from ds_fsmoe.measuring.stopwatch import Prepare, Stopwatch, at_least
from ds_fsmoe.planning.cost import fit
from ds_fsmoe.planning.lina.packing import Packing, pack

CPU_BYTES = 1 << 20
"""The size of the largest micro-op that is timed on CPUs, whose links are slow."""
_PARTS = (8, 4, 2, 1)
"""The sizes that are timed, as parts of the largest."""


@dataclass(frozen=True)
class ExpertSizes:
    """Holds the sizes of one kind of layer's experts."""

    num_experts: int
    """E."""
    width: int
    """M."""
    hidden: int
    """H, of a whole expert."""
    has_gate: bool
    """Whether the first product gives gate and value."""
    dtype: torch.dtype
    """The type in which rows are sent and multiplied."""
    is_grouped: bool = False
    """Whether one grouped product computes all experts of a rank, as in training; otherwise one product each."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row as it is sent between ranks."""
        return self.width * self.dtype.itemsize


def pack_by_times(
    watch: Stopwatch,
    layers: Mapping[ExpertSizes, int],
    layouts: Mapping[int, Layout],
    micro_op_bytes: int,
) -> Packing:
    """Choose how many experts each rank has by the times of micro-ops, of all layers together. Collective over all
    ranks of the job: the slowest rank's medians count, and the first rank decides.

    Args:
        watch: the stopwatch of the job.
        layers: the sizes of experts -> how many layers have such.
        layouts: number of ranks over which all experts can be spread -> the layout of the job with it.
        micro_op_bytes: the bytes of a micro-op.

    Raises:
        MeasuringError: on every rank, if one has failed.
    """

    def of_layers_ms(
        what: str, preparing: Callable[[ExpertSizes], Prepare], group: dist.ProcessGroup | None = None
    ) -> float:
        times_ms = 0.0
        for sizes, count in layers.items():
            most = max(1, micro_op_bytes // sizes.row_bytes)
            rows = _timed_rows(most, sizes.row_bytes, watch.device)
            timed_ms = watch.times_ms(what, rows, preparing(sizes), group)
            times_ms += count * fit(rows, timed_ms).cost.ms(most)
        # Ranks go on alike: what they do next is collective.
        return from_first_rank(times_ms)

    def experts_ms(ep_size: int) -> float:
        sharing = layouts[ep_size].esp_size
        return of_layers_ms(
            f"experts of {ep_size} ranks", lambda sizes: _experts(sizes, ep_size, sharing, watch.device)
        )

    def alltoall_ms(ep_size: int) -> float:
        with passing_communicators([layouts[ep_size].ep], "fsmoe_packing") as (group,):
            return of_layers_ms(
                f"an all-to-all of {ep_size} ranks", lambda sizes: _alltoall(sizes, group, watch.device), group
            )

    with torch.no_grad(), torch.random.fork_rng([watch.device] if watch.device.type == "cuda" else []):
        return pack([each.num_experts for each in layers], list(layouts), experts_ms, alltoall_ms)


def _timed_rows(most: int, row_bytes: int, device: torch.device) -> list[int]:
    """Return the numbers of rows that are timed, ascending: at least three, up to a micro-op or what is quick."""
    largest = most if device.type == "cuda" else min(most, max(1, CPU_BYTES // row_bytes))
    return at_least(3, (max(1, largest // parts) for parts in _PARTS))


def _experts(sizes: ExpertSizes, ep_size: int, sharing: int, device: torch.device) -> Prepare:
    """Return a function that prepares the forward of one rank's experts on so many rows of this rank, as many for each
    expert; ``sharing`` ranks have a part of each expert, and gather each other's rows."""
    at = {"device": device, "dtype": sizes.dtype}
    num_local, hidden = sizes.num_experts // ep_size, sizes.hidden // sharing
    weights: list[torch.Tensor] = []

    def prepare(rows: int) -> Callable[[], object]:
        if not weights:
            # Of each its own memory, as the experts have it.
            up_FM = torch.randn(hidden * (1 + sizes.has_gate), sizes.width, **at)
            down_MH = torch.randn(sizes.width, hidden, **at)
            weights.extend(each.repeat(num_local, 1, 1) for each in (up_FM, down_MH))
        up_eFM, down_eMH = weights
        x_RM = torch.randn(rows * sharing, sizes.width, **at)
        bounds = [len(x_RM) * each // num_local for each in range(num_local + 1)]
        ends_e = torch.tensor(bounds[1:], dtype=torch.int32, device=device)

        def product(x_RI: torch.Tensor, weight_eOI: torch.Tensor) -> torch.Tensor:
            if sizes.is_grouped:
                return functional.grouped_mm(x_RI, weight_eOI.transpose(1, 2), offs=ends_e)
            y_RO = x_RI.new_empty(len(x_RI), weight_eOI.shape[1])
            for weight_OI, (first, stop) in zip(weight_eOI, pairwise(bounds), strict=True):
                torch.mm(x_RI[first:stop], weight_OI.t(), out=y_RO[first:stop])
            return y_RO

        def run() -> None:
            h_RF = product(x_RM, up_eFM)
            if sizes.has_gate:
                gate_RH, value_RH = h_RF.chunk(2, dim=1)
                h_RH = functional.silu(gate_RH) * value_RH
            else:
                h_RH = functional.relu(h_RF)
            product(h_RH, down_eMH)

        return run

    return prepare


def _alltoall(sizes: ExpertSizes, group: dist.ProcessGroup, device: torch.device) -> Prepare:
    """Return a function that prepares an all-to-all of so many rows of each rank of a group, spread equally."""

    def prepare(rows: int) -> Callable[[], object]:
        x_RM = torch.zeros(-(-rows // group.size()) * group.size(), sizes.width, device=device, dtype=sizes.dtype)
        y_RM = torch.empty_like(x_RM)
        return lambda: dist.all_to_all_single(y_RM, x_RM, group=group)

    return prepare

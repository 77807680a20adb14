# SPDX-License-Identifier: Apache-2.0
"""Chooses over how many ranks the experts of a Hugging Face model are spread, by expert packing (Lina, ATC'23)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.contract import contract_of, shape_of
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError
from ds_fsmoe.distributed.topology import layout, world_size_now
from ds_fsmoe.layer.own_experts_marks import loaded_part
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.measuring.packing_times import ExpertSizes, pack_by_times
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.planning.chunks import MICRO_OP_BYTES
from ds_fsmoe.planning.packing import packings


def packed_ep_size(
    block: FSMoEBlock,
    experts: Iterable[nn.Module],
    ep_sizes: Iterable[int],
    device: torch.device,
    expert_before_data: bool,
) -> int:
    """Return over how many ranks experts are spread so that their micro-ops take as long as the all-to-all's.

    Collective over all ranks of the job, unless the modules were loaded with a part of their experts: that was chosen
    when they were made.

    Args:
        block: the options.
        experts: the modules of experts.
        ep_sizes: the numbers of ranks over which all of them can be spread.
        device: the device of this rank.
        expert_before_data: see :func:`~ds_fsmoe.distributed.topology.layout`.

    Raises:
        ConfigError: on every rank, where nothing is to follow from a clock; names the size that would have been chosen.
        MeasuringError: on every rank, if one has failed.
    """
    modules = list(experts)
    loaded = {part.ep_size for each in modules if (part := loaded_part(each)) is not None}
    if loaded:
        return max(loaded)
    sizes = list(ep_sizes)
    if len(packings(sizes)) == 1:
        log_on_rank_0(f"expert packing (lina): ep_size = {max(sizes)}, as these ranks and experts have no half of it")
        return max(sizes)
    asked = block.gradient_partition.asked_bytes
    found = pack_by_times(
        Stopwatch(device),
        Counter(map(_sizes_of, modules)),
        {each: layout(world_size_now(), each, block.esp_size, expert_before_data) for each in sizes},
        MICRO_OP_BYTES if asked is None else asked,
    )
    wanted = f'write "ep_size": {found.ep_size}'
    if block.deterministic:
        raise ConfigError(
            f'{BLOCK}.placement.policy = "lina": goes against {BLOCK}.deterministic = true, as it follows from a '
            f"clock; it would choose ep_size = {found.ep_size} here: {wanted} and leave the policy out"
        )
    per_rank = " or ".join(map(str, found.experts_per_rank(found.ep_size)))
    log_on_rank_0(
        f"expert packing (lina): ep_size = {found.ep_size}, {per_rank} experts of a layer on each rank; {wanted} to "
        f"keep it in later runs\n{found.table()}"
    )
    return found.ep_size


def _sizes_of(module: nn.Module) -> ExpertSizes:
    """Return the sizes of a module of experts that has all of them."""
    contract = contract_of(module)
    up = getattr(module, contract.up)
    num_experts, *inner = shape_of(up) or (0, 0, 0)
    width, inside = inner if contract.is_transposed else inner[::-1]
    return ExpertSizes(num_experts, width, inside // (1 + contract.has_gate), contract.has_gate, up.dtype)

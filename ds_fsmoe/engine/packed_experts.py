# SPDX-License-Identifier: Apache-2.0
"""Chooses over how many ranks the experts of a Hugging Face model are spread, by expert packing (Lina, ATC'23)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.contract import contract_of, shape_of
from ds_fsmoe.components.expert_compute.grouped_products import takes_grouped
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError
from ds_fsmoe.distributed.topology import layout, world_size_now
from ds_fsmoe.layer.own_experts_marks import loaded_part
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.measuring.packing_times import ExpertSizes, pack_by_times
from ds_fsmoe.measuring.stopwatch import Stopwatch
from ds_fsmoe.planning.chunks import MICRO_OP_BYTES
from ds_fsmoe.planning.packing import packings
from ds_fsmoe.terminal.tables import Message

_CHOSEN = "fsmoe_packed_over"
"""The attribute of a module of experts with the number of ranks that was chosen for it, before it has an engine."""
_TYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
}
"""DeepSpeed's words for the types in which one may train."""


def type_of_run(ds_config: Mapping[str, Any], device_type: str) -> torch.dtype | None:
    """Return the type in which a DeepSpeed config lets experts compute, ``None`` for that of their weights.

    Args:
        ds_config: the config.
        device_type: the kind of device, such as "cuda": each has a type of its own for autocast.
    """
    for name in ("bf16", "bfloat16", "fp16"):
        if _is_on(ds_config.get(name)):
            return _TYPES[name]
    autocast = ds_config.get("torch_autocast") or {}
    if not _is_on(autocast):
        return None
    own = torch.get_autocast_dtype(device_type)
    return _TYPES.get(str(autocast["dtype"]).removeprefix("torch."), own) if "dtype" in autocast else own


def _is_on(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("enabled") is True


def packed_ep_size(
    block: FSMoEBlock,
    experts: Iterable[nn.Module],
    ep_sizes: Iterable[int],
    device: torch.device,
    expert_before_data: bool,
    dtype: torch.dtype | None = None,
) -> int:
    """Return over how many ranks experts are spread so that their micro-ops take as long as the all-to-all's.

    Collective over all ranks of the job, unless it was chosen when the modules were made.

    Args:
        block: the options.
        experts: the modules of experts.
        ep_sizes: the numbers of ranks over which all of them can be spread.
        device: the device of this rank.
        expert_before_data: see :func:`~ds_fsmoe.distributed.topology.layout`.
        dtype: the type in which experts will compute; ``None``: that of their weights.

    Raises:
        ConfigError: on every rank, where nothing is to follow from a clock; names the size that would have been chosen.
        MeasuringError: on every rank, if one has failed.
    """
    modules, sizes = list(experts), list(ep_sizes)
    loaded = {part.ep_size for each in modules if (part := loaded_part(each)) is not None}
    # With all experts on every rank there is no part to tell.
    loaded |= {getattr(each, _CHOSEN, 0) for each in modules} & set(sizes)
    ep_size = max(loaded) if loaded else _chosen(block, modules, sizes, device, expert_before_data, dtype)
    for each in modules:
        setattr(each, _CHOSEN, ep_size)
    return ep_size


def _chosen(
    block: FSMoEBlock,
    modules: list[nn.Module],
    sizes: list[int],
    device: torch.device,
    expert_before_data: bool,
    dtype: torch.dtype | None,
) -> int:
    if len(packings(sizes)) == 1:
        log_on_rank_0(f"expert packing (lina): ep_size = {max(sizes)}, as these ranks and experts have no half of it")
        return max(sizes)
    asked = block.gradient_partition.asked_bytes
    found = pack_by_times(
        Stopwatch(device),
        Counter(_sizes_of(each, dtype, block.esp_size, device) for each in modules),
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
    head = (
        f"expert packing (lina): ep_size = {found.ep_size}, {per_rank} experts of a layer on each rank; {wanted} to "
        "keep it in later runs"
    )
    log_on_rank_0(Message([head, found.table()]))
    return found.ep_size


def _sizes_of(module: nn.Module, dtype: torch.dtype | None, sharing: int, device: torch.device) -> ExpertSizes:
    """Return the sizes of a module of experts that has all of them; ``sharing`` ranks will share each."""
    contract = contract_of(module)
    up = getattr(module, contract.up)
    num_experts, *inner = shape_of(up) or (0, 0, 0)
    width, inside = inner if contract.is_transposed else inner[::-1]
    dtype, hidden = dtype or up.dtype, inside // (1 + contract.has_gate)
    is_grouped = takes_grouped((width, inside // sharing, hidden // sharing), (dtype,), device)
    return ExpertSizes(num_experts, width, hidden, contract.has_gate, dtype, is_grouped)

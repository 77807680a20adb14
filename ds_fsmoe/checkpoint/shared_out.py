# SPDX-License-Identifier: Apache-2.0
"""Finds what of each parameter a rank has at ZeRO 3: a piece of the flattened parameter, optimized or frozen.

DeepSpeed flattens each parameter, cuts it into one piece for each of its ranks, and lays a rank's pieces of a sub-group
of parameters end to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.utils import is_optimized_parameter
from torch import nn

from ds_fsmoe.checkpoint.live_group import LiveGroup
from ds_fsmoe.checkpoint_files.pieces import WEIGHTS, Group, Keys, Piece

OPTIMIZER = "optimizer_state_dict"
"""Where a file has DeepSpeed's optimizer, and that has the one that computes."""
FLAT = "fp32_flat_groups"
"""Where a file of ZeRO 3 has the optimized tensors, one for each sub-group."""
FROZEN = "frozen_param_fragments"
"""Where a rank's file has its pieces of what is not optimized, by name."""


def live_groups_at_stage_3(
    outer: Any, base: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> list[LiveGroup] | None:
    """Return the groups of ZeRO 3's optimizer; ``None`` where its tensors are not in memory.

    Args:
        outer: DeepSpeed's optimizer.
        base: the optimizer that computes.
        names: parameter -> its name in the files.
    """
    found: list[LiveGroup] = []
    # In this order the states are numbered in the file.
    order = sorted(range(len(outer.fp16_groups)), key=outer.sub_group_to_group_id.__getitem__)
    for at, number in enumerate(order):
        parameters, tensor = outer.fp16_groups[number], outer.fp32_partitioned_groups_flat[number]
        if tensor.numel() != sum(each.ds_tensor.ds_numel for each in parameters):
            return None  # swapped out
        pieces = tuple(_end_to_end(parameters, names))
        keys: Keys = (OPTIMIZER, FLAT, number)
        state_keys: Keys = (OPTIMIZER, OPTIMIZER, "state", at)
        options = base.param_groups[outer.sub_group_to_group_id[number]]
        named = tuple(names[each] for each in parameters)
        found.append(LiveGroup(named, pieces, tensor, tensor, base.state.get(tensor, {}), options, keys, state_keys))
    return found


def _end_to_end(parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> Iterator[Piece]:
    at = 0
    for each in parameters:
        if (piece := piece_of(each, names[each], at)) is not None:
            yield piece
        at += each.ds_tensor.ds_numel


def piece_of(parameter: nn.Parameter, name: str, at: int = 0) -> Piece | None:
    """Return which elements of a parameter this rank has; ``None`` where it has padding alone.

    Args:
        parameter: a parameter that ZeRO 3 has shared out.
        name: its name in the files.
        at: where its piece begins in the tensor that holds it.
    """
    first = parameter.ds_zero_partition_rank * parameter.ds_tensor.ds_numel
    size = min(parameter.ds_tensor.ds_numel, parameter.ds_numel - first)
    return Piece(name, first, size, at) if size > 0 else None


def frozen_groups(engine: Any, names: Mapping[nn.Parameter, str], file: str) -> Iterator[Group]:
    """Return where this rank's pieces of what is not optimized will be.

    Args:
        engine: our engine, at ZeRO 3.
        names: parameter -> its name in the files.
        file: the rank's file of weights.
    """
    for parameter, name in names.items():
        if is_optimized_parameter(parameter) or not hasattr(parameter, "ds_id"):
            continue
        if (piece := piece_of(parameter, name)) is not None:
            yield Group(file, {WEIGHTS: (FROZEN, engine.param_names[parameter])}, {}, {}, (piece,))

# SPDX-License-Identifier: Apache-2.0
"""Says where a checkpoint of stock DeepSpeed at ZeRO 3, which has no index, has the pieces of each parameter.

DeepSpeed cuts each flattened parameter into equal pieces, one for each rank, and lays a rank's pieces of a sub-group of
parameters end to end, in the order of ``param_shapes``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ds_fsmoe.checkpoint_files.pieces import MASTER, WEIGHTS, Group, Index, Keys, Piece
from ds_fsmoe.checkpoint_files.tags import CheckpointError

_STATES = re.compile(r"^(?:bf16_)?zero_pp_rank_(?P<rank>[0-9]{1,9})_mp_rank_00_optim_states\.pt$")
_WEIGHTS = re.compile(r"^zero_pp_rank_(?P<rank>[0-9]{1,9})_mp_rank_00_model_states\.pt$")
_FLAT: Keys = ("optimizer_state_dict", "fp32_flat_groups")
_FROZEN = "frozen_param_fragments"


def stock_index(names: Iterable[str], main: Mapping[str, Any], read: Callable[[str], Any]) -> Index:
    """Return an index of the weights alone: of the optimizer's states only DeepSpeed itself knows what they mean.

    Args:
        names: the files of the checkpoint.
        main: what the first rank's file of weights holds.
        read: reads a file.

    Raises:
        CheckpointError: files of ranks are missing, or parameters were shared out over some of the ranks.
    """
    names = list(names)
    states, weights = _by_rank(names, _STATES), _by_rank(names, _WEIGHTS)
    world = main["dp_world_size"]
    if sorted(states) != list(range(world)) or sorted(weights) != list(range(world)):
        raise CheckpointError(f"{len(states)} files of the optimizer and {len(weights)} of weights, for {world} ranks")
    if read(states[0])["optimizer_state_dict"].get("ds_zero_partition_groups") is not None:
        raise CheckpointError("experts were shared out over some of the ranks, by DeepSpeed's AutoEP")
    groups: list[Group] = []
    for rank in range(world):
        for number, shapes in enumerate(main["param_shapes"] or ()):
            items = {MASTER: (*_FLAT, number)}
            groups.append(Group(states[rank], items, {}, {}, tuple(_end_to_end(shapes, rank, world))))
        for name, shape in (main["frozen_param_shapes"] or {}).items():
            pieces = tuple(_end_to_end({name: shape}, rank, world))
            groups.append(Group(weights[rank], {WEIGHTS: (_FROZEN, name)}, {}, {}, pieces))
    return Index("", tuple(groups), {})


def _by_rank(names: list[str], pattern: re.Pattern[str]) -> dict[int, str]:
    found = ((pattern.match(each), each) for each in names)
    return {int(match["rank"]): name for match, name in found if match is not None}


def _end_to_end(shapes: Mapping[str, Any], rank: int, world: int) -> Iterator[Piece]:
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        size = -(-numel // world)
        if numel > rank * size:
            yield Piece(name, rank * size, min(size, numel - rank * size), at)
        at += size

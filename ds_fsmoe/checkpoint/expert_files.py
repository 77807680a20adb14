# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the experts of Hugging Face models, which are spread over ranks: one file for each part of them.

At ZeRO 3 there are no such files, since the pieces of all parameters are in the files of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import groups as stock_groups

from ds_fsmoe.checkpoint.layout import stage_of
from ds_fsmoe.checkpoint_files.expert_parts import part_name, part_of, parts_file, parts_in
from ds_fsmoe.checkpoint_files.guards import guarded
from ds_fsmoe.checkpoint_files.manifest import STAGE_3, PartSizes
from ds_fsmoe.checkpoint_files.numbering import expert_name
from ds_fsmoe.checkpoint_files.pieces import FROZEN

_SHAPES, _FROZEN_SHAPES = "param_shapes", "frozen_param_shapes"
_TOPS = {"module", "optimizer", "optimizer_state_dict"}
"""The keys by one of which files of weights and of the optimizer's states are known."""


def sizes_of_parts(engine: Any) -> dict[str, PartSizes]:
    """Return name -> how it is spread over ranks, of every parameter of a Hugging Face model's experts."""
    return {name: PartSizes.of(part, stage_of(engine)) for name, _, part in parts_in(engine.module)}


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> whole shape of every parameter and buffer that is saved, but those of experts with own files."""
    found = {}
    for name, each in model.state_dict(keep_vars=True).items():
        if torch.is_tensor(each) and expert_name(name) is None:
            part, shape = part_of(each), tuple(getattr(each, "ds_shape", each.shape))
            found[name] = shape if part is None else part.whole_shape(shape)
    return found


def write_parts(engine: Any, place: Path, exclude_frozen: bool) -> None:
    """Write this rank's experts, on one rank of those that have the same.

    Args:
        engine: our engine.
        place: the folder of the tag.
        exclude_frozen: whether to leave out what is not trained.
    """
    parts = list(parts_in(engine.module))
    if not parts or engine.zero_optimization_partition_weights():
        return
    _, first, of_all = parts[0]
    rank = stock_groups._get_expert_data_parallel_rank(first.group_name)
    if not engine.checkpoint_engine.is_data_parallel_writer(rank):
        return
    state = {
        part_name(name, part.number): parameter.detach().to("cpu", copy=True)
        for name, parameter, part in parts
        if parameter.requires_grad or not exclude_frozen
    }
    engine.checkpoint_engine.save(guarded(state), str(place / parts_file(of_all.number, stage_of(engine))))


def without_parts(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return what DeepSpeed writes for all ranks, without what is of one rank alone.

    Args:
        state: what would be in the file of weights of a stage below 3.
        names: the parameters that are spread over ranks.
    """
    kept = {
        each: {name: value for name, value in state[each].items() if name not in names}
        for each in ("module", FROZEN, _FROZEN_SHAPES)
        if isinstance(state.get(each), dict)
    }
    return state | kept


def misleads_others(engine: Any) -> bool:
    """Return whether DeepSpeed's own readers would take parts of experts for whole ones, or find some nowhere."""
    is_below_3 = engine.zero_optimization_stage() < STAGE_3
    return any(
        part.num_parts > 1 or (is_below_3 and not parameter.requires_grad)
        for _, parameter, part in parts_in(engine.module)
    )


def for_others(state: dict[str, Any], is_misleading: bool) -> dict[str, Any]:
    """Return what DeepSpeed writes into a file so that its own readers read it rightly, or not at all."""
    if not _TOPS & state.keys():  # one layer of a pipeline, or one expert of DeepSpeed's
        return state
    # Where a model has experts, DeepSpeed makes tuples of these shapes, and its reader of ZeRO 3 asks them for numel().
    groups, frozen = state.get(_SHAPES), state.get(_FROZEN_SHAPES)
    shapes = {
        _SHAPES: groups and [{name: torch.Size(each) for name, each in group.items()} for group in groups],
        _FROZEN_SHAPES: frozen and {name: torch.Size(each) for name, each in frozen.items()},
    }
    state = state | {name: each for name, each in shapes.items() if each}
    return guarded(state) if is_misleading else state


def with_parts(state: dict[str, Any], parts: Mapping[str, torch.Tensor], frozen: set[str]) -> dict[str, Any]:
    """Return what DeepSpeed expects in the file of weights of a stage below 3, with this rank's experts.

    Args:
        state: what the file holds.
        parts: name -> this rank's part.
        frozen: the names of what is not trained.
    """
    found = state | {"module": state["module"] | dict(parts)}
    if state.get(FROZEN) is not None:
        found[FROZEN] = state[FROZEN] | {name: each for name, each in parts.items() if name in frozen}
    return found

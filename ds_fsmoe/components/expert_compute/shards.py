# SPDX-License-Identifier: Apache-2.0
"""Shards an expert along its hidden width, for the ranks of an expert tensor parallelism group.

The engine shards experts when it converts layers; checkpoints read from here how each parameter is sharded.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import nn

from ds_fsmoe.components.expert_compute.linears import UnbiasedShardLinear
from ds_fsmoe.components.expert_compute.manual_ffn import ManualExpert, manual_form

ShardDim = Literal[0, 1, "first", "whole"]
"""How a parameter is sharded: along a dimension; whole in the first shard and zero in others; whole in all."""


def check_shardable(expert: nn.Module, count: int) -> ManualExpert:
    """Return the hand-written form of an expert, and refuse one that cannot be split into ``count`` shards.

    Raises:
        ValueError: an expert of unknown structure, or a count that does not divide H.
    """
    form = manual_form(expert)
    if form is None:
        raise ValueError(
            f"expert {type(expert).__name__} cannot be sharded: its structure is unknown. Use 1, or GPTFeedForward, "
            "MixtralFeedForward, a subclass of ExpertBase that defines written(), or nn.Sequential(nn.Linear, "
            "activation, nn.Linear) with nn.ReLU, nn.GELU or nn.SiLU, without replaced, shared or reparametrised "
            "layers"
        )
    hidden = form.down.in_features
    if count < 1 or hidden % count:
        divisors = ", ".join(str(each) for each in range(1, hidden + 1) if hidden % each == 0)
        raise ValueError(
            f"expert {type(expert).__name__} has a hidden width of {hidden}, which {count} shards do not divide: "
            f"choose from {divisors}"
        )
    return form


def shard_expert(expert: nn.Module, index: int, count: int) -> tuple[nn.Module, dict[nn.Parameter, nn.Parameter]]:
    """Return shard ``index`` of ``count``: the expert with ``H / count`` of its hidden elements.

    The results of all shards on the same rows sum to the expert's. Names, shapes except H, the module's mode, hooks and
    attributes, and the parameters' attributes and ``requires_grad`` stay. The last bias is whole in every shard, but
    only shard 0 adds it; in the others it is zero with a gradient of zeros.

    Args:
        expert: one with a hand-written form (:func:`~ds_fsmoe.components.expert_compute.manual_ffn.manual_form`); not
            changed.
        index: of the shard, from 0.
        count: P, the number of shards.

    Returns:
        The shard, in its own memory, and the parameter of ``expert`` behind each of its parameters.

    Raises:
        ValueError: an expert of unknown structure, a count that does not divide H, an index out of range.
    """
    form = check_shardable(expert, count)
    hidden = form.down.in_features
    if not 0 <= index < count:
        raise ValueError(f"shard {index} of {count}: the index must be between 0 and {count - 1}")
    width = hidden // count
    ours = slice(index * width, (index + 1) * width)

    new_of_old: dict[nn.Parameter, nn.Parameter] = {}
    for old, cut in _shard_dims(expert, form).items():
        values = old.detach()
        if cut == "first":
            values = torch.zeros_like(values) if index else values
        elif cut != "whole":
            values = values[ours] if cut == 0 else values[:, ours]
        new_of_old[old] = _shard_from(old, values)

    # deepcopy uses the new parameters in place of the old ones, which are never copied whole.
    shard = copy.deepcopy(expert, {id(old): new for old, new in new_of_old.items()})
    new_form = manual_form(shard)
    assert new_form is not None
    for up in new_form.up:
        up.out_features = width
    new_form.down.in_features = width
    if index:
        new_form.down.__class__ = UnbiasedShardLinear
    return shard, {new: old for old, new in new_of_old.items()}


def shard_dims_of(expert: nn.Module) -> dict[str, ShardDim]:
    """Return how each parameter of an expert, or of its shard, is sharded; empty for one that cannot be."""
    form = manual_form(expert)
    if form is None:
        return {}
    cuts = _shard_dims(expert, form)
    return {name: cuts[parameter] for name, parameter in expert.named_parameters()}


def _shard_dims(expert: nn.Module, form: ManualExpert) -> dict[nn.Parameter, ShardDim]:
    # Parameters outside the known structure are whole in every shard.
    cuts: dict[nn.Parameter, ShardDim] = dict.fromkeys(expert.parameters(), "whole")
    for up in form.up:
        cuts |= dict.fromkeys(up.parameters(), 0)
    cuts[form.down.weight] = 1
    if form.down.bias is not None:
        cuts[form.down.bias] = "first"
    return cuts


def _shard_from(old: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    new = nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    return new

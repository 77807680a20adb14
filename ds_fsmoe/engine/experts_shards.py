# SPDX-License-Identifier: Apache-2.0
"""Cuts the experts of Hugging Face models along their hidden width, and refuses those that cannot be cut rightly."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import Shard, part_of
from ds_fsmoe.components.expert_compute.contract import Contract, contract_of, shape_of
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError
from ds_fsmoe.layer.own_experts_marks import loaded_part
from ds_fsmoe.layer.parts import LayerError

_FEW = 3
"""As many experts and rows are tried."""
_TOLERANCE = 1e-3


def shards_of(contract: Contract, count: int, index: int) -> dict[str, Shard | None]:
    """Return weight -> which part of each of its experts one of ``count`` ranks has; ``None`` where it has all.

    The first product is cut along its results, gate and value alike, the second along what it takes in; the results of
    all shards add up to the expert's, so that the first alone adds the last bias.
    """
    if count == 1:
        return dict.fromkeys(contract.weights)
    pieces = 2 if contract.has_gate and contract.is_concatenated else 1
    up, down = (2, 1) if contract.is_transposed else (1, 2)
    found: dict[str, Shard | None] = {
        contract.up: Shard(count, index, up, pieces),
        contract.down: Shard(count, index, down),
    }
    if contract.has_bias:
        found[f"{contract.up}_bias"] = Shard(count, index, 1, pieces)
        found[f"{contract.down}_bias"] = Shard(count, index, None)
    return found


def contract_of_shard(contract: Contract, index: int) -> Contract:
    """Return what a module of shards says of its weights."""
    return contract if index == 0 else replace(contract, adds_down_bias=False)


def check_shards_of_experts(
    block: FSMoEBlock, ds_config: Mapping[str, Any], experts: Mapping[str, nn.Module], adapted: Iterable[str] = ()
) -> None:
    """Refuse experts that cannot be cut into as many shards as a block asks for. No group is needed.

    Args:
        block: the block.
        ds_config: the whole DeepSpeed config.
        experts: the modules of experts, by name.
        adapted: names of those with adapters.

    Raises:
        ConfigError, LayerError: name the experts and what to do.
    """
    count = block.esp_size
    if count == 1 or not experts:
        return
    said = f"{BLOCK}.expert_tensor_parallel_size = {count}"
    if ds_config.get("zero_optimization", {}).get("stage", 0) == 3:
        raise ConfigError(
            f"{said}: at ZeRO 3 experts of a Hugging Face model ({next(iter(experts))}) are not cut; leave it out, or "
            "use stage 2"
        )
    for name in adapted:
        raise ConfigError(f"{said}: {name} has adapters, and experts with adapters are not cut; leave it out")
    for name, module in experts.items():
        contract = contract_of(module)
        if loaded_part(module) is not None:
            raise LayerError(
                f"{said}: {name} was loaded with this rank's experts only, which are not cut; leave it out"
            )
        if contract.has_post_expert_norm:
            raise LayerError(f"{said}: {name} norms the results of its experts, which shards have in parts; use 1")
        part = part_of(getattr(module, contract.down))
        if part is not None and part.shard is not None:
            if part.shard.count == count:
                continue  # tried when they were cut
            raise LayerError(
                f"{said}: an engine has left {name} in {part.shard.count} shards: call ds_fsmoe.make_whole(model) on "
                "every rank first, and give initialize() its parameters"
            )
        down = shape_of(getattr(module, contract.down)) or (0, 0, 0)
        hidden = down[1] if contract.is_transposed else down[2]
        if hidden % count:
            choices = ", ".join(str(each) for each in range(1, hidden + 1) if hidden % each == 0)
            raise LayerError(f"{said}: must divide the hidden width of {name} ({hidden}); the choices are {choices}")
        if not _adds_up(module, contract, count):
            raise LayerError(
                f"{said}: the experts of {name}, a {type(module).__name__}, compute something else in shards: their "
                "own forward is not what transformers' contract says, or what lies between the products mixes "
                "hidden elements; use 1"
            )


@torch.no_grad()
def _adds_up(module: nn.Module, contract: Contract, count: int) -> bool:
    """Return whether the results of shards add up to what the module's own forward gives, on a few rows."""
    weights = {name: getattr(module, name).detach() for name in contract.weights}
    down = weights[contract.down]
    if down.is_meta or not down.numel():
        return True
    few = {name: each[:_FEW] for name, each in weights.items()}
    num_rows = len(few[contract.down])
    width = down.shape[2] if contract.is_transposed else down.shape[1]
    x_RM = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0)).to(down)
    own = getattr(type(module).forward, "__wrapped__", type(module).forward)
    index_R1 = torch.arange(num_rows, device=down.device).unsqueeze(1)
    theirs = own(_with_weights(module, few), x_RM, index_R1, x_RM.new_ones(num_rows, 1)).float()
    ours = torch.zeros_like(theirs)
    for index in range(count):
        shards = shards_of(contract, count, index)
        cut = {name: each if shards[name] is None else shards[name].cut(each) for name, each in few.items()}
        shard = _with_weights(module, cut)
        ours += StackedExperts(shard, contract_of_shard(contract, index)).on_few_rows(x_RM, [1] * num_rows).float()
    if not theirs.isfinite().all():  # memory without weights: these come later
        return True
    scale = theirs.abs().max().clamp(min=1e-6)
    return bool((theirs - ours).abs().max() / scale <= max(_TOLERANCE, 4 * torch.finfo(down.dtype).eps))


def _with_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module that shares all with another but these weights."""
    made = copy.copy(module)
    made._parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in weights.items()}
    if hasattr(module, "num_experts"):
        made.num_experts = len(next(iter(weights.values())))
    return made

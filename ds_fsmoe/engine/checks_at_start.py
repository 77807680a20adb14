# SPDX-License-Identifier: Apache-2.0
"""Checks a model and its config before any process group is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_fsmoe.checks.preflight import check_deepspeed_blocks, check_experts, check_gate_hooks, check_tensor_parallel
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.distributed.groups import sizes_of_mpu
from ds_fsmoe.engine import compat
from ds_fsmoe.engine.convert_adapters import wrappers_around
from ds_fsmoe.engine.convert_experts import chosen_ep_size, num_experts_of
from ds_fsmoe.engine.convert_layers import check_layers, check_parts, check_shards, find_layers
from ds_fsmoe.engine.experts_checks import check_experts_modules, check_hugging_face, find_experts
from ds_fsmoe.engine.experts_shards import check_shards_of_experts
from ds_fsmoe.layer.expert_container import check_containers
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.ops.loading import LIBRARIES


def check_before_any_group(block: FSMoEBlock, ds_config: Mapping[str, Any], model: nn.Module, mpu: Any) -> None:
    """Refuse what cannot be trained, as far as one rank can see that by itself.

    Args:
        block: the block.
        ds_config: the whole DeepSpeed config.
        model: the model, or this rank's stage of one.
        mpu: what knows the tensor- and pipeline-parallel groups, if there is one.

    Raises:
        ConfigError, LayerError, IncompatibleError: say what to change.
    """
    compat.check_versions()
    compat.check_private_names()
    check_deepspeed_blocks(ds_config)
    device_type = get_accelerator().device_name()
    if block.ops == "required" and device_type not in LIBRARIES:
        raise ConfigError(
            f"fsmoe.ops = 'required': there are compiled ops for {' and '.join(LIBRARIES)}, and this is {device_type}; "
            "use 'auto' or 'plain'"
        )
    if isinstance(model, DualPipeVModule):
        raise LayerError("a DualPipeVModule is not supported in this version: use a PipelineModule")
    experts = find_experts(model)
    layers = find_layers(model, bool(experts))
    check_experts_modules(model, experts, layers)
    adapted = [name for name in experts if wrappers_around(model, name)]
    check_hugging_face(block, ds_config, experts, layers, isinstance(model, PipelineModule), mpu, adapted)
    check_shards_of_experts(block, ds_config, experts, adapted)
    check_layers(layers, block.gate)
    # Under a launcher that sets no WORLD_SIZE the engine checks again, as soon as the ranks have found each other.
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 0))
    if isinstance(model, PipelineModule):
        world_size //= model.num_stages
    if experts and world_size and (block.ep_size != "auto" or block.esp_size > 1):
        chosen_ep_size(block, [num_experts_of(each) for each in experts.values()], world_size, world_size)
    check_experts(layers, world_size or None, block.gate, block.esp_size)
    check_tensor_parallel(layers, world_size or None, sizes_of_mpu(mpu)[0], block.esp_size)
    check_gate_hooks(layers, block.gate)
    check_parts(block, layers)
    check_containers(layers, block.esp_size)
    check_shards(layers, block.esp_size)

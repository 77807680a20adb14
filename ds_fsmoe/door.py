# SPDX-License-Identifier: Apache-2.0
"""The door: ``initialize`` in place of ``deepspeed.initialize``, and ``install`` for scripts that call the latter.

Every way in ends in the same mechanism. The block is read and checked; if it is enabled, DeepSpeed's own
``initialize`` runs with our engine class in place of its own, and our engine makes the layers ours at the point where
DeepSpeed itself replaces layers: the config and the process group are there, the optimizer is not.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_fsmoe import accelerate_config, compat
from ds_fsmoe.blocks import FSMoEBlock
from ds_fsmoe.config import ConfigError, read_block
from ds_fsmoe.engine import FSMoEEngine, FSMoEPipelineEngine
from ds_fsmoe.layer import StockMoE
from ds_fsmoe.ops.loading import LIBRARIES
from ds_fsmoe.parts import LayerError
from ds_fsmoe.preflight import (
    check_deepspeed_blocks,
    check_experts,
    check_sequence_parallel,
    check_tensor_parallel,
)
from ds_fsmoe.run_record import watch_ours, watch_stock
from ds_fsmoe.runtime.groups import sizes_of_mpu, stock_names
from ds_fsmoe.takeover import (
    check_layers,
    check_parts,
    check_shards,
    check_unused,
    find_layers,
    give_back,
)

# Whoever imports this module first imports stock's function: install() replaces the attribute later, if asked to.
_stock_initialize = deepspeed.initialize


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` that honours the ``"fsmoe"`` block: same arguments, same 4-tuple.

    Without a block, or with ``"enabled": false``, DeepSpeed's own function runs and nothing else; a record or a trace,
    if the block asks for them, only watch it. Otherwise everything that can be wrong is checked first, on every rank,
    before any process group is made.

    Raises:
        ConfigError: the block, or DeepSpeed blocks that do not go with it.
        LayerError: the model.
        IncompatibleError: the installed versions.
    """
    arguments = dict(locals())
    written = next((each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each), None)
    ds_config = {} if written is None else compat.load_ds_config(written)
    block = read_block(ds_config)
    if model is None:
        return _stock_initialize(**arguments)
    if block is None or not block.enabled:
        _make_stock(model, block is not None, mpu)
        made = _stock_initialize(**arguments)
        if block is not None:
            watch_stock(made[0], block)
        return made
    _check_before_any_group(block, ds_config, model, mpu)
    if block.esp_size > 1:
        _rename_expert_groups((optimizer, model_parameters), block.esp_size)
    with _our_engine():
        made = _stock_initialize(**arguments)
    watch_ours(made[0])
    return made


def _rename_expert_groups(holders: Iterable[Any], esp_size: int) -> None:
    """Parameter groups of experts that a script has split carry DeepSpeed's name for their ranks: with shards, the new
    one, by which ZeRO looks them up."""
    for holder in holders:
        groups = getattr(holder, "param_groups", holder)
        for group in groups if isinstance(groups, list) else ():
            name = group.get("name", "") if isinstance(group, dict) and group.get("moe") else ""
            if found := re.fullmatch(r"ep_size_(\d+)", name):
                group["name"] = stock_names(int(found[1]), esp_size).expert_group_name


def _make_stock(model: nn.Module, has_block: bool, mpu: Any) -> None:
    """Not enabled means stock, for layers written as ``ds_fsmoe.MoE`` too."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, StockMoE)}
    if has_block:
        check_unused(layers)
    check_sequence_parallel(layers, sizes_of_mpu(mpu)[0])
    for layer in layers.values():
        give_back(layer)


def _check_before_any_group(block: FSMoEBlock, ds_config: Mapping[str, Any], model: nn.Module, mpu: Any) -> None:
    compat.check_versions()
    compat.check_private_names()
    check_deepspeed_blocks(ds_config)
    device_type = get_accelerator().device_name()
    if block.ops == "required" and device_type not in LIBRARIES:
        raise ConfigError(
            f"fsmoe.ops = 'required': there are compiled ops for {' and '.join(LIBRARIES)}, and this is {device_type}; "
            "use 'auto' or 'reference'"
        )
    if isinstance(model, DualPipeVModule):
        raise LayerError("a DualPipeVModule is not supported in this version: use a PipelineModule")
    layers = find_layers(model)
    check_layers(layers, block.gate)
    check_unused(layers)
    # Under a launcher that sets no WORLD_SIZE the engine checks again, as soon as the ranks have found each other.
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 0))
    if isinstance(model, PipelineModule):
        world_size //= model.num_stages
        mpu = model.mpu()
    check_experts(layers, world_size or None, block.gate, block.esp_size)
    check_tensor_parallel(layers, world_size or None, sizes_of_mpu(mpu)[0], block.esp_size)
    check_parts(block, layers)
    check_shards(layers, block.esp_size)


@contextmanager
def _our_engine() -> Iterator[None]:
    """DeepSpeed looks its engine classes up in its own module when ``initialize`` runs; ours are there meanwhile."""
    stock_engines = deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine
    deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine = FSMoEEngine, FSMoEPipelineEngine
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine = stock_engines


def install() -> None:
    """From now on ``deepspeed.initialize`` is :func:`initialize`, for every library that calls it too.

    Raises:
        RuntimeError: a module holds stock's function under a name of its own already, and would go past us.
    """
    for name, module in list(sys.modules.items()):
        if module in (deepspeed, sys.modules[__name__]) or not hasattr(module, "__dict__"):
            continue
        held = next((alias for alias, value in list(vars(module).items()) if value is _stock_initialize), None)
        if held is not None:
            raise RuntimeError(
                f"{name} took deepspeed.initialize in before ds_fsmoe.install(), as {held}, and would go past it: call "
                "install() first, or use ds_fsmoe.initialize"
            )
    deepspeed.initialize = initialize
    accelerate_config.leave_block_alone()


def uninstall() -> None:
    """Undo :func:`install`."""
    deepspeed.initialize = _stock_initialize
    accelerate_config.look_at_block_again()

# SPDX-License-Identifier: Apache-2.0
"""Provides ``initialize`` in place of ``deepspeed.initialize``, and ``install`` for scripts that call the latter.

Every entry point ends in the same mechanism. The block is read and checked. If it is enabled, DeepSpeed's own
``initialize`` runs with our engine class in place of its own. Our engine converts the layers where DeepSpeed itself
replaces layers. Scripts call this through ``ds_fsmoe``; :mod:`ds_fsmoe.run` calls it for scripts as they are.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_fsmoe.checkpoint.ranks import replaced
from ds_fsmoe.checks.preflight import (
    check_deepspeed_blocks,
    check_experts,
    check_gate_hooks,
    check_sequence_parallel,
    check_tensor_parallel,
)
from ds_fsmoe.components.expert_compute.contract import follows_contract
from ds_fsmoe.config import accelerate
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import BLOCK, ConfigError, read_block
from ds_fsmoe.config.words import words_of
from ds_fsmoe.distributed import launch_order
from ds_fsmoe.distributed.groups import sizes_of_mpu, stock_names
from ds_fsmoe.engine import compat
from ds_fsmoe.engine import own_experts as building
from ds_fsmoe.engine.convert_experts import (
    check_experts_modules,
    check_hugging_face,
    chosen_ep_size,
    find_experts,
)
from ds_fsmoe.engine.convert_layers import check_layers, check_parts, check_shards, find_layers, restore_stock
from ds_fsmoe.engine.engine import FSMoEEngine, FSMoEPipelineEngine
from ds_fsmoe.engine.restore_model import take_back
from ds_fsmoe.engine.set_up import check_engine_stages, refused_on_all_stages, wait_for_all_ranks
from ds_fsmoe.engine.shard_experts import check_shards_of_experts, num_experts_of, wrappers_around
from ds_fsmoe.engine.telemetry import claim_folders, watch_fsmoe, watch_stock
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.stock_layer import StockMoE, check_containers
from ds_fsmoe.log import log_on_rank_0, logger
from ds_fsmoe.ops.loading import LIBRARIES

# ---- Checks a model and its config before any process group is made


def check_before_any_group(block: FSMoEBlock, ds_config: Mapping[str, Any], model: nn.Module, mpu: Any) -> None:
    """Refuse models and configs that cannot be trained, by the checks that need no other rank.

    Args:
        block: the block.
        ds_config: the whole DeepSpeed config.
        model: the model, or this rank's stage of one.
        mpu: the object that knows the tensor- and pipeline-parallel groups, if there is one.

    Raises:
        ConfigError, LayerError, IncompatibleError: name the setting to change.
    """
    compat.check_versions()
    compat.check_private_names()
    check_deepspeed_blocks(ds_config)
    device_type = get_accelerator().device_name()
    if block.ops == "required" and device_type not in LIBRARIES:
        raise ConfigError(
            f"fsmoe.ops = 'required': there are compiled ops for {' and '.join(LIBRARIES)}, and this is "
            f"{device_type}; use 'auto' or 'plain'"
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


# ---- Provides ``initialize`` in place of ``deepspeed.initialize``, and ``install`` for scripts that call the
# latter


_wrapped_functions: list[Callable[..., Any]] = [deepspeed.initialize]
"""The functions that ours calls in turn. The first is DeepSpeed's own, or what another library had put in its place
before this module was imported; :func:`install` adds what it finds there, and puts ours over it."""
_replaced: Callable[..., Any] | None = None
"""The function that :func:`install` has replaced, once it has been called."""
_depth = 0
"""The number of our calls under way: a function beneath may call ours again."""


@dataclass
class InitializeArgs:
    """Holds the block given from outside the script, and whether an engine has used it."""

    block: dict[str, Any]
    is_used: bool = False


_given: InitializeArgs | None = None


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
) -> tuple[FSMoEEngine, Any, Any, Any]:
    """Run ``deepspeed.initialize`` with the ``"fsmoe"`` block; arguments and the 4-tuple returned are DeepSpeed's.

    Without a block, or with ``"enabled": false``, only DeepSpeed's own function runs; a record or a trace, if the block
    asks for them, only observes it. Otherwise the config and the model are checked first, on every rank, before any
    process group is made.

    Args:
        args: the script's own, of which DeepSpeed reads ``deepspeed_config`` and ``local_rank``.
        model: any module, or a ``PipelineModule``, with ``deepspeed.moe.layer.MoE`` or :class:`ds_fsmoe.MoE` in it.
        optimizer: passed on to DeepSpeed as it is, as are all below except the config.
        model_parameters: the parameters that DeepSpeed trains.
        training_data: a data set for DeepSpeed's loader.
        lr_scheduler: a scheduler, or a function that makes one.
        distributed_port: the port of the first rank.
        mpu: the object that knows the tensor- and pipeline-parallel groups.
        dist_init_required: whether to initialise torch.distributed.
        collate_fn: the function that makes a batch of samples.
        mesh_param: the shape of DeepSpeed's device mesh.
        config: the DeepSpeed config, as a dict (its block may be a :class:`ds_fsmoe.Config`) or a JSON file's path.
        config_params: the older name of ``config``.

    Returns:
        The engine, the optimizer, the data loader and the learning-rate scheduler. If the block is not enabled, the
        engine is DeepSpeed's own, without ``engine.fsmoe``.

    Raises:
        ConfigError: the block is wrong, or conflicts with DeepSpeed's blocks.
        LayerError: the model's layers cannot be converted.
        IncompatibleError: the installed versions do not work together.
        DisagreementError: some ranks train with stock DeepSpeed; names them.

    Examples:
        >>> import torch, ds_fsmoe
        >>> model = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> ds_config = {"train_micro_batch_size_per_gpu": 2, "fsmoe": ds_fsmoe.Config(ops="reference")}
        >>> ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        >>> engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        >>> output, l_aux, _ = engine(torch.randn(2, 3, 8))
        >>> engine.backward(output.square().mean() + 0.01 * l_aux)
        >>> engine.step()
        >>> engine.fsmoe.num_layers
        1
    """
    arguments = dict(locals())
    if _depth:
        # A wrapped function below ours calls ours again: the block is already active.
        return _call_wrapped(arguments)
    written = next((each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each), None)
    ds_config = {} if written is None else compat.load_ds_config(written)
    passed_on: AbstractContextManager[None] = nullcontext()
    if _given is not None and written is not None and model is not None:
        ds_config = _with_given_block(ds_config, model)
        passed_on = _config_passed(arguments, ds_config)
    # Whatever is wrong, it is called as the user has written it.
    with passed_on, words_of(ds_config.get(BLOCK)).in_errors():
        return _initialize_by(read_block(ds_config), arguments, ds_config)


def _initialize_by(block: FSMoEBlock | None, arguments: dict[str, Any], ds_config: Mapping[str, Any]) -> Any:
    model, mpu = arguments["model"], arguments["mpu"]
    if model is None:
        return _call_wrapped(arguments)
    is_enabled = block is not None and block.enabled
    take_back(model, ds_config, is_enabled)
    if not is_enabled:
        _make_stock(model, mpu)
        made = _call_wrapped(arguments)
        if block is not None:
            watch_stock(made[0], block)
        elif _given is None:
            log_on_rank_0("the config has no fsmoe block: stock DeepSpeed trains the model")
        return made
    if isinstance(model, PipelineModule):
        wait_for_all_ranks("initialize", block.debug.hang_timeout_s)
        # The stages have found each other when they were built, on the devices that they were put on.
        get_accelerator().set_device(model.local_rank)
        with refused_on_all_stages():
            check_engine_stages(model)
            check_before_any_group(block, ds_config, model, model.mpu())
    else:
        check_before_any_group(block, ds_config, model, mpu)
    launch_order.ask()
    compat.check_initialize(_wrapped_function(), _given_arguments(arguments))
    if not isinstance(model, PipelineModule):
        # As DeepSpeed's function does it, which then finds it done.
        deepspeed.init_distributed(
            get_accelerator().communication_backend_name(),
            distributed_port=arguments["distributed_port"],
            dist_init_required=arguments["dist_init_required"],
        )
        wait_for_all_ranks("initialize", block.debug.hang_timeout_s)
    claim_folders(block)
    if block.esp_size > 1:
        _rename_expert_groups((arguments["optimizer"], arguments["model_parameters"]), block.esp_size)
    with (
        # Where DeepSpeed's function looks them up.
        replaced(deepspeed, "DeepSpeedEngine", FSMoEEngine),
        replaced(deepspeed, "PipelineEngine", FSMoEPipelineEngine),
    ):
        made = _call_wrapped(arguments)
    watch_fsmoe(_engine_of(made))
    return made


def _wrapped_function() -> Callable[..., Any]:
    # Called without install(), ours still goes through what another library has put in DeepSpeed's place.
    if _depth == 0 and _replaced is None and deepspeed.initialize is not initialize:
        return deepspeed.initialize
    return _wrapped_functions[max(len(_wrapped_functions) - 1 - _depth, 0)]


def _call_wrapped(arguments: dict[str, Any]) -> Any:
    """Call DeepSpeed's own function, or the replacement by another library."""
    global _depth
    function = _wrapped_function()
    _depth += 1
    try:
        return function(**_given_arguments(arguments))
    finally:
        _depth -= 1


def _given_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that have a value; a wrapper may lack the others."""
    defaults = inspect.signature(initialize).parameters
    return {name: value for name, value in arguments.items() if value is not defaults[name].default}


def _engine_of(made: Any) -> Any:
    """Return our engine among the results; a wrapper around DeepSpeed's function may return them in another form."""
    engine = next((each for each in (made if isinstance(made, tuple) else (made,)) if hasattr(each, "fsmoe")), None)
    if engine is None:
        raise compat.IncompatibleError(
            f"{compat.name_and_place(_wrapped_function())} replaces deepspeed.initialize and has not returned an "
            "engine of ds_fsmoe: it must call deepspeed.initialize and return its result"
        )
    return engine


def _with_given_block(ds_config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a config with its block replaced by the one given from outside.

    A model without MoE layers gets no block, since a script may have engines for such models too.
    """
    others = {key: value for key, value in ds_config.items() if key != BLOCK}
    has_layers = any(isinstance(each, StockMoE) or follows_contract(each) for each in model.modules())
    if getattr(model, "num_stages", 1) == 1 and not has_layers:
        log_on_rank_0(
            f"{type(model).__name__} is trained by stock DeepSpeed (the model has no MoE layers for the command line's "
            "fsmoe block)",
            logging.WARNING,
            "MoE layers are those of DeepSpeed or transformers",
        )
        return others
    _given.is_used = True
    if ds_config.get(BLOCK, _given.block) != _given.block:
        log_on_rank_0("the fsmoe block of the command line replaces the one in the script's config")
    return others | {BLOCK: _given.block}


@contextmanager
def _config_passed(arguments: dict[str, Any], ds_config: Mapping[str, Any]) -> Iterator[None]:
    """Make DeepSpeed read this config inside the block, from where it would have read the script's own."""
    where = next((name for name in ("config", "config_params") if arguments[name]), None)
    if where is not None:
        arguments[where] = ds_config
        yield
        return
    args = arguments["args"]
    written = args.deepspeed_config
    args.deepspeed_config = ds_config
    try:
        yield
    finally:
        args.deepspeed_config = written


def _rename_expert_groups(holders: Iterable[Any], esp_size: int) -> None:
    """Rename parameter groups of experts that a script has split.

    They have DeepSpeed's name for their ranks. With shards they need the new name, by which ZeRO finds them.
    """
    for holder in holders:
        groups = getattr(holder, "param_groups", holder)
        for group in groups if isinstance(groups, list) else ():
            name = group.get("name", "") if isinstance(group, dict) and group.get("moe") else ""
            if found := re.fullmatch(r"ep_size_(\d+)", name):
                group["name"] = stock_names(int(found[1]), esp_size).expert_group_name


def _make_stock(model: nn.Module, mpu: Any) -> None:
    """Turn layers written as ``ds_fsmoe.MoE`` into stock's, for a config that is not enabled."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, StockMoE)}
    check_sequence_parallel(layers, sizes_of_mpu(mpu)[0])
    for layer in layers.values():
        restore_stock(layer)


def install(block: Mapping[str, Any] | None = None) -> None:
    """Replace ``deepspeed.initialize`` by :func:`initialize` from now on, also for every library that calls it.

    A replacement that another library made before is called by ours. A replacement made later calls ours. A second call
    changes the block, if it has one, and is otherwise ignored.

    Args:
        block: the ``"fsmoe"`` block, a dict or a :class:`ds_fsmoe.Config`, of every engine with MoE layers from now on;
            it replaces the block of the engine's config. ``None``: the block of the config, or of an earlier call.

    Raises:
        ConfigError: the block is wrong.
        RuntimeError: a module already holds the function in DeepSpeed's place under its own name, and would bypass us.

    Examples:
        >>> import deepspeed, ds_fsmoe
        >>> ds_fsmoe.install({"enabled": True, "num_chunks": 2})
        >>> deepspeed.initialize is ds_fsmoe.initialize
        True
        >>> ds_fsmoe.uninstall()
    """
    global _given, _replaced
    if block is not None:
        read_block({BLOCK: block})
    found = deepspeed.initialize
    if found is not initialize:
        # Where a library has taken its own away again, what lay over it has gone, too.
        kept = (
            _wrapped_functions[: _wrapped_functions.index(found) + 1]
            if found in _wrapped_functions
            else [*_wrapped_functions, found]
        )
        _refuse_bypass(kept)
        _wrapped_functions[:] = kept
        _replaced = found if _replaced is None else _replaced
        deepspeed.initialize = initialize
    else:
        _refuse_bypass(_wrapped_functions)
    launch_order.ask()
    accelerate.leave_block_alone()
    building.follow(lambda: None if _given is None else _given.block)
    if block is not None:
        _given = InitializeArgs(dict(block))


def _refuse_bypass(functions: Sequence[Callable[..., Any]]) -> None:
    # A wrapper's own module holds what it wraps, as it has to.
    own = {sys.modules[__name__], deepspeed, *(sys.modules.get(_module_of(each)) for each in functions)}
    for name, module in list(sys.modules.items()):
        if module in own or not hasattr(module, "__dict__"):
            continue
        for alias, value in list(vars(module).items()):
            if any(value is each for each in functions):
                raise RuntimeError(
                    f"{name} imported deepspeed.initialize before ds_fsmoe.install(), as {alias}, and would bypass "
                    "it: call install() first, or use ds_fsmoe.initialize"
                )


def _module_of(function: Callable[..., Any]) -> str:
    """Return where a function was written; behind ``functools.wraps`` its ``__module__`` is another's."""
    return getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", "")


def uninstall() -> None:
    """Undo :func:`install`, and drop its block; later replacements by others are undone as well.

    Examples:
        >>> import deepspeed, ds_fsmoe
        >>> ds_fsmoe.install()
        >>> ds_fsmoe.uninstall()
        >>> deepspeed.initialize is ds_fsmoe.initialize
        False
    """
    global _given, _replaced
    accelerate.watch_block_again()
    building.follow(None)
    if _replaced is not None:
        deepspeed.initialize = _replaced
    del _wrapped_functions[1:]
    _given = _replaced = None


def warn_if_unused() -> None:
    """Warn if no engine has used the block that was given from outside."""
    if _given is not None and not _given.is_used and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "the fsmoe block of the command line was not used (deepspeed.initialize got no config or no MoE layers)"
        )

# SPDX-License-Identifier: Apache-2.0
"""Builds Hugging Face models with this rank's experts only, from their construction on: no rank holds all experts.

This module has all that is replaced in ``transformers`` for that, and every name of it that is used.
``from_pretrained`` and ``from_config`` run unchanged. Experts are split between the construction of a model and the
reading of its files. Only this rank's experts are passed on; renaming, merging and casting remain those of
``transformers``. Scripts call it, or :func:`ds_fsmoe.install` does; ``expert_tensors`` reads the files.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_fsmoe.config.accelerate import without_placeholders
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.imported_later import Finder
from ds_fsmoe.config.reading import BLOCK, ConfigError, read_block
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.engine import compat
from ds_fsmoe.engine.expert_tensors import CONVERSIONS, DEVICE, Build
from ds_fsmoe.engine.set_up import wait_for_all_ranks
from ds_fsmoe.layer.experts_layer import loaded_in
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.log import log_on_rank_0

_MODULE = "transformers.modeling_utils"
_NAMES: dict[str, tuple[str, ...] | None] = {
    f"{_MODULE}:PreTrainedModel.from_pretrained": None,
    f"{_MODULE}:PreTrainedModel.save_pretrained": ("self",),
    f"{_MODULE}:PreTrainedModel._from_config": ("config",),
    f"{_MODULE}:PreTrainedModel._load_pretrained_model": ("model", "state_dict", "checkpoint_files", "load_config"),
    f"{_MODULE}:convert_and_load_state_dict_in_model": ("model", "state_dict", "load_config", "disk_offload_index"),
    f"{_MODULE}:load_state_dict": ("checkpoint_file",),
    f"{_MODULE}:is_deepspeed_zero3_enabled": None,
    f"{_MODULE}:deepspeed_config": None,
    **{
        f"{CONVERSIONS}:{name}": None
        for name in ("rename_source_key", "dot_natural_key", "ConversionOps", "WeightConverter", "WeightRenaming")
    },
}
"""Each name of transformers that is used, and the first of the parameters that it takes."""

_Wanted = tuple[FSMoEBlock, Mapping[str, Any]]
"""An enabled block, and the config that it is in."""
_asked: list[_Wanted | None] = []
"""What :func:`own_experts` has been given, the innermost last."""
_given: Callable[[], Mapping[str, Any] | None] | None = None
"""Asks for the block given from outside; ``None`` as long as nothing is installed."""
_build: Build | None = None
"""The model that is being built."""


@contextmanager
def own_experts(config: Any = None) -> Iterator[None]:
    """Make ``from_pretrained`` and ``from_config`` build Hugging Face models with this rank's experts only.

    Each rank then holds its own experts and the dense part of a model, and reads only its own experts from the files.
    :func:`ds_fsmoe.initialize`, with the same config, accepts such a model as it is. Before that it neither runs nor
    can be saved. Every rank has to build the model, since ranks agree on where experts are.

    :func:`ds_fsmoe.install` does this for ``from_pretrained`` by itself if it has a block, or if an
    ``HfDeepSpeedConfig`` with a block is alive. Trainer's arguments keep one alive.

    Args:
        config: the DeepSpeed config, as a dict or the path of a JSON file. With ``"enabled": false`` in its block
            models are built whole. ``None``: the config of ``HfDeepSpeedConfig``. A block given to ``install`` replaces
            its block.

    Raises:
        ConfigError: the block is wrong, or missing.
        IncompatibleError: the installed transformers cannot be used for this.

    Yields:
        ``None``; models built inside have this rank's experts only.

    Examples:
        >>> import torch, ds_fsmoe
        >>> from transformers import AutoModelForCausalLM, MixtralConfig
        >>> sizes = {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
        >>> config = MixtralConfig(hidden_size=16, intermediate_size=32, num_local_experts=4, **sizes)
        >>> ds_config = {"train_micro_batch_size_per_gpu": 1, "fsmoe": {"enabled": True, "ops": "reference"}}
        >>> ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        >>> with ds_fsmoe.own_experts(ds_config):
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> model.model.layers[0].mlp.experts.down_proj.shape  # [experts of this rank, M, H]
        torch.Size([4, 16, 32])
        >>> engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    """
    # First of all: without transformers that is the error.
    modeling = importlib.import_module(_MODULE)
    if (problem := compat.problem_with(_NAMES)) is not None:
        raise compat.IncompatibleError(f"{problem}; own_experts() needs transformers 5.23; load the model without it")
    _patch(modeling)
    ds_config = _ds_config(modeling) if config is None else compat.load_ds_config(config)
    is_off = BLOCK in ds_config and _wanted(ds_config) is None
    wanted = None if is_off else _wanted(_with_block_from_outside(ds_config))
    if wanted is None and not is_off:
        raise ConfigError(
            f"own_experts(): no {BLOCK} block is known yet; pass the DeepSpeed config that initialize() gets"
        )
    _asked.append(wanted)
    try:
        yield
    finally:
        _asked.pop()


def follow(given: Callable[[], Mapping[str, Any] | None] | None) -> None:
    """Build models with this rank's experts from now on, wherever a block is known.

    Args:
        given: returns the block from outside; ``None`` undoes it.
    """
    global _given
    _given = given
    if given is None:
        _finder.end()
    else:
        _finder.begin()


def _patch_if_possible(modeling: ModuleType) -> None:
    if (problem := compat.problem_with(_NAMES)) is None:
        _patch(modeling)
    else:
        log_on_rank_0(
            f"{problem}: each rank loads all experts, and drops those of other ranks in initialize()",
            logging.WARNING,
        )


_finder = Finder(_MODULE, _patch_if_possible)


def _ds_config(modeling: ModuleType) -> Mapping[str, Any]:
    """Return the config that transformers has, without numbers that stand for those of a later call."""
    return without_placeholders(modeling.deepspeed_config() or {})


def _with_block_from_outside(ds_config: Mapping[str, Any]) -> Mapping[str, Any]:
    given = None if _given is None else _given()
    return ds_config if given is None else dict(ds_config) | {BLOCK: given}


def _wanted(ds_config: Mapping[str, Any]) -> _Wanted | None:
    """Return the settings of a DeepSpeed config; ``None`` if its block is missing or not enabled.

    Raises:
        ConfigError: the block is wrong.
    """
    block = read_block(ds_config)
    return None if block is None or not block.enabled else (block, ds_config)


def _begin(modeling: ModuleType) -> Build | None:
    """Return the builder of the next model, ``None`` for a whole one; connect ranks if needed. Collective."""
    if _build is not None:
        return None  # a model within a model
    if _asked:
        wanted = _asked[-1]
    elif _given is not None:
        wanted = _wanted(_with_block_from_outside(_ds_config(modeling)))
    else:
        wanted = None
    if wanted is None:
        return None
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        deepspeed.init_distributed()
    if "LOCAL_RANK" in os.environ:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # where ranks exchange the names of their hosts
    if world_size_now() == 1:
        return None
    _barrier(wanted[0].debug.hang_timeout_s)
    return Build(*wanted, modeling.is_deepspeed_zero3_enabled())


@functools.cache  # once: with its groups made, one rank may read another model alone
def _barrier(limit_s: float) -> None:
    wait_for_all_ranks("from_pretrained", limit_s)


@contextmanager
def _built(build: Build) -> Iterator[None]:
    global _build
    _build = build
    try:
        with build.building():
            yield
    finally:
        _build = None


@functools.cache
def _patch(modeling: ModuleType) -> None:
    """Wrap the methods of ``PreTrainedModel`` once."""
    model_class = modeling.PreTrainedModel
    from_pretrained, from_config = model_class.from_pretrained.__func__, model_class._from_config.__func__
    load, save = model_class._load_pretrained_model, model_class.save_pretrained

    @functools.wraps(from_pretrained)
    def build_from_files(cls: Any, *args: Any, **kwargs: Any) -> Any:
        build = _begin(modeling)
        if build is None:
            return from_pretrained(cls, *args, **kwargs)
        with _built(build):
            made = from_pretrained(cls, *args, **kwargs)
        model = made[0] if isinstance(made, tuple) else made
        if not build.is_sharded:
            raise LayerError(
                f"{cls.__name__}.from_pretrained: a distributed checkpoint cannot be loaded inside own_experts()"
            )
        build.finish(model)
        return made

    @functools.wraps(from_config)
    def build_from_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Only where it is asked for, as ranks draw other weights than one process would.
        build = _begin(modeling) if _asked else None
        if build is None:
            return from_config(cls, *args, **kwargs)
        with _built(build):
            model = from_config(cls, *args, **kwargs)
            # Where the script itself is on the meta device, weights come later.
            drawn = {name for name, each in model.named_parameters() if hasattr(each, DEVICE)}
            build.shard_experts(model)
        build.draw(model, drawn & build.own.keys())
        if build.is_zero3:
            build.share_out(model)
        build.finish(model)
        return model

    @functools.wraps(load)
    def read(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        if _build is None or _build.is_sharded:
            return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        others = {**dict(zip(["expected_keys"], args, strict=False)), **kwargs}
        return _build.read(modeling, load, (model, state_dict, checkpoint_files, load_config), others)

    @functools.wraps(save)
    def refuse_or_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, _, part in loaded_in(self):
            raise LayerError(
                f"{name} has {part.num_local} of {part.num_experts} experts: save_pretrained would lose the others"
            )
        return save(self, *args, **kwargs)

    model_class.from_pretrained = classmethod(build_from_files)
    model_class._from_config = classmethod(build_from_config)
    model_class._load_pretrained_model = staticmethod(read)
    model_class.save_pretrained = refuse_or_save

# SPDX-License-Identifier: Apache-2.0
"""Holds what is done to ``transformers`` so that models are built with this rank's experts only, and every name of it
that is used.

``from_pretrained`` and ``from_config`` run as they are. Between the construction of a model and the reading of its
files experts are cut, and of tensors with experts only this rank's are handed on; renaming, merging and casting stay
theirs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import Any

from ds_fsmoe.config.imported_later import Finder
from ds_fsmoe.config.reading import BLOCK, ConfigError
from ds_fsmoe.engine import compat
from ds_fsmoe.engine.arrivals import wait_for_all_ranks
from ds_fsmoe.engine.expert_tensors import read_own
from ds_fsmoe.engine.own_experts import DEVICE, Build, Wanted, block_of, find_ranks
from ds_fsmoe.layer.own_experts_marks import loaded_in
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.log import log_on_rank_0

_MODULE = "transformers.modeling_utils"
_NAMES: dict[str, tuple[str, ...]] = {
    "PreTrainedModel.from_pretrained": (),
    "PreTrainedModel.save_pretrained": ("self",),
    "PreTrainedModel._from_config": ("config",),
    "PreTrainedModel._load_pretrained_model": ("model", "state_dict", "checkpoint_files", "load_config"),
    "convert_and_load_state_dict_in_model": ("model", "state_dict", "load_config", "disk_offload_index"),
    "load_state_dict": ("checkpoint_file",),
    "is_deepspeed_zero3_enabled": (),
    "deepspeed_config": (),
}
"""Each name in the module and the first of the parameters that it takes."""
_CONVERSIONS = "transformers.core_model_loading"
_OF_CONVERSIONS = ("rename_source_key", "dot_natural_key", "ConversionOps", "WeightConverter", "WeightRenaming")

_asked: list[Wanted | None] = []
"""What :func:`own_experts` has been given, the innermost last."""
_given: Callable[[], Mapping[str, Any] | None] | None = None
"""Asks for the block given from outside; ``None`` as long as nothing is installed."""
_build: Build | None = None
"""The model that is being built."""


def _why_not(modeling: ModuleType) -> str | None:
    """Return why the installed transformers cannot be used, ``None`` if it can."""
    for name, wanted in _NAMES.items():
        found: Any = modeling
        for each in name.split("."):
            found = getattr(found, each, None)
        if found is None:
            return f"{_MODULE} has no {name}"
        takes = tuple(inspect.signature(found).parameters)[: len(wanted)]
        if takes != wanted:
            return f"{_MODULE}: {name} takes ({', '.join(takes)}), not ({', '.join(wanted)})"
    conversions = importlib.import_module(_CONVERSIONS)
    missing = [name for name in _OF_CONVERSIONS if not hasattr(conversions, name)]
    return f"{_CONVERSIONS} has no {missing[0]}" if missing else None


@contextmanager
def own_experts(config: Any = None) -> Iterator[None]:
    """Let ``from_pretrained`` and ``from_config`` build Hugging Face models with this rank's experts only.

    No rank then holds more than its own experts and the dense part of a model, and of the experts in its files each
    rank reads its own. :func:`ds_fsmoe.initialize`, given the same config, takes such a model as it is; before that it
    neither runs nor is saved. Every rank has to build the model, since ranks agree on where experts are.

    Under :func:`ds_fsmoe.install` this is done for ``from_pretrained`` without asking, where a block is given to it or
    an ``HfDeepSpeedConfig`` with one is alive, as Trainer's arguments keep it.

    Args:
        config: the DeepSpeed config, as a dict or the path of a JSON file. With ``"enabled": false`` in its block
            models are built whole. ``None``: that of ``HfDeepSpeedConfig``. A block given to ``install`` replaces its.

    Raises:
        ConfigError: the block is wrong, or there is none.
        IncompatibleError: the installed transformers cannot be used for it.

    Yields:
        Nothing; what is built inside has this rank's experts only.

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
    modeling = importlib.import_module(_MODULE)
    why_not = _why_not(modeling)
    if why_not is not None:
        raise compat.IncompatibleError(
            f"transformers {version('transformers')}: {why_not}; own_experts() works with transformers 5.23, load the "
            "model without it"
        )
    _patch(modeling)
    ds_config = modeling.deepspeed_config() or {} if config is None else compat.load_ds_config(config)
    is_off = BLOCK in ds_config and Wanted.by(ds_config) is None
    wanted = None if is_off else Wanted.by(block_of(ds_config, _block_from_outside()))
    if wanted is None and not is_off:
        raise ConfigError(
            f"own_experts(): no {BLOCK} block is known yet; give it the DeepSpeed config that initialize() gets"
        )
    _asked.append(wanted)
    try:
        yield
    finally:
        _asked.pop()


def follow(given: Callable[[], Mapping[str, Any] | None]) -> None:
    """Build models with own experts from now on, wherever a block is known. ``given`` returns the one from outside."""
    global _given
    _given = given
    _finder.begin()


def unfollow() -> None:
    """Undo :func:`follow`."""
    global _given
    _given = None
    _finder.end()


def _patch_if_possible(modeling: ModuleType) -> None:
    why_not = _why_not(modeling)
    if why_not is None:
        _patch(modeling)
    else:
        log_on_rank_0(
            f"transformers {version('transformers')}: {why_not}: models are loaded with all experts on every rank, and "
            "cut when they get an engine",
            logging.WARNING,
        )


_finder = Finder(_MODULE, _patch_if_possible)


def _block_from_outside() -> Mapping[str, Any] | None:
    return None if _given is None else _given()


def _begin(modeling: ModuleType) -> Build | None:
    """Return what builds the next model, ``None`` where it is built whole."""
    if _build is not None:
        return None  # a model within a model
    if _asked:
        wanted = _asked[-1]
    elif _given is not None:
        wanted = Wanted.by(block_of(modeling.deepspeed_config() or {}, _block_from_outside()))
    else:
        wanted = None
    if wanted is None or find_ranks() == 1:
        return None
    _meet(wanted.block.debug.hang_timeout_s)
    return Build(wanted, modeling.is_deepspeed_zero3_enabled())


@functools.cache  # once: with its groups made, one rank may read another model alone
def _meet(limit_s: float) -> None:
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


def _patch(modeling: ModuleType) -> None:
    """Put ours around the methods of ``PreTrainedModel``, once."""
    model_class = modeling.PreTrainedModel
    if getattr(model_class, "fsmoe_is_patched", False):
        return
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
        if not build.is_cut:
            raise LayerError(
                f"{cls.__name__}.from_pretrained: a distributed checkpoint is not read within own_experts()"
            )
        if not build.is_zero3:
            build.draw(model, build.undrawn)
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
            build.cut(model)
        build.draw(model, drawn & set(build.names(model)))
        if build.is_zero3:
            build.share_out(model)
        build.finish(model)
        return model

    @functools.wraps(load)
    def read(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        if _build is None or _build.is_cut:
            return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        conversions = importlib.import_module(_CONVERSIONS)
        others = {**dict(zip(["expected_keys"], args, strict=False)), **kwargs}
        given = model, state_dict, checkpoint_files, load_config
        return read_own(modeling, conversions, _build, load, given, others)

    @functools.wraps(save)
    def refuse_or_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, _, part in loaded_in(self):
            raise LayerError(
                f"{name} has {part.num_local} of {part.num_experts} experts: save_pretrained would lose all others"
            )
        return save(self, *args, **kwargs)

    model_class.from_pretrained = classmethod(build_from_files)
    model_class._from_config = classmethod(build_from_config)
    model_class._load_pretrained_model = staticmethod(read)
    model_class.save_pretrained = refuse_or_save
    model_class.fsmoe_is_patched = True

# SPDX-License-Identifier: Apache-2.0
"""Builds Hugging Face models with this rank's experts only, from when they are made: no rank holds all experts."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, describe_as
from ds_fsmoe.components.expert_compute.contract import OWN_NAMES, contract_of, shape_of
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.imported_later import Finder
from ds_fsmoe.config.reading import BLOCK, ConfigError, read_block
from ds_fsmoe.distributed.groups import make_groups, stock_names
from ds_fsmoe.distributed.partitioned import is_shared_out
from ds_fsmoe.distributed.topology import layout, world_size_now
from ds_fsmoe.engine import compat
from ds_fsmoe.engine.convert_adapters import adapt_all_experts
from ds_fsmoe.engine.convert_experts import check_experts_modules, ep_size_of, find_experts, num_experts_of
from ds_fsmoe.engine.cut_experts import share_out_over_replicas, tag_as_experts, type_of_run
from ds_fsmoe.engine.expert_tensors import read_own
from ds_fsmoe.engine.set_up import wait_for_all_ranks
from ds_fsmoe.layer.experts_layer import loaded_in, mark_loaded
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.log import log_on_rank_0

DEVICE = "fsmoe_device"
"""The attribute of a parameter on the meta device with the device that it is to have."""
_SEEDS_APART = 1_000_003


@dataclass(frozen=True)
class Wanted:
    """Holds what a config says about experts before there is an engine."""

    block: FSMoEBlock
    expert_before_data: bool
    dtype: torch.dtype | None = None
    """The type in which experts will compute; ``None``: that of their weights."""

    @staticmethod
    def by(ds_config: Mapping[str, Any]) -> Wanted | None:
        """Return what a DeepSpeed config wants, ``None`` where its block is not there or not enabled.

        Raises:
            ConfigError: the block is wrong.
        """
        block = read_block(ds_config)
        if block is None or not block.enabled:
            return None
        dtype = type_of_run(ds_config, get_accelerator().device_name())
        return Wanted(block, not ds_config.get("use_data_before_expert_parallelism", False), dtype)


class Build:
    """Makes one model with this rank's experts only: :meth:`building` around its construction, then :meth:`cut`,
    the weights, and :meth:`finish`. Collective over all ranks of the job.

    Args:
        wanted: what the config says.
        is_zero3: whether ``zero.Init`` shares out what is constructed.
    """

    def __init__(self, wanted: Wanted, is_zero3: bool) -> None:
        self.wanted, self.is_zero3 = wanted, is_zero3
        self.parts: dict[str, ExpertPart] = {}
        """Name of a module of experts -> this rank's part."""
        self.is_cut = False
        self.undrawn: set[str] = set()
        """Names of parameters of experts that no file has."""
        self._building = ExitStack()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Keep weights of experts off memory while modules are constructed, until :meth:`cut`."""
        handle = register_module_parameter_registration_hook(_keep_off_memory)
        self._building.callback(handle.remove)
        if self.is_zero3:
            self._building.enter_context(_zero_init_leaves_experts())
        try:
            yield
        finally:
            self._building.close()

    def cut(self, model: nn.Module) -> None:
        """Give each module of experts its part of them, without weights. Collective.

        Raises:
            ConfigError: ``ep_size`` does not fit; see :func:`chosen_ep_size`.
            LayerError: experts cannot be cut; see :func:`check_experts_modules`.
        """
        self._building.close()
        self.is_cut = True
        experts = find_experts(model)
        if not experts:
            return
        check_experts_modules(model, experts, {})
        device = torch.device(get_accelerator().current_device_name())
        ep_size = ep_size_of(self.wanted.block, experts, device, self.wanted.expert_before_data, self.wanted.dtype)
        ranks = layout(world_size_now(), ep_size, 1, self.wanted.expert_before_data).group_of("ep", dist.get_rank())
        for name, module in experts.items():
            self.parts[name] = part = ExpertPart(
                "stacked", num_experts_of(module), ep_size, ranks.index(dist.get_rank())
            )
            for each in contract_of(module).weights:
                whole = getattr(module, each)
                shape = part.part_shape(shape_of(whole) or ())
                weight = torch.empty(shape, dtype=whole.dtype, device="meta")
                mine = nn.Parameter(weight, requires_grad=whole.requires_grad)
                vars(mine).update(vars(whole))
                setattr(module, each, mine)
            if hasattr(module, "num_experts"):
                module.num_experts = part.num_local

    def names(self, model: nn.Module) -> dict[str, ExpertPart]:
        """Return name -> part of every parameter of experts."""
        return {
            f"{name}.{each}": part
            for name, part in self.parts.items()
            for each in contract_of(model.get_submodule(name)).weights
        }

    def draw(self, model: nn.Module, undrawn: set[str]) -> None:
        """Initialise parameters as the model's own class does it, ranks with different experts differently.

        Args:
            model: a ``PreTrainedModel``.
            undrawn: names of parameters of experts.
        """
        if not undrawn:
            return
        owners = [(name, each) for name, each in model.named_modules() if hasattr(each, "_init_weights")]
        start = int(torch.randint(0, 2**40, (), device="cpu"))
        for index, (name, part) in enumerate(self.parts.items()):
            module = model.get_submodule(name)
            mine = [each for each in contract_of(module).weights if f"{name}.{each}" in undrawn]
            if not mine:
                continue
            for each in mine:
                parameter = getattr(module, each)
                if parameter.is_meta:
                    device = getattr(parameter, DEVICE, torch.device("cpu"))
                    weight = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    parameter = nn.Parameter(weight, requires_grad=parameter.requires_grad)
                    setattr(module, each, parameter)
                parameter._is_hf_initialized = False
            device = getattr(module, mine[0]).device
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                torch.manual_seed(start + _SEEDS_APART * (index * part.ep_size + part.ep_rank))
                _owner_of(name, owners)._init_weights(module)
            for each in mine:
                getattr(module, each)._is_hf_initialized = True

    def share_out(self, model: nn.Module) -> None:
        """Share this rank's experts out over the ranks that have the same, as ZeRO 3 does. Collective."""
        if not self.parts:
            return
        block, ep_size = self.wanted.block, next(iter(self.parts.values())).ep_size
        asked = block.topology.ranks_per_node
        make_groups(
            ep_size,
            expert_before_data=self.wanted.expert_before_data,
            ranks_per_node=None if asked == "auto" else asked,
            mp_size=1,
            pp_size=1,
            max_ctas=None if block.max_ctas == "auto" else block.max_ctas,
        )
        of_zero = next((each for each in model.parameters() if is_shared_out(each)), None)
        if of_zero is None:
            raise LayerError(f"{type(model).__name__}: zero.Init has shared out no parameter")
        for name, part in self.parts.items():
            module = model.get_submodule(name)
            weights = [getattr(module, each) for each in contract_of(module).weights]
            for each in weights:
                tag_as_experts(each, part, stock_names(ep_size, 1).expert_group_name)
            share_out_over_replicas(weights, of_zero)

    def finish(self, model: nn.Module) -> None:
        """Mark what was cut: it runs under an engine only."""
        ranks_of_experts = {part.ep_size for part in self.parts.values()}
        for name, part in self.parts.items():
            module = model.get_submodule(name)
            for each in contract_of(module).weights:
                parameter = getattr(module, each)
                describe_as(parameter, part)
                # A range of a stacked tensor keeps all of it alive, or mapped from its file.
                if part.ep_size > 1 and parameter.untyped_storage().nbytes() > parameter.nbytes > 0:
                    parameter.data = parameter.data.clone()
            if part.ep_size > 1:
                mark_loaded(module, part)
                adapt_all_experts()
        if ranks_of_experts and max(ranks_of_experts) > 1:
            log_on_rank_0(
                f"{type(model).__name__} has this rank's experts only, of ep_size = {max(ranks_of_experts)} rank(s)"
            )


def _owner_of(name: str, owners: list[tuple[str, nn.Module]]) -> Any:
    """Return the innermost of the modules that a module is in; ``owners`` come in module order."""
    return [each for prefix, each in owners if not prefix or name == prefix or name.startswith(f"{prefix}.")][-1]


def _keep_off_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Put a new parameter of experts on the meta device. The flags of the contract come after the parameters."""
    if parameter is None or parameter.is_meta or name not in OWN_NAMES or not hasattr(type(module), "_apply_gate"):
        return None
    away = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    setattr(away, DEVICE, parameter.device)
    return away


@contextmanager
def _zero_init_leaves_experts() -> Iterator[None]:
    """Let ``zero.Init`` leave parameters without memory as they are; it would share them out over all ranks."""
    theirs = partition_parameters.Init._post_init_method

    def around(self: Any, module: nn.Module) -> None:
        away = {name: each for name, each in module._parameters.items() if hasattr(each, DEVICE)}
        module._parameters.update(dict.fromkeys(away))
        try:
            theirs(self, module)
        finally:
            module._parameters.update(away)

    partition_parameters.Init._post_init_method = around
    try:
        yield
    finally:
        partition_parameters.Init._post_init_method = theirs


def find_ranks() -> int:
    """Return the number of ranks of the job, which find each other if they have not yet. Collective."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        deepspeed.init_distributed()
    if "LOCAL_RANK" in os.environ:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # where ranks exchange the names of their hosts
    return world_size_now()


def with_block_from_outside(ds_config: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a config with the block given from outside, if one was."""
    return dict(ds_config) if given is None else dict(ds_config) | {BLOCK: given}


# ---- Holds what is done to ``transformers`` so that models are built with this rank's experts only, and every
# name of it that is used
#
# ``from_pretrained`` and ``from_config`` run as they are. Between the construction of a model and the reading of its
# files experts are cut, and of tensors with experts only this rank's are handed on; renaming, merging and casting
# stay theirs.


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
    wanted = None if is_off else Wanted.by(with_block_from_outside(ds_config, _block_from_outside()))
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
        wanted = Wanted.by(with_block_from_outside(modeling.deepspeed_config() or {}, _block_from_outside()))
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

# SPDX-License-Identifier: Apache-2.0
"""Builds a Hugging Face model with this rank's experts only, and reads this rank's part of its files.

This rank reads the dense part and its own experts. Files hold experts stacked, one tensor for all of a layer, or one by
one; transformers merges the latter by converters. Of stacked experts a range is read, of single ones those of this
rank. Where a converter mixes experts in other ways, its tensors are read whole, one parameter at a time, and split
after it. ``own_experts`` calls this; that module has what is replaced in ``transformers``.
"""

from __future__ import annotations

import copy
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ds_fsmoe.checkpoint.ranks import replaced
from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, describe_as
from ds_fsmoe.components.expert_compute.contract import OWN_NAMES, contract_of
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.groups import make_groups, stock_names
from ds_fsmoe.distributed.partitioned import is_shared_out
from ds_fsmoe.distributed.topology import layout, world_size_now
from ds_fsmoe.engine.convert_experts import (
    check_experts_modules,
    ep_size_of,
    find_experts,
    keep_own_weights,
)
from ds_fsmoe.engine.shard_experts import (
    PEFT_COUNTS_ALL,
    num_experts_of,
    share_out_over_replicas,
    tag_as_experts,
    type_of_run,
)
from ds_fsmoe.layer.experts_layer import leave_alone
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.log import log_on_rank_0

# ---- Makes one model with this rank's experts only


CONVERSIONS = "transformers.core_model_loading"
DEVICE = "fsmoe_device"
"""The attribute of a parameter on the meta device with the device that it is to have."""
_SEEDS_APART = 1_000_003


class Build:
    """Makes one model with this rank's experts only. Collective over all ranks of the job.

    Call :meth:`building` around its construction, then :meth:`shard_experts`, load the weights, then :meth:`finish`.

    Args:
        block: the options of experts that are needed before there is an engine.
        ds_config: the DeepSpeed config that has the block.
        is_zero3: whether ``zero.Init`` partitions new parameters over ranks.
    """

    def __init__(self, block: FSMoEBlock, ds_config: Mapping[str, Any], is_zero3: bool) -> None:
        self.block, self.is_zero3, self._ds_config = block, is_zero3, ds_config
        self._expert_before_data = not ds_config.get("use_data_before_expert_parallelism", False)
        self._dtype = type_of_run(ds_config, get_accelerator().device_name())
        self._ep_size = 1
        self.parts: dict[str, ExpertPart] = {}
        """Name of a module of experts -> this rank's part."""
        self.own: dict[str, ExpertPart] = {}
        """Name of a parameter of experts -> this rank's part."""
        self.is_sharded = False
        self._undrawn: set[str] = set()
        """Names of parameters of experts that no file has."""
        self._building = ExitStack()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Keep weights of experts off memory while modules are constructed, until :meth:`shard_experts`."""
        handle = register_module_parameter_registration_hook(_keep_off_memory)
        self._building.callback(handle.remove)
        if self.is_zero3:
            self._building.enter_context(_zero_init_leaves_experts())
        with self._building:
            yield

    def shard_experts(self, model: nn.Module) -> None:
        """Reduce each experts module to this rank's experts, without weights. Collective.

        Raises:
            DisagreementError: ranks have different blocks, and a size is chosen.
            ConfigError: ``ep_size`` does not fit; see :func:`chosen_ep_size`.
            LayerError: experts cannot be split over ranks; see :func:`check_experts_modules`.
        """
        self._building.close()
        self.is_sharded = True
        experts = find_experts(model)
        if not experts:
            return
        check_experts_modules(model, experts, {})
        device = torch.device(get_accelerator().current_device_name())
        self._ep_size = ep_size = ep_size_of(
            *(self.block, experts, device, self._expert_before_data, self._dtype),
            model=model,
            ds_config=self._ds_config,
        )
        ranks = layout(world_size_now(), ep_size, 1, self._expert_before_data).group_of("ep", dist.get_rank())
        for name, module in experts.items():
            part = ExpertPart("stacked", num_experts_of(module), ep_size, ranks.index(dist.get_rank()))
            self.parts[name] = part
            weights = dict.fromkeys(contract_of(module).weights, part)
            keep_own_weights(module, weights, stock_names(ep_size, 1).expert_group_name)
            self.own |= {f"{name}.{each}": part for each in weights}

    def draw(self, model: nn.Module, undrawn: set[str]) -> None:
        """Initialize parameters by the model's own class; ranks with different experts draw different numbers.

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
                weight = getattr(module, each)
                if weight.is_meta:
                    memory = torch.empty_like(weight, device=getattr(weight, DEVICE, "cpu"))
                    setattr(module, each, nn.Parameter(memory, requires_grad=weight.requires_grad))
                getattr(module, each)._is_hf_initialized = False
            device = getattr(module, mine[0]).device
            # The innermost of the modules around them that initialise, which come in module order.
            *_, owner = (each for prefix, each in owners if not prefix or f"{name}.".startswith(f"{prefix}."))
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                torch.manual_seed(start + _SEEDS_APART * (index * part.ep_size + part.ep_rank))
                owner._init_weights(module)
            for each in mine:
                getattr(module, each)._is_hf_initialized = True

    def share_out(self, model: nn.Module) -> None:
        """Partition this rank's experts over the ranks that have the same ones, as ZeRO 3 does. Collective."""
        if not self.parts:
            return
        asked = self.block.topology.ranks_per_node
        make_groups(
            self._ep_size,
            expert_before_data=self._expert_before_data,
            ranks_per_node=None if asked == "auto" else asked,
            mp_size=1,
            pp_size=1,
            max_ctas=None if self.block.max_ctas == "auto" else self.block.max_ctas,
        )
        of_zero = next((each for each in model.parameters() if is_shared_out(each)), None)
        if of_zero is None:
            raise LayerError(f"{type(model).__name__}: zero.Init has partitioned no parameter")
        mine = {model.get_parameter(name): part for name, part in self.own.items()}
        for each, part in mine.items():
            tag_as_experts(each, part, stock_names(self._ep_size, 1).expert_group_name)
        share_out_over_replicas(list(mine), of_zero)

    def finish(self, model: nn.Module) -> None:
        """Initialize weights that no file holds, and mark shards, which need an engine to run."""
        self.draw(model, self._undrawn)
        for name, part in self.own.items():
            parameter = model.get_parameter(name)
            describe_as(parameter, part)
            # A range of a stacked tensor keeps all of it alive, or mapped from its file.
            if part.ep_size > 1 and parameter.untyped_storage().nbytes() > parameter.nbytes > 0:
                parameter.data = parameter.data.clone()
        if self._ep_size > 1:
            for name, part in self.parts.items():
                leave_alone(model.get_submodule(name), loaded=part)
            PEFT_COUNTS_ALL.begin()
            log_on_rank_0(
                f"{type(model).__name__} was loaded with this rank's experts only (ep_size = {self._ep_size})"
            )

    def read(
        self,
        modeling: ModuleType,
        load: Callable[..., Any],
        given: tuple[Any, Any, Any, Any],
        others: Mapping[str, Any],
    ) -> Any:
        """Load a model whose experts have no memory yet, in place of ``PreTrainedModel._load_pretrained_model``.

        Args:
            modeling: ``transformers.modeling_utils``.
            load: transformers' own function.
            given: its model, state dict, files and options of loading.
            others: other arguments of that function, by name.

        Returns:
            The result of transformers' function.

        Raises:
            ConfigError, LayerError: see :meth:`shard_experts`; or the model is quantised or sharded in other ways.
        """
        model, state_dict, files, load_config = given
        self.shard_experts(model)
        if not self.parts:
            return load(*given, **others)
        for name, why in (("hf_quantizer", "is quantised"), ("device_mesh", "is sharded by transformers")):
            if getattr(load_config, name, None) is not None:
                raise LayerError(
                    f"{type(model).__name__} {why}: its experts cannot be loaded per rank; load it outside of "
                    "own_experts()"
                )
        conversions = importlib.import_module(CONVERSIONS)
        with ExitStack() as stack:
            tensors = (
                state_dict if state_dict is not None else stack.enter_context(_opened(modeling, files, load_config))
            )
            dense, experts, is_whole = split_tensors(
                conversions, model, tensors, load_config.weight_mapping or [], self.own
            )
            stack.enter_context(_sharding_results(conversions, is_whole))
            if not self.is_zero3:
                info, index = load(model, dense | experts, files, load_config, **others)
                self._undrawn = self.own.keys() & info.missing_keys
                return info, index
            # ZeRO 3 takes values from the first rank.
            values = {name: each[...] if dist.get_rank() == 0 else each[...].to("meta") for name, each in dense.items()}
            info, index = load(model, values, files, load_config, **others)
            del values
            kept = getattr(model, "_weight_conversions", None)
            found, _ = modeling.convert_and_load_state_dict_in_model(
                model=model, state_dict=experts, load_config=load_config, disk_offload_index=None
            )
            model._weight_conversions = kept
            info.missing_keys = set(info.missing_keys) - (self.own.keys() - found.missing_keys)
            for name in ("mismatched_keys", "unexpected_keys", "conversion_errors"):
                getattr(info, name).update(getattr(found, name))
            self.draw(model, self.own.keys() & found.missing_keys)
            self.share_out(model)
            for each in self.own:
                model.get_parameter(each)._is_hf_initialized = True
        return info, index


def _keep_off_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Place a new parameter of experts on the meta device; the flags of the contract come after the parameters."""
    if parameter is None or parameter.is_meta or name not in OWN_NAMES or not hasattr(type(module), "_apply_gate"):
        return None
    away = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    setattr(away, DEVICE, parameter.device)
    return away


def _zero_init_leaves_experts() -> AbstractContextManager[None]:
    """Make ``zero.Init`` skip parameters without memory, which it would partition over all ranks."""
    theirs = partition_parameters.Init._post_init_method

    def around(self: Any, module: nn.Module) -> None:
        away = {name: each for name, each in module._parameters.items() if hasattr(each, DEVICE)}
        module._parameters.update(dict.fromkeys(away))
        try:
            theirs(self, module)
        finally:
            module._parameters.update(away)

    return replaced(partition_parameters.Init, "_post_init_method", around)


# ---- Splits the tensors of a model's files


class OwnRange:
    """Represents a tensor with experts in a file: indexing reads this rank's range of it.

    Args:
        source: a tensor, or a slice of ``safetensors``, [E, ...].
        experts: the range of experts to read.
    """

    def __init__(self, source: Any, experts: range) -> None:
        self._source, self._experts = source, experts

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._source[self._experts.start : self._experts.stop][index]


@contextmanager
def _opened(modeling: ModuleType, files: list[str] | None, load_config: Any) -> Iterator[dict[str, Any]]:
    """Yield name -> tensor; safetensors are read only when indexed."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in files or ():
            if str(file).endswith(".safetensors") and not getattr(load_config, "disable_mmap", None):
                opened = stack.enter_context(modeling.safe_open(file, framework="pt", device="cpu"))
                found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  it is no mapping
            else:
                found |= modeling.load_state_dict(file)
        yield found


def split_tensors(
    conversions: ModuleType,
    model: Any,
    tensors: Mapping[str, Any],
    weight_mapping: list[Any],
    own: Mapping[str, ExpertPart],
) -> tuple[dict[str, Any], dict[str, Any], dict[int, tuple[Any, ExpertPart]]]:
    """Split the tensors of a model's files into the dense part and this rank's experts.

    Args:
        conversions: ``transformers.core_model_loading``.
        model: a model with this rank's experts only.
        tensors: name in the files -> tensor, or slice of ``safetensors``.
        weight_mapping: transformers' renamings and converters for the model.
        own: name -> part of every parameter of experts.

    Returns:
        Name in the files -> tensor of the dense part; name -> source of this rank's experts; and id of a converter
        whose result has all experts of a layer -> (converter, part).

    Raises:
        LayerError: a file has another number of experts than the model.
    """
    dense: dict[str, Any] = {}
    experts: dict[str, Any] = {}
    is_whole: dict[int, tuple[Any, ExpertPart]] = {}
    # Copies, as they take note of what they have seen.
    mapping = copy.deepcopy(weight_mapping)
    renamings = [each for each in mapping if isinstance(each, conversions.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, conversions.WeightConverter)]
    originals = [each for each in weight_mapping if isinstance(each, conversions.WeightConverter)]
    of_pattern = {pattern: each for each in originals for pattern in each.source_patterns}
    known = dict(model.state_dict())
    names: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(tensors, key=conversions.dot_natural_key):
        become, pattern = conversions.rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if become not in known and name in known:
            become, pattern = conversions.rename_source_key(name, [], [], model.base_model_prefix, known)
        if become in own:
            names[become][pattern].append(name)
        else:
            dense[name] = tensors[name]
    for become, by_pattern in names.items():
        part, num_dims = own[become], known[become].dim()
        mine = [
            _own_of(alike, tensors, part, num_dims, None if pattern is None else of_pattern[pattern])
            for pattern, alike in by_pattern.items()
        ]
        if None in mine:
            mine = [{name: tensors[name] for name in alike} for alike in by_pattern.values()]
            converter = of_pattern[next(pattern for pattern in by_pattern if pattern is not None)]
            is_whole[id(converter)] = converter, part
        for found in mine:
            experts |= found
    return dense, experts, is_whole


def _own_of(
    names: list[str], tensors: Mapping[str, Any], part: ExpertPart, num_dims: int, converter: Any
) -> dict[str, Any] | None:
    """Return this rank's tensors among those of one kind; ``None`` where only the converter can tell them apart.

    Raises:
        LayerError: their number of experts differs from the model's.
    """
    sources = [tensors[name] for name in names]
    shapes = {tuple(each.shape if isinstance(each, torch.Tensor) else each.get_shape()) for each in sources}
    dims = {len(shape) for shape in shapes}
    operations = [] if converter is None else converter.operations
    stacks = [hasattr(each, "stack_dim") or type(each).__name__ == "MergeModulelist" for each in operations]
    if dims == {num_dims} and not any(stacks) and not any(map(_mixes_experts, operations)):
        if any(shape[0] != part.num_experts for shape in shapes):
            counts = ", ".join(str(shape[0]) for shape in sorted(shapes))
            raise LayerError(f"{names[0]} has {counts} experts, and the model {part.num_experts}")
        return {name: OwnRange(tensors[name], part.experts) for name in names}
    behind = operations[stacks.index(True) + 1 :] if any(stacks) else None
    if dims == {num_dims - 1} and behind is not None and not any(map(_mixes_experts, behind)):
        if len(names) % part.num_experts:
            raise LayerError(f"{names[0]} is one of {len(names)} experts, and the model has {part.num_experts}")
        # Several modules may come from one list, one behind the other.
        return {name: tensors[name] for index, name in enumerate(names) if index % part.num_experts in part.experts}
    if converter is None:
        raise LayerError(f"{names[0]} has shape {list(next(iter(shapes)))}: must have {num_dims} dimensions")
    return None


def _mixes_experts(operation: Any) -> bool:
    """Return True if a conversion may mix elements of the first dimension; an unknown one may."""
    dims = [getattr(operation, name) for name in ("dim", "dim0", "dim1") if hasattr(operation, name)]
    return not dims or any(not isinstance(each, int) or each <= 0 for each in dims)


@contextmanager
def _sharding_results(conversions: ModuleType, converters: Mapping[int, tuple[Any, ExpertPart]]) -> Iterator[None]:
    """Reduce the results of converters to this rank's part inside the block; id -> (converter, part)."""

    class ShardExperts(conversions.ConversionOps):  # type: ignore[name-defined, misc]
        """Takes this rank's experts from the results of a converter."""

        def __init__(self, part: ExpertPart) -> None:
            self.part = part

        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            found = {}
            for name, made in input_dict.items():
                whole = made[0] if isinstance(made, list) else made
                if whole.shape[0] != self.part.num_experts:
                    raise LayerError(f"{name} has {whole.shape[0]} experts, and the model {self.part.num_experts}")
                found[name] = self.part.take(whole).clone()
            return found

    for each, part in converters.values():
        each.operations.append(ShardExperts(part))
    try:
        yield
    finally:
        for each, _ in converters.values():
            each.operations.pop()

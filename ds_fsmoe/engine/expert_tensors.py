# SPDX-License-Identifier: Apache-2.0
"""Reads of the files of a Hugging Face model what this rank needs: the dense part, and of the experts its own.

Files keep experts stacked, one tensor for all of a layer, or one by one; transformers merges the latter by converters.
Of stacked ones a range is read, of the others those of this rank. Where a converter mixes experts in other ways its
tensors are read whole, one parameter at a time, and cut behind it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.layer.parts import LayerError

if TYPE_CHECKING:
    from ds_fsmoe.engine.own_experts import Build


class OwnRange:
    """Stands for a tensor with experts in a file: read where it is indexed, and then a range of it alone.

    Args:
        source: a tensor, or a slice of ``safetensors``, [E, ...].
        part: which experts.
    """

    def __init__(self, source: Any, part: ExpertPart) -> None:
        self._source, self._part = source, part

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._source[self._part.experts.start : self._part.experts.stop][index]

    def get_shape(self) -> list[int]:
        """Return the shape of the range."""
        return [self._part.num_local, *_shape_of(self._source)[1:]]

    def get_dtype(self) -> Any:
        """Return the type of its elements."""
        return self._source.get_dtype() if hasattr(self._source, "get_dtype") else self._source.dtype


@dataclass
class Split:
    """Holds what of a model's files is for this rank."""

    dense: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    """Name in the file -> what becomes this rank's experts."""
    cut_after: list[tuple[Any, ExpertPart]] = field(default_factory=list)
    """Converters whose result has all experts of a layer."""


def read_own(
    modeling: ModuleType,
    conversions: ModuleType,
    build: Build,
    load: Callable[..., Any],
    given: tuple[Any, Any, Any, Any],
    others: Mapping[str, Any],
) -> Any:
    """Load a model whose experts have no memory yet, in the place of ``PreTrainedModel._load_pretrained_model``.

    Args:
        modeling: ``transformers.modeling_utils``.
        conversions: ``transformers.core_model_loading``.
        build: what builds the model.
        load: transformers' own function.
        given: its model, state dict, files and options of loading.
        others: its other arguments, by name.

    Returns:
        What it returns.

    Raises:
        ConfigError, LayerError: see :meth:`Build.cut`; or the model is quantised or sharded in other ways.
    """
    model, state_dict, files, load_config = given
    build.cut(model)
    if not build.parts:
        return load(*given, **others)
    for name, why in (("hf_quantizer", "is quantised"), ("device_mesh", "is sharded by transformers")):
        if getattr(load_config, name, None) is not None:
            raise LayerError(f"{type(model).__name__} {why}: its experts cannot be loaded by ranks; load it without")
    own = build.names(model)
    with ExitStack() as stack:
        tensors = state_dict if state_dict is not None else stack.enter_context(_opened(modeling, files, load_config))
        split = split_tensors(conversions, model, tensors, load_config.weight_mapping or [], own)
        stack.enter_context(_cutting_after(conversions, split))
        if not build.is_zero3:
            info, index = load(model, split.dense | split.experts, files, load_config, **others)
            build.undrawn = set(own) & set(info.missing_keys)
            return info, index
        mine = {name: _values(each) for name, each in split.dense.items()}
        info, index = load(model, mine, files, load_config, **others)
        del mine
        kept = getattr(model, "_weight_conversions", None)
        found, _ = modeling.convert_and_load_state_dict_in_model(
            model=model, state_dict=split.experts, load_config=load_config, disk_offload_index=None
        )
        model._weight_conversions = kept
        info.missing_keys = set(info.missing_keys) - (set(own) - set(found.missing_keys))
        for name in ("mismatched_keys", "unexpected_keys", "conversion_errors"):
            getattr(info, name).update(getattr(found, name))
        build.draw(model, set(own) & set(found.missing_keys))
        build.share_out(model)
        for each in own:
            model.get_parameter(each)._is_hf_initialized = True
    return info, index


def _values(source: Any) -> torch.Tensor:
    """Return a tensor as ZeRO 3 is handed it: its values come from the first rank."""
    if dist.get_rank() == 0:
        return source[...]
    if isinstance(source, torch.Tensor):
        return source.to("meta")
    return source[...].to("meta")


@contextmanager
def _opened(modeling: ModuleType, files: list[str] | None, load_config: Any) -> Iterator[dict[str, Any]]:
    """Open files; name -> tensor or slice, read where it is indexed."""
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
) -> Split:
    """Split the tensors of a model's files into those of the dense part and those that become this rank's experts.

    Args:
        conversions: ``transformers.core_model_loading``.
        model: a model whose experts are cut.
        tensors: name in the files -> tensor, or slice of ``safetensors``.
        weight_mapping: transformers' renamings and converters for the model.
        own: name -> part of every parameter of experts.

    Raises:
        LayerError: a file has another number of experts than the model.
    """
    split = Split()
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
            split.dense[name] = tensors[name]
    for become, by_pattern in names.items():
        part, num_dims = own[become], known[become].dim()
        found: dict[str, Any] = {}
        is_whole = False
        for pattern, alike in by_pattern.items():
            converter = None if pattern is None else of_pattern[pattern]
            mine = _own_of(alike, tensors, part, num_dims, converter)
            is_whole |= mine is None
            found |= mine or {}
        if is_whole:
            found = {name: tensors[name] for alike in by_pattern.values() for name in alike}
            converter = of_pattern[next(pattern for pattern in by_pattern if pattern is not None)]
            split.cut_after.append((converter, part))
        split.experts |= found
    return split


def _own_of(
    names: list[str], tensors: Mapping[str, Any], part: ExpertPart, num_dims: int, converter: Any
) -> dict[str, Any] | None:
    """Return what of alike tensors is this rank's, ``None`` where that is known behind the converter only.

    Raises:
        LayerError: they have another number of experts than the model.
    """
    shapes = {tuple(_shape_of(tensors[name])) for name in names}
    dims = {len(shape) for shape in shapes}
    operations = [] if converter is None else converter.operations
    merges = [index for index, each in enumerate(operations) if _stacks(each)]
    if dims == {num_dims} and not merges and not any(map(_mixes_experts, operations)):
        if any(shape[0] != part.num_experts for shape in shapes):
            counts = ", ".join(str(shape[0]) for shape in sorted(shapes))
            raise LayerError(f"{names[0]} has {counts} experts, and the model {part.num_experts}")
        return {name: OwnRange(tensors[name], part) for name in names}
    if dims == {num_dims - 1} and merges and not any(map(_mixes_experts, operations[merges[0] + 1 :])):
        if len(names) % part.num_experts:
            raise LayerError(f"{names[0]} is one of {len(names)} experts, and the model has {part.num_experts}")
        # Several modules may come from one list, one behind the other.
        return {name: tensors[name] for index, name in enumerate(names) if index % part.num_experts in part.experts}
    if converter is None:
        raise LayerError(f"{names[0]} has shape {list(next(iter(shapes)))}: must have {num_dims} dimensions")
    return None


def _stacks(operation: Any) -> bool:
    return hasattr(operation, "stack_dim") or type(operation).__name__ == "MergeModulelist"


def _mixes_experts(operation: Any) -> bool:
    """Return whether a conversion may do anything along the first dimension; what is not known may."""
    dims = [getattr(operation, name) for name in ("dim", "dim0", "dim1") if hasattr(operation, name)]
    return not dims or any(not isinstance(each, int) or each <= 0 for each in dims)


def _shape_of(source: Any) -> list[int]:
    return list(source.shape) if isinstance(source, torch.Tensor) else list(source.get_shape())


@contextmanager
def _cutting_after(conversions: ModuleType, split: Split) -> Iterator[None]:
    """Have the results of converters cut, meanwhile."""

    class CutExperts(conversions.ConversionOps):  # type: ignore[name-defined, misc]
        """Cuts the experts of this rank out of what a converter has made."""

        def __init__(self, part: ExpertPart) -> None:
            self.part = part

        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            found = {}
            for name, made in input_dict.items():
                whole = made[0] if isinstance(made, list) else made
                if whole.shape[0] != self.part.num_experts:
                    raise LayerError(f"{name} has {whole.shape[0]} experts, and the model {self.part.num_experts}")
                found[name] = self.part.cut(whole).clone()
            return found

    converters = {id(each): (each, part) for each, part in split.cut_after}
    for each, part in converters.values():
        each.operations.append(CutExperts(part))
    try:
        yield
    finally:
        for each, _ in converters.values():
            each.operations.pop()

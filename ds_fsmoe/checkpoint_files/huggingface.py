# SPDX-License-Identifier: Apache-2.0
"""Reads and writes folders of safetensors files in Hugging Face's form: ``model.safetensors``, or parts with an index.

``convert`` calls it. The weights of a Hugging Face model are written as its ``save_pretrained`` would, without its
ranks. A checkpoint has the model's own config. transformers makes an empty model from it, which knows the names of
published checkpoints of the family: some have each expert's matrices apart.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.modules.module import register_module_module_registration_hook

from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.untrusted import MOST_LAYERS, problem_of, read_json

CONFIG = "config.json"
_LAYER = re.compile(r"^(?P<layer>.*?\.[0-9]+)\.")
_ADAPTERS = "base_model.model."
_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
_MODULES, _MODULES_OF_TENSOR = 10_000, 20
"""The modules that a model may have at the most: so many, and so many for each tensor of its checkpoint."""

Convert = Callable[[str], torch.Tensor]


def config_text(model: torch.nn.Module) -> str | None:
    """Return the config of the Hugging Face model in a model, as its ``save_pretrained`` would write it; ``None``
    without such a model."""
    for module in model.modules():
        if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
            dtype = str(module.dtype).removeprefix("torch.")
            found = module.config.to_dict() | {"architectures": [type(module).__name__], "dtype": dtype}
            return json.dumps(found, indent=2, sort_keys=True, default=str) + "\n"
    return None


def write_pretrained(
    whole: Whole, folder: Path, like: Convert, read: Convert, limit_bytes: int, dtype: str | None = None
) -> Iterator[tuple[str, int]]:
    """Write weights and config as ``save_pretrained`` would, one file and one layer in memory at a time.

    Args:
        whole: the checkpoint.
        folder: an existing folder.
        like: returns a tensor without data for a name of the model, in the dtype to write.
        read: returns the weights of that name, in that dtype.
        limit_bytes: the largest size of a file.
        dtype: the dtype of ``read``, for the config; ``None`` for that of the checkpoint.

    Yields:
        Each written file, and its number of bytes.

    Raises:
        CheckpointError: the model has adapters, or transformers does not know it.
    """
    names = list(whole.names())
    if any(each.startswith(_ADAPTERS) for each in names):
        raise CheckpointError(
            f"{whole.place} has the adapters of a PEFT model: save them with save_pretrained, or merge them first"
        )
    model = _empty_model(whole.place / CONFIG, len(names))
    left_out = {*(getattr(model, "all_tied_weights_keys", None) or {}), *(model._keys_to_ignore_on_save or ())}
    layers: dict[str, list[str]] = {}
    for each in names:
        if each not in left_out:
            layers.setdefault(_layer_of(each), []).append(each)
    sources: dict[str, UnreadTensor] = {}
    for of_layer in layers.values():
        sources |= _converted(model, of_layer, like, read)
    yield from write_tensors(sources, folder, limit_bytes)
    if dtype is not None:
        model.config.dtype = getattr(torch, dtype)  # transformers loads in the data type that the config names
    model.config.save_pretrained(folder)
    yield CONFIG, (folder / CONFIG).stat().st_size
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return name if found is None else found["layer"]


def _converted(model: Any, names: list[str], like: Convert, read: Convert) -> dict[str, UnreadTensor]:
    """Return the tensors of one layer under published names, still unread."""
    from transformers.core_model_loading import revert_weight_conversion

    kept: dict[str, torch.Tensor] = {}

    def of_layer(name: str) -> torch.Tensor:
        if not kept:
            kept.update(revert_weight_conversion(model, {each: read(each) for each in names}))
        return kept.pop(name)

    shapes = revert_weight_conversion(model, {each: like(each) for each in names})
    return {
        name: UnreadTensor(each.shape, each.numel() * each.itemsize, lambda name=name: of_layer(name))
        for name, each in shapes.items()
    }


def _empty_model(path: Path, num_tensors: int) -> Any:
    """Return the model of a config, without memory for its weights and without access to the network.

    Args:
        path: the config, which is untrusted.
        num_tensors: the number of tensors of its checkpoint, which bounds the number of modules.

    Raises:
        CheckpointError: the model cannot be built, has no experts that follow transformers' contract, or is far too
            large.
    """
    if (problem := problem_of(path, path.parent)) is not None:
        raise CheckpointError(problem)
    try:
        import transformers
        from huggingface_hub import constants
    except ImportError as error:
        raise CheckpointError(f"{path}: a Hugging Face model needs transformers: {error}") from error
    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        said = _checked(read_json(path))
        config = transformers.AutoConfig.for_model(said.pop("model_type"), **said)
        kind = getattr(transformers, config.architectures[0])
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise TypeError(f"architectures = {config.architectures}: not the name of a model class")
        inner = (transformers.MODEL_MAPPING.get(type(each), None) for each in vars(config).values())
        if not any(map(_has_experts, (kind, *inner))):
            raise TypeError(f"architectures = {config.architectures}: its experts do not follow transformers' contract")
        with torch.device("meta"), _at_most(_MODULES + _MODULES_OF_TENSOR * num_tensors):
            return kind(config)
    except Exception as error:  # a config of another version, or of code that is not transformers' own
        raise CheckpointError(f"{path}: transformers {transformers.__version__} cannot build it: {error}") from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def _checked(said: Any) -> Any:
    """Return a config without the names of code to run, which may be on the Hub.

    Raises:
        ValueError: the config has far too many layers.
    """
    if isinstance(said, list):
        return [_checked(each) for each in said]
    if not isinstance(said, dict):
        return said
    for name, value in said.items():
        if ("layers" in name or "depth" in name) and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(f"{name} = {value}: must be at most {MOST_LAYERS}")
    return {name: _checked(value) for name, value in said.items() if name not in _IMPLEMENTATIONS}


def _has_experts(kind: Any) -> bool:
    """Return True if the file of a class of models has experts that follow the contract of transformers 5."""
    there = () if kind is None else vars(sys.modules[kind.__module__]).values()
    return any(isinstance(each, type) and hasattr(each, "_apply_gate") for each in there)


@contextmanager
def _at_most(num_modules: int) -> Iterator[None]:
    """Raise a ValueError as soon as more modules than the limit are made."""
    made = itertools.count(1)

    def count(*_: Any) -> None:
        if next(made) > num_modules:
            raise ValueError(f"it has more than {num_modules} modules, far more than the checkpoint has tensors")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


# ---- the files

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class UnreadTensor:
    """Represents a tensor that has not been read yet.

    Attributes:
        shape: the tensor's shape.
        size_bytes: the tensor's size when it is written.
        read: reads and returns the tensor.
    """

    shape: torch.Size
    size_bytes: int
    read: Callable[[], torch.Tensor]


def write_tensors(sources: Mapping[str, UnreadTensor], folder: Path, limit_bytes: int) -> Iterator[tuple[str, int]]:
    """Write tensors into a folder, part by part, so that only one part is in memory at a time.

    Args:
        sources: name -> tensor.
        folder: an existing folder.
        limit_bytes: the largest size of a part; a larger tensor has a part to itself.

    Yields:
        Each written file, and its number of bytes.
    """
    parts: list[list[str]] = [[]]
    size_bytes = 0
    for name, source in sources.items():
        if parts[-1] and size_bytes + source.size_bytes > limit_bytes:
            parts.append([])
            size_bytes = 0
        parts[-1].append(name)
        size_bytes += source.size_bytes
    files = (
        [_ONE] if len(parts) == 1 else [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    )
    for file, names in zip(files, parts, strict=True):
        # In memory of their own: parameters that are tied share theirs, which such a file cannot say.
        save_file({name: sources[name].read().contiguous().clone() for name in names}, folder / file, {"format": "pt"})
        yield file, sum(sources[name].size_bytes for name in names)
    if len(parts) > 1:
        total = sum(each.size_bytes for each in sources.values())
        weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
        (folder / _INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        )


def read_tensors(path: Path) -> dict[str, UnreadTensor]:
    """Return all tensors of a file, or of a folder of files, without reading their data.

    Raises:
        CheckpointError: there are no tensors, one is damaged, a part is missing, or two have the same name.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} contains no .safetensors files")
    index = path / _INDEX
    if path.is_dir() and index.is_file():
        try:
            wanted = set(read_json(index)["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}") from error
        missing = sorted(wanted - {each.name for each in files})
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(map(str, missing))}, listed in {_INDEX}")
    found: dict[str, UnreadTensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file")
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if name in found:
                        raise CheckpointError(f"{path}: two files contain {name!r}")
                    piece = opened.get_slice(name)
                    shape = torch.Size(piece.get_shape())
                    found[name] = UnreadTensor(shape, shape.numel(), lambda file=file, name=name: _read(file, name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return found


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)

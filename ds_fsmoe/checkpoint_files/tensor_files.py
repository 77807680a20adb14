# SPDX-License-Identifier: Apache-2.0
"""Folders of safetensors files as Hugging Face lays them out: ``model.safetensors``, or parts and an index of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.untrusted import read_json

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class UnreadTensor:
    """A tensor that has not been read yet.

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
        sources: maps each name -> its tensor.
        folder: an existing folder.
        limit_bytes: the largest size of a part; a larger tensor has a part to itself.

    Yields:
        Each file once it is written, and its number of bytes.
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
        CheckpointError: there are none, one is damaged, a part is missing, or two have the same name.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no .safetensors files")
    index = path / _INDEX
    if path.is_dir() and index.is_file():
        try:
            wanted = set(read_json(index)["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}") from error
        missing = sorted(wanted - {each.name for each in files})
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(map(str, missing))}, which {_INDEX} names")
    found: dict[str, UnreadTensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file")
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if name in found:
                        raise CheckpointError(f"{path}: two files have a {name!r}")
                    piece = opened.get_slice(name)
                    shape = torch.Size(piece.get_shape())
                    found[name] = UnreadTensor(shape, shape.numel(), lambda file=file, name=name: _read(file, name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return found


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)

# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint's parameters as whole tensors, however ranks and shards cut its files. Reading needs no ranks."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_fsmoe.checkpoint_files.auto_ep_names import LAYERS, AutoEPNames
from ds_fsmoe.checkpoint_files.expert_parts import part_name, part_number, parts_file, whole_name
from ds_fsmoe.checkpoint_files.manifest import OURS, Manifest, PartSizes, read_manifest
from ds_fsmoe.checkpoint_files.numbering import ExpertName, Numbering, expert_file, expert_name, join
from ds_fsmoe.checkpoint_files.pieces import MASTER, WEIGHTS, Group, Index, Piece, read_index
from ds_fsmoe.checkpoint_files.plain_files import problem_of
from ds_fsmoe.checkpoint_files.reading import WITHOUT_DEEPSPEED, read_file
from ds_fsmoe.checkpoint_files.stock_pieces import stock_index
from ds_fsmoe.checkpoint_files.tags import CheckpointError

DENSE_FILE = "mp_rank_00_model_states.pt"
SHARED_OUT_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""The first rank's file of a checkpoint of ZeRO 3, whose weights are in pieces in the files of all ranks."""
_OF_STAGES = re.compile(r"layer_\d+-model_.*_states\.pt")
_OPEN_FILES = 64


def layer_file(layer: int, number: int) -> str:
    """Return DeepSpeed's name for the file of an expert."""
    return f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


class Whole:
    """Reads one tag of a checkpoint piece by piece.

    Names are the model's own, with experts numbered from 0 to E - 1.

    Args:
        place: the folder of the tag.
        trusted: see :func:`~ds_fsmoe.checkpoint_files.reading.read_file`.

    Attributes:
        place: that folder.
        numbering: maps the path of each MoE layer -> how its files number experts.
        index: where the optimizer's states are; ``None`` where that was not written down.
        parts: the parameters that were spread over ranks, as experts of Hugging Face models are.
        is_shared_out: whether ZeRO 3 has saved it, with the weights in pieces.
        main_file: the file with what is not of single ranks.

    Raises:
        CheckpointError: it is not a checkpoint, or has tensor parallelism or pipeline stages.
    """

    def __init__(self, place: Path, trusted: Sequence[Any] = WITHOUT_DEEPSPEED) -> None:
        self.place = place
        self._trusted = trusted
        self._open: OrderedDict[str, Any] = OrderedDict()
        self.manifest: Manifest | None = read_manifest(place) if place.is_dir() else None
        there = sorted(each.name for each in self.files())
        names = [each for each in there if each.endswith("_model_states.pt")]
        self.is_shared_out = DENSE_FILE not in names and SHARED_OUT_FILE in names
        self.main_file = SHARED_OUT_FILE if self.is_shared_out else DENSE_FILE
        if self.main_file not in names:
            raise CheckpointError(f"{place} is no checkpoint of DeepSpeed's: it has no {DENSE_FILE}")
        if any("mp_rank_00" not in each for each in names) or any(map(_OF_STAGES.match, there)):
            raise CheckpointError(
                f"{place} was saved with tensor-parallel ranks or pipeline stages, whose layers only the model itself "
                "can put together"
            )
        self._auto_ep: AutoEPNames | None = None
        if self.manifest is None and not self.is_shared_out and self.dense.get(LAYERS):
            self._auto_ep = AutoEPNames(self.dense, lambda layer, number: self._file(layer_file(layer, number)))
            names = []  # its files of experts are read by their names
        self._experts = sorted(found for found in map(expert_file, names) if found is not None)
        self._layer_at = {
            next(iter(self._names_in(layer_file(*each)))).layer: each[0] for each in dict(self._experts).items()
        }
        self.index: Index | None = read_index(place)
        if self.index is None and self.is_shared_out:
            try:
                self.index = stock_index(there, self.dense, self._file)
            except CheckpointError as error:
                raise CheckpointError(f"{place} cannot be put together: {error}") from error
        self.numbering = self._numberings()
        self.parts: Mapping[str, PartSizes] = {} if self.manifest is None else self.manifest.parts
        self._pieces: dict[str, list[tuple[Group, Piece]]] = {}
        for group in self.index.groups if self.index is not None else ():
            for piece in group.pieces:
                known = self._pieces.setdefault(piece.name, [])
                # Without ZeRO each rank that writes a file has all that is no expert's.
                if all(other.first != piece.first for _, other in known):
                    known.append((group, piece))

    @property
    def dense(self) -> dict[str, Any]:
        """The data that DeepSpeed stores beside the non-expert weights, and these weights as ``"module"``: at ZeRO 3
        buffers alone have their values there."""
        return self._file(self.main_file)

    def files(self) -> Iterator[Path]:
        """Return the checkpoint's files, except those that describe it; other files in its folder are not known here.

        Raises:
            CheckpointError: one of them must not be opened.
        """
        if self.manifest is not None:
            found = [self.place / each for each in self.manifest.files]
        else:
            found = [each for each in self.place.iterdir() if not each.is_dir()] if self.place.is_dir() else []
        for each in found:
            if each.name.startswith(OURS):
                continue
            if (problem := problem_of(each, self.place)) is not None:
                raise CheckpointError(problem)
            yield each

    def names(self) -> Iterator[str]:
        """The names of all parameters and buffers."""
        yield from self.dense["module"] if self._auto_ep is None else self._auto_ep
        if not self.is_shared_out:
            there = self._file(parts_file(0)) if self.parts else ()
            yield from (name for name in self.parts if part_name(name, 0) in there)
        for layer, at in self._layer_at.items():
            numbering = self.numbering[layer]
            for expert in range(numbering.num_experts):
                number = numbering.number(expert, 0)
                for each in self._names_in(layer_file(at, number)):
                    yield str(ExpertName(layer, expert, each.parameter))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every parameter and buffer, whole, but those that experts' own files have."""
        if self._auto_ep is not None:
            return {name: self._auto_ep.shape(name) for name in self._auto_ep}
        found = {}
        for name in self.names():
            if expert_name(name) is None and torch.is_tensor(self.dense["module"].get(name, torch.empty(0))):
                is_buffer = name in self.dense["buffer_names"]
                saved = self._optimized(self._saved_names(name)[0])
                shape = tuple(self._weights_of(saved).shape if is_buffer else self._shape_of(saved))
                found[name] = self.parts[name].first().whole_shape(shape) if name in self.parts else shape
        return found

    def parameters_of(self, layer: str) -> set[str]:
        """Return the parameters and buffers of one expert of a layer, under the names that the expert gives them."""
        number = self.numbering[layer].number(0, 0)
        return {each.parameter for each in self._names_in(layer_file(self._layer_at[layer], number))}

    def weights(self, name: str) -> torch.Tensor:
        """Return a parameter's weights as the model has them, in its data type.

        Raises:
            CheckpointError: there is no such parameter.
        """
        return self._joined(name, self._piecewise_weights_of if self.is_shared_out else self._weights_of)

    def state(self, name: str, item: str) -> torch.Tensor:
        """Return an optimizer state in the parameter's shape; ``"fp32"`` is the parameter in the optimizer's precision.

        Raises:
            CheckpointError: the state is missing, or incomplete.
        """
        if item == MASTER and not self.has_state(name, item):
            return self.weights(name).float()
        return self._joined(self._optimized(name), lambda saved: self._state_of(saved, item))

    def has_state(self, name: str, item: str) -> bool:
        """Return whether the optimizer had such a state."""
        first = self._saved_names(self._optimized(name))[0]
        return any(item in group.items for group, _ in self._pieces.get(first, ()))

    def _optimized(self, name: str) -> str:
        """Return the one name under which a parameter with several names is optimized."""
        return (self.dense.get("shared_params") or {}).get(name, name)

    def _joined(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        shards = [read(each) for each in self._saved_names(name)]
        if name in self.parts:
            return self.parts[name].first().join(shards)
        if len(shards) == 1:
            return shards[0]
        expert = expert_name(name)
        layers = () if self.manifest is None else self.manifest.layers
        cuts = next((each.cuts for each in layers if expert is not None and each.path == expert.layer), {})
        if expert is not None and expert.parameter not in cuts and cuts:
            return shards[0]  # no parameter, but a buffer
        if expert is None or not cuts:
            raise CheckpointError(f"{self.place} does not say how {name} is cut into its {len(shards)} shards")
        return join(shards, cuts[expert.parameter])

    def _saved_names(self, name: str) -> list[str]:
        """Return the names that the files have for a parameter: one for each shard."""
        if name in self.parts:
            return [part_name(name, each) for each in range(self.parts[name].first().num_parts)]
        expert = expert_name(name)
        if expert is None:
            return [name]
        if expert.layer not in self.numbering:
            raise CheckpointError(f"{self.place} has no MoE layer {expert.layer!r}; it has {', '.join(self.numbering)}")
        numbering = self.numbering[expert.layer]
        return [
            str(ExpertName(expert.layer, numbering.number(expert.number, shard), expert.parameter))
            for shard in range(numbering.esp)
        ]

    def _weights_of(self, saved: str) -> torch.Tensor:
        expert, number = expert_name(saved), part_number(saved) if whole_name(saved) in self.parts else None
        if expert is not None:
            file = layer_file(self._layer_at[expert.layer], expert.number)
        else:
            file = self.main_file if number is None else parts_file(number)
        holds = self._file(file)
        try:
            if self._auto_ep is not None:
                return self._auto_ep.weights(saved)
            return (holds["module"] if file == self.main_file else holds)[saved]
        except KeyError:
            raise CheckpointError(f"{self.place / file} has no {saved!r}") from None

    def _piecewise_weights_of(self, saved: str) -> torch.Tensor:
        """Return weights that ZeRO 3 has saved in pieces, in the data type of the job."""
        if saved in self.dense["buffer_names"]:
            return self._weights_of(saved)
        found = self._optimized(saved)
        if any(MASTER in group.items for group, _ in self._pieces.get(found, ())):
            dtype = torch.float32 if self.manifest is None else getattr(torch, self.manifest.sizes.dtype)
            return self._state_of(found, MASTER).to(dtype)
        return self._state_of(found, WEIGHTS)

    def _shape_of(self, saved: str) -> torch.Size:
        if not self.is_shared_out:
            return self._weights_of(saved).shape
        name = whole_name(saved) if whole_name(saved) in self.parts else saved
        for shapes in (*(self.dense["param_shapes"] or ()), self.dense["frozen_param_shapes"] or {}):
            if name in shapes:
                return torch.Size(shapes[name])
        raise CheckpointError(f"{self.place} has no {name!r}")

    def _state_of(self, saved: str, item: str) -> torch.Tensor:
        shape = self._shape_of(saved)
        numel = shape.numel()
        flat: torch.Tensor | None = None
        filled = 0
        for group, piece in self._pieces.get(saved, ()):
            if item not in group.items:
                continue
            found: Any = self._file(group.file)
            for key in group.items[item]:
                found = found[key]
            flat = torch.empty(numel, dtype=found.dtype) if flat is None else flat
            flat[piece.first : piece.first + piece.size] = found.reshape(-1)[piece.at : piece.at + piece.size]
            filled += piece.size
        if flat is None or filled != numel:
            raise CheckpointError(f"{self.place} has {filled} of the {numel} elements of {item} of {saved}")
        return flat.view(shape)

    def _numberings(self) -> Mapping[str, Numbering]:
        counts = {layer: sum(1 for number, _ in self._experts if number == at) for layer, at in self._layer_at.items()}
        if self.manifest is None:
            return {layer: Numbering(count, 1, 1) for layer, count in counts.items()}
        esp = self.manifest.sizes.esp
        found = {each.path: Numbering(each.num_experts, each.ep, esp) for each in self.manifest.layers}
        for layer, count in counts.items():
            if layer not in found or found[layer].num_experts * esp != count:
                should = found[layer].num_experts * esp if layer in found else 0
                raise CheckpointError(f"{self.place} has {count} files of experts of {layer}, and should have {should}")
        return found

    def _names_in(self, file: str) -> list[ExpertName]:
        found = [expert_name(each) for each in self._file(file)]
        if not found or None in found:
            raise CheckpointError(f"{self.place / file} is not of an expert")
        return [each for each in found if each is not None]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = read_file(self.place / name, self._trusted, in_place=True)
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]

# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint's parameters as whole tensors, however ranks and shards cut its files. Reading needs no ranks."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_fsmoe.checkpoint_files.auto_ep_names import LAYERS, AutoEPNames
from ds_fsmoe.checkpoint_files.expert_parts import part_name, part_number, parts_file, whole_name
from ds_fsmoe.checkpoint_files.manifest import OURS, Manifest, PartSizes, read_manifest
from ds_fsmoe.checkpoint_files.numbering import ExpertFile, ExpertName, Numbering, expert_file, expert_name, join
from ds_fsmoe.checkpoint_files.pieces import MASTER, WEIGHTS, Group, Index, Keys, Piece, read_index
from ds_fsmoe.checkpoint_files.plain_files import problem_of
from ds_fsmoe.checkpoint_files.reading import WITHOUT_DEEPSPEED, read_file
from ds_fsmoe.checkpoint_files.stages import main_file, stage_of_file
from ds_fsmoe.checkpoint_files.stock_pieces import stock_index
from ds_fsmoe.checkpoint_files.tags import CheckpointError

DENSE_FILE = main_file(0)
SHARED_OUT_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""The first rank's file of a checkpoint of ZeRO 3, whose weights are in pieces in the files of all ranks."""
_OF_TENSOR_PARALLEL_STAGES = re.compile(r"layer_\d+-model_.*_states\.pt")
_OPEN_FILES = 64


class Whole:
    """Reads one tag of a checkpoint piece by piece.

    Names are the model's own, with experts numbered from 0 to E - 1.

    Args:
        place: the folder of the tag.
        trusted: see :func:`~ds_fsmoe.checkpoint_files.reading.read_file`.
        stage: the pipeline stage whose values are returned of what several stages have under one name.

    Attributes:
        place: that folder.
        numbering: maps the path of each MoE layer -> how its files number experts.
        index: where the optimizer's states are; ``None`` where that was not written down.
        parts: the parameters that were spread over ranks, as experts of Hugging Face models are.
        is_shared_out: whether ZeRO 3 has saved it, with the weights in pieces.
        main_file: the file with what is not of single ranks; of the first stage, in a pipeline.
        num_stages: the number of pipeline stages.

    Raises:
        CheckpointError: it is not a checkpoint, or has tensor parallelism, or stages that it does not describe.
    """

    def __init__(self, place: Path, trusted: Sequence[Any] = WITHOUT_DEEPSPEED, stage: int = 0) -> None:
        self.place = place
        self._stage = stage
        self._trusted = trusted
        self._open: OrderedDict[str, Any] = OrderedDict()
        self.manifest: Manifest | None = read_manifest(place) if place.is_dir() else None
        there = sorted(each.name for each in self._listed())
        names = [each for each in there if each.endswith("_model_states.pt")]
        self.is_shared_out = DENSE_FILE not in names and SHARED_OUT_FILE in names
        self.main_file = SHARED_OUT_FILE if self.is_shared_out else DENSE_FILE
        if self.main_file not in names:
            raise CheckpointError(f"{place} is no checkpoint of DeepSpeed's: it has no {DENSE_FILE}")
        stages = () if self.manifest is None else self.manifest.stages
        self.num_stages = max(1, len(stages))
        has_others = not stages and any("mp_rank_00" not in each for each in names)
        has_tensor_parallel = self.manifest is not None and self.manifest.sizes.mp > 1
        if has_others or has_tensor_parallel or any(map(_OF_TENSOR_PARALLEL_STAGES.match, there)):
            raise CheckpointError(
                f"{place} was saved with tensor-parallel ranks, or in pipeline stages by stock DeepSpeed or an older "
                "version, whose layers only the model itself can put together"
            )
        self._auto_ep: AutoEPNames | None = None
        if self.manifest is None and not self.is_shared_out and self.dense.get(LAYERS):
            self._auto_ep = AutoEPNames(self.dense, lambda layer, number: self._file(str(ExpertFile(0, layer, number))))
            names = []  # its files of experts are read by their names
        self._experts = sorted(found for found in map(expert_file, names) if found is not None)
        lasts = {(each.stage, each.layer): each for each in self._experts}
        self._layer_at = {next(iter(self._names_in(str(last)))).layer: at for at, last in lasts.items()}
        self._dense = self._dense_places()
        self.index: Index | None = read_index(place)
        if self.index is None and self.is_shared_out:
            try:
                self.index = stock_index(there, self.dense, self._file)
            except CheckpointError as error:
                raise CheckpointError(f"{place} cannot be put together: {error}") from error
        self.numbering = self._numberings()
        self.parts: Mapping[str, PartSizes] = {} if self.manifest is None else self.manifest.parts
        self._pieces: dict[str, list[tuple[Group, Piece]]] = {}
        groups = self.index.groups if self.index is not None else ()
        for group in sorted(groups, key=lambda each: stage_of_file(each.file) != stage):
            number = stage_of_file(group.file)
            for piece in group.pieces:
                known = self._pieces.setdefault(piece.name, [])
                # Without ZeRO each rank that writes a file has all that is no expert's; each stage has what they share.
                if all(other.first != piece.first and stage_of_file(of.file) == number for of, other in known):
                    known.append((group, piece))

    @property
    def dense(self) -> dict[str, Any]:
        """The data that DeepSpeed stores beside the non-expert weights, and these weights as ``"module"``: at ZeRO 3
        buffers alone have their values there."""
        return self._file(self.main_file)

    def main(self, stage: int) -> dict[str, Any]:
        """Return the data that DeepSpeed stores beside the weights of a stage; see :attr:`dense`."""
        return self.dense if stage == 0 else self._file(main_file(stage))

    def states_of(self, stage: int) -> Index | None:
        """Return the index of the optimizer states that a stage has; ``None`` where that was not written down."""
        if self.index is None:
            return None
        return replace(
            self.index, groups=tuple(each for each in self.index.groups if stage_of_file(each.file) == stage)
        )

    def files(self) -> Iterator[Path]:
        """Return the checkpoint's files, except those that describe it; other files in its folder are not known here.

        Raises:
            CheckpointError: one of them must not be opened.
        """
        for each in self._listed():
            if (problem := problem_of(each, self.place)) is not None:
                raise CheckpointError(problem)
            yield each

    def _listed(self) -> list[Path]:
        if self.manifest is not None:
            found = [self.place / each for each in self.manifest.files]
        else:
            found = [each for each in self.place.iterdir() if not each.is_dir()] if self.place.is_dir() else []
        return [each for each in found if not each.name.startswith(OURS)]

    def names(self) -> Iterator[str]:
        """The names of all parameters and buffers; what several stages share is named once."""
        yield from dict.fromkeys(name for stage in range(self.num_stages) for name in self.names_of(stage))

    def names_of(self, stage: int) -> Iterator[str]:
        """The names of the parameters and buffers of one stage."""
        yield from self._dense[stage] if self._auto_ep is None else self._auto_ep
        if not self.is_shared_out:
            parts = [name for name, each in self.parts.items() if each.stage == stage]
            there = self._file(parts_file(0, stage)) if parts else ()
            yield from (name for name in parts if part_name(name, 0) in there)
        for layer, at in self._layer_at.items():
            if at[0] == stage:
                numbering = self.numbering[layer]
                for expert in range(numbering.num_experts):
                    for each in self._names_in(str(ExpertFile(*at, numbering.number(expert, 0)))):
                        yield str(ExpertName(layer, expert, each.parameter))

    def shapes(self, stage: int = 0) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of a stage's parameters and buffers, whole, but those that experts' own files have."""
        if self._auto_ep is not None:
            return {name: self._auto_ep.shape(name) for name in self._auto_ep}
        found = {}
        for name in self.names_of(stage):
            if expert_name(name) is None and (name in self.parts or torch.is_tensor(self._weights_of(name))):
                is_buffer = name in self.main(stage)["buffer_names"]
                saved = self._optimized(self._saved_names(name)[0])
                shape = tuple(self._weights_of(saved).shape if is_buffer else self._shape_of(saved))
                found[name] = self.parts[name].first().whole_shape(shape) if name in self.parts else shape
        return found

    def parameters_of(self, layer: str) -> set[str]:
        """Return the parameters and buffers of one expert of a layer, under the names that the expert gives them."""
        number = self.numbering[layer].number(0, 0)
        return {each.parameter for each in self._names_in(str(ExpertFile(*self._layer_at[layer], number)))}

    @property
    def dense_files(self) -> set[str]:
        """The files that have what no single rank has, beside them what DeepSpeed stores of each stage."""
        stages = () if self.manifest is None else self.manifest.stages
        own = {main_file(at) for at in range(1, self.num_stages)}
        return {self.main_file} | own | {file for stage in stages for file in stage.files}

    def file_of(self, layer: str, number: int) -> str:
        """Return DeepSpeed's name for the file of an expert of a layer."""
        return str(ExpertFile(*self._layer_at[layer], number))

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
        shared = (self.main(stage).get("shared_params") or {} for stage in range(self.num_stages))
        return next((each[name] for each in shared if name in each), name)

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
        expert, part = expert_name(saved), self.parts.get(whole_name(saved))
        keys: Keys = (saved,)
        if expert is not None:
            file = self.file_of(expert.layer, expert.number)
        elif part is not None and (number := part_number(saved)) is not None:
            file = parts_file(number, part.stage)
        else:
            places = self._places_of(saved)
            file, keys = places.get(self._stage) or next(iter(places.values()), (self.main_file, ("module", saved)))
        if self._auto_ep is not None:
            try:
                return self._auto_ep.weights(saved)
            except KeyError:
                raise CheckpointError(f"{self.place / file} has no {saved!r}") from None
        return self._at(file, keys)

    def _at(self, file: str, keys: Keys) -> Any:
        found = self._file(file)
        try:
            for key in keys:
                found = found[key]
            return found
        except KeyError:
            raise CheckpointError(f"{self.place / file} has no {keys[-1]!r}") from None

    def _places_of(self, saved: str) -> dict[int, tuple[str, Keys]]:
        """Return stage -> file and keys in it, of what no single rank has."""
        return {stage: each[saved] for stage, each in self._dense.items() if saved in each}

    def check_shared(self) -> None:
        """Check that what several stages have under one name is the same on all.

        Raises:
            CheckpointError: it is not, as of a ``TiedLayerSpec`` only its ``tied_weight_attr`` is.
        """
        for name in self.names():
            places = self._places_of(name)
            values = [self._at(*each) for each in places.values()] if len(places) > 1 else []
            if any(not torch.equal(values[0], each) for each in values[1:]):
                raise CheckpointError(
                    f"{self.place}: {name} differs between the stages {', '.join(map(str, places))} of the pipeline, "
                    "and has one name: a TiedLayerSpec keeps only its tied_weight_attr the same; name it there too"
                )

    def _dense_places(self) -> dict[int, dict[str, tuple[str, Keys]]]:
        """Return, for each stage, name -> file and keys in it, of what no single rank has."""
        found: dict[int, dict[str, tuple[str, Keys]]] = {}
        for at in range(self.num_stages):
            file = self.main_file if at == 0 else main_file(at)
            found[at] = {name: (file, ("module", name)) for name in self.main(at)["module"] or ()}
        for at, stage in enumerate(() if self.manifest is None else self.manifest.stages):
            for file, path in stage.files.items():
                found[at] |= {f"{path}.{key}": (file, (key,)) for key in self._file(file)}
        return found

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
        counts = {layer: sum(each[:2] == at for each in self._experts) for layer, at in self._layer_at.items()}
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

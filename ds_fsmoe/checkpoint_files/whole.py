# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint's parameters as whole tensors, for every layout of its files over ranks and shards.

It needs no ranks. ``convert`` reads a whole checkpoint by it, and loading reads single ranges.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_fsmoe.checkpoint_files.expert_parts import (
    ExpertPart,
    of_one_expert,
    part_name,
    part_number,
    parts_file,
    whole_name,
)
from ds_fsmoe.checkpoint_files.manifest import OURS, Manifest, PartSizes, read_manifest
from ds_fsmoe.checkpoint_files.numbering import (
    AUTO_EP_LAYERS,
    AutoEPExperts,
    ExpertFile,
    ExpertName,
    Numbering,
    expert_file,
    expert_name,
    main_file,
    names_of_auto_ep,
    stage_of_file,
)
from ds_fsmoe.checkpoint_files.pieces import (
    MASTER,
    WEIGHTS,
    Index,
    Keys,
    OpenFiles,
    SavedPieces,
    Source,
    elements_of_part,
    joined,
    read_index,
    stock_index,
)
from ds_fsmoe.checkpoint_files.reading import WITHOUT_DEEPSPEED, read_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.untrusted import problem_of

DENSE_FILE = main_file(0)
SHARED_OUT_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""The first rank's file of a checkpoint of ZeRO 3, whose weights are in pieces in the files of all ranks."""
_OF_TENSOR_PARALLEL_STAGES = re.compile(r"layer_\d+-model_.*_states\.pt")


class Whole:
    """Reads the parameters of one tag as whole tensors, or ranges of them, however the files split them.

    Names are the model's own, with experts numbered from 0 to E - 1.

    Args:
        place: the folder of the tag.
        trusted: see :func:`~ds_fsmoe.checkpoint_files.reading.read_file`.
        stage: the pipeline stage that is read where several stages have a parameter of one name.
        index: reads the index of the optimizer states of a folder, given its manifest.

    Attributes:
        place: the folder of the tag.
        file: returns the content of a file; tensors stay in the file.
        numbering: path of each MoE layer -> how its files number experts.
        index: the places of the optimizer's states; ``None`` if there is no index.
        parts: the parameters that were spread over ranks, as experts of Hugging Face models are.
        is_shared_out: True if ZeRO 3 has saved it, with the weights in pieces.
        main_files: the file of each pipeline stage with data that is not specific to a rank; without stages, one.
        num_stages: the number of pipeline stages.

    Raises:
        CheckpointError: it is no checkpoint, or has tensor parallelism, or stages without a description.
    """

    def __init__(
        self,
        place: Path,
        trusted: Sequence[Any] = WITHOUT_DEEPSPEED,
        stage: int = 0,
        index: Callable[[Path, Manifest | None], Index | None] = read_index,
    ) -> None:
        self.place = place
        self._stage = stage
        self.file = OpenFiles(place, partial(read_file, trusted=trusted, in_place=True))
        self.manifest: Manifest | None = read_manifest(place) if place.is_dir() else None
        self.index: Index | None = index(place, self.manifest)
        there = sorted(each.name for each in self._listed())
        names = [each for each in there if each.endswith("_model_states.pt")]
        self.is_shared_out = DENSE_FILE not in names and SHARED_OUT_FILE in names
        first = SHARED_OUT_FILE if self.is_shared_out else DENSE_FILE
        if first not in names:
            raise CheckpointError(f"{place} is not a DeepSpeed checkpoint: it has no {DENSE_FILE}")
        stages = () if self.manifest is None else self.manifest.stages
        self.num_stages = max(1, len(stages))
        self.main_files = [first, *map(main_file, range(1, self.num_stages))]
        has_others = not stages and any("mp_rank_00" not in each for each in names)
        has_tensor_parallel = self.manifest is not None and self.manifest.sizes.mp > 1
        if has_others or has_tensor_parallel or any(map(_OF_TENSOR_PARALLEL_STAGES.match, there)):
            raise CheckpointError(
                f"{place} was saved with tensor-parallel ranks, or in pipeline stages by stock DeepSpeed or an "
                "older version: load it into its model, as it cannot be converted"
            )
        main = self.main()
        self._buffers = frozenset(main["buffer_names"]) if self.is_shared_out else frozenset()
        self._stacked: Mapping[str, AutoEPExperts] = {}
        renamed: Mapping[str, str] | None = None
        if self.manifest is None and not self.is_shared_out and main.get(AUTO_EP_LAYERS):
            renamed, self._stacked = names_of_auto_ep(main)
            names = []  # its files of experts are read by their names
        self._experts = sorted(found for found in map(expert_file, names) if found is not None)
        lasts = {(each.stage, each.layer): each for each in self._experts}
        self._layer_at = {next(iter(self._names_in(str(last)))).layer: at for at, last in lasts.items()}
        self._dense = self._dense_places(renamed)
        if self.index is None and self.is_shared_out:
            try:
                self.index = stock_index(there, main, self.file)
            except CheckpointError as error:
                raise CheckpointError(f"{place} cannot be converted: {error}") from error
        self.numbering = self._numberings()
        self.parts: Mapping[str, PartSizes] = {} if self.manifest is None else self.manifest.parts
        self._first = {name: each.first() for name, each in self.parts.items()}
        for name, each in self._stacked.items():
            self._first[name] = ExpertPart("stacked", each.num_experts, each.num_experts, 0)
        self._saved_states = SavedPieces(self.index, stage, self.file, place)
        self._shard_dims = {} if self.manifest is None else {each.path: each.cuts for each in self.manifest.layers}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def main(self, stage: int = 0) -> dict[str, Any]:
        """Return DeepSpeed's data of a stage, with its non-expert weights as ``"module"``: at ZeRO 3 only buffers have
        their values there."""
        return self.file(self.main_files[stage])

    def states_of(self, stage: int) -> Index | None:
        """Return the index of the optimizer states of a stage; ``None`` if there is none."""
        if self.index is None:
            return None
        return replace(
            self.index, groups=tuple(each for each in self.index.groups if stage_of_file(each.file) == stage)
        )

    def files(self) -> Iterator[Path]:
        """Return the checkpoint's files, except those that describe it; other files in its folder are ignored.

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

    def names(self) -> Iterable[str]:
        """Return the names of all parameters and buffers; those that stages share are listed once."""
        found: dict[str, None] = {}
        for stage in range(self.num_stages):
            found |= dict.fromkeys(self.dense_names_of(stage))
            for layer in (each for each, at in self._layer_at.items() if at[0] == stage):
                for expert in range(self.numbering[layer].num_experts):
                    for each in self._names_in(self.file_of(layer, self.numbering[layer].number(expert, 0))):
                        found[str(ExpertName(layer, expert, each.parameter))] = None
        return found

    def dense_names_of(self, stage: int) -> Iterator[str]:
        """Return the names of parameters and buffers outside of experts' own files, without opening these."""
        yield from self._dense[stage]
        yield from self._stacked
        if not self.is_shared_out:
            parts = [name for name, each in self.parts.items() if each.stage == stage]
            there = self.file(parts_file(0, stage)) if parts else ()
            yield from (name for name in parts if part_name(name, 0) in there)

    def shapes(self, stage: int = 0) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of a stage's parameters and buffers, whole, except those in experts' own files."""
        names = (each for each in self.dense_names_of(stage) if expert_name(each) is None)
        return {
            each: self._shape(each) for each in names if each in self._first or torch.is_tensor(self._weights_of(each))
        }

    def parameters_of(self, layer: str) -> set[str]:
        """Return the parameters and buffers of one expert of a layer, by the names within the expert."""
        return {each.parameter for each in self._names_in(self.file_of(layer, self.numbering[layer].number(0, 0)))}

    @property
    def dense_files(self) -> set[str]:
        """Return the files with parameters that are not specific to a rank, and with DeepSpeed's data of each stage."""
        stages = () if self.manifest is None else self.manifest.stages
        return {*self.main_files, *(file for stage in stages for file in stage.files)}

    def file_of(self, layer: str, number: int) -> str:
        """Return DeepSpeed's name for the file of an expert of a layer."""
        return str(ExpertFile(*self._layer_at[layer], number))

    def weights(self, name: str) -> torch.Tensor:
        """Return a parameter's weights in the model's shape and dtype.

        Raises:
            CheckpointError: there is no such parameter.
        """
        if self._first_saved_part(name, None) is None and not self._is_partitioned(name):
            return self._weights_of(self._saved_name(name, 0))
        return self.part(name, None)

    def like(self, name: str) -> torch.Tensor:
        """Return a tensor of the shape and dtype of :meth:`weights`, on the meta device, without reading.

        Raises:
            CheckpointError: there is no such parameter.
        """
        shape = torch.Size(self.part_shape(name))
        first = next(iter(self.sources(name, None, 0, shape.numel())))
        return torch.empty(shape, dtype=first.dtype or first.read().dtype, device="meta")

    def exact(self, name: str) -> torch.Tensor:
        """Return a parameter in the optimizer's precision, or the model's weights if it is not optimized."""
        return self.part(name, MASTER) if self.has_state(name, MASTER) else self.weights(name)

    def part(self, name: str, item: str | None, here: ExpertPart | None = None) -> torch.Tensor:
        """Return a part of a parameter, or all of it; see :meth:`sources`."""
        shape = torch.Size(self.part_shape(name, here))
        return joined(self.sources(name, item, 0, shape.numel(), here)).view(shape)

    def part_shape(self, name: str, here: ExpertPart | None = None) -> tuple[int, ...]:
        """Return the shape of a part of a parameter, or of all of it."""
        shape = self._shape(name) if here is None else here.part_shape(self._shape(name))
        return shape if expert_name(name) is None else shape[1:]

    def has_state(self, name: str, item: str) -> bool:
        """Return True if the optimizer had such a state."""
        return self._saved_states.has(self._saved_name(self._optimized(name), 0), item)

    def _optimized(self, name: str) -> str:
        """Return the one name under which a parameter with several names is optimized."""
        shared = (self.main(stage).get("shared_params") or {} for stage in range(self.num_stages))
        return next((each[name] for each in shared if name in each), name)

    def sources(
        self, name: str, item: str | None, first: int, size: int, here: ExpertPart | None = None
    ) -> Iterator[Source]:
        """Return where consecutive elements of a parameter, or of a part of it, are; it reads none of them.

        Args:
            name: the parameter's name in the model.
            item: the name of a state, ``None`` for the weights; ``"fp32"`` is the parameter in the optimizer's
                precision, or its weights in fp32 where that is not known.
            first: the first element of the flattened parameter or part.
            size: the number of elements.
            here: the part of an expert parameter; a shard of one of DeepSpeed's experts is a part of it.

        Raises:
            CheckpointError: there is no such parameter, or elements of its state are missing.
        """
        rounded = None
        if item == MASTER and not self.has_state(name, item):
            item, rounded = None, torch.float32
        if item is not None:
            name = self._optimized(name)
        was = self._first_saved_part(name, here)

        def saved(number: int, start: int, count: int) -> Iterator[Source]:
            return self._saved(self._saved_name(name, number), item, start, count, rounded)

        if was is None:
            return saved(0, first, size)
        return elements_of_part(was, here or was.all_of_it(), self._shape(name), first, size, saved)

    def _first_saved_part(self, name: str, wanted: ExpertPart | None) -> ExpertPart | None:
        """Return the first saved part of a parameter; ``None`` if it is whole in the files and ``wanted`` whole."""
        if name in self._first:
            return self._first[name]
        expert = expert_name(name)
        num_shards = 1 if expert is None else self._numbering_of(expert).esp
        if expert is None or num_shards == 1:
            return None if wanted is None else wanted.all_of_it()
        cuts = self._shard_dims.get(expert.layer)
        if not cuts:
            raise CheckpointError(
                f"{self.place} does not contain the dimension along which {name} is split into its {num_shards} shards"
            )
        # Only parameters are listed in `cuts`; anything else is a buffer, which every shard has whole.
        return of_one_expert(cuts.get(expert.parameter, "whole"), 0, num_shards)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape of a parameter or buffer; for an expert of DeepSpeed's it begins with a 1."""
        if name not in self._shapes:
            was, shape = (
                self._first_saved_part(name, None),
                tuple(self._shape_of(self._optimized(self._saved_name(name, 0)))),
            )
            shape = shape if expert_name(name) is None else (1, *shape)
            self._shapes[name] = shape if was is None else was.whole_shape(shape)
        return self._shapes[name]

    def _saved(
        self, saved: str, item: str | None, first: int, size: int, dtype: torch.dtype | None = None
    ) -> Iterator[Source]:
        """Return where elements of a rank's saved tensor, or of its state, are."""
        if item is not None:
            return self._saved_states.sources(saved, item, first, size)
        if not self._is_partitioned(saved):
            return iter([Source(self._place_of(saved)[0], partial(self._weights_of, saved), first, size, dtype)])
        found = self._optimized(saved)
        if not self._saved_states.has(found, MASTER):
            return self._saved_states.sources(found, WEIGHTS, first, size, dtype)
        # Weights come in the dtype in which the job trained.
        own = torch.float32 if self.manifest is None else getattr(torch, self.manifest.sizes.dtype)
        return self._saved_states.sources(found, MASTER, first, size, dtype or own)

    def _is_partitioned(self, name: str) -> bool:
        """Return True if ZeRO 3 has saved a tensor in pieces, as it does all except buffers."""
        return self.is_shared_out and name not in self._buffers

    def _saved_name(self, name: str, number: int) -> str:
        """Return the name of a shard or part of a parameter in the files."""
        if name in self._first:
            return part_name(name, number)
        expert = expert_name(name)
        if expert is None:
            return name
        return str(replace(expert, number=self._numbering_of(expert).number(expert.number, number)))

    def _numbering_of(self, expert: ExpertName) -> Numbering:
        if expert.layer not in self.numbering:
            raise CheckpointError(f"{self.place} has no MoE layer {expert.layer!r}; it has {', '.join(self.numbering)}")
        return self.numbering[expert.layer]

    def _weights_of(self, saved: str) -> Any:
        file, keys = self._place_of(saved)
        if (number := part_number(saved)) is not None and (of := self._stacked.get(whole_name(saved))) is not None:
            return torch.cat([self.file.at(file, (key,)) for key in of.keys(number)]).unsqueeze(0)
        return self.file.at(file, keys)

    def _place_of(self, saved: str) -> tuple[str, Keys]:
        """Return the file that has a tensor, and its keys in this file."""
        expert, number, whole = expert_name(saved), part_number(saved), whole_name(saved)
        if expert is not None:
            return self.file_of(expert.layer, expert.number), (saved,)
        if number is not None and whole in self.parts:
            return parts_file(number, self.parts[whole].stage), (saved,)
        if number is not None and whole in self._stacked:
            return str(ExpertFile(0, self._stacked[whole].layer, number)), ()
        places = self._places_of(saved)
        return places.get(self._stage) or next(iter(places.values()), (self.main_files[0], ("module", saved)))

    def _places_of(self, saved: str) -> dict[int, tuple[str, Keys]]:
        """Return stage -> (file, keys in it), for parameters that are not specific to a rank."""
        return {stage: each[saved] for stage, each in self._dense.items() if saved in each}

    def check_shared(self) -> None:
        """Check that parameters of one name are the same on all stages.

        Raises:
            CheckpointError: they differ, since only the ``tied_weight_attr`` of a ``TiedLayerSpec`` is shared.
        """
        for name in self.names():
            places = self._places_of(name)
            values = [self.file.at(*each) for each in places.values()] if len(places) > 1 else []
            if any(not torch.equal(values[0], each) for each in values[1:]):
                raise CheckpointError(
                    f"{self.place}: {name} differs between the stages {', '.join(map(str, places))} of the pipeline, "
                    "and has one name: a TiedLayerSpec keeps only its tied_weight_attr the same; name it there too"
                )

    def _dense_places(self, renamed: Mapping[str, str] | None) -> dict[int, dict[str, tuple[str, Keys]]]:
        """Return stage -> name -> (file, keys in it), for data that is not specific to a rank.

        Args:
            renamed: name -> name in the file, where they differ.
        """
        found: dict[int, dict[str, tuple[str, Keys]]] = {}
        for at, file in enumerate(self.main_files):
            names = renamed or {name: name for name in self.main(at)["module"] or ()}
            found[at] = {name: (file, ("module", saved)) for name, saved in names.items()}
        for at, stage in enumerate(() if self.manifest is None else self.manifest.stages):
            for file, path in stage.files.items():
                found[at] |= {f"{path}.{key}": (file, (key,)) for key in self.file(file)}
        return found

    def _shape_of(self, saved: str) -> torch.Size:
        if not self._is_partitioned(saved):
            return self._weights_of(saved).shape
        name = whole_name(saved) if whole_name(saved) in self.parts else saved
        for shapes in (*(self.main()["param_shapes"] or ()), self.main()["frozen_param_shapes"] or {}):
            if name in shapes:
                return torch.Size(shapes[name])
        raise CheckpointError(f"{self.place} has no {name!r}")

    def _numberings(self) -> Mapping[str, Numbering]:
        of_layers = Counter(each[:2] for each in self._experts)
        counts = {layer: of_layers[at] for layer, at in self._layer_at.items()}
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
        found = [expert_name(each) for each in self.file(file)]
        if not found or None in found:
            raise CheckpointError(f"{self.place / file} does not belong to an expert")
        return [each for each in found if each is not None]

# SPDX-License-Identifier: Apache-2.0
"""Makes DeepSpeed read files safely while our engine loads: no code in them runs, and experts get this job's layout.

``checkpoints`` calls it for each load. From files of another layout a rank reads only its own ranges. Experts of
Hugging Face models may have been spread over other ranks, and ZeRO 3 may have partitioned parameters, then or now.
Below ZeRO 3 DeepSpeed needs one file with this rank's weights. At ZeRO 3 it needs one with frozen parameters, and one
with the pieces of optimized ones.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_fsmoe.checkpoint import optimizer_states
from ds_fsmoe.checkpoint.layout import stage_of, stock_layers
from ds_fsmoe.checkpoint.optimizer_states import live_groups, piece_of
from ds_fsmoe.checkpoint.ranks import replaced
from ds_fsmoe.checkpoint_files import guards
from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, of_one_expert, part_of, parts_in, whole_name
from ds_fsmoe.checkpoint_files.manifest import NAME, Manifest
from ds_fsmoe.checkpoint_files.numbering import (
    AUTO_EP_LAYERS,
    ExpertName,
    Numbering,
    ShardDim,
    expert_file,
    expert_name,
    main_file,
)
from ds_fsmoe.checkpoint_files.pieces import FLAT, FROZEN, MASTER, OPTIMIZER, Copies, Index, Source, read_index
from ds_fsmoe.checkpoint_files.reading import OF_DEEPSPEED, read_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.components.expert_compute.shards import shard_dims_of
from ds_fsmoe.distributed.waits import waiting


def trusted_classes(names: list[str]) -> tuple[Any, ...]:
    """Return the classes that files may name besides plain data: DeepSpeed's few, and those that the config trusts."""
    parts = (name.rpartition(".") for name in (*OF_DEEPSPEED, *names))
    return tuple(getattr(importlib.import_module(module), attribute) for module, _, attribute in parts)


class Relaid:
    """Makes the files of weights that this rank would have saved, from those of another layout, for DeepSpeed to load.

    Args:
        engine: our engine.
        whole: the checkpoint.
        sources: returns where this rank's elements of a parameter, by its name here, or of its state are. Without a
            state: of its weights.
        parts: name -> this rank's part, for parameters that are spread over ranks.
        sharper: whether weights come from the optimizer's copies, if there are any.
        with_optimizer: whether the files of the optimizer's states may be read even if weights are elsewhere.
        rounds: whether weights may get their values from the optimizer's copies afterwards.

    Attributes:
        main_file: the file of this rank's stage that DeepSpeed will read, from which the rest is made.
        main_files: the files of all stages, of which DeepSpeed picks this rank's.
        rounds: whether weights have to get their values from the optimizer's copies, of which each rank reads its own:
            ZeRO 3 has saved no weights, and whole copies would be twice as many bytes as the weights.
        has_filled_masters: whether the optimizer's copies of the parameters are already filled.
    """

    def __init__(
        self,
        engine: Any,
        whole: Whole,
        sources: Callable[[str, str | None, int, int], Iterator[Source]],
        parts: Mapping[str, ExpertPart],
        sharper: bool,
        with_optimizer: bool,
        rounds: bool,
    ) -> None:
        self._engine, self._whole, self._sources, self._parts, self._sharper = engine, whole, sources, parts, sharper
        self.has_filled_masters = False
        self._has_masters = with_optimizer or whole.is_shared_out
        self._live = engine.module.state_dict(keep_vars=True)
        self._copies = Copies()
        self._is_shared_out = bool(engine.zero_optimization_partition_weights())
        saved = None if whole.manifest is None else getattr(torch, whole.manifest.sizes.dtype)
        now = next(engine.module.parameters()).dtype
        is_low = now != torch.float32 and saved in (torch.float32, now)
        self.rounds = rounds and is_low and whole.is_shared_out and not self._is_shared_out
        groups = (live_groups(engine) or ()) if self.rounds else ()
        self._rounded = {whole_name(each) for group in groups if group.master is not None for each in group.names}
        stage = stage_of(engine)
        self._names = {each for each in whole.dense_names_of(stage) if expert_name(each) is None}
        self._main = whole.main(stage)
        self.main_files = [whole.place / each for each in whole.main_files]
        self.main_file = self.main_files[stage]

    def file(self, path: Path) -> Any:
        """Return the content that a file would have, had this job saved it; ``None`` for a file that is not needed."""
        place, made = self._whole.place, None
        if path == self.main_file:
            made = self._weights()
        elif self._is_shared_out and path == Path(self._engine._get_zero_ckpt_name(str(place.parent), place.name)):
            made = {OPTIMIZER: self._optimized()}
        self._copies.run()
        return made

    def _weights(self) -> dict[str, Any]:
        # Layers of AutoEP, which DeepSpeed would look for here, are ours now.
        others = {name: None if name == AUTO_EP_LAYERS else each for name, each in self._main.items()}
        others = {name: each for name, each in others.items() if name not in ("module", FROZEN)}
        sizes = {"dp_world_size": self._engine.seq_dp_world_size, "mp_world_size": self._engine.mp_world_size}
        # What was saved without MoE layers does not say so.
        others = {"num_experts": list(self._engine.num_experts)} | others | sizes
        if not self._is_shared_out:
            return others | {"module": {name: self._own(name) for name in self._names}, FROZEN: None}
        here = dict(self._engine.module.named_parameters(remove_duplicate=False))
        module = {
            name: here[name].data if name in here else self._own(name) for name in self._names
        }  # parameters have no elements here, and DeepSpeed compares only their names
        return others | {"module": module, FROZEN: self._frozen()}

    def _own(self, name: str) -> Any:
        """Return a parameter or buffer, or this rank's part of it: in its file, or in memory that is filled later."""
        live, part = self._live.get(name), self._parts.get(name)
        if not torch.is_tensor(live):
            return self._whole.weights(name)
        if name in self._rounded and live.dtype != torch.float32:
            return live.data
        shape = self._whole.part_shape(name, part)
        sources = list(self._sources(name, self._item(name), 0, math.prod(shape)))
        if len(sources) == 1:
            return sources[0].take().view(shape)
        own = torch.empty(shape, dtype=live.dtype)
        self._copies.add(sources, own.view(-1))
        return own

    def _item(self, name: str) -> str | None:
        """Return the state that has a parameter's weights; ``None`` if the saved weights have them."""
        return MASTER if self._sharper and self._whole.has_state(name, MASTER) else None

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Return this rank's pieces of frozen parameters."""
        found = {}
        for name in self._engine._get_zero_frozen_param_attributes(lambda parameter: None):
            parameter = self._engine.module.get_parameter(name)
            found[name] = fragment = parameter.ds_tensor.detach().clone()
            piece = piece_of(parameter, name)
            if piece is not None and name in self._names:
                values = self._sources(name, self._item(name), piece.first, piece.size)
                self._copies.add(values, fragment.view(-1)[: piece.size])
        return found

    def _optimized(self) -> dict[str, Any]:
        """Return the optimizer's state dict, with this rank's pieces of the parameters as ``FLAT``.

        Raises:
            CheckpointError: ZeRO 3 weights are swapped out.
        """
        groups = live_groups(self._engine)
        if groups is None:
            raise CheckpointError(
                f"{self._whole.place}: ZeRO 3 weights that are swapped out cannot be converted to another layout"
            )
        flat = [torch.empty(0)] * len(groups)
        for group in groups:
            flat[group.keys[-1]] = target = group.tensor.detach().clone()
            for piece in group.pieces:
                if whole_name(piece.name) in self._names:
                    values = self._sources(piece.name, MASTER if self._has_masters else None, piece.first, piece.size)
                    self._copies.add(values, target[piece.at : piece.at + piece.size])
        self.has_filled_masters = self._has_masters
        return self._engine.optimizer.state_dict() | {FLAT: flat}


class Reading:
    """Reads one tag for the engine that loads it.

    Args:
        engine: our engine.
        place: the folder of the tag.
        manifest: the tag's manifest; ``None`` for a tag of stock DeepSpeed.
        has_parts: whether this rank has parts of a Hugging Face model's experts.
    """

    def __init__(self, engine: Any, place: Path, manifest: Manifest | None, has_parts: bool) -> None:
        self._engine = engine
        self._place = place
        self._manifest = manifest
        self._trusted = trusted_classes(engine.fsmoe.block.checkpoint.trusted)
        self._relaid: Relaid | None = None
        self._shard_dims: dict[str, dict[str, ShardDim]] = {}
        self._has_parts = has_parts

    @cached_property
    def index(self) -> Index | None:
        """Return the index of the optimizer's states; ``None`` if there is none."""
        return read_index(self._place, self._manifest)

    @cached_property
    def whole(self) -> Whole:
        """Return the whole parameters of the tag, read when first needed, to move states from another layout."""
        return Whole(self._place, self._trusted, stage_of(self._engine), lambda *_: self.index)

    @cached_property
    def _parts(self) -> dict[str, ExpertPart]:
        return {name: part for name, _, part in parts_in(self._engine.module)} if self._has_parts else {}

    @contextmanager
    def in_use(
        self, resharded: bool, sharper: bool, strict: bool, relaid: bool, moved: bool, rounds: bool
    ) -> Iterator[None]:
        """Make DeepSpeed load through this reader within the block.

        Args:
            resharded: whether the number of shards of experts differs from the saved one.
            strict: whether every saved parameter of an expert has to exist here.
            sharper: whether this job's weights have more digits than the saved ones; then they come from the
                optimizer's copies.
            relaid: whether the file of weights is assembled from several: from ranks with experts of Hugging Face
                models, or from another layout with ZeRO 3 on one side.
            moved: whether states of the optimizer are loaded from another layout; otherwise their files may be
            missing.
            rounds: whether weights may get their values from the optimizer's copies after these are filled.
        """
        files = self._engine.checkpoint_engine
        if type(files) is not TorchCheckpointEngine:
            with replaced(guards, guards.use_ds_fsmoe_convert.__name__, guards.skip_guard):
                yield
            return

        own = None
        if relaid:
            own = self._relaid = Relaid(self._engine, self.whole, self._sources, self._parts, sharper, moved, rounds)
        main = main_file(stage_of(self._engine))
        first: dict[str, Any] = {}

        def load(path: str, map_location: Any = None) -> Any:
            # DeepSpeed reads the first file once more, after it has read how many there should be.
            if (found := first.get(path)) is not None:
                first[path] = None
                return found
            found = read(Path(path), map_location)
            if not first:
                first[path] = found
            return found

        def read(path: Path, map_location: Any) -> Any:
            if own is not None and (made := own.file(path)) is not None:
                return made
            expert = expert_file(path.name) if resharded or sharper else None
            if expert is not None:
                return self._expert(expert.layer, expert.number, sharper, strict)
            self._check_named(path)
            if moved:
                found = self._in_place(path.name, main)
            else:
                is_of_others = path.name == main_file(0) != main
                found = read_file(path, self._trusted, map_location or "cpu", in_place=is_of_others)
            if sharper and path.name == main and found["module"] is not None:
                found["module"] |= {name: self.whole.exact(name) for name in found["module"]}
            elif sharper and (layer := self._layer_in(path.name)) is not None:
                found |= {name: self.whole.exact(f"{layer}.{name}") for name in found}
            return found

        with ExitStack() as stack:
            stack.enter_context(replaced(files, "load", load))
            if own is not None:
                names = list(map(str, own.main_files))
                stack.enter_context(replaced(self._engine, "_get_all_ckpt_names", lambda folder, tag: names))
            yield

    def _in_place(self, name: str, main: str) -> dict[str, Any]:
        """Return the content of a file of weights; these stay in the file, while the data of scripts is read."""
        found = copy(self.whole.file(name))
        if name == main:
            found["module"] = copy(found["module"])
            own = found.keys() - {"module", "optimizer", FROZEN}
            found |= {name: deepcopy(found[name]) for name in own}
        return found

    def _layer_in(self, file: str) -> str | None:
        """Return the path of the pipeline layer in a file of one layer; ``None`` for another file."""
        stages = () if self._manifest is None else self._manifest.stages
        return next((each.files[file] for each in stages if file in each.files), None)

    def _check_named(self, path: Path) -> None:
        """Refuse a file that the manifest does not name, since no checksum was checked."""
        name = str(path).removeprefix(f"{self._place}/")
        if self._manifest is not None and name != str(path) and name not in self._manifest.files:
            raise CheckpointError(f"{path} is not listed in {NAME}: it does not belong to this checkpoint")

    def check_weights(self, strict: bool) -> None:
        """Check, before anything is loaded, that the weights belong to this model.

        Args:
            strict: whether parameters of both sides must be the same.

        Raises:
            CheckpointError: they belong to another model; names parameters and shapes.
        """
        here, there = shapes_of(self._engine.module), self.whole.shapes(stage_of(self._engine))
        wrong = [
            f"{name} has shape {list(there[name])} there and {list(shape)} here"
            for name, shape in here.items()
            if name in there and there[name] != shape
        ]
        if strict:
            wrong += [f"{name} is here and not there" for name in here if name not in there]
            wrong += [f"{name} is there and not here" for name in there if name not in here]
        if wrong:
            more = f"; and {len(wrong) - 3} others" if len(wrong) > 3 else ""
            raise CheckpointError(f"{self._place} was saved from another model: {'; '.join(wrong[:3])}{more}")

    def check_states(self) -> None:
        """Check, before anything is loaded, that the optimizer's states can be moved to this layout.

        Raises:
            CheckpointError: they cannot be moved; names the reason.
        """
        optimizer_states.check_states(self._engine, self.whole.states_of(stage_of(self._engine)), self._place)

    def fill_optimizer(self) -> None:
        """Load the optimizer's states; called after the weights are loaded.

        Raises:
            CheckpointError: they do not fit here; see :func:`~ds_fsmoe.checkpoint.optimizer_states.fill`.
        """
        index = self.whole.states_of(stage_of(self._engine))
        assert index is not None
        has_masters = self._relaid is not None and self._relaid.has_filled_masters
        optimizer_states.fill(self._engine, index, self._sources, self._place, has_masters)

    def round_weights(self) -> None:
        """Fill weights that no file holds in their own dtype; called after :meth:`fill_optimizer`.
        Collective."""
        if self._relaid is not None and self._relaid.rounds:
            with waiting("weights that are rounded after a load"):
                optimizer_states.round_weights(self._engine)

    def _expert(self, layer: int, number: int, sharper: bool, strict: bool) -> dict[str, torch.Tensor]:
        """Return the content of an expert's file, had this job saved it."""
        path = list(stock_layers(self._engine))[layer]
        parameters = list(self._engine.fsmoe.layers[path].experts.deepspeed_experts[0].state_dict())
        unexpected = sorted(self.whole.parameters_of(path) - set(parameters))
        if strict and unexpected:
            raise CheckpointError(
                f"{self._place}: experts of {path} have {', '.join(unexpected)} in the checkpoint, and not in the model"
            )
        found = {}
        for each in parameters:
            name, here = self._meant(ExpertName(path, number, each))
            item = MASTER if sharper and self.whole.has_state(name, MASTER) else None
            found[str(ExpertName(path, number, each))] = self.whole.part(name, item, here)
        return found

    def _sources(self, name: str, item: str | None, first: int, size: int) -> Iterator[Source]:
        """Return where this rank's elements of a parameter, by its name here, or of its state are."""
        expert = expert_name(name)
        if expert is not None:
            meant, here = self._meant(expert)
            return self.whole.sources(meant, item, first, size, here)
        name = whole_name(name)
        return self.whole.sources(name, item, first, size, self._parts.get(name))

    def _meant(self, expert: ExpertName) -> tuple[str, ExpertPart | None]:
        """Return the model's name for an expert's parameter, and this rank's shard of it."""
        esp = self._engine.fsmoe.block.esp_size
        layer = self._engine.fsmoe.layers[expert.layer]
        meant, shard = Numbering(layer.total_experts, layer.ep_size, esp).meant(expert.number)
        name = str(ExpertName(expert.layer, meant, expert.parameter))
        if esp == 1:
            return name, None
        if expert.layer not in self._shard_dims:
            self._shard_dims[expert.layer] = shard_dims_of(layer.experts.deepspeed_experts[0])
        return name, of_one_expert(self._shard_dims[expert.layer].get(expert.parameter, "whole"), shard, esp)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> whole shape of every saved parameter and buffer, except those of experts with own files."""
    found = {}
    for name, each in model.state_dict(keep_vars=True).items():
        if torch.is_tensor(each) and expert_name(name) is None:
            part, shape = part_of(each), tuple(getattr(each, "ds_shape", each.shape))
            found[name] = shape if part is None else part.whole_shape(shape)
    return found

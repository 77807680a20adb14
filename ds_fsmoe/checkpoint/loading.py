# SPDX-License-Identifier: Apache-2.0
"""Makes DeepSpeed read files safely while our engine loads: nothing in them is run, and experts are cut as this
job's are. Of files of another layout a rank reads the ranges that it keeps.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_fsmoe.checkpoint import optimizer_states
from ds_fsmoe.checkpoint.expert_files import live_parts, number_of_job, shapes_of, with_parts
from ds_fsmoe.checkpoint.optimizer_states import missing_and_unexpected, optimizer_name
from ds_fsmoe.checkpoint.ranks import replaced
from ds_fsmoe.checkpoint.relaid import Relaid
from ds_fsmoe.checkpoint.saving import stock_layers
from ds_fsmoe.checkpoint.shared_out import FROZEN
from ds_fsmoe.checkpoint.stages import stage_of
from ds_fsmoe.checkpoint_files import guards
from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, of_one_expert, parts_file, whole_name
from ds_fsmoe.checkpoint_files.manifest import NAME, Manifest
from ds_fsmoe.checkpoint_files.numbering import Cut, ExpertName, Numbering, expert_file, expert_name, main_file
from ds_fsmoe.checkpoint_files.pieces import MASTER, Index, read_index
from ds_fsmoe.checkpoint_files.reading import OF_DEEPSPEED, read_file
from ds_fsmoe.checkpoint_files.sources import Source
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole
from ds_fsmoe.components.expert_compute.shards import cuts_of
from ds_fsmoe.distributed.waits import waiting


def trusted_classes(names: list[str]) -> tuple[Any, ...]:
    """Return what files may name beside plain data: DeepSpeed's few classes, and those that the config trusts."""
    parts = (name.rpartition(".") for name in (*OF_DEEPSPEED, *names))
    return tuple(getattr(importlib.import_module(module), attribute) for module, _, attribute in parts)


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
        self._cuts: dict[str, dict[str, Cut]] = {}
        self._has_parts = has_parts

    @cached_property
    def index(self) -> Index | None:
        """The index of the optimizer's states; ``None`` if there is none."""
        return read_index(self._place, self._manifest)

    @cached_property
    def whole(self) -> Whole:
        """The whole parameters of the tag, read when first needed: only to move states from another layout."""
        return Whole(self._place, self._trusted, stage_of(self._engine), lambda *_: self.index)

    @cached_property
    def _stock_paths(self) -> list[str]:
        return list(stock_layers(self._engine))

    @cached_property
    def _parts(self) -> dict[str, ExpertPart]:
        return {name: part for name, (_, part) in live_parts(self._engine).items()} if self._has_parts else {}

    @contextmanager
    def in_use(
        self, recut: bool, sharper: bool, strict: bool, relaid: bool, moved: bool, rounds: bool
    ) -> Iterator[None]:
        """Make DeepSpeed load through this reader within the block.

        Args:
            recut: whether experts are cut into another number of shards than they were.
            strict: whether every saved parameter of an expert has to exist here.
            sharper: whether this job's weights have more digits than the saved ones; the optimizer's copies have them.
            relaid: whether weights lie otherwise in the files than this job's would: experts spread over other ranks,
                or ZeRO 3 on one side.
            moved: whether states of the optimizer are to be loaded from another layout; without them its files need not
                be there.
            rounds: whether weights may get their values from the optimizer's copies after these are filled.
        """
        files = self._engine.checkpoint_engine
        if type(files) is not TorchCheckpointEngine:
            with replaced(guards, guards.use_ds_fsmoe_convert.__name__, guards.passed_over):
                yield
            return

        own = None
        if relaid:
            own = self._relaid = Relaid(self._engine, self.whole, self._sources, self._parts, sharper, moved, rounds)
        main = main_file(stage_of(self._engine))
        first: dict[str, Any] = {}

        def load(path: str, map_location: Any = None) -> Any:
            # DeepSpeed reads the first file once more, after a look at how many there should be.
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
            expert = expert_file(path.name) if recut or sharper else None
            if expert is not None:
                return self._expert(expert.layer, expert.number, sharper, strict)
            self._check_named(path)
            if moved:
                found = self._in_place(path.name, main)
            else:
                is_of_others = path.name == main_file(0) != main
                found = read_file(path, self._trusted, map_location or "cpu", in_place=is_of_others)
            if sharper and path.name == main and found["module"] is not None:
                found["module"] |= {name: self._sharp(name) for name in found["module"]}
            elif sharper and (layer := self._layer_in(path.name)) is not None:
                found |= {name: self._sharp(f"{layer}.{name}") for name in found}
            if path.name == main and self._parts:
                frozen = {name for name, each in self._engine.module.named_parameters() if not each.requires_grad}
                found = with_parts(found, self._own_parts(map_location), frozen)
            return found

        with replaced(files, "load", load):
            if own is None:
                yield
                return
            with replaced(self._engine, "_get_all_ckpt_names", lambda folder, tag: list(map(str, own.main_files))):
                yield

    def _in_place(self, name: str, main: str) -> dict[str, Any]:
        """Return what a file of weights holds, which stay in the file; what scripts have saved beside them does not."""
        found = copy(self.whole.file(name))
        if name == main:
            found["module"] = copy(found["module"])
            own = found.keys() - {"module", "optimizer", FROZEN}
            found |= {name: deepcopy(found[name]) for name in own}
        return found

    def _layer_in(self, file: str) -> str | None:
        """Return the path of the one layer of a pipeline that a file has; ``None`` for another file."""
        stages = () if self._manifest is None else self._manifest.stages
        return next((each.files[file] for each in stages if file in each.files), None)

    def _own_parts(self, map_location: Any) -> dict[str, torch.Tensor]:
        """Return this rank's experts, where they are spread over ranks as they were."""
        number = number_of_job(self._engine)
        if number is None or self._manifest is None:
            return {}
        path = self._place / parts_file(number, stage_of(self._engine))
        self._check_named(path)
        found = read_file(path, self._trusted, map_location or "cpu", in_place=True)
        return {whole_name(name): each for name, each in found.items()}

    def _check_named(self, path: Path) -> None:
        """Refuse a file that the manifest does not name, as it was not checked against a checksum."""
        name = str(path).removeprefix(f"{self._place}/")
        if self._manifest is not None and name != str(path) and name not in self._manifest.files:
            raise CheckpointError(f"{path} is not named in {NAME}: it is not of this checkpoint")

    def check_weights(self, strict: bool) -> None:
        """Check, before anything is loaded, that the weights are of this model.

        Args:
            strict: whether parameters may be missing on neither side.

        Raises:
            CheckpointError: they are of another; the message names parameters and shapes.
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
            raise CheckpointError(f"{self._place} was saved of another model: {'; '.join(wrong[:3])}{more}")

    def check_states(self) -> None:
        """Check, before anything is loaded, that the optimizer's states can be moved to this layout.

        Raises:
            CheckpointError: they cannot be; the message says why.
        """
        index = self.whole.states_of(stage_of(self._engine))
        if index is None:
            raise CheckpointError(
                f"{self._place} does not say where its states of the optimizer lie (saved by stock DeepSpeed, by an "
                "older version, or with an optimizer that is not known)"
            )
        if index.optimizer != optimizer_name(self._engine):
            raise CheckpointError(
                f"{self._place} has states of {index.optimizer}, and this job's optimizer is "
                f"{optimizer_name(self._engine)}"
            )
        missing, unexpected = missing_and_unexpected(self._engine, index)
        if missing or unexpected:
            raise CheckpointError(
                f"{self._place}: parameters with states here and not there: {', '.join(missing) or 'none'}; there and "
                f"not here: {', '.join(unexpected) or 'none'}"
            )

    def fill_optimizer(self) -> None:
        """Load the optimizer's states; called after the weights are loaded.

        Raises:
            CheckpointError: they cannot be put here; see :func:`~ds_fsmoe.checkpoint.optimizer_states.fill`.
        """
        index = self.whole.states_of(stage_of(self._engine))
        assert index is not None
        has_masters = self._relaid is not None and self._relaid.has_filled_masters
        optimizer_states.fill(self._engine, index, self._sources, self._place, has_masters)

    def round_weights(self) -> None:
        """Give weights that no file has in their data type their values; called after :meth:`fill_optimizer`.
        Collective."""
        if self._relaid is not None and self._relaid.rounds:
            with waiting("weights that are rounded after a load"):
                optimizer_states.round_weights(self._engine)

    def _sharp(self, name: str) -> torch.Tensor:
        return self.whole.state(name, MASTER) if self.whole.has_state(name, MASTER) else self.whole.weights(name)

    def _expert(self, layer: int, number: int, sharper: bool, strict: bool) -> dict[str, torch.Tensor]:
        """Return what the file of an expert would hold, had this job saved it."""
        path = self._stock_paths[layer]
        inner = self._engine.fsmoe.layers[path].deepspeed_moe
        parameters = list(inner.experts.deepspeed_experts[0].state_dict())
        unexpected = sorted(self.whole.parameters_of(path) - set(parameters))
        if strict and unexpected:
            raise CheckpointError(f"{self._place}: experts of {path} have {', '.join(unexpected)} there, and not here")
        found = {}
        for each in parameters:
            name, here = self._meant(ExpertName(path, number, each))
            item = MASTER if sharper and self.whole.has_state(name, MASTER) else None
            found[str(ExpertName(path, number, each))] = self.whole.part(name, item, here)
        return found

    def _sources(self, name: str, item: str | None, first: int, size: int) -> Iterator[Source]:
        """Return where elements are that this rank has of a parameter, by its name here, or of its state."""
        expert = expert_name(name)
        if expert is not None:
            meant, here = self._meant(expert)
            return self.whole.sources(meant, item, first, size, here)
        name = whole_name(name)
        return self.whole.sources(name, item, first, size, self._parts.get(name))

    def _meant(self, expert: ExpertName) -> tuple[str, ExpertPart | None]:
        """Return the model's name for an expert's parameter, and which shard of it this rank has."""
        esp = self._engine.fsmoe.block.esp_size
        layer = self._engine.fsmoe.layers[expert.layer]
        meant, shard = Numbering(layer.num_experts, layer.deepspeed_moe.ep_size, esp).meant(expert.number)
        name = str(ExpertName(expert.layer, meant, expert.parameter))
        if esp == 1:
            return name, None
        if expert.layer not in self._cuts:
            self._cuts[expert.layer] = cuts_of(layer.deepspeed_moe.experts.deepspeed_experts[0])
        return name, of_one_expert(self._cuts[expert.layer].get(expert.parameter, "whole"), shard, esp)

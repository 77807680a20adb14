# SPDX-License-Identifier: Apache-2.0
"""Makes, for DeepSpeed to load, the files of weights that this job would have saved, from those of another layout.

Experts of Hugging Face models may have been spread over other ranks, and ZeRO 3 may have cut every parameter, or has
now. Below ZeRO 3 DeepSpeed wants one file with this rank's weights; at ZeRO 3 one with what is not optimized, and one
with the pieces that are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_fsmoe.checkpoint.optimizer_states import live_groups
from ds_fsmoe.checkpoint.shared_out import FLAT, FROZEN, OPTIMIZER, piece_of
from ds_fsmoe.checkpoint.stages import stage_of
from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, whole_name
from ds_fsmoe.checkpoint_files.names import AUTO_EP_LAYERS
from ds_fsmoe.checkpoint_files.numbering import expert_name, main_file
from ds_fsmoe.checkpoint_files.pieces import MASTER
from ds_fsmoe.checkpoint_files.sources import Copies, Source
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole


class Relaid:
    """Makes the files of one rank.

    Args:
        engine: our engine.
        whole: the checkpoint.
        sources: says where elements are that this rank has of a parameter, by its name here, or of its state. Without
            a state: of its weights.
        parts: name -> what this rank has of it, of parameters that are spread over ranks.
        sharper: whether weights are taken from the optimizer's copies where there are any.
        with_optimizer: whether the files of its states may be read where weights are elsewhere.
        rounds: whether weights may get their values from the optimizer's copies afterwards.

    Attributes:
        main_file: the file of this rank's stage that DeepSpeed is to read, from which all else is made.
        main_files: those of all stages, of which DeepSpeed picks this rank's.
        rounds: whether weights have to get their values from the optimizer's copies, of which each rank reads its own:
            ZeRO 3 has saved no others, and whole they would be twice as many bytes as the weights.
        has_filled_masters: whether the optimizer has got its copies of the parameters with them.
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
        names = [whole.main_file, *map(main_file, range(1, whole.num_stages))]
        self.main_files = [whole.place / each for each in names]
        self.main_file = self.main_files[stage]

    def file(self, path: Path) -> Any:
        """Return what a file would hold, had this job saved it; ``None`` for a file that does not have to be made."""
        place, made = self._whole.place, None
        if path == self.main_file:
            made = self._weights()
        elif self._is_shared_out and path == Path(self._engine._get_zero_ckpt_name(str(place.parent), place.name)):
            made = {OPTIMIZER: self._optimized()}
        self._copies.run()
        return made

    def _weights(self) -> dict[str, Any]:
        # Layers of AutoEP, which DeepSpeed would look for here, are ours now.
        left_out = ("module", FROZEN, AUTO_EP_LAYERS)
        others = {name: each for name, each in self._main.items() if name not in left_out}
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
        """Return the state that has a parameter's weights; ``None``: the weights have them."""
        return MASTER if self._sharper and self._whole.has_state(name, MASTER) else None

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Return this rank's pieces of what is not optimized."""
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
        """Return this rank's pieces of what is optimized; its states are loaded afterwards."""
        groups = live_groups(self._engine)
        if groups is None:
            raise CheckpointError(
                f"{self._whole.place}: weights of ZeRO 3 that are swapped out cannot be laid out here"
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

# SPDX-License-Identifier: Apache-2.0
"""Makes, for DeepSpeed to load, the files of weights that this job would have saved, from those of another layout.

Experts of Hugging Face models may have been spread over other ranks, and ZeRO 3 may have cut every parameter, or has
now. Below ZeRO 3 DeepSpeed wants one file with this rank's weights; at ZeRO 3 one with what is not optimized, and one
with the pieces that are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_fsmoe.checkpoint.expert_files import live_parts
from ds_fsmoe.checkpoint.optimizer_states import live_groups
from ds_fsmoe.checkpoint.shared_out import FLAT, FROZEN, OPTIMIZER, piece_of
from ds_fsmoe.checkpoint.stages import stage_of
from ds_fsmoe.checkpoint_files.auto_ep_names import LAYERS
from ds_fsmoe.checkpoint_files.expert_parts import whole_name
from ds_fsmoe.checkpoint_files.numbering import expert_name
from ds_fsmoe.checkpoint_files.pieces import MASTER
from ds_fsmoe.checkpoint_files.stages import main_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.checkpoint_files.whole import Whole


class Relaid:
    """Makes the files of one rank.

    Args:
        engine: our engine.
        whole: the checkpoint.
        read: returns a parameter's weights by its name in the model.
        with_optimizer: whether the files of its states may be read where weights are elsewhere.

    Attributes:
        main_file: the file of this rank's stage that DeepSpeed is to read, from which all else is made.
        main_files: those of all stages, of which DeepSpeed picks this rank's.
    """

    def __init__(self, engine: Any, whole: Whole, read: Callable[[str], torch.Tensor], with_optimizer: bool) -> None:
        self._engine, self._whole, self._read = engine, whole, read
        self._has_masters = with_optimizer or whole.is_shared_out
        self._parts = live_parts(engine)
        self._is_shared_out = bool(engine.zero_optimization_partition_weights())
        stage = stage_of(engine)
        self._names = {each for each in whole.names_of(stage) if expert_name(each) is None}
        self._main = whole.main(stage)
        names = [whole.main_file, *map(main_file, range(1, whole.num_stages))]
        self.main_files = [whole.place / each for each in names]
        self.main_file = self.main_files[stage]

    def file(self, path: Path) -> Any:
        """Return what a file would hold, had this job saved it; ``None`` for a file that does not have to be made."""
        if path == self.main_file:
            return self._weights()
        place = self._whole.place
        if self._is_shared_out and path == Path(self._engine._get_zero_ckpt_name(str(place.parent), place.name)):
            return {OPTIMIZER: self._optimized()}
        return None

    def _weights(self) -> dict[str, Any]:
        # Layers of AutoEP, which DeepSpeed would look for here, are ours now.
        left_out = ("module", FROZEN, LAYERS)
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

    def _own(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer, or this rank's part of it."""
        found = self._read(name)
        # In memory of its own: a range of a weight would keep the experts of all ranks alive.
        return self._parts[name][1].cut(found).clone() if name in self._parts else found

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Return this rank's pieces of what is not optimized."""
        found = {}
        for name in self._engine._get_zero_frozen_param_attributes(lambda parameter: None):
            parameter = self._engine.module.get_parameter(name)
            found[name] = fragment = parameter.ds_tensor.detach().clone()
            piece = piece_of(parameter, name)
            if piece is not None and name in self._names:
                values = self._own(name).reshape(-1)[piece.first : piece.first + piece.size]
                fragment.view(-1)[: piece.size].copy_(values)
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
                name = whole_name(piece.name)
                if name in self._names:
                    values = self._master(name).reshape(-1)[piece.first : piece.first + piece.size]
                    target[piece.at : piece.at + piece.size].copy_(values)
        return self._engine.optimizer.state_dict() | {FLAT: flat}

    def _master(self, name: str) -> torch.Tensor:
        found = self._whole.state(name, MASTER) if self._has_masters else self._whole.weights(name)
        return self._parts[name][1].cut(found) if name in self._parts else found

# SPDX-License-Identifier: Apache-2.0
"""Compares how a checkpoint was laid out over ranks with how this job is.

Each stage of a pipeline has layers of its own. So a rank compares what it has, all ranks tell each other, and what is
decided by it is the same on every one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_fsmoe.checkpoint.ranks import Ranks
from ds_fsmoe.checkpoint.saving import sizes_of, stock_layers
from ds_fsmoe.checkpoint.stages import check_stages, stage_of
from ds_fsmoe.checkpoint_files.manifest import STAGE_3, Manifest, PartSizes
from ds_fsmoe.checkpoint_files.numbering import Numbering
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.fail_together import on_every_rank


class Comparison:
    """Compares the layout of one checkpoint with that of an engine. Collective.

    Args:
        engine: our engine.
        ranks: the ranks of its job.
        place: the folder of the tag.
        manifest: the manifest of the tag; ``None`` for a tag of stock DeepSpeed.
        parts: how parameters are spread over this job's ranks.

    Attributes:
        differences: what differs, in words; the same on every rank.
        is_recut: whether the files of this rank's experts would differ, had this job saved them.
        is_recut_anywhere: whether those of any rank would.
        has_parts_anywhere: whether a rank has parts of a Hugging Face model's experts.
    """

    def __init__(
        self, engine: Any, ranks: Ranks, place: Path, manifest: Manifest | None, parts: Mapping[str, PartSizes]
    ) -> None:
        self._engine, self._manifest, self._parts = engine, manifest, parts
        own = ranks.together(f"comparing {place}", lambda: (self._differences(), self._recut(), bool(parts)))
        of_ranks = on_every_rank(own)
        self.differences = [*dict.fromkeys(each for differences, *_ in of_ranks for each in differences)]
        self.is_recut = own[1]
        self.is_recut_anywhere = any(recut for _, recut, _ in of_ranks)
        self.has_parts_anywhere = any(parts for *_, parts in of_ranks)

    def is_relaid(self, differences: Sequence[str]) -> bool:
        """Return whether this rank's files of weights would differ, had this job saved them.

        Args:
            differences: all that differs, in words.
        """
        parts = bool(self._parts)
        return parts if self._manifest is None else bool(differences) and (parts or self._is_in_pieces())

    def is_compared(self) -> bool:
        """Return whether to compare parameters with the model's before any is changed: pieces and parts of one model
        could be put into another without an error."""
        sizes, manifest = sizes_of(self._engine), self._manifest
        has_other_stages = sizes.pp > 1 and not (manifest is not None and manifest.stages)
        if sizes.mp > 1 or has_other_stages or self._engine.use_node_local_storage():
            return False
        return self.has_parts_anywhere or self._is_in_pieces() or bool(manifest is not None and manifest.parts)

    def _is_in_pieces(self) -> bool:
        """Return whether weights are shared out over ranks there or here, as at ZeRO 3."""
        stages = 0 if self._manifest is None else self._manifest.sizes.zero_stage, sizes_of(self._engine).zero_stage
        return self._manifest is not None and STAGE_3 in stages

    def _differences(self) -> list[str]:
        manifest, sizes = self._manifest, sizes_of(self._engine)
        if manifest is None:
            # Stock's, and whatever else has no manifest, has whole experts.
            return [f"expert_tensor_parallel_size 1 -> {sizes.esp}"] if sizes.esp > 1 else []
        differences = manifest.sizes.differences(sizes)
        now = {name: layer.deepspeed_moe.ep_size for name, layer in stock_layers(self._engine).items()}
        now |= {name: each.ep for name, each in self._parts.items()}
        was = {each.path: each.ep for each in manifest.layers}
        was |= {name: each.ep for name, each in manifest.parts.items()}
        both = was.keys() & now.keys()
        was, now = ({name: each[name] for name in both} for each in (was, now))
        if was != now:
            differences.append(f"ep_size {sorted(set(was.values()))} -> {sorted(set(now.values()))}")
        return differences

    def _recut(self) -> bool:
        manifest, esp = self._manifest, sizes_of(self._engine).esp
        if manifest is None:
            return esp > 1
        was = {each.path: Numbering(each.num_experts, each.ep, manifest.sizes.esp) for each in manifest.layers}
        layers = stock_layers(self._engine).items()
        now = {name: Numbering(layer.num_experts, layer.deepspeed_moe.ep_size, esp) for name, layer in layers}
        return any(was.get(name) != each and max(was[name].esp, esp) > 1 for name, each in now.items() if name in was)


def check_model(engine: Any, place: Path, manifest: Manifest, parts: Mapping[str, PartSizes]) -> None:
    """Check that a checkpoint has the stages and the MoE layers of this job's model, whose parts are given.

    Raises:
        CheckpointError: it has others.
    """
    check_stages(engine, place, manifest)
    now = {name: layer.num_experts for name, layer in stock_layers(engine).items()}
    saved = {each.path: each.num_experts for each in manifest.layers if each.stage == stage_of(engine)}
    if saved != now and (manifest.stages or engine.fsmoe.running.pp_size == 1):
        raise CheckpointError(f"{place} has MoE layers (path: experts) {saved}, and the model has {now}")
    for name, each in manifest.parts.items():
        if name in parts and parts[name].num_experts != each.num_experts:
            raise CheckpointError(
                f"{place} has {each.num_experts} experts in {name}, and the model has {parts[name].num_experts}"
            )


def check_reach(engine: Any, place: Path, differences: Sequence[str]) -> None:
    """Check that this rank can read all that a move to another layout takes.

    Raises:
        CheckpointError: it cannot.
    """
    if sizes_of(engine).mp > 1 or any(each.startswith("mp ") for each in differences):
        raise CheckpointError(f"{place}: tensor-parallel ranks stay as they are")
    if engine.use_node_local_storage():
        raise CheckpointError(f"{place} lies on several nodes, and its files are needed on all")


def check_packing(engine: Any, place: Path, manifest: Manifest, parts: Mapping[str, PartSizes]) -> None:
    """Refuse to go on with another ``ep_size`` than then, where times have chosen it: a job that goes on as it was
    keeps its layout.

    Raises:
        CheckpointError: times have chosen another ``ep_size``.
    """
    block = engine.fsmoe.block
    was = {each.ep for name, each in manifest.parts.items() if name in parts}
    now = {each.ep for name, each in parts.items() if name in manifest.parts}
    if block.placement.policy == "lina" and was != now and manifest.sizes.world == dist.get_world_size():
        raise CheckpointError(
            f'{place} was saved with ep_size = {max(was)}, and fsmoe.placement.policy = "lina" has chosen '
            f'{max(now)} now: write "ep_size": {max(was)} in the fsmoe block and leave the policy out, or load it '
            "with load_optimizer_states=False"
        )

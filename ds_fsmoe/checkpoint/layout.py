# SPDX-License-Identifier: Apache-2.0
"""Describes how a job is distributed over ranks and pipeline stages, and compares it with the layout of a checkpoint.

``saving`` and ``loading`` call it. Each stage of a pipeline has its own layers. So a rank compares its own part, ranks
exchange the results, and the decision is the same on every rank. A checkpoint may move to other ranks within each
stage. It cannot move to another number of stages, or to stages with other layers: DeepSpeed's files have a whole stage
each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_fsmoe.checkpoint.ranks import Ranks, replaced
from ds_fsmoe.checkpoint_files.manifest import STAGE_3, Manifest, PartSizes, Sizes
from ds_fsmoe.checkpoint_files.numbering import Numbering, StageOfLayers
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.layer.stock_layer import FSMoELayer

_TIE = "_synchronize_tied_weights"
"""The method by which a ``PipelineModule`` shares its tied weights."""


def sizes_of(engine: Any) -> Sizes:
    """Return the layout of an engine's job."""
    running = engine.fsmoe.running
    dtype = next((str(each.dtype) for each in engine.module.parameters()), "none")
    return Sizes(
        world=dist.get_world_size(),
        mp=running.mp_size,
        pp=running.pp_size,
        zero_stage=engine.zero_optimization_stage(),
        esp=engine.fsmoe.block.esp_size,
        dtype=dtype.removeprefix("torch."),
    )


def stock_layers(engine: Any) -> dict[str, FSMoELayer]:
    """Return path -> layer within a ``deepspeed.moe.layer.MoE`` of an engine, in order: their experts have files."""
    return {path: each for path, each in engine.fsmoe.layers.items() if isinstance(each, FSMoELayer)}


def stage_of(engine: Any) -> int:
    """Return the number of this rank's stage; 0 without stages."""
    return engine.stage_id if has_known_stages(engine) else 0


def has_known_stages(engine: Any) -> bool:
    """Return True if the model is a ``PipelineModule`` of several stages, without tensor-parallel ranks in them."""
    running = engine.fsmoe.running
    return engine.pipeline_parallelism and running.pp_size > 1 and running.mp_size == 1


def described(engine: Any) -> StageOfLayers | None:
    """Describe this rank's stage; ``None`` without stages."""
    if not has_known_stages(engine):
        return None
    model, number = engine.module, engine.stage_id
    first, end = map(int, model.parts[number : number + 2])
    if engine.has_moe_layers:
        return StageOfLayers(first, end)
    path_of = {module: path for path, module in model.named_modules()}
    layers = enumerate(model.forward_funcs)
    return StageOfLayers(
        first,
        end,
        {
            Path(model.ckpt_layer_path("", at)).name: path_of[layer]
            for at, layer in layers
            if hasattr(layer, "state_dict")
        },
    )


def without_tying(engine: Any) -> AbstractContextManager[None]:
    """Keep stages from sharing tied parameters inside the block; :func:`tie` shares them on all stages.

    DeepSpeed shares them while it loads a stage without MoE layers, and not in a stage with them: the former would wait
    for the latter.
    """
    return replaced(engine.module, _TIE, lambda: None) if engine.pipeline_parallelism else nullcontext()


def tie(engine: Any) -> None:
    """Broadcast the parameters that stages share, from the first of these stages. Collective; no rank may have failed
    before."""
    if engine.pipeline_parallelism:
        getattr(engine.module, _TIE)()


def check_stages(engine: Any, place: Path, manifest: Manifest) -> None:
    """Check that each stage of a checkpoint has the layers that it has in this job.

    Raises:
        CheckpointError: the number of stages or the layers of a stage differ.
    """
    was, now = manifest.sizes.pp, engine.fsmoe.running.pp_size
    if was != now:
        cure = f"PipelineModule(num_stages={was})" if was > 1 else "a model without a PipelineModule"
        raise CheckpointError(
            f"{place} has {was} pipeline stage{'s' * (was > 1)}, and this job has {now}: checkpoints move to other "
            f"ranks within a stage, and not to other stages. Load it into {cure}; or write its whole weights with "
            "'ds_fsmoe convert --to fp32', and put them into the model before initialize"
        )
    own = described(engine)
    if own is None or not manifest.stages:
        return
    before = manifest.stages[stage_of(engine)]
    if (before.first, before.end) != (own.first, own.end):
        raise CheckpointError(
            f"{place}: stage {stage_of(engine)} of the pipeline had {before.layers} and has {own.layers} now: use "
            "the original partition_method of PipelineModule"
        )


class Comparison:
    """Compares the layout of one checkpoint with that of an engine. Collective.

    Args:
        engine: our engine.
        ranks: the ranks of its job.
        place: the folder of the tag.
        manifest: the manifest of the tag; ``None`` for a tag of stock DeepSpeed.
        parts: the distribution of parameters over this job's ranks.

    Attributes:
        differences: the differences, in words; the same on every rank.
        is_recut: whether the files of this rank's experts would differ, had this job saved them.
        is_recut_anywhere: whether those of any rank would differ.
        has_parts_anywhere: whether a rank has parts of a Hugging Face model's experts.
    """

    def __init__(
        self, engine: Any, ranks: Ranks, place: Path, manifest: Manifest | None, parts: Mapping[str, PartSizes]
    ) -> None:
        self._engine, self._manifest, self._parts = engine, manifest, parts
        own = ranks.together(f"comparing {place}", self._own)
        of_ranks = on_every_rank(own)
        self.differences = [*dict.fromkeys(each for differences, *_ in of_ranks for each in differences)]
        self.is_resharded = own[1]
        self.is_resharded_anywhere = any(recut for _, recut, _ in of_ranks)
        self.has_parts_anywhere = any(parts for *_, parts in of_ranks)

    def is_relaid(self, differences: Sequence[str]) -> bool:
        """Return True if this rank's weights for DeepSpeed have to be assembled from several files.

        This applies where files have pieces or parts, and their layout differs or they have experts only.

        Args:
            differences: all differences, in words.
        """
        return bool(differences) if self._is_partitioned() else bool(self._parts)

    def is_compared(self) -> bool:
        """Return True if parameters have to be compared with the model's before a change: pieces and parts of one model
        could be loaded into another without an error."""
        sizes, manifest = sizes_of(self._engine), self._manifest
        has_other_stages = sizes.pp > 1 and not (manifest is not None and manifest.stages)
        if sizes.mp > 1 or has_other_stages or self._engine.use_node_local_storage():
            return False
        return self.has_parts_anywhere or self._is_partitioned() or bool(manifest is not None and manifest.parts)

    def _is_partitioned(self) -> bool:
        """Return True if ZeRO 3 has partitioned the weights, in the checkpoint or in this job."""
        stages = 0 if self._manifest is None else self._manifest.sizes.zero_stage, sizes_of(self._engine).zero_stage
        return self._manifest is not None and STAGE_3 in stages

    def _own(self) -> tuple[list[str], bool, bool]:
        """Return the differences in words; True if the files of this rank's experts differ; True if it has parts."""
        manifest, sizes, has_parts = self._manifest, sizes_of(self._engine), bool(self._parts)
        if manifest is None:
            # Stock's, and whatever else has no manifest, has whole experts.
            is_cut = sizes.esp > 1
            return [f"expert_tensor_parallel_size 1 -> {sizes.esp}"] if is_cut else [], is_cut, has_parts
        differences, layers = manifest.sizes.differences(sizes), stock_layers(self._engine).items()
        before = {each.path: Numbering(each.num_experts, each.ep, manifest.sizes.esp) for each in manifest.layers}
        here = {name: Numbering(layer.total_experts, layer.ep_size, sizes.esp) for name, layer in layers}
        was = {name: each.ep for name, each in (*before.items(), *manifest.parts.items())}
        now = {name: each.ep for name, each in (*here.items(), *self._parts.items())}
        both = was.keys() & now.keys()
        if any(was[name] != now[name] for name in both):
            sets = ({ep_of[name] for name in both} for ep_of in (was, now))
            differences.append("ep_size " + " -> ".join(str(sorted(each)) for each in sets))
        is_recut = any(
            before[name] != here[name] and max(before[name].esp, sizes.esp) > 1 for name in before.keys() & here.keys()
        )
        return differences, is_recut, has_parts


def check_model(engine: Any, place: Path, manifest: Manifest, parts: Mapping[str, PartSizes]) -> None:
    """Raise if a checkpoint has other stages or MoE layers than the model.

    Args:
        engine: our engine.
        place: the folder of the tag.
        manifest: the checkpoint's manifest.
        parts: the model's experts that are spread over ranks.

    Raises:
        CheckpointError: its stages or layers differ.
    """
    check_stages(engine, place, manifest)
    now = {name: layer.total_experts for name, layer in stock_layers(engine).items()}
    saved = {each.path: each.num_experts for each in manifest.layers if each.stage == stage_of(engine)}
    if saved != now and (manifest.stages or engine.fsmoe.running.pp_size == 1):
        raise CheckpointError(f"{place} has MoE layers (path: experts) {saved}, and the model has {now}")
    for name, each in manifest.parts.items():
        if name in parts and parts[name].num_experts != each.num_experts:
            raise CheckpointError(
                f"{place} has {each.num_experts} experts in {name}, and the model has {parts[name].num_experts}"
            )


def check_reach(engine: Any, place: Path, differences: Sequence[str]) -> None:
    """Check that this rank can read all files that a move to another layout needs.

    Raises:
        CheckpointError: files are missing.
    """
    if sizes_of(engine).mp > 1 or any(each.startswith("mp ") for each in differences):
        raise CheckpointError(f"{place}: the number of tensor-parallel ranks cannot change")
    if engine.use_node_local_storage():
        raise CheckpointError(f"{place} is split over node-local disks: copy all of its files to every node, then load")


def check_packing(engine: Any, place: Path, manifest: Manifest, parts: Mapping[str, PartSizes]) -> None:
    """Refuse to continue with another ``ep_size`` than the saved one, if measured times have chosen it: a job that
    continues keeps its layout.

    Raises:
        CheckpointError: times have chosen another ``ep_size``.
    """
    block = engine.fsmoe.block
    was = {each.ep for name, each in manifest.parts.items() if name in parts}
    now = {each.ep for name, each in parts.items() if name in manifest.parts}
    if block.placement.policy == "lina" and was != now and manifest.sizes.world == dist.get_world_size():
        raise CheckpointError(
            f'{place} was saved with ep_size = {max(was)}, and fsmoe.placement.policy = "lina" has chosen {max(now)} '
            f'now: set "ep_size": {max(was)} in the fsmoe block and remove the policy, or load with '
            "load_optimizer_states=False"
        )

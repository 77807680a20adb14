# SPDX-License-Identifier: Apache-2.0
"""Describes the stage of a pipeline that a rank has, and checks that a checkpoint's stages are this job's.

A checkpoint may move to other ranks within each stage. To another number of stages, or to stages with other layers, it
does not: DeepSpeed's files have what a whole stage has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_fsmoe.checkpoint.ranks import replaced
from ds_fsmoe.checkpoint_files.manifest import Manifest
from ds_fsmoe.checkpoint_files.numbering import Stage
from ds_fsmoe.checkpoint_files.tags import CheckpointError

_TIE = "_synchronize_tied_weights"
"""The method by which a ``PipelineModule`` shares its tied weights."""


def stage_of(engine: Any) -> int:
    """Return the number of the stage that this rank has; 0 without stages."""
    return engine.stage_id if has_known_stages(engine) else 0


def has_known_stages(engine: Any) -> bool:
    """Return whether the model is a ``PipelineModule`` of several stages, with no tensor-parallel ranks in them."""
    running = engine.fsmoe.running
    return engine.pipeline_parallelism and running.pp_size > 1 and running.mp_size == 1


def described(engine: Any) -> Stage | None:
    """Describe the stage that this rank has; ``None`` without stages."""
    if not has_known_stages(engine):
        return None
    model, number = engine.module, engine.stage_id
    first, end = map(int, model.parts[number : number + 2])
    if engine.has_moe_layers:
        return Stage(first, end)
    path_of = {module: path for path, module in model.named_modules()}
    layers = enumerate(model.forward_funcs)
    return Stage(
        first,
        end,
        {
            Path(model.ckpt_layer_path("", at)).name: path_of[layer]
            for at, layer in layers
            if hasattr(layer, "state_dict")
        },
    )


@contextmanager
def without_tying(engine: Any) -> Iterator[None]:
    """Keep stages from sharing what they have in common within the block; :func:`tie` does it on all of them.

    DeepSpeed shares it while it loads a stage without MoE layers, and not with one: the first would wait for the other.
    """
    if not engine.pipeline_parallelism:
        yield
        return
    with replaced(engine.module, _TIE, lambda: None):
        yield


def tie(engine: Any) -> None:
    """Share what stages have in common, from the first of them. Collective; call it where no rank can have failed."""
    if engine.pipeline_parallelism:
        getattr(engine.module, _TIE)()


def check_stages(engine: Any, place: Path, manifest: Manifest) -> None:
    """Check that each stage of a checkpoint has the layers that it has in this job.

    Raises:
        CheckpointError: the number of stages is another one, or a stage has other layers.
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
            f"{place}: stage {stage_of(engine)} of the pipeline has {before.layers} there and {own.layers} here: give "
            "PipelineModule the partition_method of then"
        )

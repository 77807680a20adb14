# SPDX-License-Identifier: Apache-2.0
"""Lets the stages of a ``PipelineModule`` decide together: each has other layers, and what is collective takes all
ranks of the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.execution.tensor_parallel import TensorParallelUse
from ds_fsmoe.layer.experts_layer import HuggingFaceLayer
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.layer.stock_layer import StockMoE


@contextmanager
def refused_on_all_stages() -> Iterator[None]:
    """Let what is refused of one stage's layers end all ranks: the others would wait for it. Collective.

    Raises:
        LayerError: on the ranks of the stages that have nothing against theirs; the others raise what they found.
    """
    found: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others have to hear of it
        found = error
    of_ranks = on_every_rank(None if found is None else str(found))
    if found is not None:
        raise found
    told = next(((rank, text) for rank, text in enumerate(of_ranks) if text is not None), None)
    if told is not None:
        raise LayerError(f"rank {told[0]}, in another stage of the PipelineModule, has been refused: {told[1]}")


def check_stages(model: Any) -> None:
    """Refuse stages that are not laid out as DeepSpeed's groups of experts are: each a run of neighbouring ranks.

    Args:
        model: a ``PipelineModule``.

    Raises:
        LayerError: on every rank; names the ranks of a stage.
    """
    size = world_size_now() // model.num_stages
    for stage in range(model.num_stages):
        ranks, wanted = sorted(model.topology().filter_match(pipe=stage)), range(stage * size, (stage + 1) * size)
        if ranks != [*wanted]:
            raise LayerError(
                f"stage {stage} of the PipelineModule has the ranks {ranks}, and DeepSpeed spreads the experts of a "
                f"stage over neighbours, here {[*wanted]}: let pipe be the first axis of its topology, as with "
                "num_stages, or set fsmoe.enabled to false"
            )


def make_groups_on_every_stage(
    model: nn.Module, layers: Mapping[str, StockMoE | HuggingFaceLayer], running: LayerRuntime
) -> None:
    """Let every stage make the groups of the layers of all stages, which is collective: a stage may have no MoE layer.
    Collective itself.

    Args:
        model: a ``PipelineModule``.
        layers: the layers of this rank's stage, converted.
        running: the runtime of the engine.

    Raises:
        LayerError: no stage has a layer, or stages have layers that are spread differently; on every rank.
    """
    own = dict.fromkeys(_spread_of(each) for each in layers.values())
    of_stages = [each for each in on_every_rank(list(own)) if each]
    if not of_stages:
        raise LayerError(
            "fsmoe.enabled = true, but no stage of the PipelineModule has a deepspeed.moe.layer.MoE or an experts "
            "module of transformers 5"
        )
    kinds = sorted({tuple(dict.fromkeys(size for size, _ in each)) for each in of_stages})
    if len(kinds) > 1:
        raise LayerError(
            f"the stages of the PipelineModule have MoE layers with ep_size {' and '.join(map(str, kinds))}: in every "
            "stage that has any it has to be the same; fsmoe.ep_size is that of experts of Hugging Face models"
        )
    spreads = list(dict.fromkeys(each for of_stage in of_stages for each in of_stage))

    def make(*_: Any) -> None:
        for ep_size, use in spreads:
            groups = running.groups(ep_size, use)
            for alltoall in _alltoalls(running):
                running.exchange(groups, alltoall)

    # DeepSpeed comes to the model ahead of its layers.
    model.set_deepspeed_parallelism = make


def _spread_of(layer: StockMoE | HuggingFaceLayer) -> tuple[int, TensorParallelUse]:
    inner = layer.deepspeed_moe
    return inner.ep_size, inner.fsmoe.tensor_parallel


def _alltoalls(running: LayerRuntime) -> list[str]:
    """Return the all-to-alls that a stage may come to use, each of which has communicators of its own."""
    block: FSMoEBlock = running.block
    compares = block.alltoall == "auto" and block.autotune.enabled
    return [running.plan.alltoall, *(registry.known("alltoall") if compares else ())]

# SPDX-License-Identifier: Apache-2.0
"""Sets up the parts of an engine besides layers: barrier of ranks, pipeline stages, two-batch overlap, placement.

The engine and the entry points call it during construction. :mod:`~ds_fsmoe.engine.engine` has the order of these
calls.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn
from torch.distributed import distributed_c10d

from ds_fsmoe import registry
from ds_fsmoe.config.reading import STAY, ConfigError
from ds_fsmoe.distributed.agreement import DisagreementError, in_words
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.replay import Taped
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.layer.state import ConvertedLayer
from ds_fsmoe.log import log_on_rank_0, logger
from ds_fsmoe.observing.step_timer import most_of
from ds_fsmoe.placement.moving import PlacementError
from ds_fsmoe.placement.placements import Placements, obstacle_to_placement
from ds_fsmoe.placement.watch import PlacementWatch
from ds_fsmoe.planning.placement_costs import Prices
from ds_fsmoe.two_batch.splitter import Splitter

if TYPE_CHECKING:
    from ds_fsmoe.engine.state import FSMoEState


# ---- Compares whether all ranks have come to one of our entry points, before any of them enters a collective
# of ours
#
# A rank that has come to DeepSpeed's own instead, for want of ``DS_FSMOE``, of ``install()`` or of an enabled block,
# runs nothing of ours and would sit in another collective than its peers. So it is missed in the store by which ranks
# found each other.


_num_calls: Counter[str] = Counter()
"""The number of calls in this process, the same on all ranks. It only grows, as a store may outlive a process group."""


def wait_for_all_ranks(what: str, limit_s: float) -> None:
    """Wait until every rank has called this as often as this one. It costs four messages to the store.

    Args:
        what: the entry point.
        limit_s: seconds. After a tenth of it a warning names the missing ranks, after all of it the error does.

    Raises:
        DisagreementError: names the missing ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _num_calls[what] += 1
    store = distributed_c10d._get_default_store()
    place, ranks = f"ds_fsmoe/{what}/{_num_calls[what]}", range(dist.get_world_size())
    try:
        store.set(f"{place}/{dist.get_rank()}", "")
    except RuntimeError:  # of a pretended process group, whose store is none
        return
    if store.add(place, 1) == len(ranks):
        store.set(f"{place}/all", "")
    for part_s in (0.1 * limit_s, 0.9 * limit_s):
        try:
            store.wait([f"{place}/all"], timedelta(seconds=part_s))
            return
        except dist.DistStoreError:
            missing = [rank for rank in ranks if not store.check([f"{place}/{rank}"])]
            said = f"{in_words(missing)} of {len(ranks)} did not call {what} with ds_fsmoe and an enabled block"
            if part_s < 0.5 * limit_s and dist.get_rank() == min({*ranks} - {*missing}):
                logger.log(logging.WARNING, f"{said} within {part_s:g} s; the others wait for {limit_s:g} s")
    raise DisagreementError(
        f"{said}, and rank {dist.get_rank()} did: the other ranks would wait for a rank that trains with stock "
        "DeepSpeed. Every rank needs the same block, and DS_FSMOE=1 in its environment (the launcher of DeepSpeed "
        "passes it to other nodes by a file .deepspeed_env), ds_fsmoe.install() or ds_fsmoe.initialize. If a rank "
        f"is only slow, raise fsmoe.debug.hang_timeout_s (now {limit_s:g})"
    )


# ---- Lets the stages of a ``PipelineModule`` decide together: each has other layers, and what is collective
# takes all ranks of the job


@contextmanager
def refused_on_all_stages() -> Iterator[None]:
    """Raise a refusal of one stage's layers on all ranks, so that none waits for ever. Collective.

    Raises:
        LayerError: on the ranks of stages without a problem; the others raise their own error.
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
        raise LayerError(f"rank {told[0]}, in another stage of the PipelineModule, refused: {told[1]}")


def check_engine_stages(model: Any) -> None:
    """Refuse stages whose layout differs from DeepSpeed's groups of experts: each must be a run of consecutive ranks.

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
                f"stage {stage} of the PipelineModule has the ranks {ranks}, but DeepSpeed distributes the experts "
                f"of a stage over consecutive ranks, here {[*wanted]}: make pipe the first axis of its topology, as "
                "num_stages does, or set fsmoe.enabled to false"
            )


def make_groups_on_every_stage(model: nn.Module, layers: Mapping[str, ConvertedLayer], running: LayerRuntime) -> None:
    """Make the groups of the layers of all stages on every rank, also for a stage without MoE layers. Collective.

    Args:
        model: a ``PipelineModule``.
        layers: the layers of this rank's stage, converted.
        running: the runtime of the engine.

    Raises:
        LayerError: no stage has a layer, or stages have layers that are spread differently; on every rank.
    """
    own = dict.fromkeys((each.ep_size, each.fsmoe.tensor_parallel) for each in layers.values())
    of_stages = [each for each in on_every_rank(list(own)) if each]
    if not of_stages:
        raise LayerError(
            "fsmoe.enabled = true, but no stage of the PipelineModule has a deepspeed.moe.layer.MoE or an experts "
            "module of transformers 5"
        )
    kinds = sorted({tuple(dict.fromkeys(size for size, _ in each)) for each in of_stages})
    if len(kinds) > 1:
        raise LayerError(
            f"the stages of the PipelineModule have MoE layers with ep_size {' and '.join(map(str, kinds))}: must "
            "be equal in all stages; fsmoe.ep_size sets that of Hugging Face models"
        )
    spreads = list(dict.fromkeys(each for of_stage in of_stages for each in of_stage))

    def make(*_: Any) -> None:
        # Those that a stage may come to use, each of which has communicators of its own.
        compares = running.block.alltoall == "auto" and running.block.autotune.enabled
        alltoalls = [running.plan.alltoall, *(registry.known("alltoall") if compares else ())]
        for ep_size, use in spreads:
            groups = running.groups(ep_size, use)
            for alltoall in alltoalls:
                running.exchange(groups, alltoall)

    # DeepSpeed comes to the model ahead of its layers.
    model.set_deepspeed_parallelism = make


# ---- Sets up two-batch overlap for one engine


def begin_splitting(model: nn.Module, state: FSMoEState, in_stages: bool) -> None:
    """Attach a splitter to the blocks of a model, if they may run with two-batch overlap.

    Args:
        model: the model of the engine.
        state: the state of the engine.
        in_stages: True if the model is a pipeline of stages.
    """
    asked = state.block.split_batch
    if asked == "off" or (asked == "auto" and state.autotune is None):
        state.why_whole = "off" if asked == "off" else "nothing is tried here"
        return
    stock = [path for path, each in state.layers.items() if not isinstance(each, FSMoEExperts)]
    # The same on every rank.
    if in_stages:
        state.why_whole = "pipeline stages overlap their micro-batches already"
    elif stock:
        state.why_whole = f"{stock[0]} is a DeepSpeed MoE layer, which needs the whole batch"
    else:
        agree = functools.partial(_hold_on_all, state.stage_group, state.running.device)
        state.splitter = Splitter(model, state.layers, state.block.split_blocks, agree, state.keeps_batches_whole)
        state.why_whole = state.splitter.why_not
    if state.why_whole and asked == "on":
        log_on_rank_0(f'fsmoe.two_batch_overlap = "on" is not used ({state.why_whole})')


def _hold_on_all(group: dist.ProcessGroup | None, device: torch.device, facts: Sequence[bool]) -> Sequence[bool]:
    """Return for each fact True if it holds on all ranks that run the same blocks. Collective over these ranks.

    Args:
        group: the process group of these ranks; ``None``: all of the job.
        device: the device for the communication.
        facts: the facts of this rank.
    """
    failing = most_of([float(not each) for each in facts], device, group, "the agreement on two-batch overlap")
    return [not each for each in failing]


# ---- Lets the experts of an engine move, where its config asks for it


def begin_placement(engine: Any, has_stages: bool) -> None:
    """Make the mover of an engine's experts, if its config asks for one. Collective.

    Args:
        engine: our engine, with its layers, optimizer and reduction.
        has_stages: True if its module is a ``PipelineModule``.

    Raises:
        ConfigError: on every rank, if experts cannot move in any layer, or a file with a placement is wrong.
    """
    state = engine.fsmoe
    block = state.block.placement
    if block.spare_experts:
        log_on_rank_0(
            f"fsmoe.placement.spare_experts = {block.spare_experts} is ignored: remove it (no replicas since 0.2.0)",
            logging.WARNING,
        )
    if block.policy in STAY and block.file is None:
        return
    if has_stages:
        raise ConfigError(
            f'fsmoe.placement.policy = "{block.policy}": not supported with a PipelineModule; use "off", without a file'
        )
    paths = {layer.label: path for path, layer in state.layers.items()}
    layers = state.inner_layers
    obstacles = {label: obstacle_to_placement(layer) for label, layer in layers.items()}
    movable = {label: layer for label, layer in layers.items() if obstacles[label] is None}
    if not movable:
        state.why_not_placed = next(iter(obstacles.values()), None) or "there is no layer"
        log_on_rank_0(
            f'fsmoe.placement.policy = "{block.policy}": no expert moves, as {state.why_not_placed}',
            logging.WARNING,
        )
        return
    if still := {label: why for label, why in obstacles.items() if why is not None}:
        label, why = next(iter(still.items()))
        log_on_rank_0(f"experts of {paths[label]} ({len(still)} such layer(s)) do not move: {why}")
    state.placement = Placements(engine, movable, paths, state.stage_group)
    try:
        # Whether states can be moved is known now, and not only when they are to be.
        state.placement.mover()
    except PlacementError as error:
        raise ConfigError(f'fsmoe.placement.policy = "{block.policy}": {error}') from error
    if block.file is not None:
        state.placement.load(block.file)
    if block.policy not in STAY:
        price_of = None if state.block.deterministic else lambda *of: _prices(engine, *of)
        state.placement_watch = PlacementWatch(block, state.placement, price_of, state.stage_group)
        state.running.instruments.append(state.placement_watch.watch)


def _prices(engine: Any, label: str, bytes_of_expert: int, rows_GE: np.ndarray) -> Prices | None:
    """Return the costs of steps and moves of a layer, if the autotuner has measured it.

    Args:
        engine: our engine.
        label: the label of the layer.
        bytes_of_expert: the bytes that move with an expert.
        rows_GE: [ranks, experts]: the rows of a call that each rank has for each expert.
    """
    tuner = engine.fsmoe.autotune
    result = None if tuner is None else tuner.result
    if result is None or label not in result.predictors or label not in result.shapes:
        return None
    layer, measured, shape = engine.fsmoe.inner_layers[label], result.predictors[label], result.shapes[label]
    # As if all places got as many rows: placement changes the excess of the fullest over that.
    balanced = replace(shape, capacity=max(1, round(rows_GE.sum() / shape.num_experts / len(rows_GE))))
    return Prices(
        balanced,
        layer.pipeline.forward.groups,
        layer.fsmoe.plan,
        measured.costs,
        bytes_of_expert,
        layer.pipeline.forward.alltoall,
        measured.contention,
        measured.is_serial,
        engine.gradient_accumulation_steps(),
    )


# ---- Gives functions that DeepSpeed's activation checkpointing runs again a tape of how layers routed
#
# See :mod:`~ds_fsmoe.layer.replay`; DeepSpeed's own checkpointing is another one than torch's.


def tape_deepspeeds_functions() -> None:
    """Wrap functions that DeepSpeed checkpoints in :class:`Taped`, from now on in this process. A second call changes
    nothing."""
    if getattr(checkpointing, "_ds_fsmoe_tapes", False):
        return
    forward, non_reentrant = checkpointing.CheckpointFunction.forward, checkpointing.non_reentrant_checkpoint

    @functools.wraps(forward)
    def taped_forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, Taped(run_function), *args)

    @functools.wraps(non_reentrant)
    def taped_non_reentrant(function: Any, *args: Any) -> Any:
        return non_reentrant(Taped(function), *args)

    checkpointing.CheckpointFunction.forward = staticmethod(taped_forward)
    checkpointing.non_reentrant_checkpoint = taped_non_reentrant
    checkpointing._ds_fsmoe_tapes = True

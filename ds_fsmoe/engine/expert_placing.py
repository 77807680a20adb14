# SPDX-License-Identifier: Apache-2.0
"""Lets the experts of an engine move, where its config asks for it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_fsmoe.components.expert_compute.contract import numel_of
from ds_fsmoe.config.placement import STAY
from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.distributed.fail_together import raise_on_all_ranks
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.placement.holdings import PlacementError
from ds_fsmoe.placement.placements import Placements, obstacle_to, why_no_replicas
from ds_fsmoe.placement.watch import PlacementWatch
from ds_fsmoe.planning.placement_costs import Prices


def begin_placement(engine: Any, has_stages: bool) -> None:
    """Make what moves the experts of an engine, if its config asks for it. Collective.

    Args:
        engine: our engine, with its layers, optimizer and reduction.
        has_stages: whether its module is a ``PipelineModule``.

    Raises:
        ConfigError: on every rank, where experts of no layer can move, or a file with a placement is wrong.
    """
    state = engine.fsmoe
    block = state.block.placement
    if block.policy in STAY and block.file is None and not block.spare_experts:
        return
    if has_stages:
        raise ConfigError(
            f'fsmoe.placement.policy = "{block.policy}": not yet with a PipelineModule, whose experts stay where they '
            'are; the choice is "off", without a file and without spare_experts'
        )
    paths = {layer.deepspeed_moe.label: path for path, layer in state.layers.items()}
    layers = state.inner_layers
    obstacles = {label: obstacle_to(layer) for label, layer in layers.items()}
    movable = {label: layer for label, layer in layers.items() if obstacles[label] is None}
    if not movable:
        state.why_not_placed = next(iter(obstacles.values()), None) or "there is no layer"
        log_on_rank_0(
            f'fsmoe.placement.policy = "{block.policy}": every expert stays where it is, as {state.why_not_placed}',
            logging.WARNING,
        )
        return
    if still := {label: why for label, why in obstacles.items() if why is not None}:
        label, why = next(iter(still.items()))
        log_on_rank_0(f"experts of {paths[label]} ({len(still)} such layer(s)) stay where they are: {why}")
    check_room(movable, block.spare_experts, state.stage_group)
    state.placement = Placements(engine, movable, paths, block.spare_experts, state.stage_group)
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


def check_room(layers: Mapping[str, Any], num_spare: int, group: dist.ProcessGroup | None) -> None:
    """Check that replicas have room on every rank. Collective.

    Args:
        layers: label -> converted layer, of those whose experts may move.
        num_spare: the spare places of a rank.
        group: the ranks that run the layers; ``None``: all.

    Raises:
        ConfigError: on every rank, if there would be more replicas than experts elsewhere, or than memory on any rank.
    """
    with_spare = [layer for layer in layers.values() if num_spare and why_no_replicas(layer) is None]
    problem, most = "", min((each.num_local_experts * (each.ep_size - 1) for each in with_spare), default=num_spare)
    if num_spare > most:
        raise ConfigError(
            f"fsmoe.placement.spare_experts = {num_spare}: must be at most {most}, the experts of all other ranks"
        )
    needed = sum(num_spare * bytes_of_weights(each) for each in with_spare)
    if with_spare and needed > (free := free_bytes(with_spare[0].fsmoe.running.device)):
        problem = (
            f"fsmoe.placement.spare_experts = {num_spare}: replicas of {len(with_spare)} layer(s) need "
            f"{needed / 2**20:,.0f} MiB on this rank, and {free / 2**20:,.0f} are free; use fewer"
        )
    if with_spare:
        with raise_on_all_ranks(group, "making room for replicas of experts", ConfigError):
            if problem:
                raise ConfigError(problem)


def free_bytes(device: torch.device) -> float:
    """Return the memory that is free for a rank: of its device, or its share of the host's; infinite if not known."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = {name: float(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return found.get("MemAvailable", math.inf) / max(1, ranks)


def bytes_of_weights(layer: Any) -> int:
    """Return the bytes of the weights of one expert of a layer."""
    return sum(numel_of(each) * each.element_size() for each in layer.experts.parameters()) // layer.num_local_experts


def _prices(engine: Any, label: str, bytes_of_expert: int, rows_GE: np.ndarray) -> Prices | None:
    """Return what steps and moves of a layer cost, if the autotuner has measured it.

    Args:
        engine: our engine.
        label: the label of the layer.
        bytes_of_expert: what moves with an expert.
        rows_GE: the rows of a call that each rank has for each expert.
    """
    tuner = engine.fsmoe.autotune
    if tuner is None or label not in tuner.predictors or label not in tuner.shapes:
        return None
    layer, measured, shape = engine.fsmoe.inner_layers[label], tuner.predictors[label], tuner.shapes[label]
    # As if all places got as many rows: how far the fullest lies above that is what placement changes.
    balanced = replace(shape, capacity=max(1, round(rows_GE.sum() / shape.num_experts / len(rows_GE))))
    weight_bytes = bytes_of_weights(layer)
    return Prices(
        balanced,
        layer.pipeline.forward.groups,
        layer.fsmoe.plan,
        measured.costs,
        weight_bytes,
        weight_bytes,
        bytes_of_expert,
        layer.pipeline.forward.alltoall,
        measured.contention,
        measured.is_serial,
        engine.gradient_accumulation_steps(),
    )

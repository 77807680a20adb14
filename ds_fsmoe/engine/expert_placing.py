# SPDX-License-Identifier: Apache-2.0
"""Lets the experts of an engine move, where its config asks for it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

from ds_fsmoe.config.reading import ConfigError
from ds_fsmoe.config.together import STAY
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.placement.holdings import PlacementError
from ds_fsmoe.placement.placements import Placements, obstacle_to
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
    if block.spare_experts:
        log_on_rank_0(
            f"fsmoe.placement.spare_experts = {block.spare_experts}: means nothing any more, as experts have no "
            "replicas in training; they move as before. Leave it out",
            logging.WARNING,
        )
    if block.policy in STAY and block.file is None:
        return
    if has_stages:
        raise ConfigError(
            f'fsmoe.placement.policy = "{block.policy}": not yet with a PipelineModule, whose experts stay where they '
            'are; the choice is "off", without a file'
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

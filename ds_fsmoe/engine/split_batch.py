# SPDX-License-Identifier: Apache-2.0
"""Sets up halves of the batch that take turns, for one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.distributed.topology import world_size_now
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.halves.splitter import Splitter
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.log import log_on_rank_0

if TYPE_CHECKING:
    from ds_fsmoe.engine.state import FSMoEState


def begin_splitting(model: nn.Module, state: FSMoEState, in_stages: bool) -> None:
    """Put a splitter before the blocks of a model, if they may ever be run by halves.

    Args:
        model: the engine's.
        state: of the engine.
        in_stages: whether the model is a pipeline of stages.
    """
    asked = state.block.split_batch
    if asked == "off" or (asked == "auto" and state.autotune is None):
        state.why_whole = "off" if asked == "off" else "nothing is tried here"
        return
    state.why_whole = _why_not(state, in_stages)
    if not state.why_whole:
        layers = {path: each.deepspeed_moe for path, each in state.layers.items()}
        agree = _Agreement(state.stage_group, state.running.device)
        state.splitter = Splitter(model, layers, state.block.split_blocks, agree, state.keeps_batches_whole)
        state.why_whole = state.splitter.why_not
    if state.why_whole and asked == "on":
        log_on_rank_0(f'fsmoe.split_batch = "on": batches stay whole: {state.why_whole}')


def _why_not(state: FSMoEState, in_stages: bool) -> str:
    """Return why no block is run by halves, the same on every rank; empty if there is no reason."""
    if in_stages:
        return "a pipeline of stages has halves of its own: its micro-batches"
    for path, layer in state.layers.items():
        inner = layer.deepspeed_moe
        if not isinstance(inner, FSMoEExperts):
            return f"{path} is a DeepSpeed MoE layer: its auxiliary loss and capacity need the whole batch"
    return ""


class _Agreement:
    """Asks all ranks that run the same blocks.

    Args:
        group: these ranks; ``None``: all of the job.
        device: on which they communicate.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device

    def __call__(self, facts: Sequence[bool]) -> Sequence[bool]:
        """Return for each of some facts whether it holds on all of them. Collective."""
        if world_size_now() == 1:
            return facts
        held = torch.tensor([int(each) for each in facts], device=self._device)
        with waiting("whether batches are split in halves"):
            dist.all_reduce(held, dist.ReduceOp.MIN, group=self._group)
            return [bool(each) for each in held.tolist()]

# SPDX-License-Identifier: Apache-2.0
"""Warns where layers of ours are trained by an engine that knows nothing of us, so that the block is never read."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from ds_fsmoe.log import log_on_rank_0


def warn_without_door(layer: Any, x: torch.Tensor) -> None:
    """Say at a layer's first training forward that its engine is DeepSpeed's own; later forwards are not looked at.

    Args:
        layer: an ``FSMoELayer`` outside of an engine of ours.
        x: its input, which is not looked at.
    """
    if layer.training:
        layer.fsmoe.checks_without_engine.remove(warn_without_door)
        _warn()


@functools.cache  # once in a process, however many layers and engines there are
def _warn() -> None:
    log_on_rank_0(
        "ds_fsmoe.MoE layers are trained by an engine of DeepSpeed's own, which does not read the fsmoe block: nothing "
        "is cut, overlapped, measured or checked. Make the engine with ds_fsmoe.initialize, or call ds_fsmoe.install() "
        "before it is made, or start the script with deepspeed --module ds_fsmoe.run (with fsmoe.enabled = false each "
        "of these turns the layers into DeepSpeed's)",
        logging.WARNING,
    )

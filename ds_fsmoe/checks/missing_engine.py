# SPDX-License-Identifier: Apache-2.0
"""Warns if an engine is made without ds_fsmoe, so that its block is never read.

Layers outside of an engine of ours call it, and so do the hooks that ``ds_fsmoe/env_entry_point.py`` puts on
DeepSpeed's engines.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ds_fsmoe.config.reading import BLOCK, ConfigError, refuse_misspelt_block
from ds_fsmoe.log import log_on_rank_0

_ENTRY_POINTS = (
    "Create the engine with ds_fsmoe.initialize, or call ds_fsmoe.install() before it is created,\n"
    "  or start the script with deepspeed --module ds_fsmoe.run, or with any launcher and DS_FSMOE=1 on every rank"
)
_has_warned = False
"""Whether it has been said: once in a process, however many layers and engines there are."""


def warn_missing_engine(layer: Any, x: torch.Tensor) -> None:
    """Warn at a layer's first training forward that its engine is DeepSpeed's own; later forwards are not checked.

    Args:
        layer: an ``FSMoELayer`` outside of an engine of ours.
        x: its input, which is unused.
    """
    if layer.training:
        layer.fsmoe.checks.remove(warn_missing_engine)
        _warn("ds_fsmoe.MoE layers are trained by")


def warn_of_unread_block(engine: Any) -> None:
    """Warn that an engine ignores the block of its config, unless the engine is ours or the block is off.

    Args:
        engine: a complete engine of DeepSpeed's class.
    """
    ds_config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    is_ours = any(each.__module__.startswith("ds_fsmoe.") for each in type(engine).mro())
    if is_ours or not isinstance(ds_config, Mapping):
        return
    try:
        refuse_misspelt_block(ds_config)
    except ConfigError as error:
        _warn(f"{error} The model is trained by")
        return
    block = ds_config.get(BLOCK, {"enabled": False})
    if not isinstance(block, Mapping) or block.get("enabled") is not False:
        _warn("the config has an fsmoe block, but the model is trained by")


def _warn(whose: str) -> None:
    global _has_warned
    if not _has_warned:
        log_on_rank_0(
            f"{whose} an engine of DeepSpeed, which does not read the fsmoe block\n"
            f"  no layer is chunked, overlapped, measured or checked\n  {_ENTRY_POINTS}\n"
            "  with fsmoe.enabled = false each of these trains as stock DeepSpeed does",
            logging.WARNING,
        )
    _has_warned = True

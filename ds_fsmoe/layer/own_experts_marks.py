# SPDX-License-Identifier: Apache-2.0
"""Marks modules of experts that were loaded with this rank's experts only and have no engine yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.layer.parts import LayerError

_PART, _HANDLE = "fsmoe_loaded_part", "fsmoe_loaded_handle"


def mark_loaded(module: nn.Module, part: ExpertPart) -> None:
    """Let a module of experts know which part of all experts it has, and refuse to run until it has an engine."""
    setattr(module, _PART, part)
    setattr(module, _HANDLE, module.register_forward_pre_hook(_refuse))


def loaded_part(module: nn.Module) -> ExpertPart | None:
    """Return the part that a module was loaded with, ``None`` for one that has all experts or an engine."""
    return getattr(module, _PART, None)


def loaded_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertPart]]:
    """Return (name, module, part) of every marked module of a model."""
    for name, module in model.named_modules():
        if (part := loaded_part(module)) is not None:
            yield name, module, part


def unmark(module: nn.Module) -> None:
    """Let a marked module run: it has an engine."""
    if loaded_part(module) is not None:
        getattr(module, _HANDLE).remove()
        delattr(module, _PART)
        delattr(module, _HANDLE)


def _refuse(module: nn.Module, inputs: Any) -> None:
    part = loaded_part(module)
    if part is not None:
        raise LayerError(
            f"{type(module).__name__} has {part.num_local} of {part.num_experts} experts, those of rank {part.ep_rank} "
            f"of {part.ep_size}, and no engine: give the model to ds_fsmoe.initialize before it runs, or load it whole "
            'within ds_fsmoe.own_experts({"fsmoe": {"enabled": False}})'
        )

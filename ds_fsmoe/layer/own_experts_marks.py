# SPDX-License-Identifier: Apache-2.0
"""Marks modules of experts without an engine, and parameters that an engine has replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart
from ds_fsmoe.layer.expert_shard import TRUSTED, asking, tensors_in
from ds_fsmoe.layer.parts import LayerError

# ---- Marks modules of experts that were loaded with this rank's experts only and have no engine yet


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


def unmark_loaded(module: nn.Module) -> None:
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


# ---- Makes the use of a parameter an error that a model had before its experts were spread, or put together
# again


class ReplacedParameter(nn.Parameter):
    """Stands for a parameter that a model had, and that is no parameter of it any more."""

    fsmoe_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if asking() in TRUSTED or func.__name__ in ("__hash__", "__repr__"):
                return func(*args, **(kwargs or {}))
        found = next(each for each in tensors_in((*args, kwargs or {})) if isinstance(each, ReplacedParameter))
        raise LayerError(
            f"{found.fsmoe_name}: this parameter was looked up before ds_fsmoe.initialize() or ds_fsmoe.make_whole(), "
            "which has put a new one in its place: look it up in the model again"
        )


def replace_all(replaced: Mapping[nn.Parameter, nn.Parameter], path: str, module: nn.Module) -> None:
    """Let the use of parameters that a model no longer has be an error, and give their memory back.

    Args:
        replaced: new parameter -> the one that it replaces.
        path: the path of a module that has the new ones.
        module: that module.
    """
    for name, new in module.named_parameters():
        if (old := replaced.get(new)) is not None:
            old.data, old.grad = old.data.new_empty(0), None
            old.fsmoe_name, old.__class__ = f"{path}.{name}", ReplacedParameter

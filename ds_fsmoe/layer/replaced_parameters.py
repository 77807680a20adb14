# SPDX-License-Identifier: Apache-2.0
"""Makes the use of a parameter an error that a model had before its experts were spread, or put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_fsmoe.layer.expert_shard import TRUSTED, asking, tensors_in
from ds_fsmoe.layer.parts import LayerError


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

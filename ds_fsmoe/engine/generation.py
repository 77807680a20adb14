# SPDX-License-Identifier: Apache-2.0
"""Lets ``model.generate`` run on ranks that share experts: one that has ended its sequences goes on until all have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def put_over(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Put a method over that of a module's class, and return what takes it off again."""
    setattr(module, name, method)

    def take_off() -> None:
        if vars(module).get(name) is method:
            delattr(module, name)

    return take_off


def generate_together(model: nn.Module) -> Callable[[], None]:
    """Let every rank take part in all forwards of a generation, as transformers does by itself at ZeRO 3 only.

    Args:
        model: a model whose experts are spread over ranks.

    Returns:
        What undoes it.
    """
    for module in model.modules():
        if any(base.__name__ == "GenerationMixin" for base in type(module).__mro__):
            return put_over(module, "generate", _together(module.generate))
    return lambda: None


def _together(generate: Any) -> Any:
    @functools.wraps(generate)
    def together(*args: Any, **options: Any) -> Any:
        # Also where a trainer says that it is not needed, as it knows of no other reason than ZeRO 3.
        return generate(*args, **options | {"synced_gpus": True})

    return together

# SPDX-License-Identifier: Apache-2.0
"""Handles the module ``deepspeed_moe.experts`` that holds a rank's experts, and says whether it must be called itself.

DeepSpeed's own only hands each expert its rows, so our layer takes the experts out of it. Where a user has put hooks on
it, or replaced its forward or the module itself, it is called once with all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from deepspeed.moe.experts import Experts as StockExperts
from torch import nn

from ds_fsmoe.components.expert_compute.call_context import buffers_kept
from ds_fsmoe.components.expert_compute.manual_ffn import is_observed
from ds_fsmoe.execution.unchunked import WholeExperts
from ds_fsmoe.layer.parts import LayerError


def is_like_stocks(container: nn.Module) -> bool:
    """Return whether it computes what DeepSpeed's does: its class, or one that changes neither forward nor call."""
    return (
        isinstance(container, StockExperts)
        and type(container).forward is StockExperts.forward
        and type(container).__call__ is nn.Module.__call__
        and "forward" not in vars(container)
    )


def why_called(container: nn.Module) -> str | None:
    """Say why it has to be called itself, as the rest of a sentence about its layer; ``None`` if it need not be."""
    if not is_like_stocks(container):
        kind = type(container)
        return f"its experts module is a {kind.__module__}.{kind.__qualname__}, which is called with all rows at once"
    if is_observed(container):
        return "hooks on its experts module are to see all rows at once, as in DeepSpeed"
    return None


def whole_experts(container: nn.Module, path: str) -> WholeExperts:
    """Wrap the container of a layer, to be called once.

    Args:
        container: the container of the layer.
        path: the path of the layer in the model.
    """
    name = f"{path}.deepspeed_moe.experts, a {type(container).__name__}," if path else type(container).__name__
    again = partial(buffers_kept, container)
    return WholeExperts(container, tuple(container.parameters()), name, again, is_like_stocks(container))


def check_containers(layers: Mapping[str, Any], esp_size: int) -> None:
    """Refuse to shard experts over several ranks where their module would be shown partial sums.

    Args:
        layers: name -> a ``deepspeed.moe.layer.MoE``.
        esp_size: the ranks that share an expert.

    Raises:
        LayerError: the container has to be called; names the layer.
    """
    for name, layer in layers.items() if esp_size > 1 else ():
        if reason := why_called(layer.deepspeed_moe.experts):
            raise LayerError(
                f"fsmoe.expert_tensor_parallel_size = {esp_size}: {name}: {reason}; with experts cut over {esp_size} "
                "ranks there would be parts of sums to see: use 1"
            )

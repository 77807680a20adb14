# SPDX-License-Identifier: Apache-2.0
"""The feed-forward network of GPT: two linear layers with an activation between them. :class:`MOELayer` creates it by
its name ``"gpt"``, the default."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.expert import ExpertArgs, ExpertBase
from ds_fsmoe.components.expert_compute.manual_ffn import MANUAL_ACTIVATIONS, ManualFeedForward
from ds_fsmoe.registry import register_expert

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


@register_expert("gpt")
class GPTFeedForward(ExpertBase):
    """Computes ``fc2(activation(fc1(x)))``, from [..., M] to [..., M].

    Args:
        model_dim: M.
        expert_dim: H.
        activation: ``"relu"``, ``"gelu"`` or ``"silu"``.
        bias: whether the two linear layers have a bias.

    Raises:
        ValueError: unknown activation.

    Examples:
        >>> import torch, ds_fsmoe
        >>> expert = ds_fsmoe.GPTFeedForward(model_dim=8, expert_dim=32, activation="relu")
        >>> expert(torch.randn(5, 8)).shape, expert.fc1.weight.shape
        (torch.Size([5, 8]), torch.Size([32, 8]))
    """

    def __init__(self, model_dim: int, expert_dim: int, activation: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"GPTFeedForward: activation = {activation!r}: the choices are {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.fc1 = nn.Linear(model_dim, expert_dim, bias=bias)
        self.fc2 = nn.Linear(expert_dim, model_dim, bias=bias)

    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(args.tokens)))

    def written(self) -> ManualFeedForward | None:
        activation = MANUAL_ACTIVATIONS.get(self.activation)
        return None if activation is None else ManualFeedForward(self.fc1, activation, self.fc2)

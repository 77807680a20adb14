# SPDX-License-Identifier: Apache-2.0
"""The feed-forward network of Mixtral: SwiGLU, three linear layers without bias. :class:`MOELayer` creates it by its
name ``"mixtral"``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.expert import ExpertArgs, ExpertBase
from ds_fsmoe.components.expert_compute.manual_ffn import MANUAL_ACTIVATIONS, ManualGatedFeedForward
from ds_fsmoe.registry import register_expert


@register_expert("mixtral")
class MixtralFeedForward(ExpertBase):
    """Computes ``w2(silu(w1(x)) * w3(x))``, from [..., M] to [..., M].

    The names w1 (gate), w2 (down) and w3 (up) are those of Mixtral's checkpoints; none has a bias.

    Args:
        model_dim: M.
        expert_dim: H.

    Examples:
        >>> import torch, ds_fsmoe
        >>> expert = ds_fsmoe.MixtralFeedForward(model_dim=8, expert_dim=16)
        >>> expert(torch.randn(5, 8)).shape, [name for name, _ in expert.named_parameters()]
        (torch.Size([5, 8]), ['w1.weight', 'w2.weight', 'w3.weight'])
    """

    def __init__(self, model_dim: int, expert_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(model_dim, expert_dim, bias=False)
        self.w2 = nn.Linear(expert_dim, model_dim, bias=False)
        self.w3 = nn.Linear(model_dim, expert_dim, bias=False)

    def do_experts(self, args: ExpertArgs) -> torch.Tensor:
        return self.w2(F.silu(self.w1(args.tokens)) * self.w3(args.tokens))

    def written(self) -> ManualGatedFeedForward:
        return ManualGatedFeedForward(gate=self.w1, activation=MANUAL_ACTIVATIONS["silu"], up=self.w3, down=self.w2)

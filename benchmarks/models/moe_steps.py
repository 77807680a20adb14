# SPDX-License-Identifier: Apache-2.0
"""MoE layers, one after another, trained: for what is measured of an engine rather than of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ds_fsmoe


class MoEModel(nn.Module):
    """MoE layers, one after another, their experts over all ranks.

    Args:
        layers: how many.
        M: the width.
        H: the hidden width of an expert.
        E: the experts of a layer.
        of_moe: other arguments of each layer.
    """

    def __init__(self, layers: int, M: int, H: int, E: int, **of_moe: Any) -> None:
        super().__init__()
        expert, ep_size = ds_fsmoe.GPTFeedForward(M, H), dist.get_world_size()
        self.moes = nn.ModuleList(
            ds_fsmoe.MoE(M, expert, num_experts=E, ep_size=ep_size, **of_moe) for _ in range(layers)
        )

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        total = x_SM.new_zeros(())
        for moe in self.moes:
            y_SM, aux_loss, _ = moe(x_SM)
            x_SM, total = x_SM + y_SM, total + aux_loss
        return x_SM.square().mean() + 0.01 * total


class MoESteps:
    """An engine over such a model, and a step of it on the same S tokens.

    Args:
        model: the model; made anew for each engine, with the same weights.
        num_tokens: S.
        width: M.
        block: ``fsmoe``.
        config: what the config has besides.
    """

    def __init__(self, model: MoEModel, num_tokens: int, width: int, block: dict[str, Any], **config: Any) -> None:
        whole: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_allow_untested_optimizer": True,
            "fsmoe": {"enabled": True, "autotune": False} | block,
            "steps_per_print": 1_000_000,
        } | config
        self.engine = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=whole)[0]
        torch.manual_seed(dist.get_rank())
        self.x_SM = torch.randn(num_tokens, width, device=self.engine.device)

    def __call__(self) -> None:
        self.engine.backward(self.engine(self.x_SM))
        self.engine.step()

    def close(self) -> None:
        """End the engine."""
        self.engine.destroy()

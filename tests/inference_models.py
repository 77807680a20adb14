# SPDX-License-Identifier: Apache-2.0
"""Models for inference with experts that come and go: routing by a rule that is known, skewed, of any k and E."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.models import routed_model
from tests import sgd_engines

WIDTH, HIDDEN = 20, 12


class Experts(routed_model.Experts):
    """Small ones, of odd widths."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts, WIDTH, HIDDEN)


class CalledExperts(Experts):
    """Such that compute something else than the contract says, and are called themselves."""

    def forward(self, x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x_SM, index_SK, weights_SK)


class Model(nn.Module):
    """Layers with experts, one after another, the same on every rank.

    Args:
        num_experts: E.
        k: choices of a token.
        layers: how many.
        is_ruled: whether a token's first choice in the first layer decides about all others; else routers do, with
            one expert that most tokens like.
        experts: their class.
    """

    def __init__(
        self, num_experts: int, k: int, layers: int = 3, is_ruled: bool = False, experts: type[Experts] = Experts
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_experts, self.k, self.is_ruled = num_experts, k, is_ruled
        self.routers = nn.ModuleList(nn.Linear(WIDTH, num_experts) for _ in range(layers))
        self.blocks = nn.ModuleList(experts(num_experts) for _ in range(layers))
        with torch.no_grad():
            for number, router in enumerate(self.routers):
                router.bias[(3 * number + 1) % num_experts] += 2

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        # Half of all tokens begin with expert 0, a quarter with expert 1, and so on.
        first_S = (-torch.log2(x_SM[:, 0].abs().clamp(1e-3, 1))).long() % self.num_experts
        for number, (router, experts) in enumerate(zip(self.routers, self.blocks, strict=True)):
            scores_SE = router(x_SM).softmax(-1)
            weights_SK, index_SK = scores_SE.topk(self.k)
            if self.is_ruled:
                first_S = (first_S * (number + 1) + number) % self.num_experts
                index_SK = (first_S[:, None] + torch.arange(self.k)) % self.num_experts
                weights_SK = scores_SE.gather(1, index_SK)
            x_SM = x_SM + experts(x_SM, index_SK, weights_SK)
        return x_SM


def tokens(rank: int, num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[S, M], others on each rank; the first number of each is uniform in 0..1."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x_SM = torch.randn(num_tokens, WIDTH, generator=generator)
    x_SM[:, 0] = torch.rand(num_tokens, generator=generator)
    return x_SM.to(dtype)


def ds_config(ep_size: int, stage: int = 0, **block: Any) -> dict[str, Any]:
    """The config of an engine over such a model."""
    return sgd_engines.ds_config(stage, lr=0.1, ep_size=ep_size, **block)


WAYS: dict[str, dict[str, Any]] = {
    "both": {},
    "no estimate": {"estimate": False},
    "no second phase": {"second_phase": False},
    "weights from home": {"weights": "home"},
    "weights from home, no estimate": {"weights": "home", "estimate": False},
    "short paths": {"path_length": 1, "most_per_rank": 1},
}


def watched(engine: Any) -> Any:
    """Count paths in training from now on."""
    from ds_fsmoe.telemetry.paths import PathProfiler

    profiler = PathProfiler({each.label: each.total_experts for each in engine.fsmoe.layers.values()})
    engine.fsmoe.running.instruments.append(profiler.watch)
    return profiler


def plain(engine: Any, *x: Any) -> torch.Tensor:
    """The output of the plain forward."""
    engine.eval()
    with torch.no_grad():
        result = engine(*x)
    engine.train()
    return result

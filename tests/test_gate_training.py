# SPDX-License-Identifier: Apache-2.0
"""A short training run with every gate on the shelf: the loss falls, and the load comes nearer to balance."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_fsmoe import GPTFeedForward, MOELayer, registry, update_gates
from ds_fsmoe.components.routing import kind_of
from tests.samples import sampled

M, E, S = 13, 5, 211
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek": {"k": 2, "bias_update_speed": 0.01},
    "topk": {"k": 2},
    "sigmoid": {"k": 2},
    "expert_choice": {"k": 2},
    "softmoe": {"slots_per_expert": 7},
}


def imbalance(counts_E: torch.Tensor) -> float:
    """The fullest expert over the mean; 1 is balance."""
    return (counts_E.max() / counts_E.double().mean()).item()


def train(name: str, steps: int = 150) -> tuple[list[float], list[float]]:
    """(losses, imbalances), one of each per step. The tokens are much alike, so they all want the same experts."""
    torch.manual_seed(2)
    gate = registry.lookup("gate", name)(**OPTIONS.get(name, {}))
    order = registry.lookup("order", kind_of(gate).order)()
    layer = MOELayer(gate, order, model_dim=M, num_experts=E, expert_impl=GPTFeedForward(M, 29), return_stats=True)
    common_M, teacher = 1.5 * torch.randn(M), nn.Sequential(nn.Linear(M, 19), nn.Tanh(), nn.Linear(19, M))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    losses, imbalances = [], []
    for step in range(steps):
        x_SM = torch.randn(S, M, generator=torch.Generator().manual_seed(step)) + common_M
        result = layer(x_SM)
        loss = (result.output - teacher(x_SM).detach()).square().mean()
        optimizer.zero_grad()
        (loss + 0.05 * result.aux_loss).backward()
        optimizer.step()
        update_gates([gate])
        losses.append(loss.item())
        imbalances.append(imbalance(result.counts_E))
    return losses, imbalances


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@sampled("name", registry.known("gate"), drawn=3)
def test_the_loss_falls_and_the_load_comes_nearer_to_balance(name: str) -> None:
    losses, imbalances = train(name)
    assert mean(losses[-10:]) < 0.7 * mean(losses[:10])
    first, last = mean(imbalances[:5]), mean(imbalances[-10:])
    if kind_of(registry.lookup("gate", name)).order == "sparse" and name != "expert_choice":
        assert first > 1.3
        assert last < 1 + 0.75 * (first - 1)
    else:
        # Where slots choose, no expert ever has more than another.
        assert first == last == 1.0

# SPDX-License-Identifier: Apache-2.0
"""A model of layers with experts whose tokens choose what they are told to: for inference under routing that is known.

Letters: S tokens of a rank, M width, H width of an expert, E experts, L layers, k choices of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ds_fsmoe.routes.recorded import Recording, read_routing

_FOLDER = Path(__file__).resolve().parents[1] / "routing"
_TOPICS_PER_EXPERT = 4
_SKEW = 1.5
"""The exponent of Zipf's law by which topics are popular in a batch."""


class Experts(nn.Module):
    """The experts of one layer, by the contract of Hugging Face's models."""

    has_bias, is_transposed = False, False

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * hidden, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(num_experts, width, hidden) / hidden**0.5)

    def _apply_gate(self, up: torch.Tensor) -> torch.Tensor:
        gate, value = up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * value

    def forward(self, x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
        """Return the sums over each token's experts."""
        y_SM = torch.zeros_like(x_SM)
        for expert in range(self.num_experts):
            tokens, choices = torch.where(index_SK == expert)
            h = self._apply_gate(x_SM[tokens] @ self.gate_up_proj[expert].t())
            y = h @ self.down_proj[expert].t() * weights_SK[tokens, choices, None]
            y_SM = y_SM.index_add(0, tokens, y)
        return y_SM


class RoutedModel(nn.Module):
    """Dense layers and layers with experts in turn."""

    def __init__(self, layers: int, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.blocks = nn.ModuleList(Experts(num_experts, width, hidden) for _ in range(layers))

    def forward(self, x_SM: torch.Tensor, index_SLK: torch.Tensor) -> torch.Tensor:
        """Return the tokens, [S, M], having chosen so in each of L layers."""
        weights_SK = x_SM.new_full(index_SLK[:, 0].shape, 1 / index_SLK.shape[2])
        for number, (dense, experts) in enumerate(zip(self.dense, self.blocks, strict=True)):
            x_SM = x_SM + torch.tanh(dense(x_SM))
            x_SM = x_SM + experts(x_SM, index_SLK[:, number], weights_SK)
        return x_SM


@dataclass(frozen=True)
class Topics:
    """Tokens that have topics, which say what they choose but for some noise; each batch is about other topics.

    Args:
        num_experts: E.
        k: choices of a token.
        layers: L.
        noise: the share of choices that any expert gets.
    """

    num_experts: int
    k: int
    layers: int
    noise: float

    def batch(self, num_tokens: int, step: int, rank: int) -> np.ndarray:
        """Return [S, L, k]: what the tokens of a rank choose; all ranks' are about the same topics."""
        topics = self.num_experts * _TOPICS_PER_EXPERT
        popularity = np.arange(1, topics + 1) ** -_SKEW
        of_batch = np.random.default_rng([1, step]).permutation(topics)
        draw = np.random.default_rng([2, step, rank])
        topic_S = of_batch[draw.choice(topics, num_tokens, p=popularity / popularity.sum())]
        found = []
        for layer in range(self.layers):
            of_topic = np.random.default_rng([3, layer]).random((topics, self.num_experts)).argsort(1)[:, : self.k]
            any_SK = draw.random((num_tokens, self.num_experts)).argsort(1)[:, : self.k]
            is_noise_S1 = draw.random((num_tokens, 1)) < self.noise
            found.append(np.where(is_noise_S1, any_SK, of_topic[topic_S]))
        return np.stack(found, 1)


@dataclass(frozen=True)
class Recorded:
    """Tokens that choose what was recorded of a training, step by step.

    Args:
        name: a file in ``benchmarks/routing``.
        steps: the steps to take, by their index.
    """

    name: str
    steps: tuple[int, ...]

    def batch(self, num_tokens: int, step: int, rank: int) -> np.ndarray:
        """Return [S, L, k]: what the tokens of a rank chose, again from the first on where there were fewer."""
        recording = self.recording()
        of_rank = tuple(recording.ranks)[rank % len(recording.ranks)]
        of_step = recording.steps[self.steps[step % len(self.steps)]]
        index_SLK = recording.stacked(of_rank, of_step).astype(np.int64)
        return index_SLK[np.arange(num_tokens) % len(index_SLK)]

    def recording(self) -> Recording:
        """Return all that was recorded."""
        return read_routing(_FOLDER / f"{self.name}.npz")

# SPDX-License-Identifier: Apache-2.0
"""A small byte-level GPT whose feed-forward layers are DeepSpeed's MoE. Nothing in it knows of ds_fsmoe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    width: int
    """M."""
    num_layers: int
    num_heads: int
    sequence_length: int
    """L, at the most."""
    num_experts: int
    """E."""
    ep_size: int
    """Ranks that share the experts."""
    k: int
    """Experts per token."""
    capacity_factor: float


class FeedForward(nn.Module):
    """An expert: two linear layers with GELU between, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., M] to [..., M]."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Attention, then an MoE layer, each behind a norm and added to its input."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.norm_attention = nn.LayerNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)
        self.norm_moe = nn.LayerNorm(sizes.width)
        self.moe = MoE(
            sizes.width,
            FeedForward(sizes.width),
            num_experts=sizes.num_experts,
            ep_size=sizes.ep_size,
            k=sizes.k,
            capacity_factor=sizes.capacity_factor,
            eval_capacity_factor=2 * sizes.capacity_factor,
        )

    def forward(self, x_BLM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L, M] to the same, and the gate's auxiliary loss."""
        batch_size, length, width = x_BLM.shape
        qkv = self.qkv(self.norm_attention(x_BLM)).view(batch_size, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, L, M / heads]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BLM = x_BLM + self.out(seen.transpose(1, 2).reshape(batch_size, length, width))
        y_BLM, aux_loss, _ = self.moe(self.norm_moe(x_BLM))
        return x_BLM + y_BLM, aux_loss


class GPTMoE(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.position = nn.Embedding(sizes.sequence_length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean cross-entropy in nats per byte, and the sum of the layers' auxiliary losses."""
        positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        x_BLM = self.embedding(tokens_BL) + self.position(positions_L)
        aux_losses = []
        for block in self.blocks:
            x_BLM, aux_loss = block(x_BLM)
            aux_losses.append(aux_loss)
        scores_BLV = self.head(self.norm(x_BLM))
        loss = F.cross_entropy(scores_BLV.float().flatten(0, 1), targets_BL.flatten())
        return loss, torch.stack(aux_losses).sum()

# SPDX-License-Identifier: Apache-2.0
"""A byte-level language model of the blocks in ``layers.py``, with the same weights for every system and layout."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from text_data import draw_batch, load_text, rank_generator

from benchmarks.models.layers import (
    AUX_LOSS_WEIGHT,
    Attention,
    Layer,
    Layout,
    Model,
    Mpu,
    Through,
    gathered,
    ranks_per_node,
)

VOCABULARY = 256  # bytes


def own_part(x_SM: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's of as many equal parts as the group has ranks."""
    return x_SM.chunk(group.size())[group.rank()].clone()


class LanguageModel(Model):
    """Bytes in, the mean loss of the next byte out. Embedding and head are on every rank.

    Args:
        layer, layout, mpu, stock: see :class:`~benchmarks.models.layers.Model`.

    Attributes:
        loss: of the last forward, of the text alone.
    """

    loss: torch.Tensor

    def __init__(self, layer: Layer, layout: Layout, mpu: Mpu | None, stock: bool) -> None:
        super().__init__(layer, layout, mpu, stock)
        self.parted_over = None if stock or mpu is None else mpu.get_model_parallel_group()
        self.embedding = nn.Embedding(VOCABULARY, layer.M)
        self.position = nn.Embedding(layer.L, layer.M)
        self.norm = nn.LayerNorm(layer.M, elementwise_affine=False)
        self.head = nn.Linear(layer.M, VOCABULARY, bias=False)
        expert_rank = dist.get_rank()
        if mpu is not None:
            # Stock's experts split themselves over the ranks of a node, which have parts of the same ones. Ours are
            # filled by DeepSpeed's rule for whole experts, and then cut.
            of_node = mpu.get_model_parallel_world_size()
            expert_rank = expert_rank // of_node if stock else expert_rank % (dist.get_world_size() // of_node)
        put_numbers(self, expert_rank)

    def forward(self, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
        """[B, L] bytes; a scalar in nats per byte, to which the gates' losses are added."""
        x_BLM = self.embedding(tokens_BL) + self.position(torch.arange(tokens_BL.shape[1]))
        x_SM = x_BLM.flatten(0, 1)
        if self.parted_over is not None:
            x_SM = Through.apply(x_SM, self.parted_over, own_part, gathered)
        x_SM, aux_losses = self.blocks(x_SM)
        if self.parted_over is not None:
            # What follows is done by every rank alike, so its gradients are whole.
            x_SM = Through.apply(x_SM, self.parted_over, gathered, own_part)
        loss = F.cross_entropy(self.head(self.norm(x_SM)), targets_BL.flatten())
        # Auxiliary losses are of all tokens that a gate sees together, which differ from layout to layout.
        self.loss = loss.detach()
        return loss + AUX_LOSS_WEIGHT * aux_losses


def put_numbers(model: LanguageModel, expert_rank: int) -> None:
    """Weights drawn for the whole model, of which each rank takes its part.

    Args:
        model: not yet given to an engine.
        expert_rank: of this rank among those that the experts are spread over.
    """
    for number, (attention, moe) in enumerate(zip(model.attention, model.moes, strict=True)):
        put_attention(attention, number)
        put_moe(moe, attention.layer, number, expert_rank)
    for seed, each in enumerate((model.embedding, model.position, model.head)):
        put_embedding(each, seed)


@torch.no_grad()
def put_embedding(module: nn.Embedding | nn.Linear, seed: int) -> None:
    """Into an embedding, or a head."""
    module.weight.copy_(_drawn(module.weight.shape, torch.Generator().manual_seed(seed)))


@torch.no_grad()
def put_attention(attention: Attention, number: int) -> None:
    """Into the attention of a block: the heads of this rank."""
    generator = torch.Generator().manual_seed(1000 * number)
    M, heads, group = attention.layer.M, attention.layer.heads, attention.group
    qkv, out = _drawn((3 * M, M), generator).view(3, heads, -1, M), _drawn((M, M), generator).view(M, heads, -1)
    first = 0 if group is None else group.rank() * attention.heads
    own = slice(first, first + attention.heads)
    attention.qkv.weight.copy_(qkv[:, own].reshape(-1, M))
    attention.out.weight.copy_(out[:, own].reshape(M, -1))


@torch.no_grad()
def put_moe(moe: Any, layer: Layer, number: int, expert_rank: int) -> None:
    """Into the gate and this rank's experts of a block."""
    gate = moe.deepspeed_moe.gate.wg.weight
    gate.copy_(_drawn(gate.shape, torch.Generator().manual_seed(1000 * number + 1)))
    experts = moe.deepspeed_moe.experts.deepspeed_experts
    for local, expert in enumerate(experts):
        generator = torch.Generator().manual_seed(1000 * number + 2 + expert_rank * len(experts) + local)
        group = getattr(expert, "group", None)
        for name, parameter in sorted(expert.named_parameters()):
            if parameter.dim() == 1:
                parameter.zero_()
                continue
            across = 1 if name.startswith(("fc2", "w2")) else 0
            shape = list(parameter.shape)
            shape[across] = layer.ratio * layer.M
            whole = _drawn(tuple(shape), generator)
            # Stock's tensor-parallel experts hold a part; ours are cut by the engine.
            parameter.copy_(whole if group is None else whole.chunk(group.size(), across)[group.rank()])


def _drawn(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Of a size that keeps the size of what is multiplied by it."""
    return torch.randn(tuple(shape), generator=generator) * shape[-1] ** -0.5


def batches(
    layer: Layer, layout: Layout, seed: int = 1, reader: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each step's bytes and the ones that follow them: of a node the same in both layouts.

    Args:
        layer: B sequences for each node.
        layout: of the ranks.
        seed: of the positions in the text.
        reader: whose positions these are, of the readers that have such sequences each; this rank.
    """
    text, size = (
        load_text(None, layer.L),
        ranks_per_node(),
    )  # ranks have to meet for that: not when a batch is asked for
    node, rank_inside = divmod(dist.get_rank() if reader is None else reader, size)
    generator = rank_generator(seed, node)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        both = draw_batch(text.train_L, layer.B, layer.L, generator)
        tokens_BL, targets_BL = (each.chunk(size)[rank_inside] if layout == "ranks" else each for each in both)
        return tokens_BL, targets_BL

    return (batch() for _ in itertools.count())

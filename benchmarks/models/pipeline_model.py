# SPDX-License-Identifier: Apache-2.0
"""The language model of ``language_model.py`` in two pipeline stages, for stock's ``PipelineEngine`` and ours.

The first half of the ranks has the first stage. In a stage every rank works on sequences of its own and experts are
spread over all of them: DeepSpeed has no tensor-parallel layout beside a pipeline without Megatron.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn

import ds_fsmoe
from benchmarks.models.language_model import VOCABULARY, batches, put_attention, put_embedding, put_moe
from benchmarks.models.layer_steps import Found, set_degree
from benchmarks.models.layers import Attention, Layer, StockGroups
from ds_fsmoe.gradients.reduction import OBSERVED_ROUNDS

STAGES = 2
MICRO_BATCHES = 4


class Embedding(nn.Module):
    """[B, L] bytes to [S, M]."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, layer.M), nn.Embedding(layer.L, layer.M)
        for seed, each in enumerate((self.embedding, self.position)):
            put_embedding(each, seed)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLM = self.embedding(tokens_BL) + self.position(torch.arange(tokens_BL.shape[1]))
        return x_BLM.flatten(0, 1)


class Block(nn.Module):
    """Attention and an MoE layer. The gate's own loss is left out: a stage hands on nothing but tokens."""

    def __init__(self, layer: Layer, number: int) -> None:
        super().__init__()
        ranks = dist.get_world_size() // STAGES
        kind = ds_fsmoe.GPTFeedForward if layer.ffn == "gpt" else ds_fsmoe.MixtralFeedForward
        self.attention = Attention(layer, None, scattered=False)
        self.moe = MoE(
            layer.M,
            kind(layer.M, layer.ratio * layer.M),
            num_experts=layer.E,
            ep_size=ranks,
            k=layer.k,
            capacity_factor=layer.f or 1.0,
            drop_tokens=layer.f is not None,
            min_capacity=0,
            top2_2nd_expert_sampling=False,
        )
        put_attention(self.attention, number)
        put_moe(self.moe, layer, number, expert_rank=dist.get_rank() % ranks)

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        x_SM = self.attention(x_SM)
        return x_SM + self.moe(x_SM)[0]


class Head(nn.Module):
    """[S, M] to scores."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(layer.M, elementwise_affine=False), nn.Linear(layer.M, VOCABULARY, False)
        put_embedding(self.out, 2)

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x_SM))


def _loss(scores_SV: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores_SV, targets_BL.flatten())


class PipelineSteps:
    """An engine over a pipeline, and a step of it. Collective to make.

    Args:
        layer: sizes; B for each node and micro batch.
        found: of stock; the bucket size only, stages of ZeRO are left out.
        block: ``fsmoe``; ``None`` for stock.
        lr: learning rate of SGD.

    Attributes:
        losses: of each step, the same on every rank.
    """

    def __init__(self, layer: Layer, found: Found, block: dict[str, Any] | None, lr: float) -> None:
        self.groups = StockGroups()
        self.groups.put()
        layers = [Embedding(layer), *(Block(layer, i) for i in range(layer.layers)), Head(layer)]
        # Attention and MoE layers make up the time: as many in each stage.
        model = PipelineModule(layers, num_stages=STAGES, loss_fn=_loss, partition_method="type:Block")
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "SGD", "params": {"lr": lr}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 0, "reduce_bucket_size": found.bucket},
            # Stock clips by a norm that depends on how experts are spread, ours by the true one: losses would part.
            "gradient_clipping": 0.0,
            "steps_per_print": 1_000_000,
        }
        if block is not None:
            config["fsmoe"] = {"enabled": True} | block
        initialize: Any = deepspeed.initialize if block is None else ds_fsmoe.initialize
        self.engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        self.groups.take()
        self.losses: list[torch.Tensor] = []
        # Each rank of a stage reads a text of its own, the same in both stages.
        self.batches = batches(layer, "ranks", reader=self.engine.grid.data_parallel_id)
        for _ in range(OBSERVED_ROUNDS if block is not None else 1):
            self()

    def tune(self) -> None:
        """Train until plans are settled and gradients are planned by them, on all stages. Collective."""
        while not self._is_settled_everywhere():
            self()

    def _is_settled_everywhere(self) -> bool:
        state = self.engine.fsmoe
        is_planned = state.reduction is None or state.reduction.reducer.plan is not None
        settled = torch.tensor(int(state.autotune.is_settled and is_planned))
        # Stages plan for themselves, and a batch is of all of them.
        dist.all_reduce(settled, dist.ReduceOp.MIN)
        return bool(settled)

    def set_degree(self, degree: int) -> None:
        """Cut the layers of this stage into so many chunks, in both phases."""
        set_degree(self.engine, degree)

    @property
    def degrees(self) -> str:
        """The chunks of this rank's first layer, forward and backward."""
        plan = next(iter(self.engine.fsmoe.inner_layers.values())).fsmoe.plan
        return f"{plan.forward.degree}/{plan.backward.degree}"

    def __call__(self) -> None:
        self.groups.put()
        self.losses.append(self.engine.train_batch(self.batches).detach().clone())

    def close(self) -> None:
        self.engine.destroy()

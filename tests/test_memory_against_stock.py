# SPDX-License-Identifier: Apache-2.0
"""A rank needs no more memory than with stock DeepSpeed, in stock's own layout of experts; counted, not measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn import functional as F

from tests.live_memory import LiveMemory
from tests.memory_cases import BUCKET, PERSISTENCE, PREFETCH, config_of

MOST = 1.03
"""Of stock's peak."""
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Case:
    """What is trained, with stock and with ours."""

    model: str
    """Of Hugging Face's families, with all experts on every rank; or "gpt", with DeepSpeed's MoE layers."""
    zero: int
    accumulation: int = 1
    dtype: str = "fp32"
    samples: int = 2
    length: int = 128
    block: dict[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        return self.model != "gpt"

    def ds_config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.zero, "reduce_bucket_size": BUCKET}
        if self.zero == 3:
            zero |= {"stage3_param_persistence_threshold": PERSISTENCE, "stage3_prefetch_bucket_size": PREFETCH}
            zero |= {"stage3_max_reuse_distance": 0}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.samples,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
        return config | ({} if self.dtype == "fp32" else {self.dtype: {"enabled": True}})


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.moe = MoE(width, Expert(width), num_experts=4, ep_size=2, k=2, capacity_factor=1.25)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        heads = [each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x_BLM)).chunk(3, -1)]
        y_BHLm = F.scaled_dot_product_attention(*heads, is_causal=True)
        x_BLM = x_BLM + self.out(y_BHLm.transpose(1, 2).flatten(-2))
        return x_BLM + self.moe(self.norm_2(x_BLM))[0]


class GPT(nn.Module):
    """A GPT with DeepSpeed's MoE layers."""

    def __init__(self, width: int = 128, depth: int = 4, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x_BLM = self.embed(input_ids)
        for block in self.blocks:
            x_BLM = block(x_BLM)
        return F.cross_entropy(self.head(x_BLM).float().flatten(0, 1), labels.flatten())


def model_of(case: Case) -> nn.Module:
    if not case.is_own:
        return GPT()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config_of(case.model))


@contextmanager
def counted_beside(memory: LiveMemory) -> Iterator[None]:
    """Count what messages make that travel beside the caller, too."""
    from ds_fsmoe.gradients.beside import BesideThreads

    give = BesideThreads._give

    def counted(self: Any, between: bool, step: Any, after: Any) -> Any:
        def run() -> None:
            if memory is not None:
                with memory.in_this_thread():
                    step()

        return give(self, between, run, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BesideThreads, "_give", counted)
        yield


def peak_of(case: Case, rank: int, world_size: int, stock: bool, steps: int = 6, with_places: bool = False) -> Any:
    """The peak of a case, in bytes, over all steps but the first."""
    import deepspeed

    import ds_fsmoe

    initialize = deepspeed.initialize if stock else ds_fsmoe.initialize
    ours = {"enabled": True} | ({"ep_size": 1} if case.is_own else {}) | case.block
    peaks = []
    with LiveMemory(with_places) as memory, counted_beside(memory):
        torch.manual_seed(0)
        model = model_of(case)
        parameters = list(model.parameters())
        config = case.ds_config() | ({} if stock else {"fsmoe": ours})
        engine = initialize(model=model, model_parameters=parameters, config=config)[0]
        del parameters
        if not stock:
            layers = [each.deepspeed_moe for each in engine.fsmoe.layers.values()]

            def count_lanes(call: Any) -> None:
                call.pipeline = call.pipeline.watched(memory.in_every_thread())

            layers[0].fsmoe.running.instruments.append(count_lanes)
            del layers
        for step in range(steps):
            for _ in range(16):
                gc.collect()
            memory.begin_again()
            for micro in range(case.accumulation):
                generator = torch.Generator().manual_seed((step * 7 + micro) * world_size + rank)
                x = torch.randint(3, 900, (case.samples, case.length), generator=generator)
                loss = engine(input_ids=x, labels=x)
                loss = getattr(loss, "loss", loss)
                engine.backward(loss)
                del loss
                engine.step()
            peaks.append(memory.peak)
        at_peak = memory.at_peak()
        engine.destroy()
        del engine, model
    gc.collect()
    return max(peaks[1:]), peaks, at_peak

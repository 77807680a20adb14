# SPDX-License-Identifier: Apache-2.0
"""A small model with two MoE layers of DeepSpeed's, and what the tests that train it have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import nn

import ds_fsmoe
from ds_fsmoe.components.experts.gpt import GPTFeedForward

# Odd and prime, so that a wrong reshape cannot fit by accident.
WIDTH, EXPERT_WIDTH, BATCH, LENGTH = 13, 29, 3, 7
NUM_EXPERTS = 4


@dataclass(frozen=True)
class Case:
    """One training run."""

    ep_size: int = 1
    stage: int = 0
    dtype: str = "fp32"
    accumulation: int = 1
    k: int = 1
    drop_tokens: bool = True
    use_residual: bool = False
    moe_options: tuple[tuple[str, Any], ...] = ()
    expert: str = "module"
    """Or "smooth", or "gpt" and "smooth gpt", which can be sharded."""

    def ds_config(self, **blocks: Any) -> dict[str, Any]:
        """The DeepSpeed config of this run. SGD, because Adam hides errors of scale."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 4096},
            # At stage 0 with ep_size > 1 DeepSpeed clips by a norm that depends on ep_size.
            "gradient_clipping": 0.0 if self.stage == 0 else 1.0,
            "steps_per_print": 1_000_000,
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        return config | blocks


class FeedForward(nn.Module):
    """An expert as users write them: any module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, EXPERT_WIDTH)
        self.fc2 = nn.Linear(EXPERT_WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class SmoothFeedForward(FeedForward):
    """Without the kink at which the rounding of a low precision decides whether a gradient goes through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.nn.functional.silu(self.fc1(x)))


EXPERTS = {
    "module": FeedForward,
    "smooth": SmoothFeedForward,
    "gpt": lambda: GPTFeedForward(WIDTH, 28, activation="relu"),
    "smooth gpt": lambda: GPTFeedForward(WIDTH, 28, activation="gelu"),
}


class SmallModel(nn.Module):
    """Linear, MoE, linear, MoE; the same parameters on every rank and for every ep_size, by global expert id."""

    def __init__(self, case: Case, rank: int, moe_class: type = MoE) -> None:
        super().__init__()
        options = dict(case.moe_options)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.moes = nn.ModuleList(
            moe_class(
                WIDTH,
                EXPERTS[case.expert](),
                num_experts=NUM_EXPERTS,
                ep_size=case.ep_size,
                k=case.k,
                capacity_factor=1.25,
                drop_tokens=case.drop_tokens,
                use_residual=case.use_residual,
                **options,
            )
            for _ in range(2)
        )
        self._initialise(rank % case.ep_size)

    def _initialise(self, ep_rank: int) -> None:
        for name, parameter in sorted(self.named_parameters()):
            parts = name.split(".")
            if "deepspeed_experts" in parts:
                local_id = parts.index("deepspeed_experts") + 1
                num_local = self.moes[0].num_local_experts
                parts[local_id] = str(ep_rank * num_local + int(parts[local_id]))
            generator = torch.Generator().manual_seed(sum(map(ord, "".join(parts))) * 7919 + int(parts[1] == "1"))
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 / parameter.shape[-1] ** 0.5)

    def forward(self, x_BLM: torch.Tensor, target_BLM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the output."""
        y_BLM, aux_first, _ = self.moes[0](self.first(x_BLM))
        y_BLM, aux_second, _ = self.moes[1](x_BLM + torch.tanh(self.middle(y_BLM)))
        loss = ((y_BLM - target_BLM).float() ** 2).mean() + 0.01 * (aux_first + aux_second)
        return loss, y_BLM


def small_engine(
    case: Case, rank: int, block: dict[str, Any] | None = None, model: nn.Module | None = None, **blocks: Any
) -> Any:
    """Return an engine of a small model, or of a given one: stock's without a block, and ours with one."""
    model = SmallModel(case, rank) if model is None else model
    blocks |= {} if block is None else {"fsmoe": {"enabled": True} | block}
    initialize = deepspeed.initialize if block is None else ds_fsmoe.initialize
    return initialize(model=model, model_parameters=list(model.parameters()), config=case.ds_config(**blocks))[0]


def scaled(model: nn.Module, scale: float) -> nn.Module:
    """Multiply all parameters of a model, and return it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of one micro step on one rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x_BLM, target_BLM = (torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))
    return x_BLM.to(dtype), target_BLM.to(dtype)


def train_steps(engine: Any, rank: int, steps: Iterable[int]) -> list[float]:
    """Steps of a small model, in the engine's type; the losses."""
    losses = []
    for step in steps:
        loss, _ = engine(*batch(step, rank, next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses

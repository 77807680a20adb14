# SPDX-License-Identifier: Apache-2.0
"""AutoEP beside stock in bench_layer does the same work: the same loss and the same steps, from the same weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks

# At that of the benchmark, nothing would move.
LEARNING_RATE = 0.1


@torch.no_grad()
def fill(model: Any, rank: int, world_size: int) -> None:
    """The same numbers for stock, which has a rank's experts, and for AutoEP, which is given all of them."""
    torch.manual_seed(7)
    for attention, moe in zip(model.attention, model.moes, strict=True):
        for weight in attention.parameters():
            weight.normal_(std=0.1)
        E, M, H = attention.layer.E, attention.layer.M, attention.layer.ratio * attention.layer.M
        gate, w1, w3, w2 = (0.2 * torch.randn(shape) for shape in ((E, M), (E, H, M), (E, H, M), (E, M, H)))
        if hasattr(moe, "deepspeed_moe"):
            moe.deepspeed_moe.gate.wg.weight.copy_(gate)
            for i, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts, start=rank * E // world_size):
                for linear, weights in ((expert.w1, w1), (expert.w2, w2), (expert.w3, w3)):
                    linear.weight.copy_(weights[i])
        else:
            moe.gate.weight.copy_(gate)
            moe.experts.gate_up_proj.copy_(torch.cat((w1, w3), dim=1))
            moe.experts.down_proj.copy_(w2)


def train_both(rank: int, world_size: int, stage: int) -> dict[str, list[float]]:
    from benchmarks.models.auto_ep import AutoEPSteps
    from benchmarks.models.layer_steps import Found, Steps
    from benchmarks.models.layers import Layer

    layer, found = Layer(B=2, L=13, M=20, ratio=3, f=None, ffn="mixtral"), Found(stage=stage)
    prepare = partial(fill, rank=rank, world_size=world_size)
    stock, auto_ep = Steps(layer, "ranks", None, found, None, prepare), AutoEPSteps(layer, found, prepare)
    losses: dict[str, list[float]] = {"stock": [], "AutoEP": []}
    for steps in (stock, auto_ep):
        for group in steps.engine.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
    for _ in range(3):
        for steps in (stock, auto_ep):
            steps()
        aux_loss = sum(moe.deepspeed_moe.l_aux.item() for moe in stock.engine.module.moes)
        losses["stock"].append(float(stock.losses[-1]) - 0.01 * aux_loss)
        losses["AutoEP"].append(float(auto_ep.losses[-1]))
    stock.close()
    auto_ep.close()
    return losses


@pytest.mark.daily("benchmarks", 4)
@pytest.mark.parametrize("stage", [0, 2])
def test_auto_ep_trains_as_stock_does_from_the_same_weights(stage: int, tmp_path: Path) -> None:
    for losses in run_on_ranks(train_both, 2, tmp_path, stage):
        first, second, third = losses["AutoEP"]
        assert third < second < first
        assert third < 0.95 * first
        # But for the auxiliary loss, which moves stock's gate a little.
        torch.testing.assert_close(losses["AutoEP"], losses["stock"], rtol=1e-4, atol=0)


def test_only_mixtral_without_dropping_can_be_run() -> None:
    from benchmarks.cases.bench_layer import cases
    from benchmarks.models.auto_ep import can_run
    from benchmarks.models.layers import Layer

    assert "no gpt FFN" in str(can_run(Layer(B=2, L=13, M=20, ratio=3, f=None, ffn="gpt")))
    assert "1.25" in str(can_run(Layer(B=2, L=13, M=20, ratio=3, f=1.25, ffn="mixtral")))
    assert [i for i, case in enumerate(cases()) if can_run(case.settings) is None] == [2, 11, 14, 23]

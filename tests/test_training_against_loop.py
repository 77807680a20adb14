# SPDX-License-Identifier: Apache-2.0
"""Training with DeepSpeed and our layer equals training by a plain loop over tokens: fp64, hand-written SGD."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tests.covering import covering
from tests.ranks import run_on_ranks
from tests.reference import LayerSettings, moe_layer
from tests.samples import sampled
from tests.small_model import NUM_EXPERTS, WIDTH, Case, SmallModel, batch, small_engine, train_steps

LEARNING_RATE, STEPS = 0.5, 3


def train_with_deepspeed(rank: int, world_size: int, cases: list[Case]) -> list[tuple[list[float], dict]]:
    """Losses and final parameters (by global name) of our layer under DeepSpeed, fp32."""
    results = []
    for case in cases:
        engine = small_engine(case, rank, {}, gradient_clipping=0.0)
        losses = train_steps(engine, rank, range(STEPS * case.accumulation))
        first_expert = rank % case.ep_size * (NUM_EXPERTS // case.ep_size)
        parameters = {global_name(n, first_expert): p.detach().clone() for n, p in engine.module.named_parameters()}
        results.append((losses, parameters))
        engine.destroy()
    return results


def global_name(name: str, first_expert: int) -> str:
    parts = name.split(".")
    if "deepspeed_experts" in parts:
        at = parts.index("deepspeed_experts") + 1
        parts[at] = str(first_expert + int(parts[at]))
    return ".".join(parts)


class LoopModel(nn.Module):
    """The small model with every expert in one process, in fp64, its MoE layers as loops over tokens."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.whole = SmallModel(replace(case, ep_size=1), rank=0).double()
        self.settings = LayerSettings(case.k, 1.25, 4, case.drop_tokens)
        self.case = case

    def layer(self, number: int, x_BLM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moe = self.whole.moes[number]
        inner = moe.deepspeed_moe
        x_SM = x_BLM.reshape(-1, WIDTH)
        (answer,) = moe_layer([x_SM], inner.gate.wg.weight, list(inner.experts.deepspeed_experts), self.settings)
        y_SM = answer.output_SM
        if self.case.use_residual:
            share = torch.softmax(moe.coefficient(x_SM), dim=-1)
            y_SM = y_SM * share[:, :1] + moe.mlp(x_SM) * share[:, 1:]
        return y_SM.reshape(x_BLM.shape), answer.aux_loss

    def forward(self, x_BLM: torch.Tensor, target_BLM: torch.Tensor) -> torch.Tensor:
        y_BLM, aux_first = self.layer(0, self.whole.first(x_BLM))
        y_BLM, aux_second = self.layer(1, x_BLM + torch.tanh(self.whole.middle(y_BLM)))
        return ((y_BLM - target_BLM) ** 2).mean() + 0.01 * (aux_first + aux_second)


def train_loop(case: Case, world_size: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses of every rank and final parameters, all ranks' batches averaged in one process, by hand-written SGD."""
    model = LoopModel(case)
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        model.zero_grad()
        for micro in range(case.accumulation):
            for rank in range(world_size):
                x_BLM, target_BLM = batch(step * case.accumulation + micro, rank, torch.float64)
                loss = model(x_BLM, target_BLM)
                (loss / (world_size * case.accumulation)).backward()
                losses[rank].append(loss.item())
        with torch.no_grad():
            for parameter in model.whole.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    return losses, {name: p.detach() for name, p in model.whole.named_parameters()}


LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]
"""(ranks, ep)"""
# Stages x accumulation x k x drop x residual. k = 1 is run dropless: who stays in a full expert is no formula.
AXES = ((0, 1, 2), (1, 3), (1, 2, 3), (True, False), (False, True))


@sampled("layout", LAYOUTS, kept=[2], ids="{0[0]}-{0[1]}".format)
def test_training_with_deepspeed_equals_training_by_loop(layout: tuple[int, int], tmp_path: Path) -> None:
    """The layouts together have every pair of values of two axes, theirs being one."""
    found = covering(LAYOUTS, *AXES, allowed=lambda at, stage, accumulation, k, drops, residual: k > 1 or not drops)
    options = (("top2_2nd_expert_sampling", False), ("use_rts", False))
    world_size, ep_size = layout
    cases = [
        Case(ep_size, stage, "fp32", accumulation, k, drop_tokens, use_residual, options)
        for at, stage, accumulation, k, drop_tokens, use_residual in found
        if at == layout
    ]
    ranks = run_on_ranks(train_with_deepspeed, world_size, tmp_path, cases)
    for number, case in enumerate(cases):
        losses, parameters = train_loop(case, world_size)
        for rank in range(world_size):
            seen_losses, seen_parameters = ranks[rank][number]
            torch.testing.assert_close(torch.tensor(seen_losses), torch.tensor(losses[rank]), rtol=2e-5, atol=1e-6)
            for name, value in seen_parameters.items():
                torch.testing.assert_close(value.double(), parameters[name], rtol=2e-5, atol=2e-6, msg=f"{case} {name}")

# SPDX-License-Identifier: Apache-2.0
"""``MoE(sequence_parallel=True)``: tensor-parallel ranks have different tokens, and gradients are those of all. With
DeepSpeed's own sequence parallelism (Ulysses), training is what it is there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_on_ranks
from tests.reference import LayerSettings, moe_layer
from tests.samples import sampled
from tests.small_model import (
    EXPERT_WIDTH,
    EXPERTS,
    NUM_EXPERTS,
    WIDTH,
    Case,
    batch,
    small_engine,
    train_steps,
)
from tests.tensor_parallel import SplitFeedForward, begin, degrees


class BothHalves(nn.Module):
    """What :class:`SplitFeedForward` is on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, EXPERT_WIDTH)
        self.fc2 = nn.Linear(EXPERT_WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.fc1.weight, -0.5 * self.fc1.weight
        hidden = (torch.relu(nn.functional.linear(x, each, self.fc1.bias)) for each in weights)
        return sum(map(self.fc2, hidden)) + self.bias


EXPERTS["both halves"] = BothHalves


class OneLayer(nn.Module):
    """A layer under sequence parallelism, with the same parameters for every layout, by global expert id."""

    def __init__(self, tp_size: int, ep_rank: int, expert: str, ep_size: int, **options: Any) -> None:
        import ds_fsmoe

        super().__init__()
        options |= {"k": 2, "capacity_factor": 0.75, "top2_2nd_expert_sampling": False, "sequence_parallel": True}
        self.moe = ds_fsmoe.MoE(WIDTH, EXPERTS[expert](), NUM_EXPERTS, ep_size, **options)
        self.tp_size = tp_size
        fill((global_name(name, ep_size, ep_rank), parameter) for name, parameter in self.named_parameters())

    def forward(self, x_BLM: torch.Tensor, target_BLM: torch.Tensor) -> torch.Tensor:
        """This rank's part of the loss: that of its own tokens, as a part of the mean over all."""
        y_BLM, aux_loss, _ = self.moe(x_BLM)
        return (y_BLM * target_BLM).mean() / self.tp_size + 0.1 * aux_loss


def global_name(name: str, ep_size: int, ep_rank: int) -> str:
    before, found, after = name.removeprefix("moe.deepspeed_moe.").partition("experts.deepspeed_experts.")
    if not found:
        return before
    local_id, _, rest = after.partition(".")
    return f"expert {ep_rank * NUM_EXPERTS // ep_size + int(local_id)} {rest}"


def fill(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, parameter in named:
        generator = torch.Generator().manual_seed(sum(i * ord(each) for i, each in enumerate(name)))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7 / parameter.shape[-1] ** 0.5)


def gradients_by_hand(world_size: int, tp_size: int, expert: str, drop_tokens: bool) -> dict[str, torch.Tensor]:
    """Of the mean loss over data-parallel replicas, in one process and float64, token by token."""
    whole = "both halves" if expert == "split" else expert
    experts = [EXPERTS[whole]().double() for _ in range(NUM_EXPERTS)]
    gate, mlp, coefficient = nn.Linear(WIDTH, NUM_EXPERTS, bias=False), EXPERTS[whole](), nn.Linear(WIDTH, 2)
    named = {"gate.wg.weight": gate.double().weight}
    for before, module in (("moe.mlp.", mlp), ("moe.coefficient.", coefficient)):
        named |= {before + name: parameter for name, parameter in module.double().named_parameters()}
    for i, module in enumerate(experts):
        named |= {f"expert {i} {name}": parameter for name, parameter in module.named_parameters()}
    fill(named.items())
    batches = [[each.double().reshape(-1, WIDTH) for each in batch(0, r, torch.float32)] for r in range(world_size)]
    named |= {f"input {r}": x_SM.requires_grad_() for r, (x_SM, _) in enumerate(batches)}
    settings = LayerSettings(k=2, capacity_factor=0.75, drop_tokens=drop_tokens)
    results = moe_layer([x_SM for x_SM, _ in batches], gate.weight, experts, settings)
    loss = torch.zeros((), dtype=torch.float64)
    for (x_SM, target_SM), result in zip(batches, results, strict=True):
        y_SM = result.output_SM
        if expert != "split":
            coefficient_S2 = torch.softmax(coefficient(x_SM), dim=-1)
            y_SM = y_SM * coefficient_S2[:, :1] + mlp(x_SM) * coefficient_S2[:, 1:]
        loss = loss + ((y_SM * target_SM).mean() + 0.1 * result.aux_loss) / tp_size
    loss.backward()
    replicas = world_size // tp_size
    used = ((name, each.grad) for name, each in named.items() if each.grad is not None)
    return {name: gradient if "input" in name else gradient / replicas for name, gradient in used}


def sequence_parallel(
    rank: int, world_size: int, ep_size: int, esp_size: int, expert: str, drop_tokens: bool
) -> dict[str, float]:
    """How far gradients are from those by hand, by name, as a part of their largest number."""
    import ds_fsmoe

    mpu = begin(2)
    is_split = expert == "split"
    ep_rank = rank // (2 if is_split else 1) % ep_size
    options = {"enable_expert_tensor_parallelism": True} if is_split else {"use_residual": True}
    model = OneLayer(2, ep_rank, expert, ep_size, drop_tokens=drop_tokens, **options)
    for module in model.modules():
        if isinstance(module, SplitFeedForward):
            module.differ()
    engine, *_ = ds_fsmoe.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=Case().ds_config(fsmoe=degrees(3, 2, esp_size=esp_size)),
        mpu=mpu,
    )
    x_BLM, target_BLM = batch(0, rank, torch.float32)
    x_BLM.requires_grad_()
    engine.backward(engine(x_BLM, target_BLM))
    found = {global_name(name, ep_size, ep_rank): parameter.grad for name, parameter in model.named_parameters()}
    engine.destroy()
    found[f"input {rank}"] = x_BLM.grad.reshape(-1, WIDTH)
    expected = gradients_by_hand(world_size, 2, expert, drop_tokens)
    off = {}
    for name, gradient in found.items():
        # A part of an expert has a part of the gradient, and the first shard alone that of the last bias.
        of_part = name.startswith("expert") and (esp_size > 1 or (is_split and name.split()[-1] != "bias"))
        if not of_part:
            theirs = expected[name]
            off[name] = ((gradient.double() - theirs).abs().max() / theirs.abs().max()).item()
    return off


@sampled(
    ("world_size", "ep_size", "esp_size", "expert", "drop_tokens"),
    [
        (2, 1, 1, "module", False),
        (4, 2, 1, "module", True),
        (4, 4, 1, "module", False),
        (4, 2, 2, "gpt", True),
        (4, 2, 1, "split", False),
    ],
    kept=[0, 3, 4],
)
def test_parts_of_a_sequence_have_the_gradients_of_a_loop_over_all_tokens(
    world_size: int, ep_size: int, esp_size: int, expert: str, drop_tokens: bool, tmp_path: Path
) -> None:
    for off in run_on_ranks(sequence_parallel, world_size, tmp_path, ep_size, esp_size, expert, drop_tokens):
        residual = {"moe.mlp.fc1.weight", "moe.mlp.fc2.bias", "moe.coefficient.bias"}
        assert {"gate.wg.weight"} | (set() if expert == "split" else residual) <= off.keys()
        assert any(name.startswith("expert") for name in off) or expert == "gpt"
        assert not {name: each for name, each in off.items() if not each < 1e-5}


# ---- Ulysses, where gradients stay with DeepSpeed

SIZES = {"data_parallel_size": 1, "sequence_parallel_size": 2}


def train_by_deepspeeds(rank: int, world_size: int) -> dict[str, Any]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    found: dict[str, Any] = {}
    for stage in (0, 1):
        case = Case(2, stage, "fp32", 1, 2, False, moe_options=(("top2_2nd_expert_sampling", False),))
        for system in ("stock", "ours"):
            block = None if system == "stock" else {"schedule": "fsmoe"}
            engine = small_engine(case, rank, block, **SIZES, train_batch_size=3)
            assert engine.sequence_parallel_size == 2
            losses = train_steps(engine, rank, range(3))
            weights = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
            found[f"{stage} {system}"] = losses, weights
            engine.destroy()
    return found


def test_with_deepspeeds_own_sequence_parallelism_parts_are_trained_as_stock_trains_them(tmp_path: Path) -> None:
    for found in run_on_ranks(train_by_deepspeeds, 2, tmp_path):
        for stage in (0, 1):
            (stock_losses, stock), (losses, ours) = found[f"{stage} stock"], found[f"{stage} ours"]
            assert losses == pytest.approx(stock_losses, rel=1e-6)
            assert losses[0] != losses[-1]
            for name, theirs in stock.items():
                torch.testing.assert_close(ours[name], theirs, rtol=1e-6, atol=1e-7, msg=f"stage {stage}, {name}")

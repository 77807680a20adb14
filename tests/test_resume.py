# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped goes on to the bit; plans and generators go on too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch

pytestmark = pytest.mark.long

BEFORE, AFTER = 3, 2
CUT = {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 3}}
CASES = [
    (Case(2, 0, "fp32", 1, 2, True), CUT),
    (Case(2, 1, "fp32", 2, 1, True), CUT),
    (Case(2, 2, "bf16", 1, 2, False), CUT),
    (Case(2, 0, "fp32", 1, 2, True), CUT | {"gate": {"type": "deepseek", "k": 2, "bias_update_speed": 0.1}}),
    (Case(2, 1, "bf16", 1, 2, True), {"enabled": True, "gate": {"type": "gshard", "k": 2, "noise": True}}),
]


class WithDropout(nn.Module):
    """Draws from torch's generator in every forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(x), 0.2, self.training)


def make(rank: int, case: Case, block: dict[str, Any], scale: float = 1.0) -> Any:
    import ds_fsmoe

    torch.manual_seed(rank)
    model = SmallModel(case, rank)
    model.first = WithDropout(model.first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    blocks: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}}
    blocks["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
    config = case.ds_config(fsmoe=block, **blocks)
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, rank: int, case: Case, first: int, steps: int) -> list[float]:
    """No seed is set: what is drawn follows from what was drawn before."""
    dtype, losses = next(engine.module.parameters()).dtype, []
    for step in range(first * case.accumulation, (first + steps) * case.accumulation):
        loss, _ = engine(*batch(step, rank, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def stop_and_go_on(rank: int, world_size: int, numbers: list[int], folder: str) -> list[str]:
    hurry()
    found = []
    for number in numbers:
        case, block = CASES[number]
        place = f"{folder}/{number}"
        engine = make(rank, case, block)
        train(engine, rank, case, 0, BEFORE)
        engine.save_checkpoint(place, client_state={"mine": 7})
        expected = train(engine, rank, case, BEFORE, AFTER)
        engine.destroy()
        engine = make(rank, case, block, scale=0.3)
        path, state = engine.load_checkpoint(place)
        assert path is not None
        assert state["mine"] == 7
        if train(engine, rank, case, BEFORE, AFTER) != expected:
            found.append(f"case {number}")
        engine.destroy()
    return found


@sampled("numbers", [[each] for each in range(len(CASES))], drawn=2)
def test_losses_after_a_resume_are_those_of_the_run_that_went_on(numbers: list[int], tmp_path: Path) -> None:
    for found in run_on_ranks(stop_and_go_on, 2, tmp_path, numbers, str(tmp_path / "saved")):
        assert not found


def tuned_and_resumed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    hurry()
    case = Case(2, 0, "fp32", 1, 2, True, expert="gpt")
    block = {"enabled": True, "autotune": {"enabled": True, "trials": 1}, "pipeline_degree": {"max": 3}}
    engine = make(rank, case, block)
    early = f"{folder}/early"
    train(engine, rank, case, 0, 1)
    engine.save_checkpoint(early)
    train(engine, rank, case, 1, 30)
    assert engine.fsmoe.autotune.trials is None
    engine.save_checkpoint(folder)
    plans = dict(engine.fsmoe.facts())
    expected = train(engine, rank, case, 31, AFTER)
    gradients = engine.fsmoe.reduction.reducer.plan
    engine.destroy()

    engine = make(rank, case, block, scale=0.3)
    engine.load_checkpoint(folder)
    same = dict(engine.fsmoe.facts()) == plans and engine.fsmoe.reduction.reducer.plan == gradients
    losses = train(engine, rank, case, 31, AFTER)
    measured = engine.fsmoe.autotune.result.num_measured
    engine.destroy()

    engine = make(rank, case, block)
    engine.load_checkpoint(early)
    train(engine, rank, case, 1, 4)
    measured_early = engine.fsmoe.autotune.result.num_measured
    engine.destroy()
    return {"same": same, "equal": losses == expected, "measured": measured, "early": measured_early}


def test_plans_are_taken_from_the_checkpoint_and_not_measured_again(tmp_path: Path) -> None:
    for found in run_on_ranks(tuned_and_resumed, 2, tmp_path, str(tmp_path / "saved")):
        assert found["same"]
        assert found["equal"]
        assert found["measured"] == 0
        # Saved before there was a plan, it has to be made.
        assert found["early"] > 0

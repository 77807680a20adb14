# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped goes on to the bit; plans and generators go on too. Checkpoints are DeepSpeed's, whoever wrote
them: stock to ours to stock goes on with the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch

BEFORE, AFTER = 3, 2
ENABLED = {"enabled": True}
CUT = {"enabled": True, "pipeline_degree": {"forward": 2, "backward": 3}}


class Run(NamedTuple):
    case: Case
    block: dict[str, Any] = ENABLED
    chain: tuple[str, ...] = ("stock", "ours", "stock")
    """Who trains first and saves, and who go on, each from what the one before has saved."""

    @property
    def draws(self) -> bool:
        """Whether what is drawn follows from what was drawn before. Stock DeepSpeed does not save its generators."""
        return "stock" not in self.chain


class WithDropout(nn.Module):
    """Draws from torch's generator in every forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(x), 0.2, self.training)


def make(rank: int, run: Run, who: str = "ours", scale: float = 1.0) -> Any:
    import deepspeed

    import ds_fsmoe

    torch.manual_seed(rank)
    model = SmallModel(run.case, rank)
    if run.draws:
        model.first = WithDropout(model.first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    blocks: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}}
    blocks["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
    initialize = deepspeed.initialize
    if who == "ours":
        initialize, blocks["fsmoe"] = ds_fsmoe.initialize, run.block
    config = run.case.ds_config(**blocks)
    return initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, rank: int, run: Run, first: int, steps: int) -> list[float]:
    dtype, losses = next(engine.module.parameters()).dtype, []
    for step in range(first * run.case.accumulation, (first + steps) * run.case.accumulation):
        if not run.draws:
            torch.manual_seed(step * 100 + rank)
        loss, _ = engine(*batch(step, rank, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def stop_and_go_on(rank: int, world_size: int, runs: list[Run], folder: str) -> list[str]:
    hurry()
    said = []
    for number, run in enumerate(runs):
        expected, keys = None, None
        for place, who in enumerate(run.chain):
            # From other weights than were saved, so that a load that did nothing would be seen.
            engine = make(rank, run, who, scale=0.3 if place else 1.0)
            keys = keys or list(engine.module.state_dict())
            assert list(engine.module.state_dict()) == keys
            if place:
                path, state = engine.load_checkpoint(f"{folder}/{number}/{place - 1}")
                assert path is not None
                assert state["mine"] == 7
            else:
                train(engine, rank, run, 0, BEFORE)
            engine.save_checkpoint(f"{folder}/{number}/{place}", client_state={"mine": 7})
            losses = train(engine, rank, run, BEFORE, AFTER)
            expected = expected or losses
            if losses != expected:
                said.append(f"{run}: {who}")
            engine.destroy()
    return said


STAGES = [Case(2, stage, k=1 + stage, use_residual=stage == 1) for stage in (0, 1, 2)]
STAGES += [Case(2, 1, "bf16", k=2), Case(2, 2, "bf16")]
# Over more than two ranks the last bits of a sum depend on where in a message it lies.
WHOLE = ENABLED | {"gradient_partition": {"mode": "off"}}


@sampled(
    ("world_size", "runs"),
    # Each stage, both precisions, and a residual.
    [
        (2, [Run(STAGES[each]) for each in (0, 1, 4)]),
        *((2, [Run(case)]) for case in STAGES),
        *((4, [Run(case, WHOLE)]) for case in STAGES),
    ],
    kept=[0],
)
def test_stock_to_ours_to_stock_goes_on_with_the_same_losses(world_size: int, runs: list[Run], tmp_path: Path) -> None:
    for said in run_on_ranks(stop_and_go_on, world_size, tmp_path, runs, str(tmp_path / "saved")):
        assert not said


TWICE = ("ours", "ours")
RESUMED = [
    Run(Case(2, 0, "fp32", 1, 2, True), CUT, TWICE),
    Run(Case(2, 1, "fp32", 2, 1, True), CUT, TWICE),
    Run(Case(2, 2, "bf16", 1, 2, False), CUT, TWICE),
    Run(Case(2, 0, k=2), CUT | {"gate": {"type": "deepseek", "k": 2, "bias_update_speed": 0.1}}, TWICE),
    Run(Case(2, 1, "bf16", k=2), {"enabled": True, "gate": {"type": "gshard", "k": 2, "noise": True}}, TWICE),
]


@pytest.mark.long
@sampled("run", RESUMED, drawn=2)
def test_losses_after_a_resume_are_those_of_the_run_that_went_on(run: Run, tmp_path: Path) -> None:
    for said in run_on_ranks(stop_and_go_on, 2, tmp_path, [run], str(tmp_path / "saved")):
        assert not said


def tuned_and_resumed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    hurry()
    tuned = {"enabled": True, "autotune": {"enabled": True, "trials": 1}, "pipeline_degree": {"max": 3}}
    run = Run(Case(2, k=2, expert="gpt"), tuned, TWICE)
    engine = make(rank, run)
    train(engine, rank, run, 0, 31)
    assert engine.fsmoe.autotune.trials is None
    engine.save_checkpoint(folder)
    plans = dict(engine.fsmoe.facts())
    expected = train(engine, rank, run, 31, AFTER)
    gradients = engine.fsmoe.reduction.reducer.plan
    engine.destroy()

    engine = make(rank, run, scale=0.3)
    engine.load_checkpoint(folder)
    same = dict(engine.fsmoe.facts()) == plans and engine.fsmoe.reduction.reducer.plan == gradients
    losses = train(engine, rank, run, 31, AFTER)
    measured = engine.fsmoe.autotune.result.num_measured
    engine.destroy()
    return {"same": same, "equal": losses == expected, "measured": measured}


@pytest.mark.long
def test_plans_are_taken_from_the_checkpoint_and_not_measured_again(tmp_path: Path) -> None:
    for found in run_on_ranks(tuned_and_resumed, 2, tmp_path, str(tmp_path / "saved")):
        assert found == {"same": True, "equal": True, "measured": 0}

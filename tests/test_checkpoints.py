# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are DeepSpeed's, whoever wrote them: stock to ours to stock goes on with the same losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, SmallModel, batch

STEPS_BEFORE, STEPS_AFTER = 2, 3


def make_engine(case: Case, rank: int, initialize: Any, block: dict | None, scale: float = 1.0) -> Any:
    model = SmallModel(case, rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    blocks = {} if block is None else {"fsmoe": block}
    # Adam, so that there is a state to lose; torch's own, so that nothing is compiled.
    blocks["optimizer"] = {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=case.ds_config(**blocks))
    return engine


def train(engine: Any, rank: int, first_step: int, steps: int) -> list[float]:
    losses = []
    for step in range(first_step, first_step + steps):
        x_BLM, target_BLM = batch(step, rank, next(engine.module.parameters()).dtype)
        torch.manual_seed(step * 100 + rank)
        loss, _ = engine(x_BLM, target_BLM)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def go_round(rank: int, world_size: int, cases: list[Case], folder: str) -> list[str]:
    import deepspeed

    import ds_fsmoe

    # Over more than two ranks the last bits of a sum depend on where in a message it lies.
    ours = {"enabled": True, "gradient_partition": {"mode": "off" if world_size > 2 else "auto"}}
    found = []
    for number, case in enumerate(cases):
        stock_to_ours, ours_to_stock = f"{folder}/{number}/a", f"{folder}/{number}/b"
        engine = make_engine(case, rank, deepspeed.initialize, None)
        train(engine, rank, 0, STEPS_BEFORE)
        engine.save_checkpoint(stock_to_ours)
        expected = train(engine, rank, STEPS_BEFORE, STEPS_AFTER)
        keys = list(engine.module.state_dict())
        engine.destroy()

        # Both start from other weights than were saved, so that a load that did nothing would be seen.
        engine = make_engine(case, rank, ds_fsmoe.initialize, ours, scale=0.3)
        assert list(engine.module.state_dict()) == keys
        assert engine.load_checkpoint(stock_to_ours)[0] is not None
        engine.save_checkpoint(ours_to_stock)
        if train(engine, rank, STEPS_BEFORE, STEPS_AFTER) != expected:
            found.append(f"{case}: stock to ours")
        engine.destroy()

        engine = make_engine(case, rank, deepspeed.initialize, None, scale=0.3)
        assert engine.load_checkpoint(ours_to_stock)[0] is not None
        if train(engine, rank, STEPS_BEFORE, STEPS_AFTER) != expected:
            found.append(f"{case}: ours to stock")
        engine.destroy()
    return found


CASES = [Case(stage=stage, k=1 + stage, use_residual=stage == 1) for stage in (0, 1, 2)]
CASES += [Case(stage=1, dtype="bf16", k=2), Case(stage=2, dtype="bf16", k=1)]
# Each stage, both precisions, and a residual.
SAMPLE = [CASES[0], CASES[1], CASES[4]]


@sampled(
    ("world_size", "ep_size", "cases"),
    [(2, 2, SAMPLE), *((world_size, 2, [case]) for world_size in (2, 4) for case in CASES)],
    kept=[0],
)
def test_stock_to_ours_to_stock_goes_on_with_the_same_losses(
    world_size: int, ep_size: int, cases: list[Case], tmp_path: Path
) -> None:
    cases = [replace(case, ep_size=ep_size) for case in cases]
    for found in run_on_ranks(go_round, world_size, tmp_path, cases, str(tmp_path / "checkpoints")):
        assert not found

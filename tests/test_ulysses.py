# SPDX-License-Identifier: Apache-2.0
"""With DeepSpeed's sequence parallelism (Ulysses) gradients stay with DeepSpeed, and training is what it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel, train_steps

SIZES = {"data_parallel_size": 1, "sequence_parallel_size": 2}


def train(rank: int, world_size: int) -> dict[str, Any]:
    import deepspeed

    import ds_fsmoe

    deepspeed.init_distributed("gloo")
    found: dict[str, Any] = {}
    for stage in (0, 1):
        case = Case(2, stage, "fp32", 1, 2, False, moe_options=(("top2_2nd_expert_sampling", False),))
        for system in ("stock", "ours"):
            model = SmallModel(case, rank)
            make = deepspeed.initialize if system == "stock" else ds_fsmoe.initialize
            block = {} if system == "stock" else {"fsmoe": {"enabled": True, "schedule": "fsmoe"}}
            config = case.ds_config(**SIZES, **block, train_batch_size=3)
            engine, *_ = make(model=model, model_parameters=list(model.parameters()), config=config)
            assert engine.sequence_parallel_size == 2
            losses = train_steps(engine, rank, range(3))
            weights = {name: each.detach().clone() for name, each in model.named_parameters()}
            found[f"{stage} {system}"] = losses, weights
            engine.destroy()
    return found


def test_parts_of_a_sequence_are_trained_as_stock_trains_them(tmp_path: Path) -> None:
    for found in run_on_ranks(train, 2, tmp_path):
        for stage in (0, 1):
            (stock_losses, stock), (losses, ours) = found[f"{stage} stock"], found[f"{stage} ours"]
            assert losses == pytest.approx(stock_losses, rel=1e-6)
            assert losses[0] != losses[-1]
            for name, theirs in stock.items():
                torch.testing.assert_close(ours[name], theirs, rtol=1e-6, atol=1e-7, msg=f"stage {stage}, {name}")

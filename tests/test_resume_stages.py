# SPDX-License-Identifier: Apache-2.0
"""A run in pipeline stages, or with tensor parallelism, that was stopped goes on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import BATCH
from tests.test_pipeline_stages import CHUNKED, Dense, WithExperts, batches

BEFORE, AFTER = 2, 2


def make(rank: int, zero_stage: int, kinds: tuple[str, str], scale: float = 1.0) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import ds_fsmoe

    deepspeed.init_distributed("gloo")
    made = [WithExperts(i, rank % 2) if kind == "moe" else Dense(i) for i, kind in enumerate(kinds)]
    layers = [each for i, layer in enumerate(made) for each in (layer, Dense(10 + i))]
    torch.manual_seed(0)
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 4096},
        "steps_per_print": 1_000_000,
        "fsmoe": CHUNKED,
    }
    return ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, rank: int, first: int, steps: int) -> list[float]:
    data = batches(rank % 2)
    for _ in range(2 * first):
        next(data)
    torch.manual_seed(first)
    return [engine.train_batch(data).item() for _ in range(steps)]


def stop_and_go_on(rank: int, world_size: int, zero_stage: int, kinds: tuple[str, str], folder: str) -> bool:
    hurry()
    engine = make(rank, zero_stage, kinds)
    train(engine, rank, 0, BEFORE)
    engine.save_checkpoint(folder)
    expected = train(engine, rank, BEFORE, AFTER)
    engine.destroy()
    engine = make(rank, zero_stage, kinds, scale=0.3)
    assert engine.load_checkpoint(folder)[0] is not None
    found = train(engine, rank, BEFORE, AFTER)
    engine.destroy()
    return found == expected


@sampled(("zero_stage", "kinds"), [(0, ("moe", "moe")), (1, ("moe", "moe")), (0, ("dense", "moe"))])
def test_pipeline_stages_go_on_to_the_bit(zero_stage: int, kinds: tuple[str, str], tmp_path: Path) -> None:
    assert all(run_on_ranks(stop_and_go_on, 4, tmp_path / "ranks", zero_stage, kinds, str(tmp_path / "saved")))

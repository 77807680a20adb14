# SPDX-License-Identifier: Apache-2.0
"""A run in pipeline stages that was stopped goes on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_pipeline_stages import CHUNKED, batches, make_engine

BEFORE, AFTER = 2, 2


def make(rank: int, zero_stage: int, kinds: tuple[str, str], scale: float = 1.0, **block: Any) -> Any:
    import deepspeed

    deepspeed.init_distributed("gloo")
    adam = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    return make_engine(rank, zero_stage, kinds, CHUNKED | block, clipping=0.0, optimizer=adam, scale=scale)


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
    # Numbers that are new in the config count, also beside a stage without layers.
    engine = make(rank, zero_stage, kinds, scale=0.3, pipeline_degree={"forward": 4, "backward": 2})
    engine.load_checkpoint(folder)
    torch.testing.assert_close(train(engine, rank, BEFORE, AFTER), expected, rtol=1e-4, atol=1e-5)
    assert {each.pipeline.forward.block.degree for each in engine.fsmoe.inner_layers.values()} <= {4}
    engine.destroy()
    return found == expected


@sampled(("zero_stage", "kinds"), [(0, ("moe", "moe")), (1, ("moe", "moe")), (0, ("dense", "moe"))])
def test_pipeline_stages_go_on_to_the_bit(zero_stage: int, kinds: tuple[str, str], tmp_path: Path) -> None:
    assert all(run_on_ranks(stop_and_go_on, 4, tmp_path / "ranks", zero_stage, kinds, str(tmp_path / "saved")))

# SPDX-License-Identifier: Apache-2.0
"""Models whose experts two, three and four ranks can share, under routing that is given, for tests of placement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tests.hf_families import batch, loss_of, model_of
from tests.sgd_engines import engine_of
from tests.test_alltoalls import on_nodes
from tests.test_moved_experts import adam

NUM_EXPERTS = 12
BALANCED = {"policy": "balanced", "every": 2, "moves_per_step": 1}


def skewed(engine: Any, x: torch.Tensor, hot: tuple[int, ...]) -> None:
    """Let the next forward choose these experts only, token by token in turn."""
    num_layers = engine.fsmoe.num_layers
    some = next(iter(engine.fsmoe.layers.values()))
    k = some.fsmoe.gate.k or 2
    tokens = np.arange(x.numel())
    chosen = np.stack([np.array(hot)[(tokens + at) % len(hot)] for at in range(k)], axis=1)
    engine.fsmoe.replay(np.repeat(chosen[:, None, :], num_layers, axis=1))


def trained(
    engine: Any, rank: int, steps: range, hot: tuple[int, ...] | None, world_size: int, accumulation: int = 1
) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(accumulation):
            x = batch(11 * step + micro, world_size)[rank : rank + 1]
            if hot is not None:
                skewed(engine, x, hot)
            loss = loss_of(engine, x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def made(stage: int, world_size: int, placement: Any, **more: Any) -> Any:
    config = adam(stage, **({"ep_size": world_size, "num_chunks": {"forward": 2, "backward": 3}} | more))
    if placement is not None:
        config["fsmoe"]["placement"] = placement
    with on_nodes(*(at * 2 // world_size for at in range(world_size))):
        return engine_of(model_of("qwen3_moe", num_experts=NUM_EXPERTS), config)

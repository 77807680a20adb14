# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks have the same tokens: gradients and their norm are those of one process, each counted once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.small_model import NUM_EXPERTS, Case, SmallModel, batch
from tests.tensor_parallel import begin
from tests.test_training_against_loop import LEARNING_RATE, LoopModel, global_name

CASE = Case(k=2, drop_tokens=False, moe_options=(("top2_2nd_expert_sampling", False), ("use_rts", False)))
LIMIT = 0.05
"""Below the norm, so that weights tell by what gradients were clipped."""
SPLIT = "first.weight"
"""A weight that says that each rank has a part of its own, which here are equal: it counts twice."""


def train(rank: int, world_size: int) -> list[dict[str, Any]]:
    """For experts on every rank, and spread over the ranks: a step of two ranks that have the same tokens."""
    import ds_fsmoe

    found = []
    for ep_size in (1, 2):
        case, mpu = replace(CASE, ep_size=ep_size), begin(2)
        model = SmallModel(case, rank)
        model.first.weight.tensor_model_parallel = True
        parameters = list(model.parameters())
        config = case.ds_config(fsmoe={"enabled": True}, gradient_clipping=LIMIT)
        engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=parameters, config=config, mpu=mpu)
        loss, _ = engine(*batch(0, 0, torch.float32))
        engine.backward(loss)
        first = rank % ep_size * (NUM_EXPERTS // ep_size)
        named = {global_name(name, first): parameter for name, parameter in model.named_parameters()}
        gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
        engine.step()
        weights = {name: parameter.detach() for name, parameter in named.items()}
        found.append({"norm": engine.get_global_grad_norm(), "gradients": gradients, "weights": weights})
        engine.destroy()
    return found


def test_gradients_norm_and_clipping_of_tensor_parallel_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    model = LoopModel(CASE)
    model(*batch(0, 0, torch.float64)).backward()
    gradients = {name: parameter.grad for name, parameter in model.whole.named_parameters()}
    weights = {name: parameter.detach() for name, parameter in model.whole.named_parameters()}
    squares = {name: gradient.square().sum().item() for name, gradient in gradients.items()}
    norm = (sum(squares.values()) + squares[SPLIT]) ** 0.5
    assert norm > 2 * LIMIT
    for of_rank in run_on_ranks(train, 2, tmp_path):
        for found in of_rank:
            assert found["norm"] == pytest.approx(norm, rel=1e-5)
            for name, gradient in found["gradients"].items():
                theirs = gradients[name]
                torch.testing.assert_close(gradient.double(), theirs, rtol=2e-5, atol=2e-6, msg=name)
                stepped = weights[name] - LEARNING_RATE * LIMIT / norm * theirs
                torch.testing.assert_close(found["weights"][name].double(), stepped, rtol=2e-5, atol=2e-6, msg=name)

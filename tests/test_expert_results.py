# SPDX-License-Identifier: Apache-2.0
"""``debug.check_results``: the expert that made nan or infinity is named on every rank, before a step with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.small_model import Case, small_engine, train_steps


def make(rank: int, case: Case, esp: int, checked: bool = True, **blocks: Any) -> Any:
    block = {"esp_size": esp, "pipeline_degree": {"forward": 3, "backward": 2}, "debug": {"check_results": checked}}
    return small_engine(case, rank, block, **blocks)


def spoil(engine: Any, layer: int, expert: int, value: float) -> None:
    """On the ranks that have this expert."""
    here = engine.fsmoe.expert_results._here[f"moes.{layer}"].tolist()
    if expert in here:
        modules = list(engine.module.moes[layer].deepspeed_moe.experts.deepspeed_experts)
        with torch.no_grad():
            next(modules[here.index(expert)].parameters())[0, 0] = value


def find(rank: int, world_size: int, ep: int, esp: int, stage: int) -> dict[str, Any]:
    from ds_fsmoe.checks.expert_results import ExpertResultError

    hurry()
    case = Case(ep_size=ep, stage=stage, k=2, drop_tokens=False, expert="gpt")
    losses = []
    for checked in (False, True):
        engine = make(rank, case, esp, checked)
        torch.manual_seed(0)
        losses.append(train_steps(engine, rank, range(2)))
        if not checked:
            engine.destroy()
    spoil(engine, 1, 2, float("nan"))
    weights = engine.module.first.weight.detach().clone()
    with pytest.raises(ExpertResultError) as caught:
        train_steps(engine, rank, [2])
    unchanged = torch.equal(engine.module.first.weight, weights)
    with torch.no_grad():
        engine.module.first.weight[0, 0] = float("inf")
    with pytest.raises(ExpertResultError) as given:
        train_steps(engine, rank, [3])
    engine.destroy()
    return {
        "same": losses[0] == losses[1],
        "unchanged": unchanged,
        "said": str(caught.value),
        "given": str(given.value),
    }


@sampled(("world_size", "ep", "esp", "stage"), [(2, 2, 1, 0), (2, 1, 2, 1), (4, 2, 2, 2)])
def test_layer_and_expert_are_named_on_every_rank_before_the_step(
    world_size: int, ep: int, esp: int, stage: int, tmp_path: Path
) -> None:
    outcomes = run_on_ranks(find, world_size, tmp_path, ep, esp, stage)
    assert all(each == outcomes[0] for each in outcomes)
    found = outcomes[0]
    assert found["same"]
    assert found["unchanged"]
    assert found["said"].startswith("moes.1, step 2: expert 2 returned nan or infinity for finite rows")
    assert found["given"].startswith("moes.0, step 2: the input of the experts has nan or infinity")


def overflow(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    from ds_fsmoe.checks import expert_results

    hurry()
    type(get_accelerator()).is_fp16_supported = lambda self: True
    told: list[str] = []
    expert_results.log_on_rank_0 = lambda text, *_, **__: told.append(text)
    case = Case(ep_size=2, stage=stage, dtype="fp16", k=2)
    engine = make(rank, case, 1, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    train_steps(engine, rank, [0])
    before = engine.module.first.weight.detach().clone()
    expert = engine.module.moes[0].deepspeed_moe.experts.deepspeed_experts[1]
    kept = expert.fc1.weight.detach().clone()
    if rank == 1:  # expert 3
        expert.fc1.weight.data.fill_(6e4)
    train_steps(engine, rank, [1])
    skipped = engine.skipped_steps, torch.equal(engine.module.first.weight, before)
    expert.fc1.weight.data.copy_(kept)
    (last,) = train_steps(engine, rank, [2])
    weights = engine.module.first.weight.detach().float()
    engine.destroy()
    return {"told": told, "skipped": skipped, "last": last, "weights": weights.tolist(), "before": before.tolist()}


@sampled("stage", [1, 2])
def test_an_overflow_with_fp16_is_told_and_the_step_left_out_on_all_ranks(stage: int, tmp_path: Path) -> None:
    first, second = run_on_ranks(overflow, 2, tmp_path, stage)
    for found in (first, second):
        assert found["skipped"] == (1, True)
        assert found["told"] == ["moes.0, step 1: expert 3 returned nan or infinity for finite rows"]
        assert found["last"] == found["last"]
        assert found["weights"] != found["before"]
    assert first["weights"] == second["weights"]

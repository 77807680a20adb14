# SPDX-License-Identifier: Apache-2.0
"""Who builds a model of our layers and goes through none of the doors is told so, once, and pays for it once."""

from __future__ import annotations

import logging
from pathlib import Path

import deepspeed
import torch

import ds_fsmoe
from tests.logged import Said
from tests.ranks import run_on_ranks
from tests.small_model import BATCH, LENGTH, WIDTH, Case, SmallModel


def warnings_of_engines(rank: int, world_size: int) -> dict[str, int]:
    """What was done -> how often the warning had been heard by then."""
    said = Said(logging.WARNING)
    logging.getLogger("ds_fsmoe").addHandler(said)
    heard: dict[str, int] = {}

    def note(when: str) -> None:
        heard[when] = sum("by an engine of DeepSpeed's own" in line for line in said.lines)

    def engine_of(initialize, moe_class: type, **blocks) -> deepspeed.DeepSpeedEngine:
        case = Case(ep_size=world_size)
        model = SmallModel(case, rank, moe_class)
        return initialize(model=model, model_parameters=model.parameters(), config=case.ds_config(**blocks))[0]

    x = torch.randn(BATCH, LENGTH, WIDTH)
    engine_of(ds_fsmoe.initialize, ds_fsmoe.MoE, fsmoe={"enabled": True, "ops": "reference"})(x, x)
    note("through a door")
    engine_of(ds_fsmoe.initialize, ds_fsmoe.MoE, fsmoe={"enabled": False})(x, x)
    note("through a door, disabled")
    engine_of(deepspeed.initialize, deepspeed.moe.layer.MoE)(x, x)
    note("layers of DeepSpeed's")
    engine = engine_of(deepspeed.initialize, ds_fsmoe.MoE)
    engine.eval()
    with torch.no_grad():
        engine(x, x)
    note("no door, evaluated")
    engine.train()
    engine(x, x)
    note("no door, trained")
    checks = [each.deepspeed_moe.fsmoe.checks for each in engine.module.moes]
    heard["checks left"] = sum(map(len, checks))
    engine(x, x)
    engine_of(deepspeed.initialize, ds_fsmoe.MoE)(x, x)
    note("no door, trained on")
    return heard


def test_training_without_a_door_is_warned_of_once_and_on_the_first_rank(tmp_path: Path) -> None:
    first, second = run_on_ranks(warnings_of_engines, 2, tmp_path)
    assert first == {
        "through a door": 0,
        "through a door, disabled": 0,
        "layers of DeepSpeed's": 0,
        "no door, evaluated": 0,
        "no door, trained": 1,
        "checks left": 0,
        "no door, trained on": 1,
    }
    assert set(second.values()) == {0}


def test_a_layer_without_any_engine_is_nobodys_mistake() -> None:
    layer = ds_fsmoe.MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), num_experts=4)
    layer(torch.randn(5, WIDTH))
    assert layer.deepspeed_moe.fsmoe.checks == []

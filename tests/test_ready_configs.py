# SPDX-License-Identifier: Apache-2.0
"""Every ready config works: the block is read, DeepSpeed accepts the rest, and a layer takes a step by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ds_fsmoe.config.reading import read_block
from ds_fsmoe.config.schema import schema
from ds_fsmoe.planning.decide.presets import PRESETS
from ds_fsmoe.registry import known, lookup
from tests.hurry import hurry
from tests.ranks import run_on_ranks

FOLDER = Path(__file__).resolve().parents[1] / "ds_configs"
FILES = sorted(each for each in FOLDER.glob("*.json") if each.stem != "ds_config.schema")


def test_there_is_one_for_each_gate_preset_and_stage_with_a_block_that_is_read_and_the_schema_of_this_version() -> None:
    for file in FILES:
        config = json.loads(file.read_text())
        assert read_block(config).enabled
        assert config.get("$schema", "./ds_config.schema.json") == "./ds_config.schema.json"
        assert f"`{file.name}`" in (FOLDER / "README.md").read_text()
    names = {each.stem for each in FILES}
    presets = schema()["properties"]["fsmoe"]["properties"]["schedule"]["enum"]
    # Other tests may have put gates of their own on the shelf.
    gates = [each for each in known("gate") if lookup("gate", each).__module__.startswith("ds_fsmoe.")]
    assert {f"gate_{each}" for each in gates} <= names
    assert {f"preset_{each}" for each in presets} <= names
    assert {"zero0", "zero1", "zero2", "bf16", "fp16", "cpu", "minimal"} <= names
    assert json.loads((FOLDER / "ds_config.schema.json").read_text()) == json.loads(json.dumps(schema()))


def step_by_each(rank: int, world_size: int, names: list[str]) -> dict[str, str]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.moe.layer import MoE

    import ds_fsmoe

    hurry()
    type(get_accelerator()).is_fp16_supported = lambda self: True
    found = {}
    for name in names:
        config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        # What needs a GPU, or a machine of several nodes.
        config["optimizer"]["params"]["torch_adam"] = True
        block = config["fsmoe"]
        block["expert_tensor_parallel_size"] = min(block.get("expert_tensor_parallel_size", 1), 2)
        if block.pop("autotune", None):
            block.pop("num_chunks", None)
        schedule = block.get("schedule")
        if schedule in PRESETS and PRESETS[schedule]().pipeline == "per_phase":
            block["num_chunks"] = {"forward": 2, "backward": 3}
        torch.manual_seed(0)
        expert = ds_fsmoe.GPTFeedForward(16, 32)
        ep_size = world_size // block["expert_tensor_parallel_size"]
        model = MoE(16, expert, num_experts=8, ep_size=ep_size, k=2)
        engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        x_SM = torch.randn(24, 16, dtype=next(model.parameters()).dtype)
        y_SM, aux_loss, _ = engine(x_SM)
        engine.backward(y_SM.float().square().mean() + 0.01 * aux_loss)
        engine.step()
        found[name] = "finite" if torch.isfinite(y_SM).all() else "not finite"
        engine.destroy()
    return found


def test_a_layer_takes_a_step_by_each(tmp_path: Path) -> None:
    names = [each.stem for each in FILES if not each.stem.startswith("gpt_moe_small")]
    for found in run_on_ranks(step_by_each, 2, tmp_path, names):
        assert found == dict.fromkeys(names, "finite")

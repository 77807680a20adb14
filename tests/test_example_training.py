# SPDX-License-Identifier: Apache-2.0
"""The main job as a user launches it, small: both kinds of layer learn the same, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_doors import launch

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "--width",
    "26",
    "--heads",
    "2",
    "--layers",
    "2",
    "--seq-len",
    "31",
    "--num-experts",
    "4",
    "--eval-batches",
    "4",
]


def main_job(folder: Path, moe: str, config: str, steps: int = 25) -> dict:
    """What the main job measured."""
    metrics, checkpoints = folder / f"{moe}.json", folder / f"checkpoints_{moe}"
    arguments = [str(ROOT / "examples/train.py"), "--deepspeed_config", str(ROOT / "ds_configs" / config), "--moe", moe]
    arguments += [*SMALL, "--steps", str(steps), "--metrics", str(metrics), "--save-dir", str(checkpoints)]
    said = launch(folder, *arguments)
    assert ("ds_fsmoe 0.1.0 is on for 2 MoE layer(s)" in said) == (moe == "fsmoe")
    tag = (checkpoints / "latest").read_text()
    written = {file.name for file in (checkpoints / tag).iterdir()}
    experts = {f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt" for layer in range(2) for e in range(4)}
    assert experts < written
    assert "mp_rank_00_model_states.pt" in written
    return json.loads(metrics.read_text())


@pytest.mark.parametrize("config", ["gpt_moe_small.json", "gpt_moe_small_bf16_zero2.json"])
def test_the_main_job_learns_and_equals_stock(config: str, tmp_path: Path) -> None:
    stock, ours = (main_job(tmp_path, moe, config) for moe in ("deepspeed", "fsmoe"))
    assert len(ours["losses"]) == 25
    assert ours["losses"] == stock["losses"]
    assert ours["validation_last"] == stock["validation_last"]
    assert ours["validation_last"] < 0.8 * ours["validation_first"]
    assert ours["moe"] == "ds_fsmoe, 2 layers"
    assert ours["chosen"]["gate"] == "topk, k = 2, capacity factor 1.25"
    assert stock["chosen"] == {}

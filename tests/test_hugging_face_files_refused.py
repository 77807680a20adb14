# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of another Hugging Face model are refused on all ranks, before anything of the model has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files.tags import CheckpointError
from tests import hf_families
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import ds_config, engine_of

WEIGHTS, MODULE = {"load_optimizer_states": False}, {"load_module_only": True}
LAX = WEIGHTS | {"load_module_strict": False}
# What the model has otherwise than the one that was saved (a smaller one could take the beginning of each piece), how
# it is loaded, and what the error says.
OTHERS: list[tuple[str, dict[str, int], dict[str, bool], str]] = [
    (
        "qwen3_moe",
        {"moe_intermediate_size": 16},
        {},
        r"experts.gate_up_proj has shape \[4, 48, 32\] there and \[4, 32, 32\]",
    ),
    ("qwen3_moe", {"moe_intermediate_size": 16}, WEIGHTS, r"experts.gate_up_proj has shape \[4, 48, 32\] there"),
    ("qwen3_moe", {"moe_intermediate_size": 32}, LAX, r"experts.gate_up_proj has shape \[4, 48, 32\] there"),
    ("qwen3_moe", {"vocab_size": 64}, MODULE, r"embed_tokens.weight has shape \[128, 32\] there and \[64, 32\] here"),
    (
        "qwen3_moe",
        {"num_experts": 8},
        WEIGHTS,
        "has 4 experts in model.layers.0.mlp.experts.gate_up_proj, and the model",
    ),
    ("qwen3_moe", {"num_hidden_layers": 3}, {}, "parameters with optimizer states in the job only: model.layers.2"),
    ("qwen3_moe", {"num_hidden_layers": 3}, WEIGHTS, "model.layers.2.* is here and not there"),
    ("qwen3_moe", {"num_hidden_layers": 1}, MODULE, "model.layers.1.* is there and not here"),
    ("olmoe", {}, {}, "was saved from another model: "),
]


def make(family: str, sizes: dict[str, int], stage: int) -> Any:
    config = hf_families.config_of(family)
    for name, value in sizes.items():
        setattr(config, name, value)
    ds = ds_config(stage, ep_size=2)
    ds["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    return engine_of(hf_families._class_of(family, config)(config).float(), ds)


def load_others(rank: int, world_size: int, folder: str, saved: int, stages: list[int], every: int) -> list[str]:
    import ds_fsmoe

    said = []
    engine = make("qwen3_moe", {}, saved)
    engine.save_checkpoint(folder)
    engine.destroy()
    for stage in stages:
        for family, sizes, options, error in OTHERS[::every]:
            engine = make(family, sizes, stage)
            before = ds_fsmoe.whole_state_dict(engine)
            with pytest.raises(CheckpointError, match=error):
                engine.load_checkpoint(folder, **options)
            after = ds_fsmoe.whole_state_dict(engine)
            changed = [] if before is None else [name for name in before if not torch.equal(before[name], after[name])]
            said += [f"{family} {sizes} {options} from {saved} to {stage}: {each}" for each in changed]
            engine.destroy()
    return said


@sampled(
    ("saved", "stages", "every"),
    [(3, [3], 3), (3, [0, 3], 1), (2, [2, 3], 1), (0, [0, 3], 1)],
    kept=[0],
)
def test_a_checkpoint_of_another_model_changes_nothing(
    saved: int, stages: list[int], every: int, tmp_path: Path
) -> None:
    found = run_on_ranks(load_others, 2, tmp_path, str(tmp_path / "saved"), saved, stages, every)
    assert [each for of_rank in found for each in of_rank] == []

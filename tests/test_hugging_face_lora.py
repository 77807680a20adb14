# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's models with PEFT's LoRA train as they do on one process, at every stage of ZeRO."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.hf_families import batch
from tests.hf_lora import (
    BOTH,
    differing_gradients,
    differing_weights,
    engine_with,
    lora_of,
    losses_of,
    step,
    train,
)
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import TOLERANCE, ds_config

Case = tuple[str, tuple[str, ...], dict[str, Any]]
# Attention alone, both weights, one of them; transposed, interleaved and biased weights (gpt_oss), plain ones
# (nemotron_h), a scaling of another kind, ranks that no grouped product takes, adapters of the last layer alone.
CASES: list[Case] = [
    ("olmoe", (), {}),
    ("olmoe", BOTH, {"use_rslora": True}),
    ("gpt_oss", BOTH, {"r": 3}),
    ("gpt_oss", ("down",), {"target_modules": []}),
    ("nemotron_h", BOTH, {}),
    ("qwen3_moe", ("up",), {}),
    ("mixtral", BOTH, {"target_modules": [], "rank_pattern": {"down_proj": 2}, "modules_to_save": ["lm_head"]}),
]


def gradients(rank: int, world_size: int, cases: list[Case], stage: int, degrees: dict[str, int]) -> list[str]:
    said = []
    for family, weights, options in cases:
        reference = lora_of(family, weights, **options)
        engine = engine_with(copy.deepcopy(reference), ds_config(stage, num_chunks=degrees))
        x = batch(3, world_size)
        losses = losses_of(reference, x)
        torch.stack(losses).mean().backward()
        loss = step(engine, x, rank)
        differs = list(differing_gradients(engine, reference))
        if not abs(loss - losses[rank].item()) <= TOLERANCE * losses[rank].item():
            differs.append(f"loss {loss} for {losses[rank].item()}")
        if any(each.deepspeed_moe.fsmoe.own_forward is not None for each in engine.fsmoe.layers.values()):
            differs.append("not all layers are written out")
        said += [f"{family} {weights}: {each}" for each in differs]
        engine.destroy()
    return said


@sampled(("stage", "forward", "backward"), [(0, 1, 1), (1, 2, 2), (2, 3, 2), (3, 2, 3)], kept=[2])
def test_adapters_have_the_losses_and_gradients_of_one_process(
    stage: int, forward: int, backward: int, tmp_path: Path
) -> None:
    degrees = {"forward": forward, "backward": backward}
    found = run_on_ranks(gradients, 2, tmp_path, CASES, stage, degrees)
    assert [each for of_rank in found for each in of_rank] == []


def five_steps(rank: int, world_size: int, cases: list[Case], stage: int, every: bool) -> list[str]:
    said = []
    for family, weights, options in cases:
        reference = lora_of(family, weights, **options)
        config = ds_config(stage, lr=0.3, ep_size=2, num_chunks=2)
        engine = engine_with(copy.deepcopy(reference), config, every)
        said += [f"{family}: {each}" for each in train(engine, reference, rank, world_size, 5, 0.3)]
        said += [f"{family}: {each}" for each in differing_weights(engine, reference)]
        if stage == 3 and any(each.numel() for each in engine.module.parameters()):
            said.append(f"{family}: weights were left whole")
        engine.destroy()
    return said


@sampled("stage", [0, 1, 2, 3], kept=[3])
def test_weights_after_five_steps_are_those_of_one_process_with_replicas_of_experts(stage: int, tmp_path: Path) -> None:
    cases = [("olmoe", BOTH, {}), ("gpt_oss", ("up",), {}), ("olmoe", (), {})]
    found = run_on_ranks(five_steps, 4, tmp_path, cases, stage, stage in (0, 2))
    assert [each for of_rank in found for each in of_rank] == []

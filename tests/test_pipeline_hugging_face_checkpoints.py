# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models in pipeline stages go on from their checkpoints, to the bit or within other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_pipeline_hugging_face import CHUNKED, STEPS, Case, batches, config_for, engine_of, layers_of

pytestmark = pytest.mark.long


def stop_and_go_on(rank: int, world_size: int, cases: list[Case], folder: str) -> list[str]:
    """How a run that was stopped goes on otherwise than one that was not."""
    import deepspeed

    import ds_fsmoe

    deepspeed.init_distributed("gloo")
    said = []
    for number, (kinds, num_stages, accumulation, zero_stage, block, clipping) in enumerate(cases):
        config = config_for(accumulation, zero_stage, clipping, block)
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
        layers = layers_of(kinds, world_size // num_stages)
        engine = engine_of(layers, num_stages, config)
        data = batches(engine.grid.data_parallel_id)
        losses = [engine.train_batch(data).item() for _ in range(STEPS)]
        engine.save_checkpoint(f"{folder}/{number}")
        saved = ds_fsmoe.whole_state_dict(engine) or {}
        wanted = [engine.train_batch(data).item() for _ in range(2)]
        engine.destroy()
        layers = layers_of(kinds, world_size // num_stages)
        with torch.no_grad():
            for layer in layers:
                for each in layer.parameters():
                    each.mul_(0.5)
        engine = engine_of(layers, num_stages, config)
        data = batches(engine.grid.data_parallel_id)
        for _ in range(STEPS * accumulation):
            next(data)
        if engine.load_checkpoint(f"{folder}/{number}")[0] is None:
            said.append(f"{kinds}: nothing was loaded")
        loaded = ds_fsmoe.whole_state_dict(engine) or {}
        said += [f"{kinds}: {name} was not kept" for name in saved if not torch.equal(saved[name], loaded[name])]
        found = [engine.train_batch(data).item() for _ in range(2)]
        engine.destroy()
        if found != wanted or losses[0] in found:
            said.append(f"{kinds}, ZeRO {zero_stage}: losses {found} for {wanted}")
    return said


@sampled(
    "cases",
    [
        [(("olmoe", "mixtral of 8"), 2, 2, 0, {"enabled": True}, 0.5)],
        [(("dense", "olmoe"), 2, 1, 1, {"enabled": True}, 0.5), (("olmoe", "dense"), 2, 2, 0, CHUNKED, 0.5)],
        [(("slots", "olmoe"), 2, 2, stage, CHUNKED, 0.0) for stage in (0, 1)],
        [(("olmoe", "dense", "olmoe", "mixtral", "olmoe", "dense"), 4, 2, 1, CHUNKED, 0.5)],
    ],
    kept=[0],
    ids=str,
)
def test_stages_that_were_stopped_go_on_to_the_bit(cases: list[Case], tmp_path: Path) -> None:
    found = run_on_ranks(stop_and_go_on, 4, tmp_path / "ranks", cases, str(tmp_path / "saved"))
    assert [each for of_rank in found for each in of_rank] == []


def move(rank: int, world_size: int, folder: str, blocks: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """How a run that moved to another layout within its stages goes on otherwise than one that stayed."""
    import deepspeed

    import ds_fsmoe

    deepspeed.init_distributed("gloo")
    kinds, accumulation, said = ("olmoe", "dense", "mixtral of 8", "dense"), 2, []
    config = config_for(accumulation, 0, 0.5, {"enabled": True, "autotune": False})
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    engine = engine_of(layers_of(kinds), 2, config)
    data = batches(engine.grid.data_parallel_id)
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "whole.bin")
    saved = ds_fsmoe.whole_state_dict(engine) or {}
    wanted = [engine.train_batch(data).item() for _ in range(2)]
    engine.destroy()
    for zero_stage, block in blocks:
        moved = config | {"zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 4096}}
        moved["fsmoe"] = config["fsmoe"] | block
        layers = layers_of(kinds)
        with torch.no_grad():
            for layer in layers:
                for each in layer.parameters():
                    each.mul_(0.5)
        engine = engine_of(layers, 2, moved)
        data = batches(engine.grid.data_parallel_id)
        for _ in range(STEPS * accumulation):
            next(data)
        engine.load_checkpoint(folder)
        loaded = ds_fsmoe.whole_state_dict(engine) or {}
        said += [f"{block}: {name} was not kept" for name in saved if not torch.equal(saved[name], loaded[name])]
        found = [engine.train_batch(data).item() for _ in range(2)]
        engine.destroy()
        if not torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=0.0):
            said.append(f"{block}: losses {found} for {wanted}")
    if rank == 0:
        written = torch.load(f"{folder}/whole.bin")
        said += [f"{name} differs in whole.bin" for name in saved if not torch.equal(written[name], saved[name])]
        assert written.keys() == nn.Sequential(*layers_of(kinds)).state_dict().keys()
    return said


@pytest.mark.slow
def test_a_checkpoint_moves_to_other_ranks_within_its_stages(tmp_path: Path) -> None:
    blocks = [(0, {"ep_size": 1}), (1, {}), (1, {"ep_size": 1})]
    for rank, said in enumerate(run_on_ranks(move, 4, tmp_path / "ranks", str(tmp_path / "saved"), blocks)):
        assert not said, f"rank {rank}: {said}"

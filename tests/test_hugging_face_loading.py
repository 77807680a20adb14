# SPDX-License-Identifier: Apache-2.0
"""Models come from Hugging Face's files with this rank's experts only, their weights right at every stage of ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.hf_families import batch, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.test_hugging_face import ds_config, engine_of, own_part


def saved(family: str, folder: Path, is_stacked: bool = False) -> str:
    """Write a tiny model in several shards, as transformers does it, or with stacked experts."""
    model = model_of(family)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size="40KB", save_original_format=not is_stacked)
    return str(folder)


def whole_of(folder: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def wrong_weights(engine: Any, whole: nn.Module, ep_size: int, ep_rank: int) -> list[str]:
    """Names of the parameters of an engine that are not those of the whole model."""
    import deepspeed

    wanted, said = dict(whole.named_parameters()), []
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            value = parameter.detach().clone().float()
        part = own_part(wanted[name].detach(), value.shape, ep_rank)
        if value.shape != part.shape or not torch.equal(value, part):
            said.append(f"{name}: {list(value.shape)}, wanted {list(part.shape)}")
    return said


def loaded(rank: int, world_size: int, folders: list[str], stage: int, ep_size: int, by: str) -> list[str]:
    """What is wrong with models loaded by ``from_pretrained``, up to a step."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    import ds_fsmoe

    said = []
    for folder in folders:
        whole = whole_of(folder)
        config = ds_config(stage, ep_size=ep_size)
        if by == "context":
            with ds_fsmoe.own_experts(config):
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        else:
            ds_fsmoe.install()
            kept = HfDeepSpeedConfig(config)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        engine = engine_of(model, config)
        said += [f"{folder}: {each}" for each in wrong_weights(engine, whole, ep_size, rank % ep_size)]
        x = batch(3, world_size)[rank : rank + 1]
        whole.set_experts_implementation("eager")
        found, wanted = loss_of(engine, x), loss_of(whole, x)
        if abs(found.item() - wanted.item()) > 1e-5 * abs(wanted.item()):
            said.append(f"{folder}: loss {found.item()} for {wanted.item()}")
        engine.backward(found)
        engine.step()
        engine.destroy()
        if by != "context":
            del kept
            ds_fsmoe.uninstall()
    return said


@sampled(("stage", "by"), [(0, "context"), (1, "install"), (2, "install"), (3, "context"), (3, "install")], kept=[0, 4])
def test_a_model_from_files_has_the_weights_of_the_whole_one(stage: int, by: str, tmp_path: Path) -> None:
    folders = [
        saved(each, tmp_path / f"{each}{is_stacked}", is_stacked)
        for each in ("mixtral", "qwen3_moe", "gpt_oss")
        for is_stacked in (False, True)
    ]
    found = run_on_ranks(loaded, 2, tmp_path / "ranks", folders, stage, 2, by)
    assert [each for of_rank in found for each in of_rank] == []

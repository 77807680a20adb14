# SPDX-License-Identifier: Apache-2.0
"""Models come from Hugging Face's files with this rank's experts only, their weights right at every stage of ZeRO."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.hf_families import batch, loss_of, model_of
from tests.live_memory import LiveMemory
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config, engine_of
from tests.test_hugging_face import off_loss, own_part

FORMS = ("one by one", "stacked")


def saved(family: str, folder: Path, form: str, model: nn.Module | None = None) -> str:
    """Write a model in several shards: as transformers does it, or as it is in memory."""
    model = model_of(family) if model is None else model
    folder = folder / f"{family} {form}"
    folder.mkdir(parents=True)
    model.save_pretrained(folder, max_shard_size="40KB", save_original_format=form == FORMS[0])
    assert len(list(folder.glob("*.safetensors"))) > 1
    return str(folder)


def from_files(folder: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def values_of(parameter: nn.Parameter) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def wrong_weights(model: nn.Module, whole: nn.Module, ep_rank: int) -> list[str]:
    """Names of the parameters of a model that are not those of the whole one, of experts this rank's."""
    wanted = {name: each.detach() for name, each in whole.named_parameters()}
    found = {name: values_of(each) for name, each in model.named_parameters()}
    parts = {name: own_part(wanted[name], each.shape, ep_rank) for name, each in found.items()}
    if {name for name in wanted if parts[name].shape != wanted[name].shape} != {
        name for name in wanted if ".experts." in name and name.endswith(("_proj", "_bias"))
    }:
        return ["not the experts are cut, or not them alone"]
    return [name for name, each in found.items() if not torch.equal(each, parts[name])]


class Loading:
    """``with Loading(by, config):`` makes a block known in one of the ways that there are."""

    def __init__(self, by: str, config: dict[str, Any]) -> None:
        self.by, self.config = by, config

    def __enter__(self) -> None:
        from transformers.integrations import HfDeepSpeedConfig

        import ds_fsmoe

        # Transformers holds it weakly.
        self.is_known = ds_fsmoe.own_experts(self.config) if "context" in self.by else None
        if self.is_known is not None:
            self.is_known.__enter__()
        elif "install" in self.by:
            ds_fsmoe.install(self.config["fsmoe"] if "outside" in self.by else None)
        if "Trainer" in self.by:
            others = {name: each for name, each in self.config.items() if name != "fsmoe" or "outside" not in self.by}
            self.kept = HfDeepSpeedConfig(others)

    def __exit__(self, *error: Any) -> None:
        import ds_fsmoe

        ds_fsmoe.uninstall() if self.is_known is None else self.is_known.__exit__(*error)


def loaded(rank: int, world_size: int, folder: str, stage: int, by: str) -> list[str]:
    """What is wrong with a model from files: its weights, before and in an engine, and its loss."""
    config, whole = ds_config(stage, ep_size=world_size), from_files(folder)
    with Loading(by, config):
        model = from_files(folder)
    said = wrong_weights(model, whole, rank)
    engine = engine_of(model, config)
    in_engine = {name: values_of(each) for name, each in engine.module.named_parameters()}
    said += [
        f"in an engine {name}" for name, each in whole.named_parameters() if not torch.equal(in_engine[name], each)
    ]
    x = batch(3, world_size)[rank : rank + 1]
    whole.set_experts_implementation("eager")
    found = loss_of(engine, x)
    said += off_loss(found, loss_of(whole, x))
    engine.backward(found)
    engine.step()
    engine.destroy()
    return said


class InMemory(LiveMemory):
    """Counts storages but those that are mapped from files: these the system may drop at any time."""

    def size_of(self, storage: torch.UntypedStorage) -> int:
        if not storage.nbytes() or storage.device.type == "meta":
            return 0
        with open("/proc/self/maps") as file:
            mapped = [line.split()[0].split("-") for line in file if line.rstrip().endswith(".safetensors")]
        at = storage.data_ptr()
        return 0 if any(int(first, 16) <= at < int(end, 16) for first, end in mapped) else storage.nbytes()


class CountedReads:
    """Stands for ``safetensors.safe_open``: counts the bytes of what is read of experts."""

    num_bytes = 0

    def __init__(self, file: str, **options: Any) -> None:
        from safetensors import safe_open

        self._opened = safe_open(file, **options)

    def __enter__(self) -> CountedReads:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> list[str]:
        return self._opened.keys()

    def get_slice(self, name: str) -> Any:
        return _Slice(self._opened.get_slice(name)) if ".experts." in name else self._opened.get_slice(name)


class _Slice:
    def __init__(self, source: Any) -> None:
        self._source = source
        self.get_shape, self.get_dtype = source.get_shape, source.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self._source[index]
        CountedReads.num_bytes += found.nbytes
        return found


def measured(world_size: int, folder: str, stage: int, by: str) -> dict[str, int]:
    """Of a model from files: the peak of tensors in memory and what is read of experts, in bytes."""
    from transformers import modeling_utils

    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # or other threads make tensors too
    CountedReads.num_bytes = 0
    theirs, modeling_utils.safe_open = modeling_utils.safe_open, CountedReads
    with Loading(by, ds_config(stage, ep_size=world_size)), InMemory() as memory:
        model = from_files(folder)
    modeling_utils.safe_open = theirs
    del model
    return {"peak": memory.peak, "read": CountedReads.num_bytes}


def whole_and_in_parts(rank: int, world_size: int, folder: str, big: str, stage: int, by: str) -> Any:
    """What is wrong with a model from files, and of a big one what it takes; and that of one without ours."""
    said = loaded(rank, world_size, folder, stage, by)
    return said, measured(world_size, big, stage, by), measured(world_size, big, stage, "")


WAYS = [(0, "context"), (0, "install, Trainer"), (1, "install from outside"), (2, "install, Trainer")]
WAYS += [(3, "context"), (3, "context, Trainer"), (3, "install from outside, Trainer")]


FAMILY = dict(zip(FORMS, ("mixtral", "gpt_oss"), strict=True))
"""The experts of the second have biases."""


@sampled(("stage", "by", "form"), [(*way, form) for way in WAYS for form in FORMS])
def test_a_rank_has_right_weights_and_never_more_than_its_experts_the_dense_part_and_one_tensor(
    stage: int, by: str, form: str, tmp_path: Path
) -> None:
    # Most of it is experts.
    model = model_of("qwen3_moe", num_hidden_layers=6, num_experts=8, moe_intermediate_size=64)
    sizes = {name: each.nbytes for name, each in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    dense = sum(sizes.values()) - experts
    assert experts > 6 * max(sizes.values())
    assert experts > 4 * dense
    folder, big = saved(FAMILY[form], tmp_path, form), saved("big", tmp_path, form, model)
    most = experts // 2 + dense + max(sizes.values())
    for said, ours, without in run_on_ranks(whole_and_in_parts, 2, tmp_path / "ranks", folder, big, stage, by):
        assert said == []
        assert ours["read"] == experts // 2
        assert ours["peak"] <= most
        assert without["read"] == experts
        # What is stacked in the file already is mapped, and takes no memory.
        assert form == FORMS[1] or without["peak"] > most

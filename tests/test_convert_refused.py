# SPDX-License-Identifier: Apache-2.0
"""``convert --to huggingface`` builds models with experts and no others, without the network, up to a size."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from ds_fsmoe.checkpoint_files.huggingface import CONFIG, _empty_model, config_text
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.untrusted import MOST_LAYERS
from tests import hf_families

SEVERAL = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3")


def written(folder: Path, **changed: Any) -> Path:
    said = json.loads(config_text(hf_families.model_of("qwen3_moe")))
    (folder / CONFIG).write_text(json.dumps(said | changed))
    return folder / CONFIG


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hosts that somebody has looked for."""
    found: list[Any] = []

    def look(*args: Any, **options: Any) -> Any:
        found.append(args)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", look)
    return found


@pytest.mark.parametrize("family", SEVERAL)
def test_the_empty_model_has_the_tensors_of_the_model(family: str, tmp_path: Path) -> None:
    model = hf_families.model_of(family)
    (tmp_path / CONFIG).write_text(config_text(model))
    found = _empty_model(tmp_path / CONFIG, len(model.state_dict()))
    shapes = {name: each.shape for name, each in model.state_dict().items()}
    assert {name: each.shape for name, each in found.state_dict().items()} == shapes
    assert all(each.is_meta for each in found.parameters())


def test_a_model_without_experts_is_not_built_and_the_network_is_not_asked(tmp_path: Path, asked: list[Any]) -> None:
    detr = {"model_type": "detr", "architectures": ["DetrForObjectDetection"], "use_timm_backbone": False}
    backbone = {"backbone": "attacker/backbone", "use_pretrained_backbone": True, "backbone_config": None}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    for said in (detr | backbone, llama):
        path = written(tmp_path)
        path.write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match=r"cannot build it: .*"):
            _empty_model(path, 10)
    with pytest.raises(CheckpointError, match="its experts do not follow transformers' contract"):
        _empty_model(path, 10)
    assert asked == []


def test_kernels_that_a_config_names_are_not_looked_for(tmp_path: Path, asked: list[Any]) -> None:
    names = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
    model = _empty_model(written(tmp_path, **dict.fromkeys(names, "attacker/kernel")), 100)
    assert "attacker" not in str(model.config._attn_implementation)
    assert asked == []


def test_the_network_may_be_asked_again_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    _empty_model(written(tmp_path), 100)
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("num_layers", [MOST_LAYERS + 1, 10**7, 10**9])
def test_a_config_with_far_too_many_layers_is_refused_before_it_is_built(num_layers: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"num_hidden_layers = {num_layers}: must be at most {MOST_LAYERS}"):
        _empty_model(written(tmp_path, num_hidden_layers=num_layers), 100)


def test_a_model_with_far_more_modules_than_the_checkpoint_has_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has more than 10020 modules, far more than the checkpoint has"):
        _empty_model(written(tmp_path, num_hidden_layers=1000, layer_types=None), 1)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", '{"model_type": []}', '{"model_type": "qwen3_moe"}', "x"])
def test_what_is_no_config_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match="cannot build it: "):
        _empty_model(tmp_path / CONFIG, 100)

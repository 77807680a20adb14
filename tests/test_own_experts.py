# SPDX-License-Identifier: Apache-2.0
"""Models made from a configuration with own experts; what is refused of models without an engine, and of files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers")

from tests.hf_families import batch, config_of, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.samples import sampled
from tests.sgd_engines import ds_config, engine_of
from tests.test_hugging_face_loading import FORMS, Loading, from_files, saved, values_of


def said_by(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def without_some(folder: str) -> str:
    """A copy of a folder whose files have no second weight in the first layer's experts."""
    from safetensors.torch import load_file, save_file

    copied = Path(f"{folder} less")
    shutil.copytree(folder, copied)
    for file in copied.glob("*.safetensors"):
        kept = {name: each for name, each in load_file(file).items() if ".layers.0.mlp.experts.down_proj" not in name}
        save_file(kept, file, {"format": "pt"})
    return str(copied)


def made(rank: int, world_size: int, files: str, less: str, few: str, stage: int) -> dict[str, Any]:
    """Values of experts drawn, and what is said of wrong use."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import ds_fsmoe

    config, found = ds_config(stage, ep_size=world_size), {}
    torch.manual_seed(7)
    with Loading("context, Trainer", config):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files))
        lessened = from_files(less)
        found["few"] = said_by(from_files, few)
        other = from_files(files)
    experts = model.model.layers[0].mlp.experts
    found["drawn"] = values_of(experts.down_proj)
    found["dense"] = values_of(model.model.layers[0].self_attn.q_proj.weight)
    found["missing"] = values_of(lessened.model.layers[0].mlp.experts.down_proj)
    found["there"] = values_of(lessened.model.layers[0].mlp.experts.gate_up_proj)
    if stage < 3:
        found["run"] = said_by(model, input_ids=batch(0, 1))
    found["save"] = said_by(model.save_pretrained, "nowhere")
    found["other"] = said_by(engine_of, other, ds_config(stage, ep_size=1))
    engine = engine_of(model, config)
    loss = loss_of(engine, batch(rank, 1))
    engine.backward(loss)
    engine.step()
    found["loss"] = loss.item()
    engine.destroy()
    with ds_fsmoe.own_experts({"fsmoe": {"enabled": False}}):
        whole = AutoModelForCausalLM.from_config(config_of("mixtral"))
        found["whole"] = len(whole.model.layers[0].mlp.experts.down_proj)
    unlike = ds_config(stage, sequence_length=64 if rank else "auto")
    with ds_fsmoe.own_experts(unlike):
        found["unlike"] = said_by(AutoModelForCausalLM.from_config, config_of("mixtral"))
    with ds_fsmoe.own_experts(config), torch.device("meta"):
        away = AutoModelForCausalLM.from_config(config_of("mixtral"))
    found["meta"] = said_by(engine_of, away, config)
    return found


@sampled("stage", [0, 3])
def test_ranks_draw_different_experts_and_a_model_without_an_engine_is_of_no_use(stage: int, tmp_path: Path) -> None:
    files = saved("qwen3_moe", tmp_path, FORMS[1])
    few = model_of("qwen3_moe")
    for layer in few.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            setattr(layer.mlp.experts, name, nn.Parameter(weight[:2].detach().clone()))
    small = saved("few", tmp_path, FORMS[1], few)
    of_ranks = run_on_ranks(made, 2, tmp_path / "ranks", files, without_some(files), small, stage)
    first, second = of_ranks
    whole = model_of("qwen3_moe").model.layers[0].mlp.experts
    for name in ("drawn", "missing"):
        assert not torch.equal(first[name], second[name])
        for each in of_ranks:
            assert each[name].shape == (2, *whole.down_proj.shape[1:])
            assert each[name].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first["dense"], second["dense"])
    assert torch.equal(torch.cat([each["there"] for each in of_ranks]), whole.gate_up_proj)
    for rank, each in enumerate(of_ranks):
        assert each["loss"] == pytest.approx(4.85, rel=0.01)  # log(128) of a model that knows nothing
        assert each["whole"] == 4
        assert each["save"].startswith("LayerError: model.layers.0.mlp.experts has 2 of 4 experts")
        assert "pass the same config to own_experts() and initialize()" in each["other"]
        assert each["unlike"].startswith("DisagreementError: the ranks disagree about the config")
        assert "fsmoe.sequence_length" in each["unlike"]
        assert each["meta"].startswith("LayerError: model.layers.0.mlp.experts is on the meta device")
        assert "has 2 experts, and the model 4" in each["few"]
        if stage < 3:
            assert f"has 2 of 4 experts, those of rank {rank} of 2, and no engine" in each["run"]


def test_a_transformers_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers import modeling_utils

    import ds_fsmoe
    from ds_fsmoe.engine.compat import IncompatibleError

    monkeypatch.delattr(modeling_utils.PreTrainedModel, "_load_pretrained_model")
    words = f"transformers {transformers.__version__}.*has no .*:PreTrainedModel._load"
    with pytest.raises(IncompatibleError, match=words), ds_fsmoe.own_experts(ds_config(1)):
        pass


def test_a_config_without_a_block_is_refused_and_one_rank_has_all_experts() -> None:
    from transformers import AutoModelForCausalLM

    import ds_fsmoe
    from ds_fsmoe.config.reading import ConfigError

    with pytest.raises(ConfigError, match="no fsmoe block is known yet"), ds_fsmoe.own_experts({}):
        pass
    with ds_fsmoe.own_experts(ds_config(1)):
        model = AutoModelForCausalLM.from_config(config_of("mixtral"))
    assert model(input_ids=batch(0, 1)).logits.isfinite().all()
    assert not dist.is_initialized()
